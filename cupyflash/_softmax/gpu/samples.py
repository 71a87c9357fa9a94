"""Problems that stand for all that the softmax table may compile."""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cupyflash._core import arrays
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu import config as softmax_config
from cupyflash._softmax.gpu.heuristics import on_chip
from cupyflash._softmax.gpu.heuristics.logsumexp import SUMS, WARP_SUM
from cupyflash._softmax.gpu.heuristics.rows import LANES
from cupyflash._softmax.gpu.heuristics.short_rows import (
    LONGEST_IN_SPAN,
    LONGEST_PAIRS_IN_SPAN,
    LONGEST_SUM_IN_SPAN,
)
from cupyflash._softmax.memory_layout import Layout

_MANY = 1 << 20  # rows that fill any card
_FEW = 1 << 20  # the row length that stands for a long row that is alone


def _rows_of(lengths):
    """Rows back to back of these lengths; a long one stands alone."""

    def samples(*dtypes):
        names = ("x", "dy", "b", "where", "out", "sign")
        for length in lengths(*dtypes):
            yield memory_layout.rows(1 if length == _FEW else _MANY, length, names)

    return samples


@_rows_of
def walked(*dtypes):
    return [*(int(min(length, _FEW - 1)) for length, _ in LANES), _FEW]


@_rows_of
def held_rows(*dtypes):
    """A length for each, a short one, and one with elements beside its vectors."""
    vector = on_chip.VECTOR_BYTES // max(
        2, *(softmax_config.itemsize_of(name) for name in dtypes)
    )
    configs = (*on_chip.FORWARD, *on_chip.FORWARD_CLUSTERS)
    return [vector, 25 * vector + 1, *(config.vectors * vector for config in configs)]


@_rows_of
def held_pairs(*dtypes):
    widest = max(2, *(softmax_config.itemsize_of(name) for name in dtypes))
    vector = on_chip.VECTOR_BYTES // widest
    configs = (*on_chip.BACKWARD, *on_chip.BACKWARD_CLUSTERS)
    if widest == 2:
        configs = (*on_chip.BACKWARD_16_BITS, *on_chip.BACKWARD_16_BITS_CLUSTERS)
    return [vector, 25 * vector + 1, *(config.vectors * vector for config in configs)]


@_rows_of
def spanned(*dtypes):
    longest = LONGEST_IN_SPAN[
        max(2, *(softmax_config.itemsize_of(name) for name in dtypes))
    ]
    return [n for n in (3, 4, 7, 15, 31, 33, 63, 127, 245) if n < longest]


@_rows_of
def spanned_pairs(*dtypes):
    widest = max(2, *(softmax_config.itemsize_of(name) for name in dtypes))
    longest = LONGEST_PAIRS_IN_SPAN[widest]
    return [n for n in (1, 3, 4, 7, 15, 23, 33, 63, 99) if n < longest]


@_rows_of
def spanned_sums(*dtypes):
    longest = LONGEST_SUM_IN_SPAN.get(softmax_config.itemsize_of(dtypes[0]), 0)
    return [n for n in (2, 3, 7, 12, 15, 23, 31) if n < longest] or [3]


@_rows_of
def short_rows(*dtypes):
    vector = on_chip.VECTOR_BYTES // softmax_config.itemsize_of(dtypes[0])
    return [n * vector for n in (2, 4, 8, 12, 16, 32, 64)]


@_rows_of
def summed(*dtypes):
    """A length for each step of the ladder, and long rows that are few or many."""
    size = softmax_config.itemsize_of(dtypes[0])
    vector = on_chip.VECTOR_BYTES // size
    steps = SUMS.get(size, ())
    return [*(v * vector for v, _ in steps), WARP_SUM * vector, 1 << 17, _FEW]


@_rows_of
def long_rows(*dtypes):
    return [1 << 21, _FEW]


@_rows_of
def streamed(*dtypes):
    return [1 << 20, _FEW]


def columns(*dtypes):
    """Columns of every kind: narrow and wide, short and long."""
    names = ("x", "dy", "b", "where", "out", "sign")
    for inner in (8, 7, 1024):
        for length in (4, 64, 256, 1000, 4096):
            yield memory_layout.columns(1 << 10, length, inner, names)


