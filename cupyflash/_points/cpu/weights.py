"""Kernels of all pairs of a block and a tile."""

import math

import numpy as np

# exp() of less is 0 here: it takes many times as long below the normal numbers.
LEAST = -700.0
# Of the pairs: more exponentials than this are faster all at once.
_FEW = 0.4
# Rows of a tile whose temporaries are small enough to be reused: larger ones are pages
# that the system hands out and clears each time.
_STRIP = 32


def kernel_values(kernel, block, tile, least=-math.inf):
    """K of all pairs, in a buffer of the thread; 0 perhaps where below exp(least)."""
    if kernel.name != "gaussian":
        d2 = block.squared(tile)
        if math.isfinite(least) and kernel.reach is not None:
            near = d2 < kernel.reach(max(-least, 0.0))
            if are_few(near):
                return _of_few(kernel.value, d2, near)
        return in_strips(kernel.value, d2)
    scores = block.scores(tile, None)
    if math.isfinite(least):
        near = scores > least
        if are_few(near):
            return exp_of_few(scores, near)
    if block.clouds.lowest_score < LEAST:
        vanish = scores < LEAST
        np.maximum(scores, LEAST, out=scores)
        weights = np.exp(scores, out=scores)
        weights[vanish] = 0.0
        return weights
    return np.exp(scores, out=scores)


def in_strips(function, x):
    """function(x) in the place of x, a few rows at a time."""
    for start in range(0, len(x), _STRIP):
        rows = x[start : start + _STRIP]
        rows[...] = function(rows)
    return x


def are_few(near):
    """Whether so few are True that `exp_of_few` pays."""
    return np.count_nonzero(near) < _FEW * near.size


def exp_of_few(scores, near):
    """exp(scores) in the place of scores where near, and 0 elsewhere."""
    return _of_few(np.exp, scores, near)


def _of_few(function, x, near):
    places = np.flatnonzero(near)
    flat = x.reshape(-1)
    values = function(flat[places])
    flat[...] = 0.0
    flat[places] = values
    return x
