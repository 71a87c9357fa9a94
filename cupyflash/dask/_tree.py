"""States of chunks, joined in a tree."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from cupyflash.dask import _chunks

Place = tuple[int, ...]


def joined(
    name: str,
    chunks: list[tuple[int, ...]],
    leaves: Callable[[Place], Iterator[tuple[Any, Any]]],
    join: Callable[..., tuple[Any, ...]],
    results: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Any,
    split_every: int,
) -> tuple[da.Array, ...]:
    """The arrays of which a state has one chunk each.

    Parameters
    ----------
    name : str
        Of the whole states in the graph.
    chunks : list of tuples of int
        Of the rows that have a state.
    leaves : callable
        From a place among these chunks to (key, task) pairs, one state each.
    join : callable
        Of lists, one for each result, of what several states have.
    results : dict
        For each array of a state its name, axes beside those of the rows, and dtype.
    arrays : list of dask.array.Array
        What the tasks read.
    split_every : int
        How many states are joined at once.
    """
    join = functools.partial(_join, join)
    places = list(itertools.product(*(range(len(sizes)) for sizes in chunks)))
    graph: dict[Any, Any] = {}
    for place in places:
        parts = dict(leaves(place))
        graph.update(parts)
        keys = list(parts)
        for depth in itertools.count():
            groups = [
                keys[n : n + split_every] for n in range(0, len(keys), split_every)
            ]
            keys = [(f"merged-{depth}-{name}", *place, n) for n in range(len(groups))]
            if len(groups) == 1:
                keys = [(name, *place)]
            graph.update(
                (key, (join, group)) for key, group in zip(keys, groups, strict=True)
            )
            if len(groups) == 1:
                break
    states = HighLevelGraph.from_collections(name, graph, dependencies=arrays)
    found = []
    for number, (what, (more, dtype)) in enumerate(results.items()):
        of, take = f"{what}-{name}", operator.itemgetter(number)
        layer: dict[Any, Any] = {
            (of, *place, *(0 for _ in more)): (take, (name, *place)) for place in places
        }
        whole = HighLevelGraph(
            {**states.layers, of: layer}, {**states.dependencies, of: {name}}
        )
        sizes = (*chunks, *((n,) for n in more))
        meta = _chunks.meta(arrays[0], len(sizes), dtype)
        found.append(da.Array(whole, of, sizes, meta=meta))
    return tuple(found)


def _join(join, states):
    """One state of several."""
    return (
        states[0] if len(states) == 1 else join(*map(list, zip(*states, strict=True)))
    )
