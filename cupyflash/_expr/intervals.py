"""What a mask is over a whole tile, by the interval of each node.

An interval is (least, largest), of booleans as 0 and 1; None is unknown, and so is all
that may be NaN. Floats are widened, as kernels round in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash._expr.expression import Expression
from cupyflash._expr.nodes import Node, order
from cupyflash._expr.operations import FARTHEST, OF_FLOATS

Interval = tuple[Any, Any]

_FAST_ROUNDING, _ROUNDING = 2.0**-9, 2.0**-20  # of exp and the like; of others
_EXACT = frozenset(
    {"neg", "abs", "min", "max", "sign", "floor", "ceil", "rint", "where"}
)


def _monotone(function, above=None):
    def interval(a):
        known = above is None or a[0] > above
        return (function(a[0]), function(a[1])) if known else None

    return interval


def _corners(function):
    def interval(a, b):
        values = [function(x, y) for x in a for y in b]
        known = all(value == value for value in values)
        return (min(values), max(values)) if known else None

    return interval


def _divided(function):
    corners = _corners(function)

    def interval(a, b):
        return corners(a, b) if b[0] > 0 or b[1] < 0 else None

    return interval


def _whole(function):
    return lambda x: x if math.isinf(x) else function(x)


def _bounded_exp(function):
    def exp(x):
        try:
            return function(x)
        except OverflowError:
            return math.inf if x > 0 else -math.inf

    return exp


def _remainder(a, b):
    m = b[0]  # one integer: floats are widened
    if m != b[1] or m <= 0:
        return None
    one_period = a[0] // m == a[1] // m
    return (a[0] % m, a[1] % m) if one_period else (0, m - 1)


def _whole_division(op, a, b):
    """What `//` or `%` of integers may be, whatever the divisor; by 0 both are 0."""
    if op == "mod":
        return min(b[0] + 1, 0), max(b[1] - 1, 0)
    farthest = max(-a[0], a[1], 0)
    return -farthest, farthest


def _equal(a, b):
    return int(a[0] == a[1] == b[0] == b[1]), int(a[0] <= b[1] and b[0] <= a[1])


def _negated(a):
    return 1 - a[1], 1 - a[0]


_INTERVALS: dict[str, Callable[..., Interval | None]] = {
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (max(a[0], -a[1], 0), max(-a[0], a[1])),
    "sign": _monotone(lambda x: (x > 0) - (x < 0)),
    "floor": _monotone(_whole(math.floor)),
    "ceil": _monotone(_whole(math.ceil)),
    "rint": _monotone(_whole(round)),
    "exp": _monotone(_bounded_exp(math.exp)),
    "exp2": _monotone(_bounded_exp(lambda x: 2.0**x)),
    "expm1": _monotone(_bounded_exp(math.expm1)),
    "sinh": _monotone(_bounded_exp(math.sinh)),
    "tanh": _monotone(math.tanh),
    "arctan": _monotone(math.atan),
    "log": _monotone(math.log, 0),
    "log2": _monotone(math.log2, 0),
    "log10": _monotone(math.log10, 0),
    "log1p": _monotone(math.log1p, -1),
    "sqrt": _monotone(math.sqrt, 0),
    "cbrt": _monotone(math.cbrt),
    "arcsinh": _monotone(math.asinh),
    "sin": lambda a: (-1, 1) if math.isfinite(a[0]) and math.isfinite(a[1]) else None,
    "cos": lambda a: (-1, 1) if math.isfinite(a[0]) and math.isfinite(a[1]) else None,
    "isnan": lambda a: (0, 0),
    "not": _negated,
    "float": lambda a: a,
    "int": _monotone(lambda x: int(max(-FARTHEST, min(FARTHEST, x)))),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda x, y: x * y),
    "div": _divided(lambda x, y: x / y),
    "floordiv": _divided(lambda x, y: x // y),
    "mod": _remainder,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "lt": lambda a, b: (int(a[1] < b[0]), int(a[0] < b[1])),
    "le": lambda a, b: (int(a[1] <= b[0]), int(a[0] <= b[1])),
    "eq": _equal,
    "ne": lambda a, b: _negated(_equal(a, b)),
    "xor": lambda a, b: (
        (int(a[0] != b[0]),) * 2 if a[0] == a[1] and b[0] == b[1] else None
    ),
}


def intervals(
    expression: Expression,
    ranges: Mapping[Any, Interval | None],
    values: Sequence[Any] = (),
    arrays: Mapping[str, np.ndarray] | None = None,
) -> dict[Node, Interval | None]:
    """The interval of each node over a tile; the arguments are those of `decide`.

    `ranges` may have numbers closed over, too, by their place; None is unknown.
    """
    known: dict[Node, Interval | None] = {}
    for n in order(expression.root):
        args = [known[a] for a in n.args]
        if n.op == "var" or (n.op == "param" and n.value in ranges):
            found = ranges.get(n.value)
        elif n.op in ("const", "param"):
            x = n.value if n.op == "const" else np.asarray(values[n.value]).item()
            found = (x, x) if x == x else None
        elif n.op == "load":
            found = _elements(n, args, expression.arrays[n.value], arrays or {})
        elif n.op == "where":
            found = _chosen(*args)
        elif n.op in ("and", "or") and n.dtype == "bool":
            pick = min if n.op == "and" else max
            a, b = (x or (0, 1) for x in args)  # one side may decide
            found = pick(a[0], b[0]), pick(a[1], b[1])
        elif None in args or n.op not in _INTERVALS:
            found = None
        else:
            found = _INTERVALS[n.op](*args)
            if found is None and n.dtype == "int" and n.op in ("floordiv", "mod"):
                found = _whole_division(n.op, *args)
        known[n] = _rounded(n, found)
    return known


def _rounded(n, found):
    """An interval as kernels may compute it."""
    if found is None or n.dtype == "bool":
        return found
    low, high = found
    if n.dtype == "int":  # which wraps round beyond
        return found if -(2**63) <= low and high < 2**63 else None
    if low != low or high != high:
        return None
    if n.op in _EXACT:
        return found
    share = _FAST_ROUNDING if n.op in OF_FLOATS - {"div"} else _ROUNDING
    return low - abs(low) * share - 1e-30, high + abs(high) * share + 1e-30


def _elements(n, index, dtype, arrays):
    """The least and the largest element in reach."""
    if n.value in arrays and None not in index:
        array = arrays[n.value]
        if not array.size:
            return None
        places = (
            slice(max(0, min(low, size - 1)), max(0, min(high, size - 1)) + 1)
            for (low, high), size in zip(index, array.shape, strict=True)
        )
        part = array[tuple(places)]
        low, high = part.min().item(), part.max().item()
        return (low, high) if low == low and high == high else None
    if n.dtype == "int":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return (0, 1) if n.dtype == "bool" else None


def _chosen(test, a, b):
    if test and test[0] == test[1]:
        return a if test[0] else b
    return (min(a[0], b[0]), max(a[1], b[1])) if a and b else None


def decide(
    expression: Expression,
    ranges: Mapping[str, Interval],
    values: Sequence[Any] = (),
    arrays: Mapping[str, np.ndarray] | None = None,
) -> bool | None:
    """What a mask is over a tile.

    Parameters
    ----------
    expression : Expression
        Of a mask.
    ranges : mapping of str to (int, int)
        The first and the last of each of b, h, i and j.
    values : sequence, optional
        What the function closes over, as of `lookup`.
    arrays : mapping of str to array, optional
        Arrays whose least and largest element in reach may be looked at.

    Returns
    -------
    bool or None
        True or False everywhere; None if mixed or not decided, and where an array may
        be read out of its range.
    """
    known = intervals(expression, ranges, values, arrays)
    found = known[expression.root]
    if found is None or found[0] != found[1] or not _reads_within(known, arrays or {}):
        return None
    return bool(found[0])


def _reads_within(known, arrays):
    return all(
        interval and 0 <= interval[0] and interval[1] < size
        for n in known
        if n.op == "load" and n.value in arrays
        for interval, size in zip(
            [known[a] for a in n.args], arrays[n.value].shape, strict=True
        )
    )


def fits_int32(
    expression: Expression,
    ranges: Mapping[Any, Interval | None],
    values: Sequence[Any] = (),
) -> bool:
    """Whether all integers of an expression, at such positions, fit 32 bits."""
    known = intervals(expression, ranges, values)
    return all(
        found is not None and -FARTHEST <= found[0] and found[1] <= FARTHEST
        for n, found in known.items()
        if n.dtype == "int"
    )
