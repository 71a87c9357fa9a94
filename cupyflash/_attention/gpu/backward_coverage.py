"""What can be compiled for the gradients of attention."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.copy_config import narrow_config
from cupyflash._attention.gpu.fp64.backward import TensorFloat64VjpKernel
from cupyflash._attention.gpu.gradient_config import rows_config, sum_config
from cupyflash._attention.gpu.simt.backward import (
    FALLBACK,
    VjpKernel,
    dscore_config,
    dscore_finish_config,
)
from cupyflash._attention.gpu.sm80.backward import MmaVjpKernel
from cupyflash._attention.gpu.sm80.backward_fp32 import MmaSplitVjpKernel
from cupyflash._attention.gpu.sm80.short_backward import MmaShortVjpKernel
from cupyflash._attention.gpu.sm90.backward import HOPPER_VJP, HopperVjpKernel
from cupyflash._attention.gpu.sm90.backward_wide import HopperWideVjpKernel
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core.dtypes import FLOATS, WORDS
from cupyflash._cuda import kernel, tensor_map
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) pairs that `device` may compile: a selection, or all of them."""
    found: dict[tuple[str, Variant], None] = {}
    problems = samples.everything() if everything else samples.representative()
    for forward, batch_dims in problems:
        for row in ATTENTION_VJP_KERNELS:
            problem = AttentionVjpProblem(_as_tiles(forward), (), (), ())
            if row.unsupported_reason(problem, device) is None:
                of_row = _CONFIGS[type(row)]
                asked = problem.forward, batch_dims, device, everything
                for config in of_row(row, *asked):
                    found[row.name, config.variant] = None
    for accum, grad in itertools.product(("float32", "float64"), FLOATS):
        if kernel.refuse_old_device(grad, device) is None:
            for num_sums in (1, 1000):
                config = sum_config(accum, grad, 4, num_sums, 100)
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
            for tile in _some(FALLBACK.fitting(forward, device), everything):
                yield forward, 1, tile
                if everything:
                    yield replace(forward, softcap=30.0, mask="bool"), 2, tile


def _as_tiles(forward):
    """A problem whose arrays TMA can read, if keys are contiguous."""
    return replace(forward, terms="tiles") if forward.terms == "unit" else forward


def _mapped_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem by a kernel spec of sm_90a."""
    if batch_dims <= tensor_map.MAX_BATCH_AXES:
        yield from row.configs(forward, batch_dims)
        yield from _fallbacks(forward, batch_dims, device)


def _short_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem of short entries."""
    yield row.config(forward, batch_dims, device)
    yield from _fallbacks(forward, batch_dims, device)


def _mma_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem by mma.sync."""
    yield from row.configs(forward, batch_dims, device, everything)
    yield from _fallbacks(forward, batch_dims, device)


def _split_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem of float32 by mma.sync."""
    yield from row.configs(forward, batch_dims, device, everything)
    yield rows_config(forward, batch_dims)
    yield from _fallbacks(forward, batch_dims, device, OWN_LSE=1)


def _fallbacks(forward, batch_dims, device, **of_queries):
    """The kernels that compute gradients again if they are not finite."""
    tile = FALLBACK.tile(forward, device, 1000, 1000)
    for part in ("queries", "keys"):
        grad, more = forward.dtype, of_queries if part == "queries" else {}
        yield FALLBACK.config(
            part, tile, forward, batch_dims, grad, 1, REPAIRS=1, **more
        )


def _f64_configs(row, forward, batch_dims, device, everything):
    """The launches of a float64 problem; dbias belongs to the portable row."""
    for tile in _some(row.fitting(forward, device), everything):
        yield rows_config(forward, batch_dims)
        for part in ("queries", "keys"):
            yield row.config(part, tile, forward, batch_dims, "float64", 1)
        yield from _fallbacks(forward, batch_dims, device)


def _portable_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem by the portable kernels."""
    grads = {forward.dtype: None, forward.compute_dtype: None} if everything else ()
    for tile in _some(row.fitting(forward, device), everything):
        yield rows_config(forward, batch_dims)
        for part in ("queries", "keys"):
            for grad in grads or (forward.dtype,):
                yield row.config(part, tile, forward, batch_dims, grad, 1)
        if forward.bias is not None:
            for sums in ((0, 0), (1, 0), (0, 1)) if everything else ((0, 0), (1, 0)):
                names = dict(zip(("SUM_QUERIES", "SUM_KEYS"), sums, strict=True))
                yield row.config(
                    "bias", tile, forward, batch_dims, forward.bias, 1, **names
                )


def _some(tiles, everything):
    """All tiles, or only the first."""
    return tiles if everything else tiles[:1]


_CONFIGS: dict[type, Callable[..., Iterator[LaunchConfig]]] = {
    HopperVjpKernel: _mapped_configs,
    HopperWideVjpKernel: _mapped_configs,
    MmaVjpKernel: _mma_configs,
    MmaShortVjpKernel: _short_configs,
    MmaSplitVjpKernel: _split_configs,
    TensorFloat64VjpKernel: _f64_configs,
    VjpKernel: _portable_configs,
}
