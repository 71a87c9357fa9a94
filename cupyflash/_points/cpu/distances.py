"""Squared distances of a tile, to the last digits wherever the points lie.

A point is lifted so that one matrix product is ``|x|^2 + |y|^2 - 2 x.y``. That costs
digits where the norms, as seen from a middle near by, are large beside the distance
that counts. There the coordinates are cut into two parts: the products of the first
parts have few enough bits to be exact, sums included [1]_, and what the second parts
add is small.

.. [1] K. Ozaki et al., "Error-free transformations of matrix multiplication by using
   fast routines of matrix multiplication and its applications", Numerical Algorithms
   59, 2012.
"""

import functools
import math

import numpy as np
from scipy.spatial.distance import cdist

_UNIT = 2.0**-53
# Errors of a score that are let pass: a digit beside what is promised.
_PASSES = {"float32": 1e-8, "float64": 5e-14}
# Relative errors of a distance itself, where a kernel has a cusp at 0.
_PASSES_CUSP = {"float32": 1e-8, "float64": 1e-15}
_MANY = 4096
# Of the squared norms: from here on an error of products is one of the last digit.
_NEAR = 1e-5
_REPAIRED = 4096  # pairs at once
_MANY_NEAR = 8  # one in so many are faster all at once


class Shifted:
    """Points less a middle, in bandwidths: ``high + low`` to twice the digits.

    Attributes
    ----------
    high, low : ndarray, shape (points, dim)
    norms : ndarray, shape (points,)
        Squared norms of `high`.
    largest : float
        The largest of them.
    """

    def __init__(self, points, centre, scale, scale_low):
        self._from = points, centre, scale, scale_low
        self.high = (points - centre) * scale
        self.norms = np.einsum("id,id->i", self.high, self.high)
        self.largest = float(self.norms.max())

    @functools.cached_property
    def low(self):
        """What rounding has taken from `high`."""
        points, centre, scale, scale_low = self._from
        moved, lost = _difference(points, centre)
        return _product(moved, scale)[1] + (lost * scale + moved * scale_low)

    def parts(self, quantum):
        """Multiples of `quantum`, what is left, and what that adds to the norm."""
        first = np.rint(self.high / quantum) * quantum
        rest = (self.high - first) + self.low
        added = np.einsum("id,id->i", 2 * first + rest, rest)
        return first, rest, added


def _difference(a, b):
    """a - b and its rounding error (D. E. Knuth)."""
    c = a - b
    z = c - a
    return c, (a - (c - z)) - (b + z)


_SPLITTER = 2.0**27 + 1


