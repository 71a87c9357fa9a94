"""Score and mask functions on NumPy arrays, for a block of scores at a time."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention.functions import (
    described,
    key_of,
    tiles_of_mask,
    with_options,
)
from cupyflash._expr.diagonals import distances
from cupyflash._expr.emit_numpy import evaluate
from cupyflash._expr.intervals import decide
from cupyflash._expr.nodes import is_const


class Reads(NamedTuple):
    """Reads of one array in a block: where, and the derivative of the score by them."""

    name: str
    places: list[np.ndarray]
    partial: np.ndarray


def as_options(problem: Any, operands: Any) -> tuple[Any, Any]:
    """A call with the faster options in place of functions that say the same."""
    given = operands.functions
    if given is None or all(f is None or f.expression.option is None for f in given):
        return problem, operands
    functions, left, right, softcap = with_options(
        given, problem.left, problem.right, problem.softcap
    )
    score, mask = functions or (None, None)
    problem = replace(
        problem,
        left=left,
        right=right,
        softcap=softcap,
        score=key_of(score),
        mask_function=key_of(mask),
    )
    return problem, operands._replace(functions=functions)


def without_options(given: Any, softcap: float) -> tuple[Any, tuple[Any, ...]]:
    """The functions that no option says, and what a problem depends on in all."""
    left, right, option = None, None, softcap
    if any(f is not None and f.expression.option is not None for f in given):
        given, left, right, option = with_options(given, left, right, softcap)
    score, mask = given or (None, None)
    return given, (key_of(score), key_of(mask), left, right, option)


def positions(b: Any, h: Any, first: Any, rows: int, start: int, keys: int) -> Any:
    """The variables of tiles of `rows` queries, from position `first`, and of `keys`.

    b, h and `first` are numbers, or arrays (..., 1, 1) of one number a tile.
    """
    return {
        "b": b,
        "h": h,
        "i": np.arange(rows)[:, None] + first,
        "j": np.arange(start, start + keys)[None],
        "d": distances(first, rows, start, keys),
    }


class TileFunctions:
    """The functions of a call on the scores of some tiles, all at once.

    `places` are their `positions`; `visible_by_options` tells which pairs no option
    hides, and is asked where an array is read out of its range.
    """

    def __init__(
        self, functions: Any, places: Any, dtype: Any, visible_by_options: Any
    ):
        self._score, self._mask = functions
        self._places, self._dtype = places, dtype
        self._visible_by_options = visible_by_options

    def change(self, s):
        """Scores after the function, in place."""
        if self._score is not None:
            root, _, _ = self._score.expression.of_tiles
            (value,) = self.evaluate([root], s)
            np.copyto(s, value)

    def differentiate(self, s, names=()):
        """(derivative by s or None for 1, reads of some arrays); s as by `change`."""
        root, slope, reads = self._score.expression.of_tiles
        reads = [read for read in reads if read[0] in names]
        roots = [root, slope]
        roots += [x for _, index, partial in reads for x in (*index, partial)]
        found = self.evaluate(roots, s)
        # s changes, and may be a derivative as it stands.
        value, by_s, *rest = (x.copy() if x is s else x for x in found)
        values = iter(rest)
        reads = [
            Reads(name, list(itertools.islice(values, len(index))), next(values))
            for name, index, _ in reads
        ]
        np.copyto(s, value)
        return None if is_const(slope, 1) else by_s, reads

    def hide(self, s):
        """Put -inf where the mask function hides a key."""
        if self._mask is not None:
            np.copyto(s, -np.inf, where=~self._seen())

    def evaluate(self, roots, s):
        """Values of nodes of the score."""
        return self._evaluate(
            self._score, roots, {**self._places, "s": s}, self._visible
        )

    @property
    def has_score(self):
        """Whether scores change."""
        return self._score is not None

    def _seen(self):
        """What the mask function gives."""
        root, _, _ = self._mask.expression.of_tiles
        (seen,) = self._evaluate(
            self._mask, [root], self._places, self._visible_by_options
        )
        return seen

    def _visible(self):
        """The pairs whose score counts."""
        seen = self._visible_by_options()
        return seen if self._mask is None else seen & self._seen()

    def _evaluate(self, function, roots, variables, visible):
        values, arrays = function.values, function.arrays
        return evaluate(roots, variables, values, arrays, self._dtype, visible)


class BlockFunctions:
    """The functions of a call as one task sees them."""

    def __init__(self, part: Any, functions: Any):
        self._part, self._functions = part, functions
        self._score, self._mask = functions
        shape = part.problem.batch
        self._b = int(np.ravel_multi_index(part.batch, shape)) if shape else 0
        self._tiles: dict[tuple[int, int], bool | None] = {}

    @property
    def has_score(self):
        """Whether scores change."""
        return self._score is not None

    def change(self, s, start, stop):
        """Scores of keys [start, stop) after the function, in place."""
        self._of_block(start, stop).change(s)

    def differentiate(self, s, start, stop, names=()):
        """`TileFunctions.differentiate` of keys [start, stop)."""
        return self._of_block(start, stop).differentiate(s, names)

    def hide(self, s, start, stop):
        """Put -inf where the mask function hides a key."""
        if self._mask is not None and self._tiles.get((start, stop)) is not True:
            self._of_block(start, stop).hide(s)

    def hides_all(self, start, stop):
        """Whether no row sees a key of [start, stop), by intervals."""
        if self._mask is None:
            return False
        part = self._part
        first = part.start + part.offset
        known = decide(
            self._mask.expression,
            {
                "b": (self._b, self._b),
                "h": (part.head, part.head),
                "i": (first, first + part.num_rows - 1),
                "j": (start, stop - 1),
            },
            self._mask.values,
            self._mask.arrays,
        )
        self._tiles[start, stop] = known
        return known is False

    def _of_block(self, start, stop):
        """The functions on keys [start, stop)."""
        part, keys = self._part, stop - start
        first = part.start + part.offset

        def visible_by_options():
            probe = np.zeros((part.num_rows, keys), part.dtype)
            part.hide(probe, start, stop)
            return probe == 0

        places = positions(self._b, part.head, first, part.num_rows, start, keys)
        return TileFunctions(self._functions, places, part.dtype, visible_by_options)


def add_reads(total, reads, gradient, visible):
    """Add to the gradient of an array what a block of gradients of the score gives.

    Terms are summed up along the axes on which the index does not depend first.
    """
    if not total.size:
        return
    term = np.where(visible, gradient * reads.partial, 0)
    ones = (1,) * term.ndim
    shape = np.broadcast_shapes(ones, *(index.shape for index in reads.places))
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1)
    term = term.sum(axis=axes, keepdims=True, dtype=np.float64)
    flat = np.zeros(shape, np.int64)
    for index, size in zip(reads.places, total.shape, strict=True):
        flat = flat * size + np.clip(index, 0, size - 1)
    target = total.reshape(-1)
    if target.size <= flat.size:
        target += np.bincount(flat.ravel(), term.ravel(), minlength=target.size)
    else:
        np.add.at(target, flat.ravel(), term.ravel())


def describe(problem, operands, offsets, rows, keys):
    """The functions of a call as Python; how many tiles a mask shows whole, and not."""
    details = described(operands.functions)
    _, mask = operands.functions or (None, None)
    if mask is not None:
        details["tiles_of_the_mask"] = tiles_of_mask(
            problem, mask, offsets, max(rows, 1), keys
        )
    return details
