"""The table of softmax kernels: which takes a problem, and how it cuts it."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _arrays, _kernels, _softmax_layout
from cupyflash._kernels import CUDA_TYPES, Device, Step, Variant
from cupyflash._softmax_layout import Layout

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
    """How one launch of a kernel deals a problem to blocks and threads."""

    num_blocks: int
    num_threads: int
    defines: tuple[tuple[str, str], ...] = ()
    smem: int = 0  # bytes of dynamic shared memory
    cluster: int = 1  # blocks that work on one row together
    cooperative: bool = False  # all blocks run at once
    entry: str = ""  # of the source, where that has more than one


def _cut(problem, lanes, held=0):
    """`lanes` threads a row, each with `held` elements in registers if not 0."""
    rows_per_block = max(1, _BLOCK_THREADS // lanes)
    values = {"LANES": lanes, "ROWS_PER_BLOCK": rows_per_block}
    if held:
        values["HELD"] = held
    return (
        Cut(
            min(-(-problem.num_rows // rows_per_block), MAX_BLOCKS),
            lanes * rows_per_block,
            tuple((name, str(value)) for name, value in values.items()),
        ),
    )


def _walk(problem, device):
    """Threads that walk over a row of any length and any strides."""
    lanes = _kernels.by_threshold(_LANES, problem.row_length)
    if lanes == _LANES[-1][1] and problem.num_rows < _FEW_ROWS:
        lanes = 1024
    return _cut(problem, lanes)


def _hold(problem, device):
    """Threads that hold a row in registers; any strides."""
    ladder = _HELD[_widest(problem)]
    # A mask or a scale takes registers too: the fullest step would spill.
    if problem.dtypes.get("where") or problem.scale != 1:
        ladder = ladder[:-1]
    longest = ladder[-1][0]
    if problem.row_length > longest:
        return (
            f"a row of {problem.row_length} does not fit in the registers of a block "
            f"(at most {longest} elements for these options)"
        )
    return _cut(problem, *_kernels.by_threshold(ladder, problem.row_length))


def _widest(problem):
    """Bytes of the widest element that is held or moved in a vector, at least 2."""
    names = [problem.dtypes.get(name) for name in ("x", "dy", "out")]
    return max(2, *(_itemsize(name) for name in names if name))


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
    # The launches for a problem on a device, or why the kernel cannot take it.
    cuts: Callable[[Any, Device], tuple[Cut, ...] | str]
    # Made-up layouts that reach every step of its ladder, for these dtypes.
    samples: Callable[..., Iterable[Layout]]
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
        cuts = self.cuts(problem, device)
        return cuts if isinstance(cuts, str) else None

    def steps(self, problem: Any, device: Device) -> tuple[Step, ...]:
        """What is launched, one after the other, all with the same parameters."""
        cuts = self.cuts(problem, device)
        assert not isinstance(cuts, str), "the row has refused this problem"
        defines = (
            *_switches(problem),
            ("OUTER_AXES", str(len(problem.layout.outer_size))),
            ("REDUCED_AXES", str(len(problem.layout.reduced_size))),
        )
        return tuple(
            Step(
                Variant(
                    self.source,
                    "_".join(filter(None, ("softmax", self.name, cut.entry))),
                    (*defines, *cut.defines),
                    smem=cut.smem,
                    cluster=cut.cluster,
                    cooperative=cut.cooperative,
                ),
                (cut.num_blocks, 1, 1),
                (cut.num_threads, 1, 1),
            )
            for cut in cuts
        )


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


# --- made-up layouts -----------------------------------------------------------------

_MANY = 1 << 20  # rows that fill any card
_FEW = 1 << 20  # the row length that stands for a long row that is alone


def _rows_of(lengths):
    """Rows back to back of these lengths; a long one stands alone."""

    def samples(*dtypes):
        names = ("x", "dy", "b", "where", "out", "sign")
        for length in lengths(*dtypes):
            yield _softmax_layout.rows(1 if length == _FEW else _MANY, length, names)

    return samples


def _walked(*dtypes):
    return [*(int(min(length, _FEW - 1)) for length, _ in _LANES), _FEW]


def _held(*dtypes):
    widest = max(2, *(_itemsize(name) for name in dtypes))
    return [length for length, _ in _HELD[widest]]


# --- the table -----------------------------------------------------------------------

_ANY, _TILED = ("auto", "tiled", "online"), ("auto", "tiled")

KERNELS = (  # best first
    SoftmaxKernel("tiled", FORWARD, _TILED, _hold, _rows_of(_held), fast=True),
    # Rows that do not fit on chip are read twice.
    SoftmaxKernel("online", FORWARD, _ANY, _walk, _rows_of(_walked)),
    SoftmaxKernel("safe", FORWARD, ("safe",), _walk, _rows_of(_walked)),
    SoftmaxKernel("naive", FORWARD, ("naive",), _walk, _rows_of(_walked)),
    SoftmaxKernel("logsumexp", ("logsumexp",), ("auto",), _walk, _rows_of(_walked)),
    SoftmaxKernel("vjp", BACKWARD, ("auto",), _walk, _rows_of(_walked)),
)


def select(problem: Any, device: Device, *, name: str | None = None):
    """The row for a problem, and why rows before it refused."""
    rows = [row for row in KERNELS if problem.function in row.functions]
    return _kernels.select(rows, problem, device, name=name)


# --- all that may be compiled --------------------------------------------------------


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
        return "float32" if all(d in _arrays.FLOATS[:3] for d in used) else "float64"


def _natural(*names):
    """The result type of NumPy's promotion, with bool and integers as float64."""
    names = {name if name in _arrays.FLOATS else "float64" for name in names}
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
    elif row.functions == BACKWARD:
        dtypes |= {"dy": out, "out": _natural(x, out), "where": None}
        yield _Sample(function, layout, dtypes)
    else:
        scale, method = 2.0 if scaled else 1.0, row.rungs[-1]
        yield _Sample(function, layout, dtypes | {"out": out}, scale, method)


