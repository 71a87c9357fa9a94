"""Two clouds made ready: in float64, sorted where tiles can be skipped, and cut."""

import functools
import math
from typing import Any

import numpy as np

from cupyflash._points.cpu import distances, kd_tree

# A tile of scores and one of scratch stay in a core's second cache.
TILE = 256
# Fewer tiles than this are not worth a sort.
_FEWEST_TILES = 4
# Coordinates that can be subtracted, and factors that can be squared.
_LARGEST_EXPONENT, _LARGEST_SCALE = 1000, 2.0**500


class Tile:
    """Points of y that lie together, their weights and their columns of values."""

    def __init__(self, clouds, start, stop, centre):
        self.y = clouds.y[start:stop]
        self.size = stop - start
        self.log_weights = None
        self.heaviest = 0.0
        if clouds.log_weights is not None:
            self.log_weights = clouds.log_weights[start:stop]
            self.heaviest = float(self.log_weights.max())
        self.columns = clouds.columns[start:stop]
        self.centre = self.y.mean(axis=0) if centre is None else centre
        self.shifted = distances.Shifted(
            self.y, self.centre, clouds.scale, clouds.scale_low
        )
        self._parts = None, None

    @functools.cached_property
    def lifted(self):
        """[y, |y|^2, 1], one column a point."""
        shifted = self.shifted
        ones = np.ones((1, self.size))
        return np.concatenate([shifted.high.T, shifted.norms[None], ones])

    @functools.cached_property
    def lifted_scores(self):
        """[y, log_weights - |y|^2 / 2, 1]: a product with it is a Gaussian's score."""
        lifted = self.lifted.copy()
        lifted[-2] *= -0.5
        if self.log_weights is not None:
            lifted[-2] += self.log_weights
        return lifted

    @functools.cached_property
    def absolute(self):
        """Of each point the sum of its columns' absolute values."""
        return np.abs(self.columns).sum(axis=1)

    def parts(self, quantum):
        """The lifted first parts of coordinates, and what lifts the rest."""
        known, lifted = self._parts
        if known != quantum:
            first, rest, added = self.shifted.parts(quantum)
            norms = np.einsum("jd,jd->j", first, first)
            ones = np.ones((1, self.size))
            lifted = (
                np.concatenate([first.T, norms[None], ones]),
                np.concatenate([rest.T, first.T, added[None], ones]),
            )
            self._parts = quantum, lifted
        return lifted


class Clouds:
    """The clouds of one batch entry.

    Attributes
    ----------
    x, y : ndarray of float64
        In the order in which they are computed; `order` gives the rows of the result.
    tiles : list of Tile
        Of y.
    low, high : ndarray, shape (tiles, dim)
        Boxes round the tiles.
    columns : ndarray
        What the weights of a row are multiplied by.
    lowest_score : float
        A lower bound of a Gaussian's scores below the row's largest.
    """

    def __init__(self, problem, place):
        self.dim, self.kernel = problem.dim, problem.kernel
        self.x, self.y, width = _in_units(
            problem.x[place].astype(np.float64),
            problem.y[place].astype(np.float64),
            np.array(problem.bandwidth),
        )
        self.scale = np.minimum(1.0 / width, _LARGEST_SCALE)
        self.scale_low = distances.lost_by_division(self.scale, width)
        self.weights = self.scale * self.scale
        log_weights = problem.log_weights
        self.log_weights = None
        self.columns = _columns(problem, place)
        if log_weights is not None:
            self.log_weights = log_weights[place].astype(np.float64)
            there = self.log_weights != -np.inf
            if not there.all():
                self._keep(there)
        self.order = None
        self.passes, self.passes_cusp = distances.passes(
            problem.dtype, self.kernel, self.dim, problem.num_y
        )
        num_tiles = -(-len(self.y) // TILE)
        finite = np.isfinite(self.x).all() and np.isfinite(self.y).all()
        self.skips = bool(
            self.kernel.reach is not None
            and self.dim
            and num_tiles >= _FEWEST_TILES
            and len(self.x)
            and finite
        )
        if self.skips:
            self.order = kd_tree.kd_order(self.x * self.scale, TILE)
            self.x = self.x[self.order]
            self._keep(kd_tree.kd_order(self.y * self.scale, TILE))
        weights = self.log_weights
        self.top_weight = self.weight_spread = 0.0
        if weights is not None and len(weights):
            self.top_weight = float(weights.max())
            self.weight_spread = float(weights.max() - weights.min())
        self.cut()

    def _keep(self, which):
        self.y = self.y[which]
        if self.log_weights is not None:
            self.log_weights = self.log_weights[which]
        self.columns = self.columns[which]

    def cut(self):
        """Make the tiles."""
        # One middle for all serves best where it costs no digit.
        centre = self.y.mean(axis=0) if len(self.y) else np.zeros(self.dim)
        reach = sum(
            _largest_norm((cloud - centre) * self.scale) for cloud in (self.x, self.y)
        )
        # |x - y|^2 <= 2 (|x|^2 + |y|^2)
        self.lowest_score = -reach - self.weight_spread
        common = centre if distances.one_product(reach, self.passes) else None
        cuts = range(0, len(self.y), TILE)
        self.tiles = [
            Tile(self, start, min(start + TILE, len(self.y)), common) for start in cuts
        ]
        if self.skips:
            boxes = [(tile.y.min(axis=0), tile.y.max(axis=0)) for tile in self.tiles]
            self.low = np.array([low for low, _ in boxes])
            self.high = np.array([high for _, high in boxes])
            self.heaviest = np.array([tile.heaviest for tile in self.tiles])
            absolute = np.array([tile.absolute.sum() for tile in self.tiles])
            self.log_absolute = np.log(absolute)

    def rows(self, start, stop):
        """Where the results of some points of x belong."""
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def squared_gaps(self, x):
        """Lower bounds of d2 between the box round some points and each tile."""
        below = self.low - x.max(axis=0)
        above = x.min(axis=0) - self.high
        gaps = np.maximum(np.maximum(below, above), 0.0)
        return (gaps * gaps) @ self.weights


def _in_units(x, y, width):
    """Clouds and bandwidths in powers of two near the bandwidths, which is exact.

    So that squares of neither leave the range of float64.
    """
    exponent = np.frexp(width)[1] - 1
    if exponent.any() and len(x) and len(y):
        largest = np.maximum(np.abs(x).max(axis=0), np.abs(y).max(axis=0))
        finite = np.where(np.isfinite(largest), largest, 0.0)
        exponent = np.maximum(exponent, np.frexp(finite)[1] - _LARGEST_EXPONENT)
        unit = np.ldexp(1.0, -np.clip(exponent, -1000, 1000))
        x, y, width = x * unit, y * unit, width * unit
    return x, y, width


def _columns(problem, place):
    """What the weights of a row are multiplied by: ones, but for a sum, and values."""
    if problem.values is None:
        return np.ones((problem.num_y, 1))
    values = problem.values[place].astype(np.float64)
    if problem.reduction == "mean":
        return np.concatenate([np.ones((len(values), 1)), values], axis=1)
    return values


def _largest_norm(x: Any) -> float:
    if not x.size:
        return 0.0
    norm = float(np.einsum("id,id->i", x, x).max())
    return norm if math.isfinite(norm) else math.inf
