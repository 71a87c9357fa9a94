"""Log-sums, sums and means over all pairs, a block of x and a tile of y at a time."""

import math

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core import threads
from cupyflash._points.cpu import symmetric
from cupyflash._points.cpu.clouds import TILE, Clouds
from cupyflash._points.cpu.distances import Block
from cupyflash._points.cpu.weights import (
    LEAST,
    are_few,
    exp_of_few,
    in_strips,
    kernel_values,
)
from cupyflash._points.kernels import NAMES

# A rounding of a score this large shows in a mean.
_LARGE = 16.0
# Sums may grow by exp(_ROOM) over the row's reference before that is moved.
_ROOM, _HIGHEST = 100.0, 600.0
# The same where the reference is a large distance, which digits of near ones lack.
_ROOM_BEYOND = 8.0
# The same, and the smallest score, where exponentials are float32.
_NARROW_ROOM, _NARROW_HIGHEST, _NARROW_LEAST = 8.0, 40.0, -80.0
_ONES = np.ones((TILE, 1), np.float32)
# What is left out is below exp(-DIGITS) of a row's result.
DIGITS = {"float32": 18.0, "float64": 36.0}


def compute(problem):
    """(out, lse) of a problem on NumPy arrays; None where there is none."""
    sums = problem.reduction == "kernel_sum"
    out = lse = None
    if problem.reduction != "logsumexp":
        out = np.zeros(problem.out_shape, problem.dtype)
    if not sums:
        lse = np.full(problem.lse_shape, -np.inf, problem.dtype)
    if problem.num_x == 0 or problem.num_y == 0:
        return out, lse
    for place in np.ndindex(problem.batch):
        results = (
            None if out is None else out[place],
            None if lse is None else lse[place],
        )
        with np.errstate(all="ignore"):
            same = _arrays.same_view(problem.x[place], problem.y[place])
            clouds = Clouds(problem, place)
            if clouds.top_weight == math.inf:
                _infinite(clouds, *results)
            elif same and symmetric.pays(problem, clouds):
                symmetric.compute(problem, clouds, results, DIGITS[problem.dtype])
            elif clouds.tiles:
                _compute(problem, clouds, _Sum if sums else _LogSum, results)
    return out, lse


def _infinite(clouds, out, lse):
    """Results of a point of infinite weight: an infinite log-sum, and no mean."""
    rows = clouds.rows(0, len(clouds.x))
    lse[rows] = math.inf + 0.0 * clouds.x.sum(axis=-1)  # NaN stays NaN
    if out is not None:
        out[...] = math.nan


def _compute(problem, clouds, task, results):
    def run(start, scratch):
        stop = min(start + TILE, problem.num_x)
        rows = clouds.rows(start, stop)
        task(problem, clouds, Block(clouds, start, stop, scratch)).store(rows, *results)

    blocks = range(0, problem.num_x, TILE)
    threads.for_each_with_blas(run, blocks, threads.num_cores())


def _few_bits(x):
    """Numbers cut to 20 bits, or to whole ones, so that sums with them are exact."""
    unit = np.exp2(np.clip(np.frexp(x)[1] - 20, -1000, 0))
    return np.rint(x / unit) * unit


