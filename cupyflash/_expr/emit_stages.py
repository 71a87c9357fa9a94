"""An expression as CUDA in stages, for kernels that work on tiles of scores.

A thread of such a kernel has scores of few queries and of many keys. What depends on
the batch entry and head alone is computed once for these, what depends on the query
too once a query, what depends on the key once a key, what depends on their distance
once a diagonal, and the rest once a score. The same stages bound a mask over a tile:
what queries and keys bring is known exactly.

The text goes after that of `emit_cuda`, with bounds of tiles after
``cuda_src/expr/intervals.cuh``. Equal keys give equal text.
"""

import math
from collections.abc import Sequence

from cupyflash._expr import emit_cuda
from cupyflash._expr.diagonals import DISTANCE, distance
from cupyflash._expr.expression import Expression
from cupyflash._expr.nodes import LEAVES, Node, node, order
from cupyflash._expr.operations import COMPARISONS, OPERATIONS

HEAD, ROW, COL, DIAG, PAIR = "head", "row", "col", "diag", "pair"
_STRUCTS = HEAD, ROW, COL, DIAG
_ON_POSITIONS = DIAG, PAIR  # where both of i and j are known
# i - j as a float, too: kernels have both for less than i and j.
_DISTANCE_FLOAT = node("var", "float", (), "x")
# Floats hold integers up to here, and these of them without a rounding.
_MOST = 1 << 24
_EXACT = frozenset({"neg", "abs", "add", "sub", "min", "max"})
_CUDA_TYPES = {"float": "T", "int": "expr::int_t", "bool": "bool", "place": "long long"}


class _Stages:
    """The nodes below some roots by the stage that computes them."""

    def __init__(self, roots: Sequence[Node]):
        self.nodes = order(*roots)
        self.stage = {n: _stage_of(n) for n in self.nodes}
        used_later = {
            a for n in self.nodes for a in n.args if self.stage[a] != self.stage[n]
        } | {root for root in roots if self.stage[root] != PAIR}
        # What later stages read of each: fields of its struct.
        self.fields = {
            stage: [
                n
                for n in self.nodes
                if n in used_later and n.op not in LEAVES and self.stage[n] == stage
            ]
            for stage in _STRUCTS
        }


def _stage_of(n):
    free = n.free - {"array"}
    if free <= {"b", "h"}:
        return HEAD
    if free <= {"b", "h", "i"}:
        return ROW
    if free <= {"b", "h", "j"}:
        return COL
    return DIAG if free <= {"b", "h", "d", "x"} else PAIR


def emit_stages(
    expression: Expression, name: str = "score_mod", *, small_positions: bool = False
) -> str:
    """CUDA of a score or mask in stages.

    Parameters
    ----------
    expression : Expression
        Of a score or a mask.
    name : str, default "score_mod"
        The text has structs ``name_head``, ``name_row``, ``name_col`` and
        ``name_diag``, functions ``name_of_head(b, h, args)``, ``name_of_row(head, b, h,
        i, args)``, ``name_of_col(head, b, h, j, args)`` and ``name_of_diag(head, b, h,
        d, x, args)`` that make them, and ``name_at(s, i, j, d, x, b, h, head, row, col,
        diag, args)``, d being i - j as an integer and x the same as a float. For a
        score ``name_at_with_derivative`` sets ``ds``, too, and ``name_has_derivative``
        tells whether that can be other than 1.
    small_positions : bool, default False
        Whether i and j are below 2^23: sums of them that become floats, or are
        compared, are then computed as floats, which hold them exactly.

    Returns
    -------
    str
    """
    roots = [expression.root]
    if not expression.is_mask:
        roots.append(expression.derivative.root)
    value, *ds = _rewritten(roots, small_positions)
    stages = _Stages([value, *ds])
    text = ""
    for stage in _STRUCTS:
        text += _struct(stages, name, stage)
        text += _maker(expression, stages, name, stage, name)
    text += _pair(expression, stages, name, [value])
    if ds:
        is_one = ds[0].op == "const" and ds[0].value == 1
        text += f"constexpr bool {name}_has_derivative = {str(not is_one).lower()};\n"
        text += _pair(expression, stages, name, [value, *ds])
    return text


