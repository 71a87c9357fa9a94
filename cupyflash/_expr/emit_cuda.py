"""An expression as CUDA: names made here, and nothing that a user wrote.

The text goes after ``cuda_src/expr/functions.cuh``, that of tiles after
``expr/intervals.cuh``. Equal keys give equal text.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._expr.expression import Expression
from cupyflash._expr.nodes import LEAVES, Node, order
from cupyflash._expr.operations import OPERATIONS

_TYPES = {"float": "T", "int": "expr::int_t", "bool": "bool"}
# What intervals.cuh has, for integers and booleans.
_OF_TILES = frozenset(
    "neg not int min max abs sign add sub mul floordiv mod lt le eq ne and or xor "
    "where".split()
)


def arguments_dtype(expression: Expression, accum: Any) -> np.dtype:
    """The struct of run-time arguments, as the text declares it.

    For each array k its address ``a{k}`` and, one an axis, ``a{k}_size`` and
    ``a{k}_stride`` in elements; then the numbers ``p{k}``.
    """
    fields: list[Any] = []
    for k, rank in enumerate(_ranks(expression)):
        fields.append((f"a{k}", np.uint64))
        if rank:
            fields.append((f"a{k}_size", np.int64, (rank,)))
            fields.append((f"a{k}_stride", np.int64, (rank,)))
    for k, dtype in enumerate(_number_dtypes(expression)):
        fields.append((f"p{k}", np.dtype(accum) if dtype == "float" else np.int64))
    return np.dtype(fields or [("none", np.int64)], align=True)


def arguments(
    expression: Expression, arrays: Mapping[str, Any], values: Sequence[Any]
) -> dict[str, Any]:
    """The fields of `arguments_dtype` for a call."""
    fields: dict[str, Any] = {}
    for k, name in enumerate(expression.arrays):
        array = arrays[name]
        data = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
        fields[f"a{k}"] = data
        if array.ndim:
            fields[f"a{k}_size"] = array.shape
            fields[f"a{k}_stride"] = [n // array.itemsize for n in array.strides]
    for k, value in enumerate(expression.number_values(values)):
        fields[f"p{k}"] = value
    return fields


class Packer:
    """The bytes of `arguments_dtype` for call after call; faster than by NumPy.

    Attributes
    ----------
    integers : tuple of int
        Which of the values closed over are run-time integers.
    """

    def __init__(self, expression: Expression):
        self._expression, ranks = expression, _ranks(expression)
        kinds = _number_dtypes(expression)
        self.integers = tuple(
            place
            for place, kind in zip(expression.numbers, kinds, strict=True)
            if kind == "int"
        )
        pointers = "".join(f"Q{2 * rank}q" for rank in ranks)
        self._structs = {
            accum: struct.Struct(
                pointers
                + "".join(letter if kind == "float" else "q" for kind in kinds)
                + ("" if ranks or kinds else "q")
                + "0q"  # to a multiple of 8 bytes
            )
            for accum, letter in (("float32", "f"), ("float64", "d"))
        }
        self._pack = {accum: x.pack for accum, x in self._structs.items()}

    def size(self, accum: str) -> int:
        """How many bytes these are."""
        return self._structs[accum].size

    def __call__(
        self, arrays: Mapping[str, Any], values: Sequence[Any], accum: str
    ) -> bytes:
        """The bytes for a call with arrays of CuPy.

        ValueError if an integer has more than 64 bits, or where kernels cannot read
        the elements of an array, each whole and in place.
        """
        expression = self._expression
        fields: list[Any] = []
        for name in expression.arrays:
            array = arrays[name]
            size, at, strides = array.itemsize, array.data.ptr, array.strides
            if math.gcd(size, at, *strides) != size or not array.size:
                raise ValueError(f"{name} has a memory layout that kernels cannot read")
            fields += at, *array.shape, *[n // size for n in strides]
        fields += [values[place] for place in expression.numbers]
        if not fields:  # a struct has a member at least
            fields = [0]
        try:
            return self._pack[accum](*fields)
        except OverflowError:  # of float32
            with np.errstate(over="ignore"):
                cut = [float(np.float32(x)) if isinstance(x, float) else x
                       for x in fields]  # fmt: skip
            return self._pack[accum](*cut)
        except struct.error:
            raise ValueError(
                f"{expression.name} closes over an integer of more than 64 bits"
            ) from None


def emit_cuda(
    expression: Expression,
    name: str = "score_mod",
    wrt: Sequence[str] = (),
    with_derivative: bool = True,
) -> str:
    """CUDA of an expression.

    Parameters
    ----------
    expression : Expression
        Of a score or a mask.
    name : str, default "score_mod"
        The functions made are ``name``, which returns the value, for a score
        ``name_with_derivative``, which also sets ``ds``, and with `wrt`
        ``name_gradients``. All take ``(s, b, h, i, j, args)`` first, args being a
        ``name_args<T>``, and are templates of the type T of floats.
    wrt : sequence of str, optional
        Named arrays of floats whose gradients are asked for: of each read, in the
        order of `reads_of`, the derivative and the place in contiguous arrays, those
        that are read, one behind the other. ``name_num_reads``, ``name_num_arrays`` and
        ``name_array_of(read)`` tell what there is.
    with_derivative : bool, default True
        Whether there is a function with the derivative.

    Returns
    -------
    str
    """
    root = expression.root
    text = _struct(expression, name)
    text += _function(
        expression, name, "", [root], lambda at: [f"return {at[root]};"], root.dtype
    )
    if expression.is_mask or not with_derivative:
        return text
    ds = expression.derivative.root
    text += _function(
        expression,
        f"{name}_with_derivative",
        ", T &ds",
        [root, ds],
        lambda at: [f"ds = {at[ds]};", f"return {at[root]};"],
        args=name,
    )
    if reads := reads_of(expression, wrt):
        wrt = [name for name in wrt if any(read[0] == name for read in reads)]
        order_of_arrays = ", ".join(str(wrt.index(read[0])) for read in reads)
        text += (
            f"constexpr int {name}_num_reads = {len(reads)};\n"
            f"constexpr int {name}_num_arrays = {len(wrt)};\n"
            f"__device__ constexpr int {name}_array_of(int read) {{\n"
            f"  constexpr int of[] = {{{order_of_arrays}}};\n  return of[read];\n}}\n"
        )
        roots = [x for _, index, partial in reads for x in (*index, partial)]
        text += _function(
            expression,
            f"{name}_gradients",
            f", T (&partials)[{len(reads)}], long long (&places)[{len(reads)}]",
            roots,
            lambda at: _scattered(expression, reads, wrt, at),
            result="void",
            args=name,
        )
    return text


def reads_of(expression: Expression, wrt: Sequence[str]):
    """The reads (array, index, derivative) of some arrays."""
    return [read for read in expression.reads if read[0] in wrt]


def _ranks(expression):
    """The number of axes of each array."""
    rank = {n.value: len(n.args) for n in order(expression.root) if n.op == "load"}
    return [rank[name] for name in expression.arrays]


def _number_dtypes(expression):
    kinds = {n.value: n.dtype for n in order(expression.root) if n.op == "param"}
    return [kinds[place] for place in expression.numbers]


def _struct(expression, name):
    lines = []
    for k, (dtype, rank) in enumerate(
        zip(expression.arrays.values(), _ranks(expression), strict=True)
    ):
        lines.append(f"const {CUDA_TYPES[dtype]} *__restrict__ a{k};")
        if rank:
            lines.append(f"long long a{k}_size[{rank}], a{k}_stride[{rank}];")
    for k, dtype in enumerate(_number_dtypes(expression)):
        lines.append(f"{'T' if dtype == 'float' else 'long long'} p{k};")
    body = "\n  ".join(lines or ["long long none;"])
    return f"template <typename T>\nstruct {name}_args {{\n  {body}\n}};\n"


def _function(expression, title, more, roots, finish, result="float", args=None):
    """One function: a statement for each node, then what `finish` makes of them."""
    at, lines = _statements(expression, roots)
    body = "\n  ".join([*lines, *finish(at)])
    return (
        f"template <typename T>\n"
        f"__device__ __forceinline__ {_TYPES.get(result, result)} {title}(\n"
        f"    T s, expr::int_t b, expr::int_t h, expr::int_t i, expr::int_t j,\n"
        f"    const {args or title}_args<T> &args{more}) {{\n  {body}\n}}\n"
    )


def _statements(expression, roots):
    """({node: its text}, statements)."""
    at: dict[Node, str] = {}
    lines: list[str] = []
    for n in order(*roots):
        if n.op in LEAVES:
            at[n] = leaf(expression, n)
        else:
            if n.op == "load":
                places = [
                    place(expression, n.value, axis, at[a])
                    for axis, a in enumerate(n.args)
                ]
                text = element(expression, n.value, n.dtype, places)
            else:
                text = OPERATIONS[n.op].cuda.format(*(at[a] for a in n.args))
            at[n] = f"v{len(lines)}"
            lines.append(f"const {_TYPES[n.dtype]} {at[n]} = {text};")
    return at, lines


def leaf(expression: Expression, n: Node) -> str:
    """A constant, a variable or a number of the call."""
    if n.op == "const":
        return _literal(n.value)
    if n.op == "var":
        return n.value
    number = f"args.p{expression.numbers.index(n.value)}"
    return f"expr::int_t({number})" if n.dtype == "int" else number


def place(expression: Expression, array: str, axis: int, index: str) -> str:
    """How far an index along an axis leads into an array."""
    k = list(expression.arrays).index(array)
    return f"{_within(index, k, axis)} * args.a{k}_stride[{axis}]"


def element(
    expression: Expression, array: str, dtype: str, places: Sequence[str]
) -> str:
    """An element of an array, as a float, an integer or a boolean."""
    k = list(expression.arrays).index(array)
    convert = {"float": "to<T>", "int": "static_cast<expr::int_t>"}
    found = f"expr::element(args.a{k}, {' + '.join(places) or 0})"
    return f"{convert.get(dtype, '')}({found})"


def _within(index, k, axis):
    return f"expr::within({index}, args.a{k}_size[{axis}])"


def _literal(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"expr::int_t({value}ll)"
    if math.isfinite(value):
        return f"T({value!r})"
    return (
        "nan_value<T>()"
        if value != value
        else f"({value})".replace("inf", "infinity<T>()")
    )


def _scattered(expression, reads, wrt, at):
    """The derivative and the place of each read."""
    arrays, ranks, lines = list(expression.arrays), _ranks(expression), []
    sizes = {
        name: " * ".join(
            ["1ll", *(f"args.a{k}_size[{axis}]" for axis in range(ranks[k]))]
        )
        for k, name in enumerate(arrays)
    }
    for t, (array, index, partial) in enumerate(reads):
        k, place = arrays.index(array), "0ll"
        for axis, x in enumerate(index):
            within = _within(at[x], k, axis)
            place = f"({place} * args.a{k}_size[{axis}] + {within})"
        before = "".join(f" + {sizes[name]}" for name in wrt[: wrt.index(array)])
        lines += [f"partials[{t}] = {at[partial]};", f"places[{t}] = {place}{before};"]
    return lines


def emit_cuda_tiles(expression: Expression, name: str = "mask_mod") -> str:
    """CUDA of a mask over a tile: ``name_tile(b, h, i, j, args)`` of intervals.

    It returns 0 or 1 where the mask is the same everywhere, and 2 where it is mixed or
    not decided. It stands after `emit_cuda`, whose arguments it takes; arrays are known
    where one element is read.
    """
    at: dict[Node, str] = {}
    lines: list[str] = []
    for n in order(expression.root):
        args = [at[a] for a in n.args]
        is_known = n.op == "load" and n.dtype != "float"
        text = (_interval_of_element if is_known else interval)(expression, n, args)
        at[n] = f"v{len(lines)}"
        lines.append(f"const expr::interval_t {at[n]} = {text};")
    result = at[expression.root]
    lines.append(f"return expr::is_point({result}) ? int({result}.low) : 2;")
    body = "\n  ".join(lines)
    return (
        f"template <typename T>\n"
        f"__device__ __forceinline__ int {name}_tile(\n"
        f"    expr::interval_t b, expr::interval_t h, expr::interval_t i,\n"
        f"    expr::interval_t j, const {name}_args<T> &args) {{\n  {body}\n}}\n"
    )


def unknown(n: Node) -> str:
    """The interval of what is not known."""
    is_bool = n.dtype == "bool"
    return "expr::truth(false, true, false)" if is_bool else "expr::unknown()"


def interval(expression: Expression, n: Node, args: Sequence[str]) -> str:
    """An operation on intervals."""
    if n.dtype != "float":
        if n.op == "var":
            return n.value
        if n.op == "const":
            return f"expr::point({int(n.value)}ll)"
        if n.op == "param":
            return f"expr::point({leaf(expression, n)})"
        bitwise = n.dtype == "int" and n.op in ("and", "or", "xor")
        if n.op in _OF_TILES and not bitwise:
            return f"expr::tile::op_{n.op}({', '.join(args)})"
    return unknown(n)


def _interval_of_element(expression, n, args):
    """Known where one element is read."""
    test = " && ".join(f"expr::is_point({a})" for a in args) or "true"
    places = [
        place(expression, n.value, axis, f"{a}.low") for axis, a in enumerate(args)
    ]
    k = list(expression.arrays).index(n.value)
    found = f"expr::element(args.a{k}, {' + '.join(places) or 0})"
    return f"{test} ? expr::point({found}) : {unknown(n)}"
