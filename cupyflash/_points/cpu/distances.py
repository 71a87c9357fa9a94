"""Squared distances of a tile, to the last digits wherever the points lie."""

import math

import numpy as np
from scipy.spatial.distance import cdist

# From here on a product and the repair of near pairs cost less than all differences.
_MANY_AXES = 10**6
_NEAR = 1 / 16
_REPAIRED = 4096  # pairs at once


class Block:
    """Points of x beside one tile after another."""

    def __init__(self, clouds, start, stop, scratch):
        self.clouds, self.scratch = clouds, scratch
        self.x = clouds.x[start:stop]
        self._centre = None

    def _lift(self, centre):
        """[-2 (x - c), 1, |x - c|^2], made once for one middle."""
        if self._centre is centre:
            return
        self._centre = centre
        shifted = (self.x - centre) * self.clouds.scale
        norms = np.einsum("id,id->i", shifted, shifted)
        self.squared_norm = float(norms.max())
        self.lifted = np.empty((len(self.x), self.clouds.dim + 2))
        np.multiply(shifted, -2.0, out=self.lifted[:, :-2])
        self.lifted[:, -2] = 1.0
        self.lifted[:, -1] = norms

    def by_product(self, tile):
        """Whether products of coordinates about the tile's middle cost no digit."""
        self._lift(tile.centre)
        norm = self.squared_norm + tile.squared_norm
        return norm <= self.clouds.limit or (
            self.clouds.dim >= _MANY_AXES and math.isfinite(norm)
        )

    def squared(self, tile):
        """d2 of all pairs, in a buffer of the thread."""
        shape = len(self.x), tile.size
        d2 = self.scratch.array("scores", shape, np.float64)
        if not self.by_product(tile):
            return _differences(self.x, tile.y, self.clouds.weights, d2)
        np.matmul(self.lifted, tile.lifted, out=d2)
        np.maximum(d2, 0.0, out=d2)
        norm = self.squared_norm + tile.squared_norm
        if norm > self.clouds.limit:
            self._repair(tile, d2, _NEAR * norm)
        return d2

    def _repair(self, tile, d2, near):
        """Differences for the pairs whose distance is small beside their norms."""
        i, j = np.nonzero(d2 < near)
        for start in range(0, len(i), _REPAIRED):
            a, b = i[start : start + _REPAIRED], j[start : start + _REPAIRED]
            gap = (self.x[a] - tile.y[b]) * self.clouds.scale
            d2[a, b] = np.einsum("pd,pd->p", gap, gap)


def _differences(x, y, weights, d2):
    if x.shape[1] == 0:
        d2[...] = 0.0
        return d2
    return cdist(x, y, "sqeuclidean", out=d2, w=weights)
