"""The table of softmax kernels: which takes a problem, and how it cuts it."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _arrays, _kernels
from cupyflash._kernels import CUDA_TYPES, Device, Variant

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_vjp", "log_softmax_vjp")

# Threads of a block that holds several short rows.
_BLOCK_THREADS = 128

# Blocks of a grid; each takes more rows when there are more.
MAX_BLOCKS = 1 << 20

# Row length up to -> threads a row, for kernels that walk over a row.
_LANES = (
    (8, 4),
    (64, 8),
    (1024, 32),
    (4096, 128),
    (16384, 256),
    (float("inf"), 512),
)

# Long rows that are fewer than this get all threads that a block may have.
_FEW_ROWS = 128

# Row length up to -> (threads a row, elements each holds in registers), by the size of
# the widest element. Up to 32 threads a row, its block holds other rows as well.
# 32 elements a thread spill in a block of 1024 (ptxas 13.4), and so would 16 doubles.
_HELD = {
    2: (
        *((8 * n, (n, 8)) for n in (1, 2, 4, 8, 16, 32)),
        (512, (32, 16)),
        (1024, (32, 32)),
        *((16 * n, (n, 16)) for n in (128, 256, 512, 1024)),
    ),
    4: (
        *((4 * n, (n, 4)) for n in (1, 2, 4, 8, 16, 32)),
        (256, (32, 8)),
        (512, (32, 16)),
        (1024, (32, 32)),
        *((16 * n, (n, 16)) for n in (128, 256, 512, 1024)),
    ),
    8: (
        *((2 * n, (n, 2)) for n in (1, 2, 4, 8, 16, 32)),
        (128, (32, 4)),
        (256, (32, 8)),
        (512, (32, 16)),
        *((8 * n, (n, 8)) for n in (128, 256, 512, 1024)),
    ),
}


@dataclass(frozen=True)
class Cut:
    """How a kernel deals the rows of a problem to threads."""

    lanes: int  # threads that work on one row
    rows_per_block: int
    held: int = 0  # elements that a thread keeps in registers

    @property
    def num_threads(self) -> int:
        return self.lanes * self.rows_per_block

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        values = {"LANES": self.lanes, "ROWS_PER_BLOCK": self.rows_per_block}
        if self.held:
            values["HELD"] = self.held
        return tuple((name, str(value)) for name, value in values.items())

    def num_blocks(self, num_rows: int) -> int:
        return min(-(-num_rows // self.rows_per_block), MAX_BLOCKS)


def _cut(lanes, held=0):
    return Cut(lanes, max(1, _BLOCK_THREADS // lanes), held)


def _walk(problem):
    """Threads that walk over a row of any length."""
    lanes = _kernels.by_threshold(_LANES, problem.row_length)
    if lanes == _LANES[-1][1] and problem.num_rows < _FEW_ROWS:
        lanes = 1024
    return _cut(lanes)


def _hold(problem):
    """Threads that hold a row in registers; None if it is too long."""
    if problem.row_length > _longest_held(problem):
        return None
    return _cut(*_kernels.by_threshold(_held_ladder(problem), problem.row_length))


def _held_ladder(problem):
    ladder = _HELD[_widest(problem)]
    # A mask or a scale takes registers too: the fullest step would spill.
    return ladder[:-1] if problem.dtypes["where"] or problem.scale != 1 else ladder


def _longest_held(problem):
    return _held_ladder(problem)[-1][0]


def _widest(problem):
    names = problem.dtypes["x"], problem.dtypes["out"]
    return max(2, *(_itemsize(name) for name in names))


def _itemsize(name):
    return _kernels.ITEMSIZE.get(name) or np.dtype(name).itemsize


@dataclass(frozen=True)
class SoftmaxKernel:
    """One kernel: what it accepts and how it cuts the problem.

    The name is also the stem of ``cuda_src/softmax/<name>.cu`` and, after ``softmax_``,
    its entry point.
    """

    name: str
    functions: tuple[str, ...]
    rungs: tuple[str, ...]
    cut: Callable[[Any], Cut | None]
    fast: bool = False  # must not spill registers

    @property
    def source(self) -> str:
        return f"softmax/{self.name}.cu"

    def refusal(self, problem: Any, device: Device) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        if problem.function not in self.functions:
            return f"{problem.function} is not one of {', '.join(self.functions)}"
        if problem.is_complex:
            return "complex numbers have no kernel; CuPy's array operations take them"
        for name in problem.dtypes.values():
            if name and (reason := _kernels.refuse_old_device(name, device)):
                return reason
        if self.cut(problem) is None:
            return (
                f"a row of {problem.row_length} does not fit in the registers of a "
                f"block (at most {_longest_held(problem)} elements for these options)"
            )
        return None

    def variant(self, problem: Any, outer_axes: int, reduced_axes: int) -> Variant:
        """What is compiled, for so many axes of each kind after collapsing."""
        cut = self.cut(problem)
        assert cut is not None, "the row has refused this problem"
        defines = (
            *_switches(problem),
            ("OUTER_AXES", str(outer_axes)),
            ("REDUCED_AXES", str(reduced_axes)),
            *cut.defines,
        )
        return Variant(self.source, f"softmax_{self.name}", defines)


def _switches(problem):
    """Types and options as -D, by the parameter list that the function belongs to."""
    dtypes = problem.dtypes
    types = {"OUT_T": dtypes["out"], "ACC_T": problem.compute_dtype}
    flags = {}
    if problem.function in FORWARD:
        types |= {"X_T": dtypes["x"]}
        flags["HAS_WHERE"] = bool(dtypes["where"])
        flags["SCALED"] = problem.scale != 1
    elif problem.function in BACKWARD:
        types |= {"Y_T": dtypes["x"], "DY_T": dtypes["dy"]}
    else:
        types |= {"A_T": dtypes["x"], "B_T": dtypes["b"] or dtypes["x"]}
        flags["HAS_WHERE"] = bool(dtypes["where"])
        flags["HAS_B"] = dtypes["b"] is not None
    if problem.function != "logsumexp":
        flags["LOG"] = problem.function.startswith("log_")
    return (
        *((name, CUDA_TYPES[dtype]) for name, dtype in sorted(types.items())),
        *((name, str(int(flag))) for name, flag in sorted(flags.items())),
    )


KERNELS = (  # best first
    SoftmaxKernel("tiled", FORWARD, ("auto", "tiled"), _hold, fast=True),
    # Rows that do not fit on chip are read twice.
    SoftmaxKernel("online", FORWARD, ("auto", "tiled", "online"), _walk),
    SoftmaxKernel("safe", FORWARD, ("safe",), _walk),
    SoftmaxKernel("naive", FORWARD, ("naive",), _walk),
    SoftmaxKernel("logsumexp", ("logsumexp",), ("auto",), _walk),
    SoftmaxKernel("vjp", BACKWARD, ("auto",), _walk),
)


def select(problem: Any, device: Device, *, name: str | None = None):
    """The row for a problem, and why rows before it refused."""
    rows = [row for row in KERNELS if problem.function in row.functions]
    return _kernels.select(rows, problem, device, name=name)


# --- all that may be compiled --------------------------------------------------------

_FEW = 1 << 20  # the row length that stands for a long row that is alone


@dataclass(frozen=True)
class _Shape:
    """A problem as far as a kernel's switches depend on it."""

    function: str
    row_length: int
    dtypes: dict[str, str | None]
    scale: float = 1.0
    method: str = "auto"
    is_complex: bool = False

    @property
    def num_rows(self) -> int:
        return 1 if self.row_length == _FEW else 1 << 20

    @property
    def compute_dtype(self) -> str:
        used = [d for name, d in self.dtypes.items() if d and name != "where"]
        return "float32" if all(d in _arrays.FLOATS[:3] for d in used) else "float64"


