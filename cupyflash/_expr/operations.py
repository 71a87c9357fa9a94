"""The operations of the language: of each its NumPy function, CUDA and Python text."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# A float that becomes an integer stops here; NaN becomes 0. NumPy leaves both open.
FARTHEST = 2**31 - 1


def to_int(x: Any) -> np.ndarray:
    """Floats cut toward 0, as kernels do it; integers and booleans as they are."""
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    x = np.where(np.isnan(x), 0, x.astype(np.float64))
    return np.clip(x, -FARTHEST, FARTHEST).astype(np.int64)


class Operation(NamedTuple):
    """One operation; `binding` is how strongly its Python text binds."""

    numpy: Callable[..., Any] | None
    cuda: str
    python: str
    binding: int


# How strongly Python's operators bind; comparisons bind least.
COMPARES, ORS, XORS, ANDS, ADDS, MULTIPLIES, SIGNS, CALLS = range(8)


def _call(function: Callable[..., Any], cuda: str) -> Operation:
    arguments = ", ".join(f"{{{i}}}" for i in range(getattr(function, "nin", 3)))
    return Operation(
        function, f"{cuda}({arguments})", f"np.{function.__name__}({arguments})", CALLS
    )


def _infix(function: Callable[..., Any], sign: str, binding: int) -> Operation:
    text = f"{{0}} {sign} {{1}}"
    return Operation(function, text, text, binding)


OPERATIONS = {
    "neg": Operation(np.negative, "-{0}", "-{0}", SIGNS),
    "not": Operation(np.logical_not, "!{0}", "~{0}", SIGNS),
    "abs": Operation(np.absolute, "expr::absolute({0})", "abs({0})", CALLS),
    "float": Operation(None, "static_cast<T>({0})", "{0}.astype(float)", CALLS),
    "int": Operation(to_int, "expr::to_int({0})", "{0}.astype(int)", CALLS),
    "sign": _call(np.sign, "expr::sign"),
    "floor": _call(np.floor, "floor"),
    "ceil": _call(np.ceil, "ceil"),
    "rint": _call(np.rint, "rint"),
    "exp": _call(np.exp, "exp"),
    "exp2": _call(np.exp2, "exp2"),
    "expm1": _call(np.expm1, "expm1"),
    "log": _call(np.log, "log"),
    "log2": _call(np.log2, "log2"),
    "log1p": _call(np.log1p, "log1p"),
    "log10": _call(np.log10, "log10"),
    "sqrt": _call(np.sqrt, "sqrt"),
    "cbrt": _call(np.cbrt, "cbrt"),
    "pow": _call(np.power, "pow"),
    "hypot": _call(np.hypot, "hypot"),
    "sin": _call(np.sin, "sin"),
    "cos": _call(np.cos, "cos"),
    "tan": _call(np.tan, "tan"),
    "arcsin": _call(np.arcsin, "asin"),
    "arccos": _call(np.arccos, "acos"),
    "arctan": _call(np.arctan, "atan"),
    "arctan2": _call(np.arctan2, "atan2"),
    "sinh": _call(np.sinh, "sinh"),
    "cosh": _call(np.cosh, "cosh"),
    "tanh": _call(np.tanh, "tanh"),
    "arcsinh": _call(np.arcsinh, "asinh"),
    "arccosh": _call(np.arccosh, "acosh"),
    "arctanh": _call(np.arctanh, "atanh"),
    "isfinite": _call(np.isfinite, "expr::is_finite"),
    "isnan": _call(np.isnan, "expr::is_nan"),
    "min": _call(np.minimum, "expr::minimum"),
    "max": _call(np.maximum, "expr::maximum"),
    "add": _infix(np.add, "+", ADDS),
    "sub": _infix(np.subtract, "-", ADDS),
    "mul": _infix(np.multiply, "*", MULTIPLIES),
    "div": _infix(np.divide, "/", MULTIPLIES),
    "floordiv": _infix(np.floor_divide, "//", MULTIPLIES)._replace(
        cuda="expr::floor_div({0}, {1})"
    ),
    "mod": _infix(np.remainder, "%", MULTIPLIES)._replace(
        cuda="expr::floor_mod({0}, {1})"
    ),
    "lt": _infix(np.less, "<", COMPARES),
    "le": _infix(np.less_equal, "<=", COMPARES),
    "eq": _infix(np.equal, "==", COMPARES),
    "ne": _infix(np.not_equal, "!=", COMPARES),
    "and": _infix(np.bitwise_and, "&", ANDS),
    "or": _infix(np.bitwise_or, "|", ORS),
    "xor": _infix(np.bitwise_xor, "^", XORS),
    "where": Operation(np.where, "{0} ? {1} : {2}", "np.where({0}, {1}, {2})", CALLS),
}

COMPARISONS = frozenset({"lt", "le", "eq", "ne"})
TESTS = frozenset({"isfinite", "isnan"})
LOGIC = frozenset({"and", "or", "xor", "not"})
# Their arguments, and but for tests their results, are floats.
OF_FLOATS = TESTS | {
    "exp", "exp2", "expm1", "log", "log2", "log1p", "log10", "sqrt", "cbrt", "pow",
    "hypot", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "arctan2", "sinh",
    "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "div",
}  # fmt: skip

# NumPy's name of a ufunc -> ours, with the arguments turned round for "greater".
UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div",
    "true_divide": "div", "floor_divide": "floordiv", "remainder": "mod", "mod": "mod",
    "negative": "neg", "absolute": "abs", "fabs": "abs", "minimum": "min",
    "maximum": "max", "less": "lt", "less_equal": "le", "equal": "eq",
    "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "invert": "not",
    "logical_not": "not", "greater": "lt", "greater_equal": "le",
    "sign": "sign", "floor": "floor", "ceil": "ceil", "rint": "rint",
    **{name: name for name in OF_FLOATS - {"div", "pow"}},
}  # fmt: skip
TURNED = frozenset({"greater", "greater_equal"})
LOGICAL = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})
