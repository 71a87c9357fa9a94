"""Rows of any NumPy array, brought into the cache as matrices and written back.

A block is a group of whole rows, a piece a part of its reduced axes. `Block` copies a
piece into a contiguous matrix (rows, columns) of the dtype that is computed in, from
any strides, and copies one back: the methods work on such matrices alone.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, Literal

import numpy as np

from cupyflash._core import arrays
from cupyflash._core import strides as _strides
from cupyflash._softmax.problem import split_scale

# Elements of a block: 512 KiB in float64, which stays in a core's second-level cache.
BLOCK = 64 * 1024
# Elements up to which whole rows are held; one read is worth leaving that cache.
_HELD = 256 * 1024
# Columns of memory that are read side by side where rows run across memory: strips of
# 64 take twice as long to read.
_SIDE_BY_SIDE = 256
_FEWEST_SIDE_BY_SIDE = 32
# Rows shorter than this are slow to reduce one by one (17 ns an element at 4, not 4).
_SHORT_ROW = 24
# Terms that are added one after another where many rows are summed side by side: the
# roundings of equal terms all have one sign.
_TERMS = 8
# NumPy adds up to 128 neighbours in eight sums, but the last ones, if they are no eight
# more, to the total. In a row shorter than this their roundings do not matter.
_TAIL_MATTERS = range(25, 128)

Box = tuple[slice, ...]


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut an index space into boxes of at most `limit` elements, last axes whole."""
    inner, axis = 1, len(shape)
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    whole = (slice(None),) * (len(shape) - axis)
    if axis == 0:
        yield whole
        return
    n = shape[axis - 1]
    parts = -(-n // max(1, limit // inner))
    step = -(-n // parts)
    for outer in np.ndindex(shape[: axis - 1]):
        fixed = tuple(slice(i, i + 1) for i in outer)
        for start in range(0, n, step):
            yield (*fixed, slice(start, start + step), *whole)


class Rows:
    """The operands as (kept axes..., reduced axes...), neighbours merged.

    Attributes
    ----------
    views : the operands by name; those that are None are missing
    kept, reduced : shapes of the merged axes
    kept_axes : the axes of the problem that `kept` was merged from, in its order
    reduced_axes : likewise of `reduced`
    length : elements of a row
    side_by_side : a matrix holds its rows as neighbours in memory, not one by one
    per_block : rows of a block
    fits : whole rows are held
    near_dtype : the dtype of a softmax by exponentials near a base, or None
    out_is_new : `out` was made for the call
    """

    def __init__(self, problem: Any, *, out_is_new: bool = False, **operands: Any):
        self.problem, self.out_is_new = problem, out_is_new
        given = {name: x for name, x in operands.items() if x is not None}
        x = given["x"]

        def from_far_to_near(axes):
            return sorted(axes, key=lambda a: -abs(x.strides[a]))

        self.kept_axes = from_far_to_near(set(range(x.ndim)) - set(problem.axes))
        reduced_axes = self.reduced_axes = from_far_to_near(problem.axes)

        def merged(axes):
            shape = [problem.shape[a] for a in axes]
            strides = [[y.strides[a] for a in axes] for y in given.values()]
            return _strides.collapse(shape, strides)[0] or (1,)

        self.kept, self.reduced = merged(self.kept_axes), merged(reduced_axes)
        # Merged axes are one axis in every operand: the views are no copies.
        self.views = {
            name: y.transpose(*self.kept_axes, *reduced_axes).reshape(
                self.kept + self.reduced, copy=False
            )
            for name, y in given.items()
        }
        self.length = prod(self.reduced)
        steps = self.views["x"].strides
        across = abs(steps[len(self.kept) - 1]) < abs(steps[-1])
        across &= self.kept[-1] >= _FEWEST_SIDE_BY_SIDE
        self.side_by_side = across or (self.length < _SHORT_ROW and prod(self.kept) > 1)
        self.per_block = max(1, BLOCK // self.length)
        if across:
            self.per_block = max(self.per_block, _SIDE_BY_SIDE)
        held = BLOCK if across else _HELD  # strips of few columns are slow to read
        self.fits = self.length * min(self.per_block, prod(self.kept)) <= held
        self.near_dtype = _near_dtype(problem)

    def blocks(self) -> Iterator[Box]:
        """The rows in boxes of the kept axes."""
        return boxes(self.kept, self.per_block)


def _near_dtype(problem):
    """float32 or float64 where differences x - m must be exact, and are not scaled."""
    if problem.function != "softmax" or problem.is_complex:
        return None
    if split_scale(problem.scale)[1] != 1:
        return None
    if problem.compute_dtype == "float64":
        return np.float64
    # 16 bits have no digits that x - m could lose.
    is_wide = "float32" in (problem.dtypes["x"], problem.dtypes["out"])
    return np.float32 if is_wide else None


class Block:
    """Some whole rows: a box of the kept axes."""

    def __init__(self, rows: Rows, box: Box, scratch: Any):
        self._rows, self._box, self._scratch = rows, box, scratch
        self.num_rows = prod(rows.views["x"][box].shape[: len(rows.kept)])
        self._scale = rows.problem.scale
        self._key_factor = split_scale(self._scale)[0]
        self._absent = 0 if rows.problem.function == "softmax" else -np.inf
        self.near_dtype = rows.near_dtype

    @property
    def has_weights(self) -> bool:
        return "b" in self._rows.views

    def pieces(self, columns: int | None = None) -> list[Box]:
        """The columns in boxes, `columns` at most; None is as many as a block holds."""
        if columns is None:
            columns = BLOCK // self.num_rows
        return list(boxes(self._rows.reduced, max(1, columns)))

    def whole(self) -> Box:
        """All columns as one piece."""
        return (slice(None),) * len(self._rows.reduced)

    def _part(self, name, piece):
        view = self._rows.views.get(name)
        return None if view is None else view[self._box + piece]

    def _as_part(self, matrix, shape):
        """A matrix in the shape of a part; a view, if it is in our order of memory."""
        kept = len(self._rows.kept)
        if not self._rows.side_by_side:
            return matrix.reshape(shape)
        transposed = matrix.T.reshape(shape[kept:] + shape[:kept])
        rest = len(shape) - kept
        return transposed.transpose(*range(rest, len(shape)), *range(rest))

    def buffer(self, name: str, shape: tuple[int, int], dtype: Any) -> Any:
        """A matrix (rows, columns) in our order of memory."""
        if self._rows.side_by_side:
            return self._scratch.array(name, shape[::-1], dtype).T
        return self._scratch.array(name, shape, dtype)

    def matrix(self, name: str, piece: Box, dtype: Any) -> Any:
        """A copy of one operand as (rows, columns), or None without the operand."""
        part = self._part(name, piece)
        if part is None:
            return None
        matrix = self.buffer(name, (self.num_rows, part.size // self.num_rows), dtype)
        np.copyto(self._as_part(matrix, part.shape), part, casting="unsafe")
        return matrix

    def scores(self, piece: Box, dtype: Any) -> Any:
        """scale * x, with -inf where an element is absent."""
        x = self.matrix("x", piece, dtype)
        if self._scale != 1:
            # Real and imaginary part alone: inf * (scale + 0j) would have a NaN.
            parts = (x.real, x.imag) if x.dtype.kind == "c" else (x,)
            for part in parts:
                np.multiply(part, part.dtype.type(self._scale), out=part)
        return self._without_absent(piece, x)

    def keys(self, piece: Box, dtype: Any) -> Any:
        """Numbers whose differences, times what `split_scale` leaves, are those of
        scale * x; -inf where an element is absent. Complex ones are scale * x."""
        if np.dtype(dtype).kind == "c":
            return self.scores(piece, dtype)
        x = self.matrix("x", piece, dtype)
        if self._key_factor != 1:
            np.multiply(x, dtype(self._key_factor), out=x)
        return self._without_absent(piece, x)

    def keys_to_read(self, piece: Box, dtype: Any) -> Any:
        """`keys` that may lie in the operand itself, and must not be changed."""
        if self._key_factor == 1:
            x = self._lies_ready("x", piece, dtype)
            if x is not None:
                return x
        return self.keys(piece, dtype)

    def to_read(self, name: str, piece: Box, dtype: Any) -> Any:
        """`matrix` that may lie in the operand itself, and must not be changed."""
        ready = self._lies_ready(name, piece, dtype)
        return self.matrix(name, piece, dtype) if ready is None else ready

    def target(self, piece: Box, dtype: Any) -> Any:
        """The result as (rows, columns) to write to, or None where `write` must."""
        return self._lies_ready("out", piece, dtype)

    def new_target(self, piece: Box, dtype: Any) -> Any:
        """`target` that shares no memory with an operand, laid out as a `buffer`."""
        if not self._rows.out_is_new:
            return None
        matrix = self.target(piece, dtype)
        if matrix is None:
            return None
        in_order = matrix.T if self._rows.side_by_side else matrix
        return matrix if in_order.flags.c_contiguous else None

    def _lies_ready(self, name, piece, dtype):
        """An operand as a matrix in our order of memory without a copy, or None."""
        part = self._part(name, piece)
        if "where" in self._rows.views or part.dtype != dtype:
            return None
        try:
            matrix = part.reshape(self.num_rows, -1, copy=False)
        except ValueError:  # its axes cannot be merged
            return None
        step = matrix.strides[not self._rows.side_by_side]
        return matrix if step == matrix.itemsize else None

    def _without_absent(self, piece, x):
        if (absent := self.absent(piece)) is not None:
            np.copyto(x, -np.inf, where=absent)
        return x

    def absent(self, piece: Box) -> Any:
        """Where `where` is False, as (rows, columns), or None without `where`."""
        where = self.matrix("where", piece, np.bool_)
        return None if where is None else np.logical_not(where, out=where)

    def rescale(self, piece: Box, factors: Any) -> None:
        """Multiply the written rows; an absent element stays what it is."""
        out = self._part("out", piece)
        where = self._part("where", piece)
        kept = len(self._rows.kept)
        factors = factors.reshape(out.shape[:kept] + (1,) * (out.ndim - kept))
        np.multiply(out, factors, out=out, where=True if where is None else where)

    def write(self, piece: Box, values: Any) -> None:
        """Store (rows, columns); an absent element gets the value for such."""
        if (absent := self.absent(piece)) is not None:
            np.copyto(values, self._absent, where=absent)
        out = self._part("out", piece)
        store(out, self._as_part(values, out.shape))


class SmallBlock:
    """All rows of a small array, without `where` and weights, as one block.

    It offers what the methods take of `Block`. A buffer is a new array, which for few
    elements costs less than to look for an old one.
    """

    has_weights = False

    def __init__(
        self, x: Any, side_by_side: bool, key_factor: float, near_dtype: Any = None,
        dy: Any = None,
    ):  # fmt: skip
        self._x, self._dy, self._key_factor = x, dy, key_factor
        self.near_dtype = near_dtype
        self._order: Literal["F", "C"] = "F" if side_by_side else "C"
        self.result: Any = None

    def whole(self) -> None:
        """All columns as one piece."""

    def pieces(self) -> list[None]:
        """The same in a list."""
        return [None]

    def buffer(self, name: str, shape: tuple[int, int], dtype: Any) -> Any:
        """A matrix (rows, columns)."""
        return np.empty(shape, dtype, self._order)

    def to_read(self, name: str, piece: None, dtype: Any) -> Any:
        """As those of `Block`; float32 for float64, which NumPy converts on its way.

        In large blocks a copy takes less time than that.
        """
        x = self._x if name == "x" else self._dy
        is_ready = x.dtype == dtype or (x.dtype == np.float32 and dtype == np.float64)
        return x if is_ready else x.astype(dtype)

    def new_target(self, piece: None, dtype: Any) -> None:
        """The result is what `write` is given."""

    def keys(self, piece: None, dtype: Any) -> Any:
        """As those of `Block`."""
        x = np.array(self._x, dtype, order=self._order)
        return x if self._key_factor == 1 else np.multiply(x, self._key_factor, out=x)

    scores = keys  # of logsumexp, which has no scale

    def keys_to_read(self, piece: None, dtype: Any) -> Any:
        """As those of `Block`."""
        x = self._x
        ready = self._key_factor == 1 and x.dtype == dtype and x.flags.c_contiguous
        return x if ready and self._order == "C" else self.keys(piece, dtype)

    def target(self, piece: None, dtype: Any) -> None:
        """The result is what `write` is given."""

    def matrix(self, name: str, piece: None, dtype: Any) -> Any:
        """As those of `Block`; None without the operand."""
        x = {"x": self._x, "dy": self._dy}.get(name)
        return None if x is None else np.array(x, dtype, order=self._order)

    def absent(self, piece: None) -> None:
        """There is no `where`."""

    def write(self, piece: None, values: Any) -> None:
        """Keep the result."""
        self.result = values


def store(out: Any, values: Any) -> None:
    """``out[...] = values``, rounded once."""
    if values.dtype == np.float64 and arrays.dtype_name(out) == "bfloat16":
        values = _to_odd_float32(values)
    np.copyto(out, values, casting="unsafe")


def _to_odd_float32(x):
    """float64 as float32, with the last bit set where digits are lost.

    ml_dtypes rounds to bfloat16 by way of float32. A number beside the middle of two
    then stays beside it.
    """
    y = x.astype(np.float32)
    y = np.where(np.abs(y) > np.abs(x), np.nextafter(y, np.float32(0)), y)
    odd = (y.view(np.uint32) | (y != x)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), odd)


_MINUS_INFINITY = {
    np.dtype(t): t(-np.inf) for t in (np.float32, np.float64, np.longdouble)
}


def row_max(x: Any) -> Any:
    """Largest element of each row, as a column; NaN wins."""
    first = _MINUS_INFINITY.get(x.dtype)
    if first is None:  # complex numbers have an order of two parts
        return np.maximum.reduce(x, axis=1, keepdims=True)
    # With a number to begin from, rows of whole vectors take NumPy half the time.
    return np.maximum.reduce(x, axis=1, keepdims=True, initial=first)


def row_sum(x: Any, dtype: Any = None) -> Any:
    """Sum of each row, as a column, of short partial sums."""
    num_terms = x.shape[1]
    wider = dtype is not None and np.dtype(dtype).itemsize > x.itemsize
    if x.flags.c_contiguous:
        tail = num_terms % 8
        if tail and num_terms in _TAIL_MATTERS and x.dtype == np.float64:
            total = np.add.reduce(x[:, :-tail], axis=1, keepdims=True)
            return total + np.einsum("rc->r", x[:, -tail:])[:, None]
    elif num_terms > _TERMS and not wider:
        columns, whole = x.T, num_terms - num_terms % _TERMS
        groups = columns[:whole].reshape(-1, _TERMS, len(x))
        total = row_sum(np.add.reduce(groups, axis=1, dtype=dtype).T)
        if whole == num_terms:
            return total
        return total + np.add.reduce(columns[whole:], axis=0, dtype=dtype)[:, None]
    return np.add.reduce(x, axis=1, keepdims=True, dtype=dtype)


def sum_of_parts(parts: list[Any]) -> Any:
    """The sum of what `row_sum` gave for the pieces of rows."""
    return row_sum(np.concatenate(parts, axis=1)) if len(parts) > 1 else parts[0]
