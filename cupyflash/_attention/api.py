"""attention, its gradients, and merge_attention_states."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np

from cupyflash._attention import functions
from cupyflash._attention import problem as attention_problem
from cupyflash._attention.vjp_problem import AttentionGrads, AttentionVjpProblem
from cupyflash._core import arrays, foreign_names
from cupyflash._core.typing import (
    Array,
    Layout,
    Mask,
    Method,
    NamedArrays,
    Never,
    Precision,
    Score,
    Window,
)


@functools.cache
def _gpu():
    """The CuPy back end, imported when the first GPU array arrives."""
    from cupyflash._attention.gpu import forward as attention_gpu

    return attention_gpu


@functools.cache
def _cpu():
    """The NumPy back end."""
    from cupyflash._attention.cpu import forward as attention_cpu

    return attention_cpu


@functools.cache
def _gpu_vjp():
    """The same for gradients."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu

    return attention_vjp_gpu


@functools.cache
def _cpu_vjp():
    """The same for gradients."""
    from cupyflash._attention.cpu import backward as attention_vjp_cpu

    return attention_vjp_cpu


def backend(problem):
    """The module that runs a problem."""
    on_cpu = problem.backend == "numpy"
    if isinstance(problem, AttentionVjpProblem):
        return _cpu_vjp() if on_cpu else _gpu_vjp()
    return _cpu() if on_cpu else _gpu()


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: Literal[True],
    out: Array | None = None,
    method: Method = "auto",
    score: Score | None = None,
    score_arrays: NamedArrays | None = None,
    mask_arrays: NamedArrays | None = None,
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: bool = False,
    out: Array | None = None,
    method: Method = "auto",
    score: Score | None = None,
    score_arrays: NamedArrays | None = None,
    mask_arrays: NamedArrays | None = None,
) -> Array: ...  # Any: a pair, too, if the flag is not known


