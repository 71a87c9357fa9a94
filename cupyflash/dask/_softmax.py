"""softmax, log_softmax and logsumexp of Dask arrays."""

import functools
import math
from typing import Any, Literal, overload

import dask.array as da
import numpy as np

import cupyflash
from cupyflash._core import arrays, foreign_names
from cupyflash._core.typing import Axis, Method, Never
from cupyflash._softmax import problem as softmax_problem
from cupyflash.dask import _chunks


@foreign_names.documented("x")
def softmax(
    x: Any = None,
    axis: Axis = None,
    *,
    where: Any = None,
    scale: float = 1.0,
    dtype: Any = None,
    method: Method = "auto",
    split_every: int | None = None,
    **unknown: Never,
) -> da.Array:
    """Softmax of a Dask array, chunked along any axes.

    Parameters
    ----------
    x : dask.array.Array
        With NumPy or CuPy chunks; dtypes as in `cupyflash.softmax`. Complex arrays are
        rechunked to whole rows.
    axis : int or tuple of ints, optional
        Axes that one sum runs over. None, the default, is all of them.
    where : dask.array.Array or ndarray of bool, optional
        Broadcasts to `x`. Elements where it is False are ignored and give 0.
    scale : float, default 1.0
        Factor on `x`.
    dtype : dtype, optional
        Floating dtype of the result; by default that of `x`.
    method : {"auto", "naive", "safe", "online", "tiled"}, default "auto"
        The method within a chunk.
    split_every : int, optional
        How many states are joined at once; by default Dask's setting.

    Returns
    -------
    dask.array.Array
        With the shape and chunks of `x`; nothing has been computed.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `cupyflash.softmax`, raised at once; ValueError also for axes of unknown
        length.

    Notes
    -----
    Each chunk gives its own softmax, its maximum m, and t, the logarithm of its sum of
    ``exp(scale * (x - m))``. The pairs (m, t) of a row are joined in a tree, and
    each chunk is multiplied by its share, ``exp(scale * (m - m_row) + t - t_row)`` in
    float64. The error of the share, up to 2e-16 times its logarithm, comes on top of
    that of `cupyflash.softmax`. Until a row's total is known, one number per element is
    kept instead of `x`.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> import cupyflash.dask
    >>> x = da.from_array(np.array([0.0, 0.0, 1000.0, 1000.0]), chunks=2)
    >>> cupyflash.dask.softmax(x).compute()
    array([0. , 0. , 0.5, 0.5])
    """
    return _normalized(
        cupyflash.softmax, x, axis, where, scale, dtype, method, split_every, unknown
    )


@foreign_names.documented("x")
def log_softmax(
    x: Any = None,
    axis: Axis = None,
    *,
    where: Any = None,
    scale: float = 1.0,
    dtype: Any = None,
    method: Method = "auto",
    split_every: int | None = None,
    **unknown: Never,
) -> da.Array:
    """Logarithm of `softmax` of a Dask array, chunked along any axes.

    Parameters
    ----------
    x, axis, where, scale, dtype, method, split_every
        As in `softmax`. Elements where `where` is False give -inf.

    Returns
    -------
    dask.array.Array
        With the shape and chunks of `x`; nothing has been computed.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `softmax`.
    """
    return _normalized(
        cupyflash.log_softmax,
        x,
        axis,
        where,
        scale,
        dtype,
        method,
        split_every,
        unknown,
    )


@overload
def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    *,
    where: Any = None,
    split_every: int | None = None,
) -> da.Array: ...
@overload
def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: Any = None,
    split_every: int | None = None,
) -> tuple[da.Array, da.Array]: ...
@overload
def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: bool = False,
    *,
    where: Any = None,
    split_every: int | None = None,
) -> da.Array | tuple[da.Array, da.Array]: ...
@foreign_names.documented("a")
def logsumexp(
    a: Any = None,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: bool = False,
    *,
    where: Any = None,
    split_every: int | None = None,
    **unknown: Never,
) -> da.Array | tuple[da.Array, da.Array]:
    """Logarithm of a sum of exponentials of a Dask array, chunked along any axes.

    Parameters
    ----------
    a : dask.array.Array
        With NumPy or CuPy chunks. Complex arrays are rechunked to whole rows.
    axis : int or tuple of ints, optional
        Axes that the sum runs over. None, the default, is all of them.
    b : dask.array.Array, ndarray or float, optional
        Factors, broadcast with `a`; may be negative.
    keepdims : bool, default False
        Keep the reduced axes with length one.
    return_sign : bool, default False
        Also return the sign of the sum; without it a negative sum gives NaN.
    where : dask.array.Array or ndarray of bool, optional
        Broadcasts to `a`. Elements where it is False are ignored.
    split_every : int, optional
        How many chunks' results are joined at once; by default Dask's setting.

    Returns
    -------
    dask.array.Array
        The logarithms; nothing has been computed.
    sign : dask.array.Array
        Only with `return_sign`.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `cupyflash.logsumexp`, raised at once.

    Notes
    -----
    Each chunk gives the logarithm and the sign of its sum. The same function joins them
    in a tree.
    """
    if unknown:
        foreign_names.refuse("logsumexp", unknown)
    split_every = _chunks.split_every(split_every)
    given = _chunks.adopted(1, a=a, b=b, where=where)
    stand_ins = {n: _chunks.stand_in(x) for n, x in given.items()}
    problem, _ = softmax_problem.logsumexp(
        stand_ins["a"],
        axis,
        stand_ins.get("b"),
        keepdims,
        return_sign,
        stand_ins.get("where"),
        None,
    )
    names, blocks = _aligned(problem, given)
    compute = np.dtype(problem.compute_dtype)
    states = _states(_log_state, blocks, problem.axes, compute, names=names)
    total = _joined(_join_logs, states, problem.axes, split_every)
    log, sign = total[0], total[1]
    result = _chunks.result_dtype(problem)
    if problem.is_complex and not return_sign:
        found = [(log + sign.map_blocks(_log, dtype=sign.dtype)).astype(result)]
    elif problem.is_complex:
        found = [log.real.astype(result.type(0).real.dtype), sign.astype(result)]
    elif return_sign:
        found = [log.astype(result), sign.astype(result)]
    else:
        found = [da.where(sign < 0, np.nan, log).astype(result)]
    if not keepdims:
        found = [x.squeeze(axis=problem.axes) for x in found]
    return tuple(found) if return_sign else found[0]


