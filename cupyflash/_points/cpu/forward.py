"""Log-sums, sums and means over all pairs, a block of x and a tile of y at a time."""

import math

import numpy as np

from cupyflash._core import threads
from cupyflash._points.cpu.clouds import TILE_X, Clouds
from cupyflash._points.cpu.distances import Block

# Sums may grow by exp(_ROOM) over the row's reference before that is moved.
_ROOM = 300.0
# exp() of less is 0 here: it takes many times as long below the normal numbers.
_LEAST = -700.0
# What is left out is below exp(-_DIGITS) of a row's result.
_DIGITS = {"float32": 20.0, "float64": 38.0}


def compute(problem):
    """(out, lse) of a problem on NumPy arrays; None where there is none."""
    sums = problem.reduction == "kernel_sum"
    dtype = problem.dtype
    out = None
    if problem.reduction != "logsumexp":
        out = np.zeros(problem.out_shape, dtype)
    lse = None if sums else np.full(problem.lse_shape, -np.inf, dtype)
    if problem.num_x == 0 or problem.num_y == 0:
        return out, lse
    for place in np.ndindex(problem.batch):
        with np.errstate(all="ignore"):
            clouds = Clouds(problem, place)
        if not clouds.tiles:
            continue
        task = _Sum if sums else _LogSum

        def run(start, scratch, clouds=clouds, place=place, task=task):
            stop = min(start + TILE_X, problem.num_x)
            rows = slice(start, stop)
            if clouds.order is not None:
                rows = clouds.order[rows]
            result = task(problem, clouds, Block(clouds, start, stop, scratch))
            result.store(
                rows,
                None if out is None else out[place],
                None if lse is None else lse[place],
            )

        blocks = range(0, problem.num_x, TILE_X)
        threads.for_each_with_blas(run, blocks, threads.num_cores())
    return out, lse


def _bounds(clouds, block, log):
    """(upper bound of the log of what a pair of a tile adds, tile), the best first."""
    if not clouds.skips:
        return [(math.inf, tile) for tile in clouds.tiles]
    bounds = log(clouds.squared_gaps(block.x)) + clouds.heaviest
    order = np.argsort(-bounds, kind="stable")
    return [(float(bounds[place]), clouds.tiles[place]) for place in order]


class _LogSum:
    """Sums of exp(score - reference) of a block of rows, and of values with them."""

    def __init__(self, problem, clouds, block):
        self.problem, self.clouds, self.block = problem, clouds, block
        self.log = problem.kernel.log
        self.gaussian = problem.kernel.name == "gaussian"
        self.reference = None
        columns = clouds.columns
        count = 1 if columns is None else columns.shape[1]
        self.sums = np.zeros((len(block.x), count))
        digits = _DIGITS[problem.dtype] + math.log(len(clouds.y))
        for bound, tile in _bounds(clouds, block, self.log):
            if self.reference is not None and bound < self.least() - digits:
                break
            self.add(tile)

    def least(self):
        """The smallest log-sum of a row so far."""
        with np.errstate(all="ignore"):
            return float((self.reference + np.log(self.sums[:, 0])).min())

    def add(self, tile):
        """Add a tile."""
        scores = self.scores(tile)
        if self.reference is None:
            largest = scores.max(axis=1)
            self.reference = np.where(np.isfinite(largest), largest, 0.0)
            scores -= self.reference[:, None]
        elif not scores.max() <= _ROOM:
            self.move(scores)
        if self.clouds.farthest > -_LEAST or not self.gaussian:
            np.maximum(scores, _LEAST, out=scores)
        weights = np.exp(scores, out=scores)
        if tile.columns is None:
            self.sums[:, 0] += weights.sum(axis=1)
        else:
            self.sums += weights @ tile.columns

    def move(self, scores):
        """Raise the references of rows whose sums would grow too large."""
        largest = scores.max(axis=1)
        step = np.where((largest > _ROOM) & np.isfinite(largest), largest, 0.0)
        scores -= step[:, None]
        self.reference = self.reference + step
        self.sums *= np.exp(-step)[:, None]

    def scores(self, tile):
        """log K + log_weights - reference of all pairs."""
        if self.gaussian:
            scores = self.block.scores(tile, self.reference)
            if scores is not None:
                return scores
        scores = self.log(self.block.squared(tile))
        if tile.log_weights is not None:
            scores += tile.log_weights
        if self.reference is not None:
            scores -= self.reference[:, None]
        return scores

    def store(self, rows, out, lse):
        with np.errstate(all="ignore"):
            total = self.sums[:, :1]
            lse[rows] = self.reference + np.log(total[:, 0])
            if out is not None:
                out[rows] = np.where(total == 0, 0.0, self.sums[:, 1:] / total)


class _Sum:
    """Sums of K b of a block of rows."""

    def __init__(self, problem, clouds, block):
        self.problem, self.clouds, self.block = problem, clouds, block
        self.sums = np.zeros((len(block.x), problem.num_values))
        if clouds.skips:
            self._skipping()
        else:
            for tile in clouds.tiles:
                self.add(tile)

    def _skipping(self):
        """The tiles that can matter beside a sum of the same kernels and |b|."""
        clouds, log = self.clouds, self.problem.kernel.log
        digits = _DIGITS[self.problem.dtype]
        absolute = np.array([np.abs(tile.columns).sum() for tile in clouds.tiles])
        mass = np.zeros(len(self.block.x))
        bounds = log(clouds.squared_gaps(self.block.x))
        with np.errstate(all="ignore"):
            bounds = bounds + np.log(absolute)
            for place in np.argsort(-bounds, kind="stable"):
                tile = clouds.tiles[place]
                if bounds[place] + math.log(len(clouds.tiles)) < (
                    np.log(mass.min()) - digits
                ):
                    break
                weights = self.add(tile)
                mass += weights @ np.abs(tile.columns).sum(axis=1)

    def add(self, tile):
        """Add a tile; its kernels."""
        weights = self.problem.kernel.value(self.block.squared(tile))
        self.sums += weights @ tile.columns
        return weights

    def store(self, rows, out, lse):
        out[rows] = self.sums
