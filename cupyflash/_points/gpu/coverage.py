"""What there is to compile for points."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._points import kernels
from cupyflash._points.gpu import config, functions
from cupyflash._points.gpu.config import Pairs
from cupyflash._points.gpu.registry import DIRECT, KERNELS

_COLUMNS = {"logsumexp": (0,), "kernel_sum": (1, 2, 3, 4), "mean": (1, 2, 3, 4)}
_SIZE = 1 << 20


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) of what `device` would compile: a selection, or all there is."""
    found: dict[tuple[str, Variant], None] = {}
    for pairs in _everything() if everything else _representative():
        for name, launch in _launches(pairs, device):
            found[name, launch.variant] = None
    return list(found)


def _launches(pairs: Pairs, device: Device) -> Iterator[tuple[str, LaunchConfig]]:
    yield "arrange", config.arrange_config(pairs, pairs.padded_keys)
    yield "arrange", config.boxes_config(pairs, pairs.padded_keys, config.TILE_KEYS)
    yield "arrange", config.boxes_config(pairs, pairs.padded_rows, config.GROUP)
    if pairs.is_sorted:
        size = pairs.num_rows, pairs.batch
        for launch in config.curve_configs(pairs.coord_dtype, pairs.dim, *size):
            yield "curve", launch
    yield "combine", config.combine_config(pairs)
    for row in KERNELS:
        if row.unsupported_reason(pairs, device) is None:
            launches, *_ = row.launches(pairs, device)
            for launch, _ in launches:
                yield row.name, launch
    if DIRECT.needs_repair(pairs):
        launch, _ = DIRECT.repair(pairs, 1)
        yield DIRECT.name, launch


def _pairs(reduction, columns, dim, dtype="float32", kernel="gaussian", **more):
    pairs = Pairs(
        reduction, 1, _SIZE, _SIZE, dim, columns, dtype, kernel, 1.0, dtype, **more
    )
    is_sorted = dim <= config.MAX_BOX_DIM and pairs.gpu_kernel.has_exponent
    return replace(pairs, is_sorted=is_sorted)


def _representative() -> Iterator[Pairs]:
    """Problems whose kernels differ."""
    for reduction, columns in (("logsumexp", 0), ("kernel_sum", 1), ("mean", 4)):
        for dim in (3, 7):
            yield _pairs(reduction, columns, dim)
        yield _pairs(reduction, columns, 3, "float64")
        yield _pairs(reduction, columns, 3, "float64", has_axis_scales=True)
    yield _pairs("mean", 3, 2)
    yield _pairs("mean", 2, 64)
    for reduction, columns in (("logsumexp", 0), ("kernel_sum", 1), ("mean", 2)):
        yield _pairs(reduction, columns, 64, precision="tf32")
    yield _pairs("kernel_sum", 4, 64, "float64")
    for kernel in config.KERNELS:
        yield _pairs("kernel_sum", 1, 3, kernel=kernel)
    for dtype in ("float32", "float64"):
        yield from _of_functions(dtype)
    scaled = _pairs("logsumexp", 0, 3)
    yield replace(scaled, coord_dtype="float64")
    yield replace(scaled, num_rows=256, num_keys=256, is_sorted=False)


def _of_functions(dtype):
    """A function with a number of its own, and its derivative."""
    kernel = kernels.find(_rational(2.5), "mean")
    slope, _ = kernels.slope_of(kernel)
    for reduction, columns, dim, row in (
        ("logsumexp", 0, 3, kernel),
        ("mean", 2, 3, kernel),
        ("kernel_sum", 1, 20, kernel),
        ("kernel_sum", 4, 3, slope),
    ):
        text, numbers = functions.of(row, reduction != "kernel_sum")
        more = {"function": text, "numbers": numbers}
        yield _pairs(reduction, columns, dim, dtype, row.name, **more)


def _rational(power):
    def rational(d2):
        return (1 + d2 / power) ** -power * np.exp(-np.sqrt(d2))

    return rational


def _everything() -> Iterator[Pairs]:
    """All that a call of few dimensions can lead to, and some of many."""
    for (reduction, columns), dim, dtype, kernel in itertools.product(
        _COLUMNS.items(), (*range(1, 9), 64), ("float32", "float64"), config.KERNELS
    ):
        if kernel == "energy" and reduction != "kernel_sum":
            continue
        for n in columns:
            yield _pairs(reduction, n, dim, dtype, kernel)
    yield from _representative()
