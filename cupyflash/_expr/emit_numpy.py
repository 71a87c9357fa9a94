"""An expression evaluated by NumPy, for a tile of scores at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash._expr.nodes import Node, order
from cupyflash._expr.operations import OPERATIONS


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
        s, b, h, i and j, as far as they are read: numbers, or arrays that broadcast.
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
    with np.errstate(all="ignore"):
        for n in order(*roots):
            args = [values[a] for a in n.args]
            value: Any
            if n.op == "const":
                value = n.value
            elif n.op == "var":
                value = variables[n.value]
            elif n.op == "param":
                value = numbers[n.value]
            elif n.op == "load":
                value = _read(n.value, arrays[n.value], args, variables, visible)
            else:
                function = OPERATIONS[n.op].numpy
                value = args[0] if function is None else function(*args)
            values[n] = np.asarray(value).astype(to[n.dtype], copy=False)
    return [values[root] for root in roots]


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
    raise IndexError(
        f"{name}, of shape {array.shape}, is read at {index} of axis {axis} where "
        f"{place}: indices count from 0 and do not wrap; hide such pairs by another "
        f"option, or write np.clip(index, 0, {array.shape[axis] - 1})"
    )