def _normalized(function, x, axis, where, scale, dtype, method, split_every, unknown):
    """softmax or log_softmax."""
    if unknown:
        foreign_names.refuse(function.__name__, unknown)
    split_every = _chunks.split_every(split_every)
    given = _chunks.adopted(1, x=x, where=where)
    stand_ins = {n: _chunks.stand_in(x) for n, x in given.items()}
    problem, _ = softmax_problem.softmax(
        function.__name__,
        stand_ins["x"],
        axis,
        stand_ins.get("where"),
        scale,
        dtype,
        None,
        method,
    )
    chunks = given["x"].chunks
    names, blocks = _aligned(problem, given, chunks)
    result = _chunks.result_dtype(problem)
    call = functools.partial(
        _rows, function=function, axes=problem.axes, scale=scale, method=method
    )
    if all(blocks[0].numblocks[axis] == 1 for axis in problem.axes):
        found = _elementwise(call, blocks, result, names=names)
        return _chunks.rechunk(found, chunks)  # complex rows were made whole
    compute = np.dtype(problem.compute_dtype)
    parts = _elementwise(call, blocks, compute, names=names)
    of = {"scale": problem.scale, "log": function is cupyflash.log_softmax}
    states = _states(_state, [parts, *blocks], problem.axes, _STATE, names=names, **of)
    join = functools.partial(_join_states, scale=problem.scale)
    total = _joined(join, states, problem.axes, split_every)
    return _elementwise(_share, [parts, states, total, *blocks[1:]], result, **of)


# --- layers of the graph

# An array of states has one more axis in front: the two numbers of a state. Along the
# axes that a sum runs over it has one state a chunk, and one in all once joined.
_STATE = np.dtype("float64")


def _aligned(problem, given, chunks=None):
    """(names, arrays) of the shape of the problem, in `chunks` or one another's.

    Complex rows are made whole: their numbers have no order of size.
    """
    axes = tuple(range(len(problem.shape)))
    spread = [da.broadcast_to(x, problem.shape) for x in given.values()]
    if chunks is not None:
        spread = [_chunks.rechunk(x, chunks) for x in spread]
    blocks = _chunks.unified(*(y for x in spread for y in (x, axes)))
    if problem.is_complex:
        whole = dict.fromkeys(problem.axes, -1)
        blocks = [_chunks.rechunk(x, whole) for x in blocks]
    return tuple(given), blocks


def _elementwise(function, blocks, dtype, **options):
    """`function` of the chunks in one place, and of states that belong to them."""
    ndim = blocks[0].ndim
    return _blockwise(function, range(ndim), ndim, blocks, dtype, options)


def _states(function, blocks, axes, dtype, **options):
    """A state of each row of each chunk."""
    ndim = blocks[0].ndim
    return _blockwise(
        functools.partial(function, axes=axes),
        (ndim, *range(ndim)),
        ndim,
        blocks,
        dtype,
        options,
        new_axes={ndim: 2},
        adjust_chunks={axis: lambda n: 1 for axis in axes},
    )


def _blockwise(function, indices, ndim, blocks, dtype, options, **more):
    def indices_of(x):
        return tuple(range(ndim)) if x.ndim == ndim else (ndim, *range(ndim))

    return da.blockwise(
        functools.partial(function, **options),
        tuple(indices),
        *(y for x in blocks for y in (x, indices_of(x))),
        result=dtype,
        dtype=dtype,
        align_arrays=False,
        concatenate=True,
        meta=_chunks.meta(blocks[0], len(tuple(indices)), dtype),
        **more,
    )


