"""Symbols that a function computes with while it is traced."""

from typing import Any

import numpy as np

from cupyflash._expr import composed
from cupyflash._expr.emit_numpy import evaluate
from cupyflash._expr.emit_python import python_line
from cupyflash._expr.errors import AtLine, AtLineValueError, fail
from cupyflash._expr.nodes import (
    LARGEST_PRODUCT,
    Node,
    cast,
    const,
    make,
    node,
    order,
    whole_power,
)
from cupyflash._expr.operations import LOGICAL, OPERATIONS, TURNED, UFUNCS

NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
# Kinds of NumPy dtypes; V is bfloat16, which NumPy does not know.
KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float"}
# What has no operator.
_KNOWN = ", ".join(
    sorted(
        {
            "where",
            *(f.__name__ for f in composed.FUNCTIONS),
            *(n for n, op in UFUNCS.items() if OPERATIONS[op].python.startswith("np.")),
            *composed.UFUNCS,
        }
        - {"positive", "divmod"}
    )
)


class Trace:
    """The numbers that a function closes over, and those whose value was asked for."""

    def __init__(self, values):
        self.values, self.pinned = values, set()

    def peek(self, x: Node) -> Any:
        """The value of what is made of closed-over numbers alone."""
        return evaluate([x], {}, self.values, {}, np.float64)[0].item()

    def demand(self, x: Node, what: str, instead: str) -> Any:
        """The same; the numbers are pinned, and what is not known is refused."""
        if x.free:
            fail(
                f"{what} would need a value, which is not known while the function is "
                f"traced; write {instead}"
            )
        self.pinned.update(n.value for n in order(x) if n.op == "param")
        return self.peek(x)


def _operator(name, swap=False):
    def method(self, *other):
        return self._apply(name, *((*other, self) if swap else (self, *other)))

    return method


