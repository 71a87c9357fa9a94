"""Sums over all pairs of two clouds of points, in Dask arrays.

`cupyflash.points.logsumexp`, `kernel_sum` and `mean` of clouds that are larger than
memory, or spread over processes: each pair of a chunk of x and one of y is one call;
the results over the chunks of y are joined in a tree.

>>> import dask.array as da
>>> import numpy as np
>>> import cupyflash.dask
>>> x = da.from_array(np.zeros((4, 2)), chunks=2)
>>> cupyflash.dask.points.logsumexp(x, x).compute().round(4)
array([1.3863, 1.3863, 1.3863, 1.3863])
"""

import functools
from typing import Any, Literal, overload

import dask.array as da
import numpy as np
from dask.base import tokenize

import cupyflash
from cupyflash import points
from cupyflash._core import arrays as _arrays
from cupyflash._points import problem as points_problem
from cupyflash.dask import _chunks, _tree

__all__ = ["kernel_sum", "logsumexp", "mean"]


def logsumexp(
    x: Any,
    y: Any,
    log_weights: Any = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    split_every: int | None = None,
) -> da.Array:
    """Logarithm of a sum of kernels, ``log sum_j w_j K(x_i, y_j)``.

    Parameters
    ----------
    x, y, log_weights : dask.array.Array
        As in `cupyflash.points.logsumexp`, with NumPy or CuPy chunks along any axes;
        the last axis of x and y becomes one chunk.
    kernel, bandwidth
        As in `cupyflash.points.logsumexp`.
    split_every : int, optional
        How many results over chunks of y are joined at once; by default Dask's setting.

    Returns
    -------
    dask.array.Array, shape (..., N)
        With the chunks of x; nothing has been computed.

    Raises
    ------
    TypeError, ValueError
        As in `cupyflash.points.logsumexp`, raised at once; ValueError also for axes of
        unknown length.

    Notes
    -----
    Each join rounds once to the dtype of the result. Points that are too far apart to
    matter are skipped within a pair of chunks, not from chunk to chunk.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> import cupyflash.dask
    >>> y = da.from_array(np.array([[0.0], [1.0], [2.0]]), chunks=1)
    >>> lse = cupyflash.dask.points.logsumexp(np.zeros((1, 1)), y, kernel="laplacian")
    >>> lse.compute().round(4)
    array([0.4076])
    """
    given = {"x": x, "y": y, "log_weights": log_weights}
    return _reduced("logsumexp", given, kernel, bandwidth, split_every)[0]


def kernel_sum(
    x: Any,
    y: Any,
    b: Any,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    split_every: int | None = None,
) -> da.Array:
    """Sum of kernels times values, ``sum_j K(x_i, y_j) b_j``.

    Parameters
    ----------
    x, y, b : dask.array.Array
        As in `cupyflash.points.kernel_sum`, with NumPy or CuPy chunks along any axes;
        the last axes of x, y and a matrix b become one chunk.
    kernel, bandwidth, split_every
        As in `logsumexp`.

    Returns
    -------
    dask.array.Array, shape (..., N, V), or (..., N) where `b` is a vector
        Nothing has been computed.

    Raises
    ------
    TypeError, ValueError
        As in `logsumexp`.
    """
    given = {"x": x, "y": y, "b": b}
    return _reduced("kernel_sum", given, kernel, bandwidth, split_every)[0]


@overload
def mean(
    x: Any,
    y: Any,
    v: Any,
    log_weights: Any = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    return_lse: Literal[False] = False,
    split_every: int | None = None,
) -> da.Array: ...
@overload
def mean(
    x: Any,
    y: Any,
    v: Any,
    log_weights: Any = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    return_lse: Literal[True],
    split_every: int | None = None,
) -> tuple[da.Array, da.Array]: ...
@overload
def mean(
    x: Any,
    y: Any,
    v: Any,
    log_weights: Any = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    return_lse: bool = False,
    split_every: int | None = None,
) -> da.Array | tuple[da.Array, da.Array]: ...
def mean(
    x: Any,
    y: Any,
    v: Any,
    log_weights: Any = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    return_lse: bool = False,
    split_every: int | None = None,
) -> da.Array | tuple[da.Array, da.Array]:
    """Mean of values, weighted by kernels.

    Parameters
    ----------
    x, y, v, log_weights : dask.array.Array
        As in `cupyflash.points.mean`, with NumPy or CuPy chunks along any axes; the
        last axes of x, y and a matrix v become one chunk.
    kernel, bandwidth, split_every
        As in `logsumexp`.
    return_lse : bool, default False
        Also return the logarithm of the denominator.

    Returns
    -------
    out : dask.array.Array, shape (..., N, V), or (..., N) where `v` is a vector
        Nothing has been computed.
    lse : dask.array.Array, shape (..., N)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        As in `logsumexp`.

    Notes
    -----
    Means over chunks of y are joined by `cupyflash.merge_attention_states`.
    """
    given = {"x": x, "y": y, "v": v, "log_weights": log_weights}
    out, lse = _reduced("mean", given, kernel, bandwidth, split_every, return_lse)
    return (out, lse) if return_lse else out