@foreign_names.documented("q", "k", "v")
def attention(
    q: Array = None,
    k: Array = None,
    v: Array = None,
    *,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: bool = False,
    out: Array | None = None,
    method: Method = "auto",
    score: Score | None = None,
    score_arrays: NamedArrays | None = None,
    mask_arrays: NamedArrays | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention, ``softmax(scale * q k^T + bias) v``.

    Parameters
    ----------
    q : array_like, shape (..., num_heads, seqlen_q, head_dim)
        Queries: float16, bfloat16, float32 or float64; a NumPy array (computed on the
        CPU), a CuPy array (on its GPU), or an object that exposes CUDA memory. Leading
        batch axes broadcast; a plain matrix is one head.
    k : array_like, shape (..., num_kv_heads, seqlen_k, head_dim)
        Keys. `num_kv_heads` divides `num_heads`: query head h uses head
        ``h // (num_heads // num_kv_heads)``.
    v : array_like, shape (..., num_kv_heads, seqlen_k, head_dim_v)
        Values; `head_dim_v` may differ from `head_dim`. q, k and v are read in place,
        with any strides, if the last axis is contiguous; otherwise they are copied
        once. They are also copied where rows that start at multiples of 16 bytes make
        a GPU so much faster that it pays off.
    bias : array_like of float, optional
        Added to the scores; any shape that broadcasts to
        (..., num_heads, seqlen_q, seqlen_k). It is read in place and never expanded.
    mask : array_like of bool, or function, optional
        True where a query may see a key; an array broadcasts as `bias` does. A function
        takes any of ``b, h, i, j`` by name (see Notes) and arrays from `mask_arrays`.
    scale : float, optional
        Factor on ``q k^T``; by default ``head_dim ** -0.5``. May be 0 or negative.
    causal : bool, default False
        Let query i see keys up to ``i + query_offset``.
    query_offset : int or array_like of int, shape (...), optional
        Position of query 0 among the keys, one for all or one per batch entry. None
        means key length - query length (bottom-right, as with a key-value cache); 0 is
        top-left. Clipped to 2**61 on either side.
    window : int or (left, right), optional
        How many keys query i may see on each side of key ``i + query_offset``, not
        counting that key; None means unbounded.
    softcap : float, default 0.0
        If positive, scaled scores s become ``softcap * tanh(s / softcap)``.
    sinks : array_like of float, shape (num_heads,), optional
        One extra logit per head, which only adds to the denominator.
    alibi_slopes : array_like of float, shape (num_heads,) or (..., num_heads), optional
        Adds ``-slope * abs(i + query_offset - j)`` to the score of query i and key j.
    query_lengths, key_lengths : array_like of int, shape (...), optional
        Lengths in use in each batch entry, from 0 to seqlen_q and seqlen_k. Query rows
        beyond give 0 (lse -inf), and keys beyond are ignored. Lengths on a GPU are
        read there, never by the host, and clipped to this range.
    layout : {"bhsd", "bshd"}, default "bhsd"
        "bshd" takes and returns (..., seqlen, heads, dim).
    precision : {"float32", "tf32"}, default "float32"
        For float32 input, "tf32" allows tensor cores in TF32, with an error of up to
        1.5e-3.
    return_lse : bool, default False
        Also return the logarithm of the softmax denominator.
    out : ndarray, optional
        Where to put the result; must not overlap the inputs.
    method : {"auto", "naive", "safe", "online", "tiled"}, default "auto"
        "naive" and "safe" keep all scores in memory, naive in the dtype of `q` and
        without subtracting a maximum (it overflows). "online" goes through the keys
        once for each query. "tiled" is FlashAttention. The last two only keep blocks
        of scores: on NumPy at most 2**19 scores per thread, or those of one query.
    score : function, optional
        Changes the score, after the softcap and before `bias`. It takes any of
        ``s, b, h, i, j`` by name (see Notes) and arrays from `score_arrays`.
    score_arrays, mask_arrays : dict of str to array_like, optional
        Arrays that `score` and `mask` take as keyword-only arguments and index by
        integers.

    Returns
    -------
    out : ndarray, shape (..., num_heads, seqlen_q, head_dim_v)
        The result, in the dtype of `q` and the layout of the call.
    lse : ndarray, shape (..., num_heads, seqlen_q)
        Only with `return_lse`: natural logarithm of the sum of exponentials of the
        final scores, sinks included, in either layout. float32, or float64 for float64
        input.

    Raises
    ------
    TypeError
        If dtypes or kinds of array are mixed, or an option has the wrong type.
    ValueError
        If shapes do not agree, an option is out of range, or arrays are on two devices.
    IndexError
        If a function reads an array out of its range; on a GPU it gets the nearest
        element.
    NotImplementedError
        If no kernel of the method can take the problem; never for "auto".

    See Also
    --------
    merge_attention_states : Combine results over parts of the keys.
    attention_vjp : Gradients.
    explain : Which kernel would run.

    Notes
    -----
    The order is: scale, softcap, `score`, bias and ALiBi, masks (mask, causal, window,
    lengths; they intersect), softmax in float32 (float64 for float64), product with
    `v`.

    `score` and `mask` as functions are plain functions of NumPy operations, such as
    ``lambda s, h, i, j, *, slope: s - slope[h] * abs(i - j)``: s is the score, b the
    batch entry (its position in C order if there are several batch axes), h the query
    head, i the position of the query among the keys (with the query offset added), j
    the key. They are traced once: numbers that they close over may change from call to
    call. Arrays are indexed by one integer per axis, from 0. An index out of range for
    a pair that no other option hides raises an IndexError; on a GPU it takes the
    nearest element. A mask of positions skips blocks of keys that it hides completely.

    Scores are float32 (float64 for float64). If a float64 option holds numbers below
    the range of float32, they become -inf in float32 scores. Numbers above it, and
    `alibi_slopes` beyond it on either side, raise an error on the host and become
    infinite on a GPU, where values are not checked.

    A query that sees no key, or whose scores are all -inf, gives 0 and an lse of -inf
    (with `sinks`, the sink). A score of +inf gives a row of NaN. A NaN stays in its
    row, and NaN or infinity in keys and values that a query does not see has no effect.

    Outputs below the smallest normal number of the dtype may become 0, and a `scale`
    below the smallest normal number of the scores loses digits. On a GPU, and in
    "naive" and "safe", ``q k^T`` is multiplied by the scale after it is summed, so it
    overflows above 3.4e38 (1.8e308 in float64) before the scale can help.

    Besides the result, "tiled" needs memory for blocks of scores. On the CPU, where a
    head has few scores (262,144 or fewer, or one query) and up to 2**22 numbers in its
    keys and values, 16-bit ones are converted to float32 all at once, one head for
    each thread. On a GPU it needs memory for keys and values that are prepared for the
    tensor cores or copied, and for results over parts of the keys; the guide "Streams,
    graphs, memory" says how much.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: faster attention with better parallelism and work
       partitioning", arXiv:2307.08691, 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> q = k = np.eye(2)
    >>> v = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> cupyflash.attention(q, k, v, scale=0.0)
    array([[0.5, 0.5],
           [0.5, 0.5]])
    >>> cupyflash.attention(q, k, v, causal=True)[0]
    array([1., 0.])

    The same mask as a function, and a score that falls with the distance:

    >>> cupyflash.attention(q, k, v, mask=lambda i, j: j <= i)[0]
    array([1., 0.])
    >>> slope = np.log(3.0)
    >>> near = lambda s, i, j: s - slope * abs(i - j)
    >>> cupyflash.attention(q, k, v, scale=0.0, score=near)
    array([[0.75, 0.25],
           [0.25, 0.75]])
    """
    if unknown:
        foreign_names.refuse("attention", unknown)
    of_functions: tuple[Any, ...] = ()
    if not (mask is score is score_arrays is mask_arrays is None) and functions.given(
        score, score_arrays, mask, mask_arrays
    ):
        of_functions = score, score_arrays, mask_arrays
    if type(q) in arrays.CUPY_CLASSES or arrays.is_cupy(q):
        result = _gpu().attention(
            q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
            alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse,
            out, method, of_functions,
        )  # fmt: skip
        return tuple(result) if return_lse else result[0]
    arguments: tuple[Any, ...] = (
        q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
        alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
        method,
    )  # fmt: skip
    if type(q) is np.ndarray:
        result = _cpu().attention(*arguments, *of_functions)
    elif arrays.lives_on_gpu(q):
        arrays.import_cupy()
        result = _gpu().unplanned(arguments, of_functions)
    else:
        result = _cpu().run(*attention_problem.attention(*arguments, *of_functions))
    return tuple(result) if return_lse else result[0]


@foreign_names.documented("outs", "lses")
def merge_attention_states(
    outs: Array = None,
    lses: Array = None,
    *,
    axis: int = 0,
    out: Array | None = None,
    **unknown: Never,
) -> tuple[Array, Array]:
    """Combine attention over parts of the keys into attention over all of them.

    Parameters
    ----------
    outs : array_like, shape (parts, ..., seqlen_q, head_dim_v), or list of arrays
        Results of `attention` over disjoint parts of the keys, in one dtype.
    lses : array_like, shape (parts, ..., seqlen_q), or list of arrays
        Their lse: the shape of `outs` without its last axis. float32 or float64.
    axis : int, default 0
        Axis of `lses`, and of `outs`, that counts the parts; of lists, the first.
    out : ndarray, optional
        Where to put the merged result; must not overlap the inputs.

    Returns
    -------
    out : ndarray, shape (..., seqlen_q, head_dim_v)
        ``sum_p exp(lse_p - lse) outs_p``, of the dtype of `outs`.
    lse : ndarray, shape (..., seqlen_q)
        ``log sum_p exp(lse_p)``.

    Raises
    ------
    TypeError
        If `outs` or `lses` is not floating, or dtypes or kinds of array are mixed.
    ValueError
        If the shapes do not belong together.
    numpy.exceptions.AxisError
        If `axis` is out of bounds for `lses`.

    See Also
    --------
    attention : Results over keys, with `return_lse`.

    Notes
    -----
    Exact up to rounding. A part whose lse is -inf contributes nothing; if all are, the
    result is 0 with an lse of -inf.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 4))
    >>> parts = [
    ...     cupyflash.attention(q, k[s], v[s], return_lse=True)
    ...     for s in (slice(0, 3), slice(3, 8))
    ... ]
    >>> outs, lses = zip(*parts)
    >>> out, lse = cupyflash.merge_attention_states(outs, lses)
    >>> bool(np.allclose(out, cupyflash.attention(q, k, v)))
    True
    """
    if unknown:
        foreign_names.refuse("merge_attention_states", unknown)
    first = outs[0] if isinstance(outs, (list, tuple)) and outs else outs
    if arrays.is_cupy(first) or arrays.lives_on_gpu(first):
        arrays.import_cupy()
        return _gpu().merge(outs, lses, axis, out)
    merged, lse = _cpu().merge(*attention_problem.merge(outs, lses, axis, out))
    return (merged if out is None else out), lse  # which may be of a subclass


@foreign_names.documented("dout", "q", "k", "v", "out", "lse")
def attention_vjp(
    dout: Array = None,
    q: Array = None,
    k: Array = None,
    v: Array = None,
    out: Array = None,
    lse: Array = None,
    *,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    method: Method = "auto",
    dlse: Array | None = None,
    need_dbias: bool = False,
    need_dsinks: bool = False,
    deterministic: bool = False,
    score: Score | None = None,
    score_arrays: NamedArrays | None = None,
    mask_arrays: NamedArrays | None = None,
    need_dscore: str | Sequence[str] = (),
    **unknown: Never,
) -> AttentionGrads:
    """Gradients of `attention` with respect to its inputs.

    Parameters
    ----------
    dout : array_like, of the shape and dtype of `out`
        Gradient of a loss with respect to `out`.
    q, k, v : array_like
        The inputs of `attention`.
    out, lse : array_like
        What ``attention(q, k, v, ..., return_lse=True)`` returned. They may be merged
        with results for other keys: then dk and dv are those of the whole call, and dq
        is the part that comes from these keys.
    bias, mask, scale, causal, query_offset, window, softcap, sinks, alibi_slopes, \
