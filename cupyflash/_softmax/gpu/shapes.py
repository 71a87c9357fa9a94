"""Made-up layouts that reach every step of the thresholds of a kernel."""

from collections.abc import Iterator

from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu.config import itemsize_of
from cupyflash._softmax.gpu.heuristics import on_chip, short_rows
from cupyflash._softmax.gpu.heuristics.logsumexp import SUMS, WARP_SUM
from cupyflash._softmax.gpu.heuristics.rows import LANES
from cupyflash._softmax.memory_layout import Layout

_ARRAYS = ("x", "dy", "b", "where", "out", "sign")
_MANY = 1 << 20  # rows that fill any device
_FEW = 1 << 20  # the length of a long row of its own


def _rows_of(lengths):
    """Contiguous rows; `lengths` takes bytes of the first and of the widest dtype."""

    def layouts(*dtypes: str) -> Iterator[Layout]:
        sizes = [itemsize_of(name) for name in dtypes]
        for n in lengths(sizes[0], max(2, *sizes)):
            yield memory_layout.rows(1 if n == _FEW else _MANY, n, _ARRAYS)

    return layouts


def _steps(vector, configs):
    """A length for each config, a short one, and one with elements outside vectors."""
    return [vector, 25 * vector + 1, *(config.vectors * vector for config in configs)]


def _on_chip_pairs(size, widest):
    configs = (*on_chip.BACKWARD, *on_chip.BACKWARD_CLUSTERS)
    if widest == 2:
        configs = (*on_chip.BACKWARD_16_BITS, *on_chip.BACKWARD_16_BITS_CLUSTERS)
    return _steps(on_chip.VECTOR_BYTES // widest, configs)


def _summed(size, widest):
    """A length for each step of the ladder, and long rows that are few or many."""
    vector = on_chip.VECTOR_BYTES // size
    steps = SUMS.get(size, ())
    return [*(n * vector for n in (*steps, WARP_SUM)), 1 << 17, _FEW]


def _below(longest, *lengths):
    return [n for n in lengths if n < longest]


WALKED = _rows_of(lambda size, widest: [*(int(min(n, _FEW - 1)) for n in LANES), _FEW])
ON_CHIP_ROWS = _rows_of(
    lambda size, widest: _steps(
        on_chip.VECTOR_BYTES // widest, (*on_chip.FORWARD, *on_chip.FORWARD_CLUSTERS)
    )
)
ON_CHIP_PAIRS = _rows_of(_on_chip_pairs)
SPANNED = _rows_of(
    lambda size, widest: _below(
        short_rows.LONGEST_IN_SPAN[widest], 3, 4, 7, 15, 31, 33, 63, 127, 245
    )
)
SPANNED_PAIRS = _rows_of(
    lambda size, widest: _below(
        short_rows.LONGEST_PAIRS_IN_SPAN[widest], 1, 3, 4, 7, 15, 23, 33, 63, 99
    )
)
SPANNED_SUMS = _rows_of(
    lambda size, widest: (
        _below(short_rows.LONGEST_SUM_IN_SPAN.get(size, 0), 2, 3, 7, 12, 15, 23, 31)
        or [3]
    )
)
SINGLE = _rows_of(lambda size, widest: [1])
SHORT_ROWS = _rows_of(
    lambda size, widest: [
        n * on_chip.VECTOR_BYTES // size for n in (2, 4, 8, 12, 16, 32, 64)
    ]
)
SUMMED = _rows_of(_summed)
LONG_ROWS = _rows_of(lambda size, widest: [1 << 21, _FEW])
STREAMED = _rows_of(lambda size, widest: [1 << 20, _FEW])
# Several long rows, in two groups of blocks and in one.
RELAYED = _rows_of(
    lambda size, widest: [n // widest for n in ((4 << 20) + 1024, 9 << 20)]
)


def _columns_of(*shapes: tuple[int, int, int]):
    """Slabs of columns of these shapes, whatever the dtypes."""

    def layouts(*dtypes: str) -> Iterator[Layout]:
        return (memory_layout.columns(*shape, names=_ARRAYS) for shape in shapes)

    return layouts


# Of every kind: narrow and wide, short and long, and so long that blocks of the whole
# card share them.
COLUMNS = _columns_of(
    *((1 << 10, n, inner) for inner in (8, 7, 1024) for n in (4, 64, 256, 1000, 4096)),
    (1 << 5, 8192, 1024),
    (1, 4096, 1 << 15),
    (1, 1 << 16, 64),
    (1, 1 << 17, 7),
)
# Enough to fill a device: wide or narrow, of few or many parts.
SHARED_COLUMNS = _columns_of((1, 1024, 1 << 17), (1 << 13, 1024, 8), (1, 1 << 20, 96))
# Few, of many elements.
LONG_COLUMNS = _columns_of((1, 1 << 17, 7), (1, 1 << 17, 128))
