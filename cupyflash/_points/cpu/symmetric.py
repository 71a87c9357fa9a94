"""Sums over the pairs of one cloud with itself: each pair is computed once."""

import math

import numpy as np

from cupyflash._core import threads
from cupyflash._points.cpu.clouds import TILE
from cupyflash._points.cpu.distances import Block
from cupyflash._points.cpu.weights import kernel_values

# Sums of their own, so that results do not depend on the number of threads.
_STRIPS = 8
_MOST_COLUMNS = 16
# exp() of weights that are farther apart would leave the range of float64.
_MOST_SPREAD = 600.0


def pays(problem, clouds):
    """Whether both triangles have the same kernels, and these need no reference."""
    if len(clouds.tiles) < 2 or len(clouds.y) != len(clouds.x):
        return False
    if clouds.columns.shape[1] > _MOST_COLUMNS:
        return False
    if problem.reduction == "kernel_sum":
        return True
    # Of these K is 1 for a point and itself, so that no row's sum is too small.
    named = problem.kernel.expression is None and problem.kernel.value(0.0) == 1.0
    return named and clouds.weight_spread <= _MOST_SPREAD


def compute(problem, clouds, results, digits):
    """Write (out, lse) of a batch entry."""
    heaviest = 0.0
    if clouds.log_weights is not None:
        heaviest = clouds.log_weights.max()
        clouds.columns *= np.exp(clouds.log_weights - heaviest)[:, None]
        clouds.log_weights = None
        clouds.cut()
    sums = _sums(problem.kernel, clouds, digits)
    rows = clouds.rows(0, len(clouds.x))
    out, lse = results
    if problem.reduction == "kernel_sum":
        out[rows] = sums
        return
    lse[rows] = np.log(sums[:, 0]) + heaviest
    if out is not None:
        out[rows] = sums[:, 1:] / sums[:, :1]


def _sums(kernel, clouds, digits):
    tiles = clouds.tiles
    seen, least = _matters(clouds, digits) if clouds.skips else (None, None)
    shape = len(clouds.y), clouds.columns.shape[1]
    strips = [np.zeros(shape) for _ in range(min(_STRIPS, len(tiles)))]

    def run(strip, scratch):
        total = strips[strip]
        for i in range(strip, len(tiles), len(strips)):
            start = i * TILE
            rows = slice(start, start + tiles[i].size)
            block = Block(clouds, start, start + tiles[i].size, scratch)
            for j in range(i, len(tiles)):
                if seen is not None and not seen[i, j]:
                    continue
                floor = -math.inf if least is None else least[i, j]
                weights = kernel_values(kernel, block, tiles[j], floor)
                total[rows] += weights @ tiles[j].columns
                if j > i:
                    columns = slice(j * TILE, j * TILE + tiles[j].size)
                    total[columns] += weights.T @ tiles[i].columns

    threads.for_each_with_blas(run, range(len(strips)), threads.num_cores())
    for strip in strips[1:]:
        strips[0] += strip
    return strips[0]


def _matters(clouds, digits):
    """Which pairs of tiles add to a row more than is left out, and from which log K on.

    A row's sum of kernels and absolute values is at least its own point's.
    """
    log = clouds.kernel.log
    own = np.log([tile.absolute.min() for tile in clouds.tiles])
    largest = np.log([tile.absolute.max() for tile in clouds.tiles])
    least = own[:, None] - largest - digits - math.log(len(clouds.y))
    digits += math.log(len(clouds.tiles))
    bounds = np.array([log(clouds.squared_gaps(tile.y)) for tile in clouds.tiles])
    of_rows = bounds + clouds.log_absolute >= own[:, None] - digits
    return of_rows | of_rows.T, np.minimum(least, least.T)
