"""An expression evaluated by NumPy, for a tile of scores at a time."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyflash._expr.diagonals import is_of_diagonals, spread
from cupyflash._expr.nodes import Node, order
from cupyflash._expr.operations import OPERATIONS


class _Step(NamedTuple):
    """A node to be computed, in place `at` of the values."""

    at: int
    node: Node
    function: Any  # of NumPy; None for a cast, a leaf or a read
    args: list[int]  # their places
    dtype: np.dtype
    on_diagonals: bool  # whether it has one number a diagonal
    of_diagonals: list[int]  # the arguments, by number, that have


@functools.lru_cache(maxsize=256)
def _program(dtype, *roots):
    """(constants in their places, steps): what is the same for each tile."""
    to = {"float": dtype, "int": np.dtype(np.int64), "bool": np.dtype(bool)}
    nodes = order(*roots)
    places = {n: at for at, n in enumerate(nodes)}
    on_diagonals = {n: is_of_diagonals(n) for n in nodes}
    constants = [
        np.asarray(n.value).astype(to[n.dtype]) if n.op == "const" else None
        for n in nodes
    ]
    steps = [
        _Step(
            at,
            n,
            OPERATIONS[n.op].numpy if n.op in OPERATIONS else None,
            [places[a] for a in n.args],
            to[n.dtype],
            on_diagonals[n],
            [k for k, a in enumerate(n.args) if on_diagonals[a]],
        )
        for n, at in places.items()
        if n.op != "const"
    ]
    return constants, steps, [(places[n], on_diagonals[n]) for n in roots]


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
    constants, steps, results = _program(np.dtype(dtype), *roots)
    values: list[Any] = [*constants]

    def tile(x):
        """Numbers of diagonals as a tile."""
        return spread(x, variables["i"].shape[-2], variables["j"].shape[-1])

    with np.errstate(all="ignore"):
        for at, n, function, places, of_dtype, on_diagonals, of_diagonals in steps:
            args = [values[place] for place in places]
            if of_diagonals and not on_diagonals:
                for k in of_diagonals:
                    args[k] = tile(args[k])
            if function is not None:
                value = function(*args)
            elif n.op == "var":
                value = variables[n.value]
            elif n.op == "param":
                value = numbers[n.value]
                if n.dtype == "int" and not -(2**63) <= value < 2**63:
                    raise ValueError(
                        f"a function closes over {value}, which has more than 64 bits"
                    )
            elif n.op == "load":
                tiles = dict.fromkeys(of_diagonals, tile) if on_diagonals else {}
                value = _read(n.value, arrays[n.value], args, tiles, variables, visible)
            else:
                (value,) = args  # cast below
            if type(value) is not np.ndarray or value.dtype is not of_dtype:
                value = np.asarray(value).astype(of_dtype, copy=False)
            values[at] = value
    return [
        tile(values[at]) if on_diagonals else values[at] for at, on_diagonals in results
    ]


def _read(name, array, index, tiles, variables, visible):
    """Elements of an array, with an IndexError for those that are not there.

    `tiles` has, for axes whose index is one number a diagonal, what makes a tile of it.
    """
    within = []
    for axis, (at, size) in enumerate(zip(index, array.shape, strict=True)):
        if not _are_within(at, size):
            tile = tiles.get(axis, np.asarray)
            wrong = tile((at < 0) | (at >= size)) & visible()
            if wrong.any():
                _refuse(name, array, axis, tile(at), wrong, variables)
            if not size:
                return np.zeros(np.broadcast_shapes(*(a.shape for a in index)))
            at = np.clip(at, 0, size - 1)
        within.append(at)
    return array[tuple(within)]


def _are_within(at, size):
    if at.size == 1:  # in a third of the time
        return 0 <= at.item() < size
    return not at.size or (at.min() >= 0 and at.max() < size)


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
