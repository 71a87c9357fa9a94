"""What can be compiled for attention."""

import functools
import itertools
from collections.abc import Iterator

from cupyflash._attention.gpu import diagonals, mask_bits, samples
from cupyflash._attention.gpu.combine_config import few_config, parts_config
from cupyflash._attention.gpu.copy_config import copy_config
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.simt.forward import FusedKernel
from cupyflash._attention.gpu.sm90.forward import HopperKernel, has_mask_bits
from cupyflash._attention.problem import MergeProblem
from cupyflash._core.dtypes import FLOATS
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant


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
            if isinstance(row, HopperKernel):
                configs += tuple(
                    row.config(tile, problem, batch_dims, device)
                    for tile in row.tiles_of(problem)
                )
            for config in configs:
                found[row.name, config.variant] = None
            if isinstance(row, HopperKernel) and problem.mask_function is not None:
                lists = row.tile_lists(problem, device).config(problem, batch_dims)
                found[row.name, lists.variant] = None
            if isinstance(row, HopperKernel) and has_mask_bits(problem):
                bits = mask_bits.config(row.tile(problem, device).block_n, batch_dims)
                found[row.name, bits.variant] = None
        is_old = kernel.refuse_old_device(problem.dtype, device) is not None
        if problem.score is not None and not is_old:
            found["diagonals", diagonals.config(problem).variant] = None
    for config in _merges(device):
        found["merge", config.variant] = None
    for dtype in FLOATS:
        if kernel.refuse_old_device(dtype, device) is None:
            found["copy", copy_config(dtype, 2, 1, 1).variant] = None
    return list(found)


def _merges(device: Device) -> Iterator[LaunchConfig]:
    """The launches that merge: of few rows, and of many in one and in more columns."""
    for rows, head_dim_v in ((64, 64), (1 << 16, 64), (1 << 16, 128)):
        made = functools.partial(MergeProblem, "cupy", 2, (rows,), head_dim_v)
        for dtype, lse_dtype in itertools.product(FLOATS, ("float32", "float64")):
            if kernel.refuse_old_device(dtype, device) is None:
                yield parts_config(made(dtype, lse_dtype), 1)
        for dtype in ("float32", "float64"):
            yield parts_config(made(dtype, dtype, in_sums=True), 1)
        for narrow in ("float16", "bfloat16"):
            if kernel.refuse_old_device(narrow, device) is None:
                yield parts_config(made("float32", "float32", in_sums=True), 1, narrow)
                for parts in (2, 4, 8):
                    few = MergeProblem(
                        "cupy", parts, (rows,), head_dim_v, narrow, "float32"
                    )
                    yield few_config(few, 1)