def shared_columns(*dtypes):
    """Columns that fill a card: wide or narrow, of few or many parts."""
    names = ("x", "dy", "b", "where", "out", "sign")
    for slabs, length, inner in (
        (1, 1024, 1 << 17),
        (1 << 13, 1024, 8),
        (1, 1 << 20, 96),
    ):
        yield memory_layout.columns(slabs, length, inner, names)


def long_columns(*dtypes):
    """Few columns of many elements."""
    names = ("x", "dy", "b", "where", "out", "sign")
    for inner in (7, 128):
        yield memory_layout.columns(1, 1 << 17, inner, names)


@dataclass(frozen=True)
class _Sample:
    """A problem as far as a choice of kernel and its switches depend on it."""

    function: str
    layout: Layout
    dtypes: dict[str, str | None]
    scale: float = 1.0
    method: str = "auto"
    is_complex: bool = False

    @property
    def row_length(self) -> int:
        return self.layout.row_length

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    @property
    def compute_dtype(self) -> str:
        used = [d for name, d in self.dtypes.items() if d and name != "where"]
        return "float32" if all(d in arrays.FLOATS[:3] for d in used) else "float64"


@functools.cache
def _natural(*names):
    """The result type of NumPy's promotion, with bool and integers as float64."""
    names = {name if name in arrays.FLOATS else "float64" for name in names}
    if len(names) == 1:
        return names.pop()
    return np.result_type(*(names - {"bfloat16"}), np.float32).name


def _samples(row, layout, x, out, where, scaled, function):
    """One choice of types and switches; `out` is the type of a second input if any."""
    dtypes = {"x": x, "where": where and "bool"}
    if "logsumexp" in row.functions:
        for b in (None, out):
            result = _natural(x) if b is None else _natural(x, b)
            yield _Sample(function, layout, dtypes | {"b": b, "out": result})
    elif row.functions == softmax_config.BACKWARD:
        dtypes |= {"dy": out, "out": _natural(x, out), "where": None}
        yield _Sample(function, layout, dtypes)
    else:
        scale, method = (
            2.0 if scaled else 1.0,
            row.methods[-1] if row.methods else "auto",
        )
        yield _Sample(function, layout, dtypes | {"out": out}, scale, method)


def everything(row) -> Iterable[_Sample]:
    """All types and switches, on up to two axes of each kind."""
    seconds = (
        arrays.FLOATS if row.functions == softmax_config.FORWARD else tuple(CUDA_TYPES)
    )
    scales = (False, True) if row.functions == softmax_config.FORWARD else (False,)
    masks = (False,) if row.functions == softmax_config.BACKWARD else (False, True)
    for x, second in itertools.product(CUDA_TYPES, seconds):
        # Many problems share a layout, which then finds out once what it is.
        layouts = [
            layout.spread(*axes)
            for layout in row.samples(x, second)
            for axes in ((1, 1), (2, 1), (1, 2), (2, 2))
        ]
        for where, scaled, function in itertools.product(masks, scales, row.functions):
            for layout in layouts:
                yield from _samples(row, layout, x, second, where, scaled, function)


def representative(row) -> Iterable[_Sample]:
    """Each type, switch, axis count and step of the ladder once, not all together."""
    function, other = row.functions[0], row.functions[-1]
    for x in CUDA_TYPES:
        # All rows convert in the same way: one of them shows every type.
        if row.fast or x in (*arrays.FLOATS, "int8"):
            layout = _closest(row.samples(x, _natural(x)), 1000)
            yield from _samples(row, layout, x, _natural(x), False, False, other)
    for layout in list(row.samples("float32", "float32"))[:: 1 if row.fast else 2]:
        yield from _samples(row, layout, "float32", "float32", False, False, function)
    # All switches at once, in the types that take the most registers of each kind.
    where, scaled = (
        row.functions != softmax_config.BACKWARD,
        row.functions == softmax_config.FORWARD,
    )
    for x, out in (("float32",) * 2, ("float64",) * 2, ("float16", "float32")):
        layout = _closest(row.samples(x, out), 4096).spread(2, 2)
        yield from _samples(row, layout, x, out, where, scaled, other)


def _closest(layouts, length):
    """The layout with rows nearest to `length`, seen from above."""
    layouts = list(layouts)
    longer = [layout for layout in layouts if layout.row_length >= length]
    if longer:
        return min(longer, key=lambda layout: layout.row_length)
    return max(layouts, key=lambda layout: layout.row_length)
