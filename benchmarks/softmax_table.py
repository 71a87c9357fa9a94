"""The cases of bench_softmax.py's table: a group of them a line of what is wanted.

All arrays of a case have the same bytes, several times the L2 cache, so that no launch
finds what the last one left there.
"""

from dataclasses import asdict, dataclass

import numpy as np

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
DTYPES = tuple(ITEMSIZES)

# Bytes of one array; the single row alone is longer.
ARRAY_BYTES = 512 << 20

# Lengths of the sweep, which looks for dips between those of the table.
SWEEP = tuple(
    dict.fromkeys(np.geomspace(64, 300_000, 200).round().astype(int).tolist())
)


@dataclass(frozen=True)
class Case:
    """One function over one array; the reduced axis lies between outer and inner."""

    group: str
    wanted: float  # share of the ceiling
    function: str
    outer: int
    length: int
    inner: int
    dtype: str
    shift: int = 0  # elements from a 16-byte boundary to the start of each array

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer, self.length, self.inner

    @property
    def size(self) -> int:
        return self.outer * self.length * self.inner

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def transfers(self) -> int:
        """How often memory must be crossed: what is read, and what is written."""
        if self.function == "logsumexp":
            return 1
        return 3 if self.function.endswith("_vjp") else 2

    @property
    def work(self) -> float:
        """Bytes of all transfers."""
        return float(self.transfers) * self.size * self.itemsize

    @property
    def label(self) -> str:
        shape = " x ".join(str(n) for n in self.shape if n > 1)
        shift = f", {self.shift} off" if self.shift else ""
        where = "" if self.inner == 1 else " of columns"
        return f"{self.function}{where} {shape} {self.dtype}{shift}"

    @property
    def is_drawn(self) -> bool:
        """Whether the picture of docs/speed.md shows it."""
        is_rows = self.function == "softmax" and self.inner == 1 and not self.shift
        dtypes = ("float32", "bfloat16")
        return is_rows and self.group != "sweep" and self.dtype in dtypes

    @property
    def facts(self) -> dict:
        """For the report."""
        return {"case": self.label, **asdict(self)}


def _case(group, wanted, function, dtype, length, inner=1, outer=None, shift=0):
    """As many rows as fit."""
    if outer is None:
        outer = max(1, ARRAY_BYTES // ITEMSIZES[dtype] // (length * inner))
    return Case(group, wanted, function, outer, length, inner, dtype, shift)


def _of(dtype):
    """The table for one dtype, in the order of the issue."""
    for power in range(8, 19):
        yield _case("powers of two", 0.95, "softmax", dtype, 1 << power)
    for length in (1 << 20, 1 << 23):
        yield _case("long rows", 0.90, "softmax", dtype, length)
    yield _case("one row", 0.90, "softmax", dtype, 1 << 28)
    for length in (64, 32, 16):
        yield _case("short rows", 0.85, "softmax", dtype, length)
    for length in (7, 1000, 1025, 50257):
        yield _case("odd lengths", 0.85, "softmax", dtype, length)
    for length in (1024, 8192, 131072):
        yield _case("unaligned starts", 0.85, "softmax", dtype, length, shift=1)
    for inner in (8, 16):
        yield _case("narrow columns", 0.80, "softmax", dtype, 1024, inner)
    for inner in (32, 64, 128, 256, 1024, 4096, 32768):
        yield _case("columns", 0.90, "softmax", dtype, 1024, inner)
    for length, inner in ((4096, 32768), (65536, 2048), (1 << 20, 128)):
        length = min(length, ARRAY_BYTES // ITEMSIZES[dtype] // inner)
        yield _case("axis 0", 0.90, "softmax", dtype, length, inner, outer=1)
    for length in (64, 1024, 8192, 65536, 1 << 20, 1 << 23):
        yield _case("logsumexp", 0.92, "logsumexp", dtype, length)
    yield _case("logsumexp", 0.92, "logsumexp", dtype, 1 << 28)
    for inner in (32, 1024, 32768):
        yield _case("logsumexp of columns", 0.92, "logsumexp", dtype, 1024, inner)
    for function in ("softmax_vjp", "log_softmax_vjp"):
        for length in (256, 1024, 8192, 65536, 262144, 1 << 20):
            yield _case("vjp", 0.93, function, dtype, length)
        for inner in (32, 4096):
            yield _case("vjp of columns", 0.93, function, dtype, 1024, inner)
    for length in (1024, 16384, 262144):
        yield _case("log_softmax", 0.95, "log_softmax", dtype, length)


def cases() -> list[Case]:
    """The whole table, dtype by dtype, then the sweep."""
    table = [case for dtype in DTYPES for case in _of(dtype)]
    table += [
        _case("sweep", 0.85, "softmax", dtype, length)
        for dtype in DTYPES
        for length in SWEEP
    ]
    return table
