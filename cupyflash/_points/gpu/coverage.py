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
from cupyflash._points.gpu.moments import Moments, launches
from cupyflash._points.gpu.registry import DIRECT, GRADIENT, KERNELS

ROWS = (*KERNELS, GRADIENT)
_COLUMNS = {"logsumexp": (0,), "kernel_sum": (1, 2, 3, 4), "mean": (1, 2, 3, 4)}
_SIZE = 1 << 20


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) of what `device` would compile: a selection, or all there is."""
    found: dict[tuple[str, Variant], None] = {}
    for pairs in _everything() if everything else _representative():
        for name, launch in _launches(pairs, device):
            found[name, launch.variant] = None
    for moments in _all_moments() if everything else _moments():
        for launch in launches(moments):
            is_sum = launch.variant.entry == "points_gradient"
            found[GRADIENT.name if is_sum else "arrange", launch.variant] = None
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


def _gradient(reduction, columns, dim, dtype="float32", squares=1, **more):
    """Moments that a gradient sums, of a slope."""
    slope, _ = kernels.slope_of(kernels.KERNELS[more.pop("kernel", "gaussian")])
    more = {"weights_dtype": "float64", "kernel": slope.name, **more}
    return Moments(_pairs(reduction, columns, dim, dtype, **more), squares, 1.0)


def _moments() -> Iterator[Moments]:
    """Gradients whose kernels differ."""
    for reduction, dim in itertools.product(("mean", "kernel_sum"), (3, 8, 64)):
        for squares in (0, 1):
            yield _gradient(reduction, 1, dim, squares=squares)
    for dim in (3, 8, 20):
        yield _gradient("mean", 2, dim, has_axis_scales=True, squares=2)
        yield _gradient("mean", 2, dim, "float64", has_axis_scales=True, squares=2)
    for dim in (3, 64):
        yield _gradient("mean", 9, dim)
        yield _gradient("mean", 2, dim, "float64")
    for kernel in kernels.NAMES:
        yield _gradient("kernel_sum", 2, 3, kernel=kernel)
    scaled = _gradient("mean", 2, 3)
    for change in (
        {"coord_dtype": "float64"},
        {"num_rows": 256, "num_keys": 256, "is_sorted": False},
    ):
        yield scaled._replace(pairs=replace(scaled.pairs, **change))
    kernel = kernels.find(_rational(2.5), "mean")
    slope, _ = kernels.slope_of(kernel)
    text, numbers = functions.of(slope, False)
    more = {"function": text, "numbers": numbers, "weights_dtype": "float64"}
    for reduction, dtype in (("mean", "float32"), ("kernel_sum", "float64")):
        for dim in (8, 20):
            yield Moments(_pairs(reduction, 2, dim, dtype, slope.name, **more), 1, 1.0)


def _all_moments() -> Iterator[Moments]:
    for (reduction, columns), dim, dtype, kernel, squares in itertools.product(
        (("mean", 1), ("mean", 3), ("kernel_sum", 1), ("kernel_sum", 4)),
        (*range(1, 9), 64),
        ("float32", "float64"),
        kernels.NAMES,
        (0, 1, 2),
    ):
        if kernel != "energy" or reduction == "kernel_sum":
            yield _gradient(reduction, columns, dim, dtype, squares, kernel=kernel)
    yield from _moments()


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