def emit_bounds(expression: Expression, name: str = "mask_mod") -> str:
    """CUDA of a mask over a tile, after `emit_cuda`.

    With ``exact`` for ``name_exact``: structs and functions as of `emit_stages`, on
    integers as they are; ``exact_row_numbers(row, x)`` and ``exact_col_numbers(col,
    x)``, which give what queries and keys bring as integers, ``exact_row_count`` and
    ``exact_col_count`` of them; and ``exact_bounds(i, j, d, b, h, head, rows, cols,
    args)``, which takes the least and largest of each as intervals: 0 or 1 where the
    mask is the same everywhere, 2 where it is mixed or not decided.
    """
    (root,) = _rewritten([expression.root], False)
    stages, args = _Stages([root]), name
    name = f"{name}_exact"
    text = ""
    for stage in (HEAD, ROW, COL):
        text += _struct(stages, name, stage)
        text += _maker(expression, stages, name, stage, args)
    text += "".join(_numbers(stages, name, stage) for stage in (ROW, COL))
    at: dict[Node, str] = {}
    for stage, array in ((ROW, "rows"), (COL, "cols")):
        known = _whole(stages, stage)
        for n in stages.fields[stage]:
            at[n] = f"{array}[{known.index(n)}]" if n in known else emit_cuda.unknown(n)
    for k, n in enumerate(stages.fields[HEAD]):
        known_text = f"expr::point(static_cast<long long>(head.v{k}))"
        at[n] = emit_cuda.unknown(n) if n.dtype not in ("int", "bool") else known_text
    lines: list[str] = []
    for n in stages.nodes:
        if n in at or (stages.stage[n] not in _ON_POSITIONS and n.op not in LEAVES):
            continue
        text_of_n = emit_cuda.interval(expression, n, [at[a] for a in n.args])
        if n.op in LEAVES:
            at[n] = text_of_n
            continue
        at[n] = f"v{len(lines)}"
        lines.append(f"const expr::interval_t {at[n]} = {text_of_n};")
    result = at[root]
    lines.append(f"return expr::is_point({result}) ? int({result}.low) : 2;")
    body = "\n  ".join(lines)
    return text + (
        f"template <typename T>\n"
        f"__device__ __forceinline__ int {name}_bounds(\n"
        f"    expr::interval_t i, expr::interval_t j, expr::interval_t d,\n"
        f"    expr::interval_t b, expr::interval_t h, const {name}_head<T> &head,\n"
        f"    const expr::interval_t *rows, const expr::interval_t *cols,\n"
        f"    const {args}_args<T> &args) {{\n  {body}\n}}\n"
    )


# --- nodes as tiles have them


def _rewritten(roots, small_positions):
    """The roots with i - j as one number, places of arrays apart, and exact floats."""
    done: dict[Node, Node] = {}
    for n in order(*roots):
        args = tuple(done[a] for a in n.args)
        done[n] = _rewritten_one(n, args, small_positions)
    return [done[root] for root in roots]


def _rewritten_one(n, args, small_positions):
    if (found := distance(n, args)) is not None:
        return found
    if n.op == "load":
        places = tuple(
            node("place", "place", (a,), (n.value, k)) for k, a in enumerate(args)
        )
        return node("element", n.dtype, places, n.value)
    if (
        small_positions
        and _stage_of(node(n.op, n.dtype, args, n.value)) in _ON_POSITIONS
    ):
        if n.op == "float" and args[0].dtype == "int" and _largest(args[0]) <= _MOST:
            if (exact := _exact_float(args[0])) is not None:
                return exact
        if n.op in COMPARISONS and args[0].dtype == "int":
            # A number of any size compares as its float with one that is small.
            is_small = [_largest(a) <= _MOST for a in args]
            alone = [_stage_of(a) not in _ON_POSITIONS for a in args]
            if any(is_small) and all(
                x or y for x, y in zip(is_small, alone, strict=True)
            ):
                exact = [_exact_float(a) for a in args]
                if None not in exact:
                    return node(n.op, n.dtype, tuple(exact))
    return node(n.op, n.dtype, args, n.value)


def _largest(n):
    """A bound of the size of an integer where positions are small."""
    if n.op == "const":
        return abs(n.value)
    if n.op == "var":
        return _MOST // 2
    sizes = [_largest(a) for a in n.args if a.dtype == "int"]
    if n.op in ("neg", "abs", "floordiv", "min", "max", "where"):
        return max(sizes)
    return sum(sizes) if n.op in ("add", "sub") else math.inf


def _exact_float(n):
    """A small integer as a float, for no conversion a score; or None."""
    if n is DISTANCE:
        return _DISTANCE_FLOAT
    if n.op == "const":
        return node("const", "float", (), float(n.value))
    if _stage_of(n) not in _ON_POSITIONS:
        return node("float", "float", (n,))
    if n.op in _EXACT:
        args = tuple(_exact_float(a) for a in n.args)
    elif n.op == "where":
        args = (n.args[0], *(_exact_float(a) for a in n.args[1:]))
    else:
        return None
    return None if None in args else node(n.op, "float", args)


