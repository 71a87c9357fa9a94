"""What can be compiled for the gradients of attention."""

import itertools
from dataclasses import replace

from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.copy_config import narrow_config
from cupyflash._attention.gpu.gradient_config import sum_config
from cupyflash._attention.gpu.simt.backward import (
    FALLBACK,
    dscore_config,
    dscore_finish_config,
)
from cupyflash._attention.gpu.sm80.backward_fp32 import MMA_SPLIT_VJP
from cupyflash._attention.gpu.sm90.backward import HOPPER_VJP
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core.dtypes import FLOATS, WORDS
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import Variant

# (sums, terms of each) for each number of threads of a sum.
_SUMS = ((1, 100), (1000, 100), (1000, 8), (1000, 2))


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) pairs that `device` may compile: a selection, or all of them."""
    found: dict[tuple[str, Variant], None] = {}
    problems = samples.everything() if everything else samples.representative()
    for forward, batch_dims in problems:
        for row in ATTENTION_VJP_KERNELS:
            problem = AttentionVjpProblem(_as_tiles(forward), (), (), ())
            if row.unsupported_reason(problem, device) is None:
                asked = problem.forward, batch_dims, device, everything
                for config in configs_of(row, *asked):
                    found[row.name, config.variant] = None
    for accum, grad in itertools.product(("float32", "float64"), FLOATS):
        if kernel.refuse_old_device(grad, device) is None:
            for num_sums, num_terms in _SUMS:
                config = sum_config(accum, grad, 4, num_sums, num_terms)
                found["sum", config.variant] = None
    for grad in FLOATS:
        if kernel.refuse_old_device(grad, device) is None:
            found["dscore", dscore_finish_config(grad, 1).variant] = None
    for forward, batch_dims, tile in _of_named_arrays(device, everything):
        for largest in (1, 0):
            config = dscore_config(forward, batch_dims, tile, largest)
            found["dscore", config.variant] = None
    if f"{device.arch}a" == HOPPER_VJP.arch:
        for word in WORDS:
            found["narrow", narrow_config(word, 1).variant] = None
    return list(found)


def _of_named_arrays(device, everything):
    """(problem, batch axes, tile) of gradients of what a score function reads."""
    for dtype, head_dim in itertools.product(FLOATS, (64, 128, 256)):
        forward = samples.with_gradients(samples.made_up(dtype, head_dim))
        if kernel.refuse_old_device(dtype, device) is None:
            tiles = FALLBACK.fitting(forward, device)
            for tile in tiles if everything else tiles[:1]:
                yield forward, 1, tile
                if everything:
                    yield replace(forward, softcap=30.0, mask="bool"), 2, tile


def _as_tiles(forward):
    """A problem whose arrays TMA can read, if keys are contiguous."""
    return replace(forward, terms="tiles") if forward.terms == "unit" else forward


def configs_of(row, forward, batch_dims, device, everything):
    """The launches of a problem by a kernel spec."""
    configs = [*row.configs(forward, batch_dims, device, everything)]
    if configs and row is not FALLBACK:
        of_queries = {"OWN_LSE": 1} if row is MMA_SPLIT_VJP else {}
        configs += _fallbacks(forward, batch_dims, device, **of_queries)
    return configs


def _fallbacks(forward, batch_dims, device, **of_queries):
    """The kernels that compute gradients again if they are not finite."""
    tile = FALLBACK.tile(forward, device, 1000, 1000)
    for part in ("queries", "keys"):
        grad, more = forward.dtype, of_queries if part == "queries" else {}
        yield FALLBACK.config(
            part, tile, forward, batch_dims, grad, 1, REPAIRS=1, **more
        )