def _reduced(reduction, given, kernel, bandwidth, split_every, return_lse=False):
    """The arrays of a state of the whole: sums, log-sums, or means and log-sums."""
    split_every = _chunks.split_every(split_every)
    # A number makes no array of its dtype, and goes to each call as it is.
    weights = given.get("log_weights")
    plain = (
        {"log_weights": given.pop("log_weights")} if _arrays.is_scalar(weights) else {}
    )
    needed = [name for name in given if name != "log_weights"]
    arrays = _chunks.adopted(len(needed), **given)
    values_name = needed[2] if len(needed) > 2 else "v"
    stand_ins = {n: _chunks.stand_in(x) for n, x in arrays.items()} | plain
    problem, is_vector = points_problem.points(
        reduction,
        stand_ins["x"],
        stand_ins["y"],
        stand_ins.get("log_weights"),
        stand_ins.get(values_name),
        kernel,
        bandwidth,
        return_lse,
        values_name,
    )
    if is_vector:
        arrays[values_name] = arrays[values_name][:, None]
    # Dask's own letters of axes: i and j count points, d and v what a point has.
    axes = tuple(range(len(problem.batch)))
    letters = {"x": ("i", "d"), "y": ("j", "d"), "log_weights": ("j",)}
    letters[values_name] = ("j", "v")
    shapes = {
        "x": (problem.num_x, problem.dim),
        "y": (problem.num_y, problem.dim),
        "log_weights": (problem.num_y,),
        values_name: (problem.num_y, problem.num_values),
    }
    whole = {
        n: da.broadcast_to(
            x if n == "log_weights" else _chunks.rechunk(x, {-1: -1}),
            problem.batch + shapes[n],
        )
        for n, x in arrays.items()
    }
    blocks = _chunks.unified(
        *(a for n, x in whole.items() for a in (x, (*axes, *letters[n])))
    )
    whole = dict(zip(whole, blocks, strict=True))
    call = functools.partial(
        _part, reduction=reduction, names=tuple(whole), kernel=kernel,
        bandwidth=bandwidth, **plain,
    )  # fmt: skip
    name = f"points-{reduction}-{tokenize(*blocks, call)}"

    def leaves(place):
        *entry, i = place
        for j in range(whole["y"].numblocks[-2]):
            number = {"i": i, "j": j, "d": 0, "v": 0}
            yield (
                (name, *place, j),
                (
                    call,
                    *(
                        (x.name, *entry, *(number[letter] for letter in letters[n]))
                        for n, x in whole.items()
                    ),
                ),
            )

    dtype = np.dtype(problem.dtype)
    out, lse = ((problem.num_values,), dtype), ((), dtype)
    results = {
        "logsumexp": {"lse": lse},
        "kernel_sum": {"sum": out},
        "mean": {"mean": out, "lse": lse},
    }[reduction]
    chunks = [*whole["x"].chunks[:-1]]
    found = _tree.joined(
        name, chunks, leaves, _JOINS[reduction], results, blocks, split_every
    )
    return (found[0][..., 0], *found[1:]) if is_vector else found


# --- what is done to chunks


def _part(*blocks, reduction, names, kernel, bandwidth, **plain):
    """The state over one chunk of y."""
    given = dict(zip(names, blocks, strict=True))
    function = getattr(points, reduction)
    more = {"return_lse": True} if reduction == "mean" else {}
    found = function(**given, kernel=kernel, bandwidth=bandwidth, **plain, **more)
    return found if reduction == "mean" else (found,)


def _join_logs(lses):
    xp = _chunks.namespace(lses[0])
    return (cupyflash.logsumexp(xp.stack(lses), axis=0),)


def _join_sums(sums):
    """Added in float64, and rounded once."""
    xp = _chunks.namespace(sums[0])
    total = xp.zeros(sums[0].shape, np.float64)
    for part in sums:
        total += part
    return (total.astype(sums[0].dtype, copy=False),)


_JOINS = {
    "logsumexp": _join_logs,
    "kernel_sum": _join_sums,
    "mean": cupyflash.merge_attention_states,
}