class _LogSum:
    """Sums of exp(score - reference) of a block of rows, and of values with them."""

    def __init__(self, problem, clouds, block):
        self.problem, self.clouds, self.block = problem, clouds, block
        self.log = problem.kernel.log
        self.gaussian = problem.kernel.name == "gaussian"
        self.decay = problem.kernel.decay
        self.known = None  # of d2, where its root is large
        # Elsewhere a kernel may be 0, and a row's sum, too; here where points are
        # infinite, and the row stays without a reference.
        self.positive = problem.kernel.name in NAMES
        # A mean of terms of both signs would show their roundings.
        self.narrow = problem.dtype == "float32" and problem.reduction == "logsumexp"
        self.highest = _NARROW_HIGHEST if self.narrow else _HIGHEST
        self.reference = None
        self.sums = np.zeros((len(block.x), clouds.columns.shape[1]))
        self.digits = DIGITS[problem.dtype] + math.log(len(clouds.y))
        for bound, tile in self.order():
            if self.reference is not None and bound < self.least() - self.digits:
                break
            self.add(tile)

    @property
    def room(self):
        """How far scores may be above the row's reference."""
        if self.narrow:
            return _NARROW_ROOM
        return _ROOM if self.known is None else _ROOM_BEYOND

    def order(self):
        """(upper bound of the largest score of a tile, tile), the best first."""
        clouds = self.clouds
        if not clouds.skips:
            return [(math.inf, tile) for tile in clouds.tiles]
        bounds = self.log(clouds.squared_gaps(self.block.x)) + clouds.heaviest
        order = np.argsort(-bounds, kind="stable")
        return [(float(bounds[place]), clouds.tiles[place]) for place in order]

    def least(self):
        """The smallest log-sum of a row so far."""
        return float((self.reference + np.log(self.sums[:, 0])).min())

    def add(self, tile):
        """Add a tile."""
        scores = self.scores(tile)
        if self.reference is None:
            self.reference = np.zeros(len(scores))
            self.unset = np.ones(len(scores), bool)
        if self.unset.any():
            self.set_references(scores)
            if self.lowest < -_LARGE and (self.gaussian or self.decay):
                # Once more, less the reference before a large score is rounded.
                scores = self.scores(tile)
        if not self.bounded(tile) and not scores.max() <= self.room:
            scores = self.move(tile, scores)
        if self.narrow and self.positive and not self.unset.any():
            self.sums += self.narrow_weights(scores) @ _ONES[: tile.size]
        else:
            self.sums += self.weights(scores) @ tile.columns

    def narrow_weights(self, scores):
        """exp(scores) in float32, a third of the time; below exp(-80) as much."""
        weights = self.block.scratch.array("narrow", scores.shape, np.float32)
        np.copyto(weights, scores, casting="same_kind")
        np.maximum(weights, _NARROW_LEAST, out=weights)
        return np.exp(weights, out=weights)

    def weights(self, scores):
        """exp(scores); 0 perhaps where a row's result does not show them."""
        if self.clouds.skips:
            floor = np.log(self.sums[:, 0]) - self.digits
            near = scores > floor[:, None]
            if are_few(near):
                return exp_of_few(scores, near)
        vanish = None
        if self.clouds.lowest_score < LEAST or not self.gaussian:
            if not self.positive or self.unset.any():
                vanish = scores < LEAST
            np.maximum(scores, LEAST, out=scores)
        weights = np.exp(scores, out=scores)
        if vanish is not None:
            weights[vanish] = 0.0
        return weights

    def set_references(self, scores):
        """Give a row its reference, the largest score that it meets first."""
        largest = scores.max(axis=1)
        fresh = self.unset & (largest > -np.inf)
        step = _few_bits(np.where(fresh & np.isfinite(largest), largest, 0.0))
        scores -= step[:, None]
        self.reference = self.reference + step
        self.unset &= ~fresh
        self.lowest = self.reference.min()
        self.know_distances()

    def know_distances(self):
        """Set what is taken off d2 before it is rounded and its root is taken."""
        if self.decay is None:
            return
        away = self.clouds.top_weight - self.reference
        away = np.where((away > _LARGE) & np.isfinite(away), away, 0.0)
        self.known = None
        if away.any():
            self.known = away * away / self.decay.square

    def bounded(self, tile):
        """Whether no score of a tile can be far above its row's reference."""
        known = self.problem.kernel.expression is None and self.problem.kernel.smooth
        return known and tile.heaviest - self.lowest <= self.room

    def move(self, tile, scores):
        """Raise the references of rows whose sums would grow too large; the scores."""
        largest = scores.max(axis=1)
        step = np.where((largest > self.room) & np.isfinite(largest), largest, 0.0)
        step = _few_bits(step)
        self.reference = self.reference + step
        self.lowest = self.reference.min()
        self.know_distances()
        self.sums *= np.exp(-step)[:, None]
        # Anew: beside the old reference they were rounded as large numbers. Those of
        # more than 16 digits do not meet a reference at all.
        return np.minimum(self.scores(tile), self.highest)

    def scores(self, tile):
        """log K + log_weights - reference of all pairs."""
        if self.gaussian:
            return self.block.scores(tile, self.reference)
        if self.known is not None:
            return self.scores_beyond(tile)
        scores = in_strips(self.log, self.block.squared(tile))
        if tile.log_weights is not None:
            scores += tile.log_weights
        if self.reference is not None:
            scores -= self.reference[:, None]
        return scores

    def scores_beyond(self, tile):
        """The same where r, a root of d2, is large: r - s = (r^2 - s^2) / (r + s)."""
        square, known = self.decay.square, self.known[:, None]
        less = np.maximum(self.block.squared(tile, self.known), -known)
        r = np.sqrt(square * (less + known))
        s = np.sqrt(square * known.astype(np.longdouble))
        both = np.clip(r + s.astype(np.float64), 1e-150, 1e150)
        scores = self.decay.log_beyond(r, square * less / both)
        if tile.log_weights is not None:
            scores += tile.log_weights
        scores -= (self.reference[:, None] + s).astype(np.float64)
        return scores

    def store(self, rows, out, lse):
        """Write the rows' results."""
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
            self.skip()
        else:
            for tile in clouds.tiles:
                self.add(tile)

    def skip(self):
        """Add the tiles that can matter beside a sum of the same kernels and |b|."""
        clouds, log = self.clouds, self.problem.kernel.log
        digits = DIGITS[self.problem.dtype]
        of_tile, of_pair = (
            digits + math.log(len(all_of)) for all_of in (clouds.tiles, clouds.y)
        )
        mass = np.zeros(len(self.block.x))
        bounds = log(clouds.squared_gaps(self.block.x)) + clouds.log_absolute
        for place in np.argsort(-bounds, kind="stable"):
            least = np.log(mass.min())
            if bounds[place] < least - of_tile:
                break
            tile = clouds.tiles[place]
            largest = np.log(tile.absolute.max())
            mass += self.add(tile, least - of_pair - largest) @ tile.absolute

    def add(self, tile, least=-math.inf):
        """Add a tile; its kernels, of which those below exp(least) do not matter."""
        weights = kernel_values(self.problem.kernel, self.block, tile, least)
        self.sums += weights @ tile.columns
        return weights

    def store(self, rows, out, lse):
        """Write the rows' results."""
        out[rows] = self.sums
