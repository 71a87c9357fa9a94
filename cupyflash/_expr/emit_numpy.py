"""An expression evaluated by NumPy, for a tile of scores at a time."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash._expr.diagonals import is_of_diagonals, spread
from cupyflash._expr.nodes import Node, order
from cupyflash._expr.operations import OPERATIONS


@functools.lru_cache(maxsize=256)
def _steps(*roots):
    """(node, whether it has one number a diagonal, arguments that become tiles).

    They are the same for each tile.
    """
    on_diagonals = {n: is_of_diagonals(n) for n in order(*roots)}
    return [
        (n, own, [k for k, a in enumerate(n.args) if on_diagonals[a] and not own])
        for n, own in on_diagonals.items()
    ]


def evaluate(
    roots: Sequence[Node],
    variables: Mapping[str, Any],
    numbers: Sequence[Any],
    arrays: Mapping[str, np.ndarray],
    dtype: Any,
    visible: Callable[[], Any] = lambda: True,
) -> list[np.ndarray]:
    """The values of some nodes, floats in `dtype`, each as small as it broadcasts from.

    Parameters
    ----------
    roots : sequence of Node
        What is asked for; what they share is computed once.
    variables : mapping
        s, b, h, i and j, as far as they are read: numbers, or arrays that broadcast; d
        where nodes are those of `by_distance`.
    numbers : sequence
        What the function closes over, as of `lookup`.
    arrays : mapping
        The named arrays.
    dtype : dtype
        Of floats.
    visible : callable, optional
        Gives the pairs that may be seen, asked where an array is read out of its range;
        for pairs that are not, some element is taken.

    Raises
    ------
    IndexError
        If an array is read out of its range for a visible pair.
    """
    to = {"float": np.dtype(dtype), "int": np.dtype(np.int64), "bool": np.dtype(bool)}
    values: dict[Node, np.ndarray] = {}

    def tile(x):
        """Numbers of diagonals as a tile."""
        if x.ndim != 1:
            return x
        return spread(x, variables["i"].shape[0], variables["j"].shape[1])

    with np.errstate(all="ignore"):
        for n, on_diagonals, of_tiles in _steps(*roots):
            args = [values[a] for a in n.args]
            for k in of_tiles:
                args[k] = tile(args[k])
            value: Any
            if n.op == "const":
                value = n.value
            elif n.op == "var":
                value = variables[n.value]
            elif n.op == "param":
                value = numbers[n.value]
            elif n.op == "load":
                array = arrays[n.value]
                if on_diagonals and not _is_within(array, args):
                    args = [tile(x) for x in args]
                value = _read(n.value, array, args, variables, visible)
            else:
                function = OPERATIONS[n.op].numpy
                value = args[0] if function is None else function(*args)
            values[n] = np.asarray(value).astype(to[n.dtype], copy=False)
    return [
        tile(values[root]) if is_of_diagonals(root) else values[root] for root in roots
    ]


def _is_within(array, index):
    return all(
        x.min() >= 0 and x.max() < size
        for x, size in zip(index, array.shape, strict=True)
    )


def _read(name, array, index, variables, visible):
    """Elements of an array, with an IndexError for those that are not there."""
    within = []
    for axis, (at, size) in enumerate(zip(index, array.shape, strict=True)):
        if at.size and (at.min() < 0 or at.max() >= size):
            wrong = ((at < 0) | (at >= size)) & visible()
            if wrong.any():
                _refuse(name, array, axis, at, wrong, variables)
            if not size:
                return np.zeros(np.broadcast_shapes(*(a.shape for a in index)))
            at = np.clip(at, 0, size - 1)
        within.append(at)
    return array[tuple(within)]


def _refuse(name, array, axis, at, wrong, variables):
    """Say which index is out of range, and for which pair."""
    first = tuple(np.argwhere(wrong)[0])
    known = {
        n: np.asarray(variables[n]) for n in "bhij" if variables.get(n) is not None
    }
    shape = np.broadcast_shapes(wrong.shape, *(x.shape for x in known.values()))
    first = (0,) * (len(shape) - len(first)) + first
    place = ", ".join(
        f"{n} = {np.broadcast_to(x, shape)[first]}" for n, x in known.items()
    )
    index = np.broadcast_to(at, shape)[first]
    size = array.shape[axis]
    clip = f", or write np.clip(index, 0, {size - 1})" if size else ""
    raise IndexError(
        f"{name}, of shape {array.shape}, is read at {index} of axis {axis} where "
        f"{place}: indices count from 0 and do not wrap; hide such pairs by another "
        f"option{clip}"
    )
