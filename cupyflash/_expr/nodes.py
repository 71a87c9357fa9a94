"""An expression as a graph of nodes: equal nodes are one object.

So a common subexpression is found by being there already, in one expression and between
an expression and its derivatives.
"""

import threading
import weakref
from typing import Any

import numpy as np

from cupyflash._expr.operations import (
    COMPARISONS,
    LOGIC,
    OF_FLOATS,
    OPERATIONS,
    TESTS,
)

# What a function may ask for by name, and its dtype.
VARIABLES = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
LEAVES = frozenset({"const", "var", "param"})
_RANK = {"bool": 0, "int": 1, "float": 2}
_PYTHON = {"bool": bool, "int": int, "float": float}
# x + 0 and the like are x. Never x * 0 or x - x, which are NaN where x is.
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
LARGEST_PRODUCT = 16  # whole powers up to here are products


class Node:
    """An operation on nodes, or a leaf: const, var, param (a number), load (an array).

    `value` is a constant's value, a variable's or array's name, a number's place.
    `free` are the variables that it depends on, with "array" if it reads one.
    """

    __slots__ = ("__weakref__", "args", "dtype", "free", "op", "value")

    op: str
    dtype: str
    args: tuple["Node", ...]
    value: Any
    free: frozenset[str]


_nodes: "weakref.WeakValueDictionary[Any, Node]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


def node(op: str, dtype: str, args: tuple[Node, ...] = (), value: Any = None) -> Node:
    """The one node of these facts."""
    key = (op, dtype, args, repr(value))  # by repr: 0.0 is not -0.0, and NaN is NaN
    with _lock:
        found = _nodes.get(key)
        if found is None:
            found = _nodes[key] = Node()
            found.op, found.dtype, found.args, found.value = op, dtype, args, value
            own = {"var": {value}, "load": {"array"}}.get(op, set())
            found.free = frozenset(own).union(*(a.free for a in args))
        return found


def const(value: Any) -> Node:
    """A constant: bool, int or float."""
    value = value.item() if isinstance(value, np.generic) else value
    kind = next(t for t in (bool, int, float) if isinstance(value, t))
    if kind is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"integers have 64 bits, and {value} does not fit")
    return node("const", kind.__name__, (), kind(value))


def var(name: str) -> Node:
    """One of s, b, h, i, j."""
    return node("var", VARIABLES[name], (), name)


def is_const(x: Node, value: Any) -> bool:
    """Whether a node is a constant of this value."""
    return x.op == "const" and x.value == value


def cast(x: Node, dtype: str) -> Node:
    """A node as "float", "int" (cut toward 0) or "bool"."""
    if x.dtype == dtype:
        return x
    if dtype == "bool":
        return make("ne", x, 0)
    if x.op == "const" and (dtype == "float" or x.dtype == "bool"):
        return const(_PYTHON[dtype](x.value))
    return node(dtype, dtype, (x,))


def make(op: str, *operands: Any) -> Node:
    """A node of an operation: types promoted, constants folded, idle steps left out."""
    args = [a if isinstance(a, Node) else const(a) for a in operands]
    if op == "not" and args[0].dtype == "int":
        return make("sub", -1, args[0])
    if op == "where":
        args[0] = cast(args[0], "bool")
    op, common = _promoted(op, [a.dtype for a in args[op == "where" :]])
    args = [
        a if op == "where" and k == 0 else cast(a, common) for k, a in enumerate(args)
    ]
    dtype = "bool" if op in COMPARISONS or op in TESTS else common
    if all(a.op == "const" for a in args):
        function = OPERATIONS[op].numpy
        assert function is not None
        with np.errstate(all="ignore"):
            folded = np.asarray(function(*(a.value for a in args)))[()]
        return cast(const(folded), dtype)
    if op in ("add", "mul", "eq", "ne") and args[0].op == "const":
        args = args[::-1]
    simple = _simplified(op, args)
    return node(op, dtype, tuple(args)) if simple is None else simple


def _promoted(op: str, dtypes: list[str]) -> tuple[str, str]:
    """(operation, dtype of its operands), as NumPy promotes them."""
    common = max(dtypes, key=_RANK.__getitem__)
    if op in OF_FLOATS:
        return op, "float"
    if op in LOGIC and common == "float":
        raise TypeError("& | ^ ~ need booleans: compare first, (a < b) & (c < d)")
    if common == "bool" and op in ("sub", "neg"):
        raise TypeError("- of booleans: write a.astype(int), or a ^ b, or ~a")
    if common == "bool" and op in ("add", "mul"):
        return {"add": "or", "mul": "and"}[op], common
    if common == "bool" and op not in LOGIC and op != "where":
        return op, "int"
    return op, common


def _simplified(op: str, args: list[Node]) -> Node | None:
    """What an operation comes down to, if to less."""
    a, b = args[0], args[-1]
    if op == "pow" and (simple := _simple_power(a, b)):
        return simple
    if op in _NEUTRAL and is_const(b, _NEUTRAL[op]):
        # -0.0 + 0.0 is 0.0: a difference that no score and no comparison shows.
        return a
    if op == "mul" and is_const(b, -1):
        return make("neg", a)
    if op in ("neg", "not") and a.op == op:
        return a.args[0]
    if op in ("floor", "ceil", "rint") and a.dtype == "int":
        return a
    if op == "where" and (args[1] is b or a.op == "const"):
        return args[1] if args[1] is b or a.value else b
    if op in ("and", "or") and a.dtype == "bool":
        if a is b:
            return a
        for x, y in ((a, b), (b, a)):
            if x.op == "const":
                return y if x.value == (op == "and") else x
    return None


def _simple_power(x: Node, n: Node) -> Node | None:
    """A power of floats by a product, a root or an exponential; or None."""
    if is_const(x, 2):
        return make("exp2", n)
    if n.op != "const":
        return None
    if n.value == 0.5:
        return make("sqrt", x)
    return whole_power(x, int(n.value)) if float(n.value).is_integer() else None


def whole_power(x: Node, n: int) -> Node | None:
    """A power by products, or None if there would be too many."""
    if abs(n) > LARGEST_PRODUCT:
        return None
    power = const(1 if x.dtype == "int" else 1.0)
    for bit in bin(abs(n))[2:]:
        power = make("mul", power, power)
        power = make("mul", power, x) if bit == "1" else power
    return make("div", 1, power) if n < 0 else power


def order(*roots: Node) -> list[Node]:
    """The nodes below some roots, each after its arguments."""
    done: dict[Node, None] = {}
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        x, ready = stack.pop()
        if ready:
            done[x] = None
        elif x not in done:
            stack.append((x, True))
            stack.extend((a, False) for a in reversed(x.args))
    return list(done)