query_lengths, key_lengths, layout, precision, score, score_arrays, mask_arrays
        As in the call of `attention`.
    method : {"auto", "tiled"}, default "auto"
        There is only one method for gradients.
    dlse : array_like, of the shape and dtype of `lse`, optional
        Gradient of the same loss with respect to `lse`, for example from merging parts.
    need_dbias, need_dsinks : bool, default False
        Also return the gradient of `bias`, of `sinks`.
    deterministic : bool, default False
        Make gradients bit-identical in every run. In float32 and float64 they always
        are.
    need_dscore : sequence of str, or str, default ()
        Also return the gradients of these arrays of `score_arrays`, which must hold
        floats.

    Returns
    -------
    AttentionGrads
        Named tuple ``(dq, dk, dv, dbias, dsinks, dscore)``, each of the shape and dtype
        of its array, new and contiguous. They are already summed over broadcast batch
        axes, over the query heads that share a head of `k`, and over the axes along
        which `bias` was broadcast. `dscore` is a dict by name. The last three are None
        unless you asked for them.

    Raises
    ------
    TypeError
        If dtypes or kinds of array are mixed, or an option has the wrong type.
    ValueError
        If shapes do not agree, an option is out of range, arrays are on two devices, or
        you ask for the gradient of a `bias` or `sinks` that you did not pass.
    IndexError
        If a function reads an array out of its range; on a GPU it gets the nearest
        element.
    NotImplementedError
        If `method` is any other.

    See Also
    --------
    attention : The forward call.
    explain : Which kernel would run.

    Notes
    -----
    No scores are stored: each block of P is recomputed from q, k and lse, so memory is
    linear in the number of queries and keys. Sums are float32 (float64 for
    float64).

    A query that sees no key does not affect any gradient, even if NaN flows into it.
    Neither do NaN or infinity in keys and values that no query sees, or in padding.
    With `sinks` the lse of such a query is its sink, so a finite `dlse` goes into the
    gradient of the sink.

    `alibi_slopes` and `scale` get no gradient. A score function is differentiated
    symbolically; where two arguments of minimum, maximum or clip are equal, the
    gradient is that of the first.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: faster attention with better parallelism and work
       partitioning", arXiv:2307.08691, 2023, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 8, 4))
    >>> out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv, *_ = cupyflash.attention_vjp(dout, q, k, v, out, lse, causal=True)
    >>> step = 1e-6 * dq
    >>> change = cupyflash.attention(q + step, k, v, causal=True) - out
    >>> bool(np.isclose((change * dout).sum(), (step * dq).sum()))
    True
    """
    if unknown:
        foreign_names.refuse("attention_vjp", unknown)
    arguments: tuple[Any, ...] = (
        dout, q, k, v, out, lse, bias, mask, scale, causal, query_offset, window,
        softcap, sinks, alibi_slopes, query_lengths, key_lengths, layout, precision,
        method, dlse, need_dbias, need_dsinks, deterministic,
    )  # fmt: skip
    of_functions: tuple[Any, ...] = ()
    if functions.given(score, score_arrays, mask, mask_arrays) or need_dscore:
        of_functions = score, score_arrays, mask_arrays, need_dscore
    if type(q) is np.ndarray:
        return _cpu_vjp().attention_vjp(*arguments, *of_functions)
    if type(q) in arrays.CUPY_CLASSES or arrays.is_cupy(q):
        return _gpu_vjp().attention_vjp(arguments, of_functions)
    if arrays.lives_on_gpu(q):
        arrays.import_cupy()
        return _gpu_vjp().unplanned(arguments, of_functions)
    return _cpu_vjp().attention_vjp(*arguments, *of_functions)