def _product(a, b):
    """a * b and its rounding error (T. J. Dekker)."""
    c = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return c, ((a1 * b1 - c) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(a):
    t = _SPLITTER * a
    first = t - (t - a)
    return first, a - first


def one_product(squared_norm, passes):
    """Whether one product of lifted points costs no digit that counts."""
    return squared_norm * _UNIT <= passes


def lost_by_division(scale, bandwidth):
    """What ``scale``, 1 / bandwidth rounded, lacks of it."""
    product, lost = _product(scale, bandwidth)
    return ((1.0 - product) - lost) * scale


class Block:
    """Points of x beside one tile after another."""

    def __init__(self, clouds, start, stop, scratch):
        self.clouds, self.scratch = clouds, scratch
        self.x = clouds.x[start:stop]
        self.centre = self.less = None

    def _shift(self, centre):
        """The points less a middle, made once for tiles that share it."""
        if self.centre is not centre:
            self.centre = centre
            self.shifted = Shifted(
                self.x, centre, self.clouds.scale, self.clouds.scale_low
            )
            self.lifted = None
            self.reference = self
            self.parts = None, None

    def squared_norm(self, tile):
        """The largest squared norms of both sides, added up."""
        self._shift(tile.centre)
        return self.shifted.largest + tile.shifted.largest

    def scores(self, tile, reference):
        """-d2 / 2 + log_weights - reference, in a buffer of the thread."""
        norm = self.squared_norm(tile)
        if not one_product(norm, self.clouds.passes):
            less = None if reference is None else -2 * reference
            scores = self.squared(tile, less)
            scores *= -0.5
            if tile.log_weights is not None:
                scores += tile.log_weights
            return scores
        if self.reference is not reference:
            self.reference = reference
            shifted = self.shifted
            lifted = np.empty((len(self.x), self.clouds.dim + 2))
            lifted[:, :-2] = shifted.high
            lifted[:, -2] = 1.0
            lifted[:, -1] = -0.5 * shifted.norms
            if reference is not None:
                lifted[:, -1] -= reference
            self.lifted_scores = lifted
        out = self.scratch.array("scores", (len(self.x), tile.size), np.float64)
        return np.matmul(self.lifted_scores, tile.lifted_scores, out=out)

    def squared(self, tile, less=None):
        """d2 of all pairs, in a buffer of the thread.

        Less a number for each row, before anything is rounded.
        """
        norm = self.squared_norm(tile)
        d2 = self.scratch.array("scores", (len(self.x), tile.size), np.float64)
        error, near = norm * _UNIT, 0.0
        if not math.isfinite(norm):
            return self._differences(tile, d2, less)
        if one_product(norm, self.clouds.passes):
            self._product(tile, d2)
            if less is not None:
                d2 -= less[:, None]
        else:
            bits = self._split_product(tile, d2, norm, less)
            error *= 2.0**-bits
            if error > self.clouds.passes:
                near = _NEAR * norm
        if not self.clouds.kernel.smooth:
            near = max(near, min(error / self.clouds.passes_cusp, 1e150) ** 2)
        if less is None:
            np.maximum(d2, 0.0, out=d2)
        return self._repaired(tile, d2, near, less) if near else d2

    def _product(self, tile, d2):
        if self.lifted is None:
            shifted = self.shifted
            self.lifted = np.empty((len(self.x), self.clouds.dim + 2))
            np.multiply(shifted.high, -2.0, out=self.lifted[:, :-2])
            self.lifted[:, -2] = 1.0
            self.lifted[:, -1] = shifted.norms
        np.matmul(self.lifted, tile.lifted, out=d2)

    def _split_product(self, tile, d2, norm, less):
        """An exact product of first parts, and one of the rest; bits of the first."""
        dim = self.clouds.dim
        bits = (52 - math.ceil(math.log2(8 * (dim + 2)))) // 2
        quantum = 2.0 ** (math.frexp(math.sqrt(norm))[1] - bits)
        if self.parts[0] != quantum or self.less is not less:
            self.less = less
            first, rest, added = self.shifted.parts(quantum)
            exact = np.empty((len(self.x), dim + 2))
            np.multiply(first, -2.0, out=exact[:, :dim])
            exact[:, dim] = 1.0
            exact[:, dim + 1] = np.einsum("id,id->i", first, first)
            if less is not None:
                # Cut, too, or the first sum would have too many bits.
                cut = np.rint(less / quantum**2) * quantum**2
                exact[:, dim + 1] -= cut
                added = added - (less - cut)
            small = np.empty((len(self.x), 2 * dim + 2))
            np.multiply(first + rest, -2.0, out=small[:, :dim])
            np.multiply(rest, -2.0, out=small[:, dim:-2])
            small[:, -2] = 1.0
            small[:, -1] = added
            self.parts = quantum, (exact, small)
        exact, small = self.parts[1]
        exact_y, small_y = tile.parts(quantum)
        rest = self.scratch.array("rest", d2.shape, np.float64)
        np.matmul(exact, exact_y, out=d2)
        np.matmul(small, small_y, out=rest)
        d2 += rest
        return bits

    def _differences(self, tile, d2, less):
        if self.clouds.dim == 0:
            d2[...] = 0.0
        else:
            cdist(self.x, tile.y, "sqeuclidean", out=d2, w=self.clouds.weights)
        if less is not None:
            d2 -= less[:, None]
        return d2

    def _repaired(self, tile, d2, near, less):
        """Plain differences for pairs so near that an error shows."""
        is_near = d2 < (near if less is None else (near - less)[:, None])
        if np.count_nonzero(is_near) > d2.size // _MANY_NEAR:
            plain = self.scratch.array("rest", d2.shape, np.float64)
            np.copyto(d2, self._differences(tile, plain, less), where=is_near)
            return d2
        i, j = np.nonzero(is_near)
        for start in range(0, len(i), _REPAIRED):
            a, b = i[start : start + _REPAIRED], j[start : start + _REPAIRED]
            gap = (self.x[a] - tile.y[b]) * self.clouds.scale
            d2[a, b] = np.einsum("pd,pd->p", gap, gap)
            if less is not None:
                d2[a, b] -= less[a]
        return d2


def passes(dtype, kernel, dim, num_y):
    """Errors of d2, and of a distance at a cusp, that a dtype does not show."""
    if not kernel.smooth and dtype == "float64":
        return 0.0, _PASSES_CUSP[dtype]  # a cusp makes errors of d2 their root
    steepest = 2.0 if kernel.slope is None else kernel.slope_factor
    rounded = max(1.0, math.sqrt(dim) / 3)  # by the additions of a product
    if num_y < _MANY:  # too few for roundings to cancel
        rounded *= 2
    return _PASSES[dtype] / (steepest * rounded), _PASSES_CUSP[dtype]