def _everything(row) -> Iterable[_Sample]:
    """All types and switches, on up to two axes of each kind."""
    seconds = _arrays.FLOATS if row.functions == FORWARD else tuple(CUDA_TYPES)
    scales = (False, True) if row.functions == FORWARD else (False,)
    masks = (False,) if row.functions == BACKWARD else (False, True)
    for x, second, where, scaled, function in itertools.product(
        CUDA_TYPES, seconds, masks, scales, row.functions
    ):
        for layout in row.samples(x, second):
            for axes in ((1, 1), (2, 1), (1, 2), (2, 2)):
                placed = layout.spread(*axes)
                yield from _samples(row, placed, x, second, where, scaled, function)


def _representative(row) -> Iterable[_Sample]:
    """Each type, switch, axis count and step of the ladder once, not all together."""
    function, other = row.functions[0], row.functions[-1]
    for x in CUDA_TYPES:
        # All rows convert in the same way: one of them shows every type.
        if row.fast or x in (*_arrays.FLOATS, "int8"):
            layout = _closest(row.samples(x, x), 1000)
            yield from _samples(row, layout, x, _natural(x), False, False, other)
    for layout in list(row.samples("float32", "float32"))[:: 1 if row.fast else 2]:
        yield from _samples(row, layout, "float32", "float32", False, False, function)
    # All switches at once, in the types that take the most registers of each kind.
    where, scaled = row.functions != BACKWARD, row.functions == FORWARD
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


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """Names of rows and what they compile for `device`: all of it, or a sample."""
    found: dict[tuple[str, Variant], None] = {}
    samples_of = _everything if everything else _representative
    for row in KERNELS:
        for problem in samples_of(row):
            if row.refusal(problem, device) is None:
                for step in row.steps(problem, device):
                    found[row.name, step.variant] = None
    return list(found)