class Traced:
    """A number that is not known yet."""

    __slots__ = ("_trace", "node")

    def __init__(self, node, trace):
        self.node, self._trace = node, trace

    def _lift(self, x):
        if isinstance(x, Traced):
            return x.node
        if isinstance(x, NamedArray):
            fail(f"{x.name} is an array: index it, as in {x.example()}")
        if isinstance(x, np.ndarray) and x.ndim == 0:
            x = x[()]  # np.where() and np.clip() of numbers alone make these
        if isinstance(x, NUMBERS):
            return const(x)
        fail(
            f"{type(x).__name__} in a traced expression, which only has real numbers: "
            "pass arrays by name, in score_arrays or mask_arrays, and index them"
        )

    def _apply(self, name, *operands):
        nodes = [self._lift(x) for x in operands]
        try:
            if name in UFUNCS:
                if name in LOGICAL:
                    nodes = [cast(x, "bool") for x in nodes]
                nodes = nodes[::-1] if name in TURNED else nodes
                return Traced(make(UFUNCS[name], *nodes), self._trace)
            if name in _OF_NUMBERS:
                return Traced(_OF_NUMBERS[name](self._trace, *nodes), self._trace)
            if name in composed.UFUNCS:
                return composed.UFUNCS[name](*operands)
        except AtLine:
            raise
        except TypeError as error:
            fail(str(error))
        _unknown(name)

    def astype(self, dtype):
        """Cast to int (cut toward 0), float or bool."""
        try:
            dtype = np.dtype(dtype)
        except TypeError:
            fail(f"astype takes int, float or bool, got {dtype!r}")
        kind = KINDS.get(dtype.kind)
        if kind is None:
            fail(f"astype takes int, float or bool, got {dtype}")
        if kind == "int" and (dtype.kind == "u" or dtype.itemsize < 4):
            fail(
                f"astype({dtype}): integers here are signed and have 64 bits, so they "
                "do not wrap in fewer: write x.astype(int), or x % 256 for 8 bits"
            )
        return Traced(cast(self.node, kind), self._trace)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or kwargs:
            fail(
                f"np.{ufunc.__name__}: only np.f(x) of values, without other arguments"
            )
        return self._apply(ufunc.__name__, *inputs)

    def __array_function__(self, func, types, args, kwargs):
        name = func.__name__
        if func is np.where:
            if len(args) != 3 or kwargs:
                fail("np.where: write np.where(c, x, y)")
            return Traced(make("where", *map(self._lift, args)), self._trace)
        if func not in composed.FUNCTIONS:
            _unknown(name)
        try:
            return composed.FUNCTIONS[func](*args, **kwargs)
        except AtLine:
            raise
        except (TypeError, ValueError) as error:
            fail(f"np.{name}: {error}")

    def __array__(self, *args, **kwargs):
        fail(
            "a traced value is one number and cannot become an array, nor a NumPy "
            "scalar: write np.f(x) of it, or x.astype(float)"
        )

    def __repr__(self):
        return python_line(self.node)

    def __getattr__(self, name):
        if name.startswith("__"):  # NumPy looks for some
            raise AttributeError(name)
        fail(
            f"a traced value is one number, which has no .{name}: use "
            "x.astype(int), x.clip(low, high), x.round() or np.f(x)"
        )

    def clip(self, *args, **kwargs):
        """As np.clip()."""
        return np.clip(self, *args, **kwargs)

    def round(self, *args):
        """As np.round()."""
        return np.round(self, *args)

    def __getitem__(self, index):
        if isinstance(index, tuple) and not index:  # of an array without axes
            return self
        fail("a traced value is one number, which has no elements: leave the index out")

    def __setitem__(self, index, value):
        fail("a traced value cannot be changed: write s = np.where(c, x, s)")

    def __len__(self):
        fail("a traced value is one number, which has no length")

    def __hash__(self):
        fail(
            "a traced value cannot be a key of a dict or set: pass the table as an "
            "array by name, or write np.where(c, x, y)"
        )

    def __round__(self, *digits):
        fail("round(x): write np.round(x)")

    def __format__(self, spec):
        return repr(self)

    def __matmul__(self, other):
        fail("a @ b: scores are numbers, write a * b")

    __rmatmul__ = __matmul__

    def __divmod__(self, other):
        return np.divmod(self, other)

    def __rdivmod__(self, other):
        return np.divmod(other, self)

    def __iter__(self):
        fail("a traced value is one number and cannot be iterated over")

    def __bool__(self):
        return bool(
            self._trace.demand(
                self.node,
                "`if`, `and`, `or`, `not`, `in`, min() or a < b < c",
                "np.where(c, x, y), (a < b) & (b < c), ~c, np.minimum(x, y) or "
                "np.isin(x, (1, 2))",
            )
        )

    def __index__(self):
        if self.node.dtype != "int":
            fail("an integer is needed here: write x.astype(int)")
        return self._trace.demand(
            self.node,
            "range(), or an index into a list or array that is closed over",
            "the array by name, in score_arrays or mask_arrays",
        )

    def __float__(self):
        return float(self._trace.demand(self.node, "float() or math.f(x)", "np.f(x)"))

    def __int__(self):
        return int(self._trace.demand(self.node, "int()", "x.astype(int)"))


_OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide",
    "floordiv": "floor_divide", "mod": "remainder", "pow": "power",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
_ONE_WAY = {
    "neg": "negative", "abs": "absolute", "invert": "invert", "pos": "positive",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "eq": "equal", "ne": "not_equal",
}  # fmt: skip
for _name, _ufunc in _OPERATORS.items():
    setattr(Traced, f"__{_name}__", _operator(_ufunc))
    setattr(Traced, f"__r{_name}__", _operator(_ufunc, swap=True))
for _name, _ufunc in _ONE_WAY.items():
    setattr(Traced, f"__{_name}__", _operator(_ufunc))


# --- what may need the value of a number ---------------------------------------------


