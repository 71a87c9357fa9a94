"""Kernels of all pairs of a block and a tile."""

import numpy as np

# exp() of less is 0 here: it takes many times as long below the normal numbers.
LEAST = -700.0


def kernel_values(kernel, block, tile):
    """K of all pairs, in a buffer of the thread."""
    if kernel.name != "gaussian":
        return kernel.value(block.squared(tile))
    scores = block.scores(tile, None)
    if block.clouds.lowest_score < LEAST:
        vanish = scores < LEAST
        np.maximum(scores, LEAST, out=scores)
        weights = np.exp(scores, out=scores)
        weights[vanish] = 0.0
        return weights
    return np.exp(scores, out=scores)