def _natural(*names):
    """The result type of NumPy's promotion, with bool and integers as float64."""
    names = {name if name in _arrays.FLOATS else "float64" for name in names}
    if len(names) == 1:
        return names.pop()
    return np.result_type(*(names - {"bfloat16"}), np.float32).name


def _shapes(row, x, out, where, scaled, length, function):
    """One choice of types and switches; `out` is the type of a second input if any."""
    dtypes = {"x": x, "where": where and "bool"}
    if row.functions == ("logsumexp",):
        for b in (None, out):
            result = _natural(x) if b is None else _natural(x, b)
            yield _Shape(function, length, dtypes | {"b": b, "out": result})
    elif row.functions == BACKWARD:
        yield _Shape(function, length, dtypes | {"dy": out, "out": _natural(x, out)})
    else:
        scale = 2.0 if scaled else 1.0
        yield _Shape(function, length, dtypes | {"out": out}, scale, row.rungs[-1])


def _lengths(row, *dtypes):
    """One row length for each step of the row's ladder."""
    if row.cut is _hold:
        widest = max(2, *(_itemsize(name) for name in dtypes))
        return [length for length, _ in _HELD[widest]]
    return [*(int(min(length, _FEW - 1)) for length, _ in _LANES), _FEW]


def _everything(row) -> Iterable[tuple[_Shape, int, int]]:
    seconds = _arrays.FLOATS if row.functions == FORWARD else tuple(CUDA_TYPES)
    scales = (False, True) if row.functions == FORWARD else (False,)
    masks = (False,) if row.functions == BACKWARD else (False, True)
    for x, second, where, scaled, function in itertools.product(
        CUDA_TYPES, seconds, masks, scales, row.functions
    ):
        for length in _lengths(row, x, second):
            for shape in _shapes(row, x, second, where, scaled, length, function):
                for axes in ((1, 1), (2, 1), (1, 2), (2, 2)):
                    yield shape, *axes


def _representative(row) -> Iterable[tuple[_Shape, int, int]]:
    """Each type, switch, axis count and step of the ladder once, not all together."""
    function, other = row.functions[0], row.functions[-1]
    holds = row.cut is _hold
    for x in CUDA_TYPES:
        # All rows convert in the same way: one of them shows every type.
        if holds or x in (*_arrays.FLOATS, "int8"):
            shapes = _shapes(row, x, _natural(x), False, False, 1000, other)
            yield from ((shape, 1, 1) for shape in shapes)
    for length in _lengths(row, "float32")[:: 1 if holds else 2]:
        shapes = _shapes(row, "float32", "float32", False, False, length, function)
        yield from ((shape, 1, 1) for shape in shapes)
    # All switches at once, in the types that take the most registers of each kind.
    where, scaled = row.functions != BACKWARD, row.functions == FORWARD
    for x, out in (("float32",) * 2, ("float64",) * 2, ("float16", "float32")):
        shapes = _shapes(row, x, out, where, scaled, 4096, other)
        yield from ((shape, 2, 2) for shape in shapes)


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """Names of rows and what they compile for `device`: all of it, or a sample."""
    found: dict[tuple[str, Variant], None] = {}
    shapes_of = _everything if everything else _representative
    for row in KERNELS:
        for shape, outer, reduced in shapes_of(row):
            if row.refusal(shape, device) is None:
                found[row.name, row.variant(shape, outer, reduced)] = None
    return list(found)
