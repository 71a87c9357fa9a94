"""What can be compiled for attention."""

import itertools

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.combine_config import merge_config
from cupyflash._attention.gpu.copy_config import copy_config
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.simt.forward import FusedKernel
from cupyflash._attention.gpu.sm90.forward import HopperKernel
from cupyflash._core.dtypes import FLOATS
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import Variant


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) pairs that `device` may compile: a selection, or all of them."""
    found: dict[tuple[str, Variant], None] = {}
    for problem, batch_dims in (
        samples.everything() if everything else samples.representative()
    ):
        for row in ATTENTION_KERNELS:
            if row.unsupported_reason(problem, device) is not None:
                continue
            if isinstance(row, FusedKernel):
                tiles = row._tiles(problem, device)
                chosen = tiles if everything else tiles[:1]
                configs = tuple(
                    row.config(tile, problem, batch_dims) for tile in chosen
                )
            else:
                configs = row.configs(problem, batch_dims, device)
            for config in configs:
                found[row.name, config.variant] = None
            if isinstance(row, HopperKernel) and problem.mask_function is not None:
                lists = row.tile_lists(problem).config(problem, batch_dims)
                found[row.name, lists.variant] = None
    for dtype, lse_dtype in itertools.product(FLOATS, ("float32", "float64")):
        merge = attention_problem.MergeProblem("cupy", 2, (64,), 64, dtype, lse_dtype)
        if kernel.refuse_old_device(dtype, device) is None:
            found["merge", merge_config(merge, 1).variant] = None
            found["copy", copy_config(dtype, 2, 1, 1).variant] = None
    for dtype in ("float32", "float64"):
        parts = attention_problem.MergeProblem(
            "cupy", 2, (64,), 64, dtype, dtype, in_sums=True
        )
        found["merge", merge_config(parts, 1).variant] = None
        if dtype == "float32":
            for narrow in ("float16", "bfloat16"):
                if kernel.refuse_old_device(narrow, device) is None:
                    found["merge", merge_config(parts, 1, narrow).variant] = None
    return list(found)
