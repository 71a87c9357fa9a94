"""Expressions in which i - j is one number: what depends on it alone is computed once
for each diagonal of a tile, not for each of its scores.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash._expr.nodes import LEAVES, Node, const, node, order
from cupyflash._expr.operations import COMPARISONS, OF_FLOATS

DISTANCE = node("var", "int", (), "d")  # i - j


def distance(n: Node, args: Sequence[Node]) -> Node | None:
    """A difference of i and j as a number of its own; None if it is none."""
    names = tuple(a.value for a in args) if n.op == "sub" else ()
    if names == ("i", "j") and all(a.op == "var" for a in args):
        return DISTANCE
    if names == ("j", "i") and all(a.op == "var" for a in args):
        return node("neg", "int", (DISTANCE,))
    return None


def by_distance(roots: Sequence[Node]) -> list[Node]:
    """The same results, of i - j where they depend on that."""
    done: dict[Node, Node] = {}
    for n in order(*roots):
        args = tuple(done[a] for a in n.args)
        names = [a.value for a in args if a.op == "var"]
        if n.op in COMPARISONS and names in (["i", "j"], ["j", "i"]):
            zero = const(0)
            args = (DISTANCE, zero) if names[0] == "i" else (zero, DISTANCE)
        done[n] = distance(n, args) or node(n.op, n.dtype, args, n.value)
    return [done[root] for root in roots]


def is_of_diagonals(n: Node) -> bool:
    """Whether a node depends on i - j, and on neither of both otherwise."""
    return "d" in n.free and not n.free & {"s", "i", "j"}


# A term of so many operations, or with one of these, costs more than to read it.
_MANY = 12
_SLOW = OF_FLOATS | {"floordiv", "mod"}


def sum_of_diagonals(root: Node) -> frozenset[str] | None:
    """The variables of a term of i - j, and of h, that a score adds to s or subtracts.

    None if the score is something else, or the term costs little.
    """
    (root,) = by_distance([root])
    if root.op not in ("add", "sub"):
        return None
    s, term = root.args
    if root.op == "add" and term.op == "var":
        s, term = term, s
    if (s.op, s.value) != ("var", "s") or "d" not in term.free:
        return None
    if not term.free <= {"d", "h", "array"}:
        return None
    varies = [n for n in order(term) if "d" in n.free and n.op not in LEAVES]
    costs = len(varies) >= _MANY or any(n.op in _SLOW for n in varies)
    return term.free if costs else None


def distances(first: Any, rows: int, start: int, columns: int) -> np.ndarray:
    """All i - j of a tile, from its upper right corner's to its lower left one's.

    `first` is the position of its first query, or that of many tiles: (..., 1, 1).
    """
    return first - (start + columns - 1) + np.arange(rows + columns - 1)


def spread(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Numbers of diagonals (..., 1, diagonals) as tiles, which take no memory."""
    step = x.strides[-1]
    if x.ndim == 1:  # in a fifth of the time of as_strided()
        shape, strides = (rows, columns), (step, -step)
        return np.ndarray(shape, x.dtype, x, (columns - 1) * step, strides)
    return np.lib.stride_tricks.as_strided(
        x[..., columns - 1 :],
        (*x.shape[:-2], rows, columns),
        (*x.strides[:-2], step, -step),
    )