def _joined(join, states, axes, split_every):
    """The states of whole rows."""
    return da.reduction(
        states,
        chunk=_as_it_is,
        combine=join,
        aggregate=join,
        axis=tuple(axis + 1 for axis in axes),
        keepdims=True,
        dtype=states.dtype,
        split_every=split_every,
        meta=states._meta,
    )


# --- what is done to a chunk


def _as_it_is(x, axis, keepdims):
    return x


def _rows(x, where=None, *, names, function, axes, scale, method, result):
    """softmax or log_softmax of the rows of a chunk, in a dtype."""
    if x.size == 0:
        return _chunks.namespace(x).empty(x.shape, result)
    is_complex = result.kind == "c"
    return function(
        x,
        axis=axes,
        where=where,
        scale=scale,
        method=method,
        dtype=None if is_complex else result,
    )


def _state(part, x, where=None, *, names, axes, scale, log, result):
    """(m, t) of a chunk: x of its largest score, and log sum exp(scale * (x - m)).

    `part` is its softmax, or the logarithm of that, whose largest number is -t.
    """
    xp = _chunks.namespace(x)
    if arrays.dtype_name(x) in ("float16", "bfloat16"):
        x = x.astype(np.float32)
    if scale == 0:
        x = xp.where(xp.isinf(x), math.nan, 0.0)
    low = _low(scale)
    if where is not None:
        x = xp.where(where, x, xp.asarray(low, xp.result_type(x, np.float32)))
    if not all(x.shape[axis] for axis in axes):
        shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
        return xp.stack([xp.full(shape, low), xp.full(shape, -math.inf)])
    m = (x.max if scale >= 0 else x.min)(axis=axes, keepdims=True).astype(result)
    top = part.max(axis=axes, keepdims=True).astype(result)
    with np.errstate(divide="ignore"):
        t = -top if log else -xp.log(top)
    return xp.stack([m, xp.where(m == low, -math.inf, t)])


def _low(scale):
    """The x of a score of -inf."""
    return -math.inf if scale >= 0 else math.inf


def _join_states(states, axis, keepdims, *, scale):
    """One state of several along axes."""
    xp = _chunks.namespace(states)
    axes = tuple(a - 1 for a in axis)
    m, t = states
    top = (m.max if scale >= 0 else m.min)(axis=axes, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        logs = xp.where(m == _low(scale), -math.inf, scale * (m - top) + t)
    total = cupyflash.logsumexp(logs, axis=axes, keepdims=True)
    return xp.stack([top, xp.asarray(total)])


def _share(part, state, total, where=None, *, scale, log, result):
    """A chunk of the result: its own softmax by its share of the whole row."""
    xp = _chunks.namespace(part)
    (m, t), (m_row, t_row) = state, total
    with np.errstate(all="ignore"):
        share = scale * (m - m_row) + (t - t_row)
        share = (share if log else xp.exp(share)).astype(part.dtype)
        found = part + share if log else part * share
    is_finite = bool((xp.isfinite(m) & xp.isfinite(m_row)).all())
    if not is_finite:
        found = _beside_infinities(xp, found, part, m, m_row, scale, log)
    # A share may be NaN for a t alone, as with a scale of 0.
    if where is not None and not (is_finite and bool(xp.isfinite(share).all())):
        found = xp.where(where, found, -math.inf if log else 0)
    return found.astype(result, copy=False)


def _beside_infinities(xp, found, part, m, m_row, scale, log):
    """Where the largest number of a chunk or of a row is not finite."""
    nothing, low = -math.inf if log else 0, _low(scale)
    # Chunks of -inf alone beside others; rows of -inf alone, and rows with +inf.
    found = xp.where(m == low, nothing, found)
    beside_inf = xp.where(m == m_row, part, nothing) if log else math.nan
    found = xp.where(m_row == low, part, xp.where(m_row == -low, beside_inf, found))
    return xp.where(xp.isnan(m_row), math.nan, found)


def _log_state(*blocks, names, axes, result):
    """Logarithm and sign of the sum of a chunk, in the dtype of the computation."""
    xp = _chunks.namespace(blocks[0])
    given = dict(zip(names, blocks, strict=True))
    a = given.pop("a").astype(result, copy=False)
    log, sign = cupyflash.logsumexp(
        a, axis=axes, keepdims=True, return_sign=True, **given
    )
    return xp.stack([xp.asarray(x, result) for x in (log, sign)])


def _log(x):
    with np.errstate(divide="ignore"):  # an empty sum
        return _chunks.namespace(x).log(x)


def _join_logs(states, axis, keepdims):
    """The same of several sums along axes."""
    xp = _chunks.namespace(states)
    axes = tuple(a - 1 for a in axis)
    log, sign = cupyflash.logsumexp(
        states[0], axis=axes, b=states[1], keepdims=True, return_sign=True
    )
    return xp.stack([xp.asarray(x, states.dtype) for x in (log, sign)])