# --- text


def _struct(stages, name, stage):
    fields = [
        f"{_CUDA_TYPES[n.dtype]} v{k};" for k, n in enumerate(stages.fields[stage])
    ]
    body = "".join(f"\n  {field}" for field in fields)
    return f"template <typename T>\nstruct {name}_{stage} {{{body}\n}};\n"


_POSITIONS = {
    DIAG: "expr::int_t d, T x, ",
    HEAD: "",
    ROW: "expr::int_t i, ",
    COL: "expr::int_t j, ",
}


def _maker(expression, stages, name, stage, args):
    """The function that makes the struct of a stage."""
    at: dict[Node, str] = {}
    head = ""
    if stage != HEAD:
        at |= {n: f"head.v{k}" for k, n in enumerate(stages.fields[HEAD])}
        head = f"const {name}_head<T> &head, "
    fields = stages.fields[stage]
    lines = _statements(expression, stages, fields, at)
    values = ", ".join(at[n] for n in fields)
    lines.append(f"return {{{values}}};")
    body = "\n  ".join(lines)
    return (
        f"template <typename T>\n"
        f"__device__ __forceinline__ {name}_{stage}<T> {name}_of_{stage}(\n"
        f"    {head}expr::int_t b, expr::int_t h, {_POSITIONS[stage]}\n"
        f"    const {args}_args<T> &args) {{\n  {body}\n}}\n"
    )


def _pair(expression, stages, name, roots):
    """The function of a score."""
    args = name
    at = {
        n: f"{stage}.v{k}"
        for stage in _STRUCTS
        for k, n in enumerate(stages.fields[stage])
    }
    lines = _statements(expression, stages, roots, at)
    title, more = f"{name}_at", ""
    if len(roots) > 1:
        title, more = f"{title}_with_derivative", ", T &ds"
        lines.append(f"ds = {at[roots[1]]};")
    lines.append(f"return {at[roots[0]]};")
    body = "\n  ".join(lines)
    result = _CUDA_TYPES[roots[0].dtype]
    return (
        f"template <typename T>\n"
        f"__device__ __forceinline__ {result} {title}(\n"
        f"    T s, expr::int_t i, expr::int_t j, expr::int_t d, T x, expr::int_t b,\n"
        f"    expr::int_t h, const {name}_head<T> &head, const {name}_row<T> &row,\n"
        f"    const {name}_col<T> &col, const {name}_diag<T> &diag,\n"
        f"    const {args}_args<T> &args{more}) {{\n"
        f"  {body}\n}}\n"
    )


def _statements(expression, stages, roots, at):
    """Statements for what some roots need and `at` does not have yet."""
    lines: list[str] = []
    needed = _needed(roots, at)
    for n in stages.nodes:
        if n not in needed:
            continue
        if n.op in LEAVES:
            at[n] = emit_cuda.leaf(expression, n)
            continue
        at[n] = f"v{len(lines)}"
        text = _operation(expression, n, [at[a] for a in n.args])
        lines.append(f"const {_CUDA_TYPES[n.dtype]} {at[n]} = {text};")
    return lines


def _needed(roots, at):
    """The nodes below some roots, down to those that are there."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in found and n not in at:
            found.add(n)
            stack += n.args
    return found


def _operation(expression, n, args):
    if n.op == "place":
        array, axis = n.value
        return emit_cuda.place(expression, array, axis, args[0])
    if n.op == "element":
        return emit_cuda.element(expression, n.value, n.dtype, args)
    return OPERATIONS[n.op].cuda.format(*args)


# --- bounds


def _whole(stages, stage):
    """The integers and booleans that a stage brings."""
    return [n for n in stages.fields[stage] if n.dtype in ("int", "bool")]


def _numbers(stages, name, stage):
    fields = stages.fields[stage]
    known = _whole(stages, stage)
    lines = [f"x[{k}] = of.v{fields.index(n)};" for k, n in enumerate(known)]
    body = "".join(f"\n  {line}" for line in lines)
    size = max(len(known), 1)
    return (
        f"constexpr int {name}_{stage}_count = {len(known)};\n"
        f"template <typename T>\n"
        f"__device__ __forceinline__ void {name}_{stage}_numbers(\n"
        f"    const {name}_{stage}<T> &of, long long (&x)[{size}]) {{{body}\n}}\n"
    )