def _power(trace, x, n, *modulus):
    if modulus:
        fail("pow(x, n, m): write x**n % m")
    if x.dtype == "bool":
        fail("a power of a boolean: write x.astype(int)")
    if n.free or (n.dtype == "float" and not trace.peek(n).is_integer()):
        return make("pow", x, n)
    count = trace.demand(n, "an exponent", "")
    if count < 0 and n.dtype == x.dtype == "int":
        fail(f"an integer to the power {count}: write x**{count}.0, a float")
    x = cast(x, "float") if n.dtype == "float" else x
    if abs(count) <= LARGEST_PRODUCT:
        return whole_power(x, int(count))
    return make("pow", x, n)


def _shift(op):
    def shift(trace, x, n):
        count = trace.demand(n, "a shift", "x // y or x * y")
        if x.dtype != "int" or not isinstance(count, int) or not 0 <= count < 63:
            fail("<< and >> are of integers, by 0 to 62")
        return make(op, x, 1 << count)

    return shift


_OF_NUMBERS = {
    "power": _power,
    "left_shift": _shift("mul"),
    "right_shift": _shift("floordiv"),
}


def _unknown(name):
    where = "np." if hasattr(np, name) else ""  # SciPy has ufuncs, too
    fail(f"{where}{name} is not known here. Besides operators, use {_KNOWN}")


def _count(number, one, many):
    return f"{number} {one if number == 1 else many}"


class NamedArray:
    """An array given by name, to be indexed by one integer an axis."""

    def __init__(self, name, array, trace):
        self.name, self.ndim, self._trace = name, array.ndim, trace
        self._dtype = KINDS[array.dtype.kind]

    def example(self):
        """How to index it."""
        return f"{self.name}[{', '.join(('b', 'h', 'i', 'j', '...')[: self.ndim])}]"

    def _refused(self, *args, **kwargs):
        fail(f"{self.name} is an array: index it, as in {self.example()}")

    def _of_any_size(self, what):
        fail(
            f"{what}: {self.name} can only be indexed, as in {self.example()}; close "
            "over a number such as its length"
        )

    def __repr__(self):
        return self.name

    def __setitem__(self, index, value):
        fail(f"{self.name} can only be read, as in {self.example()}")

    def __getattr__(self, name):
        if name.startswith("__"):  # NumPy looks for some
            raise AttributeError(name)
        self._of_any_size(f"{self.name}.{name}")

    def __len__(self):
        self._of_any_size(f"len({self.name})")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __pow__ = _refused
    __neg__ = __abs__ = __invert__ = __and__ = __rand__ = __or__ = __ror__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused  # type: ignore
    __rfloordiv__ = __rmod__ = __rpow__ = __divmod__ = __rdivmod__ = _refused
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refused
    __matmul__ = __rmatmul__ = __bool__ = __iter__ = __array__ = _refused
    __pos__ = __round__ = __float__ = __int__ = __index__ = __contains__ = _refused
    __array_ufunc__ = __array_function__ = _refused
    __hash__ = _refused  # type: ignore[assignment]

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            fail(
                f"{self.name} takes {_count(self.ndim, 'index', 'indices')}, as in "
                f"{self.example()}, got {len(index)}",
                kind=AtLineValueError,
            )
        nodes = []
        for x in index:
            known = isinstance(x, (int, np.integer)) and not isinstance(x, bool)
            if not (known or isinstance(x, Traced)):
                kind = (
                    f"the array {x}" if isinstance(x, NamedArray) else type(x).__name__
                )
                fail(f"{self.name} is indexed by integers, not by {kind}")
            nodes.append(const(int(x)) if known else x.node)
            if nodes[-1].dtype != "int":
                fail(
                    f"{self.name} is indexed by integers, not by a {nodes[-1].dtype}: "
                    "write x.astype(int)"
                )
            if nodes[-1].op == "const" and nodes[-1].value < 0:
                fail(
                    f"{self.name} has no index {nodes[-1].value}: count from the front",
                    kind=AtLineValueError,
                )
        return Traced(node("load", self._dtype, tuple(nodes), self.name), self._trace)
