"""attention_vjp."""

import functools

from cupyflash import _arrays, _attention_vjp_problem, _foreign_names
from cupyflash._attention_vjp_problem import AttentionGrads
from cupyflash._typing import Array, Layout, Method, Never, Precision, Window


@functools.cache
def _gpu():
    """The CuPy back end, imported when the first GPU array arrives."""
    from cupyflash import _attention_vjp_gpu

    return _attention_vjp_gpu


@functools.cache
def _cpu():
    """The NumPy back end."""
    from cupyflash import _attention_vjp_cpu

    return _attention_vjp_cpu


def backend(problem):
    """The module that runs a problem."""
    return _cpu() if problem.backend == "numpy" else _gpu()


@_foreign_names.documented
def attention_vjp(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
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
    **unknown: Never,
) -> AttentionGrads:
    """Gradients of `attention`: from that of its result to those of its inputs.

    Parameters
    ----------
    dout : array_like, of the shape and dtype of `out`
        Gradient of a number by `out`.
    q, k, v : array_like
        The inputs of `attention`.
    out, lse : array_like
        What ``attention(q, k, v, ..., return_lse=True)`` returned for them.
    bias, mask, scale, causal, query_offset, window, softcap, sinks, alibi_slopes, \
query_lengths, key_lengths, layout, precision
        As in the call of `attention`.
    method : {"auto", "tiled"}, default "auto"
        Gradients have one method.
    dlse : array_like, of the shape and dtype of `lse`, optional
        Gradient of the same number by `lse`, as merging parts brings it.
    need_dbias, need_dsinks : bool, default False
        Also return the gradient of `bias`, of `sinks`.
    deterministic : bool, default False
        Ask for gradients that are the same in every run, bit by bit. Those of float32
        and float64 always are.

    Returns
    -------
    AttentionGrads
        Named tuple ``(dq, dk, dv, dbias, dsinks)``, each of the shape and dtype of what
        it belongs to, new and contiguous: sums over broadcast batch axes, over the
        query heads that share a head of `k`, and over the axes along which `bias` was
        broadcast are done. `dbias` and `dsinks` are None where not asked for.

    Raises
    ------
    TypeError
        If dtypes or kinds of array are mixed, or an option has the wrong type.
    ValueError
        If shapes do not agree, an option is out of range, arrays are on two devices, or
        the gradient of an absent `bias` or `sinks` is asked for.
    NotImplementedError
        If `method` is another one.

    See Also
    --------
    attention : The forward call.
    explain : Which kernel would run.

    Notes
    -----
    No scores are kept: each block of P is made anew from q, k and lse, so that memory
    is linear in the number of queries and keys. Sums are float32 (float64 for
    float64).

    A query that sees no key has no part in any gradient, even if NaN flows into it;
    neither have NaN or infinity in keys and values that no query sees, and in padding.
    With `sinks` the lse of such a query is its sink, to whose gradient a finite `dlse`
    belongs.

    Only the dependence through `out` and `lse` counts: `alibi_slopes` and `scale` get
    no gradient.

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
        _foreign_names.refuse("attention_vjp", unknown)
    arguments = (
        dout, q, k, v, out, lse, bias, mask, scale, causal, query_offset, window,
        softcap, sinks, alibi_slopes, query_lengths, key_lengths, layout, precision,
        method, dlse, need_dbias, need_dsinks, deterministic,
    )  # fmt: skip
    if _arrays.is_cupy(q):
        return _gpu().attention_vjp(*arguments)
    if _arrays.lives_on_gpu(q):
        _arrays.import_cupy()
        return _gpu().unplanned(*arguments)
    return _cpu().run(*_attention_vjp_problem.attention_vjp(*arguments))
