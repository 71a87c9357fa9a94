"""What the results are measured against.

`softmax` ... `merge_attention_states` take the arguments of the public functions and
return float64 (complex128) NumPy arrays, computed by SciPy or by the formula with every
score in memory. They compute in float64, for float64 inputs in long double, so that
even there the reference is the better of the two.

`plain_attention` is the same formula as a user would write it, unfused, in the dtype of
the input and on the arrays given: a kernel may be at most twice as far from the
reference as that is.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.special

from cupyflash._core import arrays


def to_host(x: Any) -> Any:
    """`x` as a float64, complex128, integer or bool NumPy array; None stays None."""
    if x is None:
        return None
    if isinstance(x, (list, tuple)):
        return np.stack([to_host(part) for part in x]) if len(x) else np.asarray(x)
    x = arrays.adopt(x)
    if arrays.is_cupy(x):
        x = _bfloat16_to_host(x) if x.dtype.name == "bfloat16" else x.get()
    if x.dtype.name in arrays.FLOATS:
        return x.astype(np.float64)
    return x.astype(np.complex128) if x.dtype.kind == "c" else x


def _bfloat16_to_host(x):
    """The bits travel, so that no cast of CuPy's takes part."""
    return x.view(np.uint16).get().view(x.dtype)


# --- softmax -------------------------------------------------------------------------


def _wider(x):
    """The dtype to compute in: one that is wider than that of the input."""
    name = getattr(getattr(x, "dtype", None), "name", "float64")
    if name.startswith("complex"):
        return np.complex128
    return np.float64 if name in ("float16", "bfloat16", "float32") else np.longdouble


def _scores(x, scale, dtype=None):
    """scale * x in the dtype to compute in; integers too."""
    dtype = dtype or _wider(x)
    x = to_host(x).astype(dtype)
    return x if scale == 1 else x * scale


def softmax(x, axis=None, *, where=None, scale=1.0, **_ignored):
    """SciPy's softmax; elements with `where` False are absent."""
    x, where = _scores(x, scale), to_host(where)
    return _masked(scipy.special.softmax, 0, x, axis, where)


def log_softmax(x, axis=None, *, where=None, scale=1.0, **_ignored):
    """SciPy's log_softmax; elements with `where` False are absent."""
    x, where = _scores(x, scale), to_host(where)
    return _masked(scipy.special.log_softmax, -np.inf, x, axis, where)


def _masked(function, absent, x, axis, where):
    """`function` of the selected elements of each row, `absent` elsewhere."""
    if x.size == 0:
        return _narrow(x)
    with np.errstate(all="ignore"):
        if where is None:
            return _narrow(function(x, axis=axis))
        where = np.broadcast_to(where, x.shape)
        # An absent element is one more -inf in its row, which changes no other.
        y = function(np.where(where, x, -np.inf), axis=axis)
        return _narrow(np.where(where, y, absent))


def _narrow(x):
    """A long double result as float64."""
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype == np.longdouble else x


def logsumexp(
    a, axis=None, b=None, keepdims=False, return_sign=False, *, where=None, **_ignored
):
    """log |sum b exp(a)| and its sign; b = 0 and `where` False drop an element."""
    dtype = np.result_type(_wider(a), np.float64 if b is None else _wider(b))
    a, where = _scores(a, 1, dtype), to_host(where)
    if b is not None:
        a, b = np.broadcast_arrays(a, to_host(b).astype(dtype))
    if axis is None:
        axis = tuple(range(a.ndim))
    weights = np.ones_like(a) if b is None else np.array(b)
    if where is not None:
        weights[~np.broadcast_to(where, a.shape)] = 0
    a = np.where(weights == 0, -np.inf, a)
    with np.errstate(all="ignore"):
        m = np.max(a.real, axis=axis, keepdims=True, initial=-np.inf)
        m = np.where(np.isfinite(m), m, 0)
        terms = np.where(weights == 0, 0, weights * np.exp(a - m))
        top = (a.real == m) & (a.imag == 0)
        # The largest terms stand apart: near zero the small ones decide the result.
        count = np.sum(np.where(top, weights, 0), axis=axis, keepdims=True)
        rest = np.sum(np.where(top, 0, terms), axis=axis, keepdims=True)
        total = count + rest
        size = np.abs(total)
        split = (total.real > 0) & (count.real > 0) & (total.imag == 0)
        split &= np.isfinite(total)
        log = np.where(
            split,
            np.log1p((rest / np.where(split, count, 1)).real)
            + np.log(np.where(split, count, 1).real),
            np.log(size),
        )
        result = log + m
        sign = np.where(np.isinf(size) & np.isfinite(total.imag), np.sign(total.real),
                        np.sign(total))  # fmt: skip
        if not return_sign:
            if a.dtype.kind == "c":
                result = result + 1j * np.angle(total)
            else:
                result = np.where(total < 0, np.nan, result)
    if a.size == 0 and return_sign:
        sign = np.full_like(sign, -1)  # as SciPy has it: the sign of -inf
    if not keepdims:
        result, sign = (np.squeeze(r, axis=axis) for r in (result, sign))
    result, sign = _narrow(result), _narrow(sign)
    return (result, sign) if return_sign else result


def softmax_vjp(y, dy, axis=None, *, scale=1.0, **_ignored):
    """scale * y * (dy - sum(y * dy))."""
    y, dy = _operands_of_vjp(y, dy)
    with np.errstate(all="ignore"):
        return _narrow(scale * y * (dy - np.sum(y * dy, axis=axis, keepdims=True)))


def log_softmax_vjp(y, dy, axis=None, *, scale=1.0, **_ignored):
    """scale * (dy - exp(y) * sum(dy)), and 0 where y is -inf."""
    y, dy = _operands_of_vjp(y, dy)
    with np.errstate(all="ignore"):
        dx = scale * (dy - np.exp(y) * np.sum(dy, axis=axis, keepdims=True))
        return _narrow(np.where(y == -np.inf, 0, dx))


def _operands_of_vjp(y, dy):
    dtype = np.result_type(_wider(y), _wider(dy))
    return np.broadcast_arrays(_scores(y, 1, dtype), _scores(dy, 1, dtype))


# --- attention -----------------------------------------------------------------------


def attention(q, k, v, **options):
    """Float64 `out`, or `(out, lse)` with ``return_lse=True``."""
    for name, value in options.items():
        if isinstance(value, (list, np.ndarray)) or arrays.is_cupy(value):
            options[name] = to_host(value) if name != "out" else None
    exact = _wider(q)
    q, k, v = (to_host(x).astype(exact) for x in (q, k, v))
    result = _attention(np, q, k, v, exact, exact, **options)
    return tuple(map(_narrow, result)) if options.get("return_lse") else _narrow(result)


def _attention(xp, q, k, v, dtype, work, *, layout="bhsd", return_lse=False, **options):
    """softmax(scores) @ v, all scores in memory, each step in `work`, then `dtype`."""
    as_matrix = max(q.ndim, k.ndim, v.ndim) == 2
    w = _weights(xp, q, k, v, dtype, work, layout=layout, **options)

    def matmul(a, b):
        return xp.matmul(a, b).astype(dtype, copy=False).astype(work, copy=False)

    with np.errstate(all="ignore"):
        out = _times_values(xp, w.p, w.seen, w.v, matmul)
    out = xp.where(w.blind[..., None], 0, out)
    if w.padded is not None:
        out = xp.where(w.padded[..., None], 0, out)
    out = out.astype(dtype, copy=False)
    lse = w.lse.astype(work, copy=False)
    if as_matrix:
        out, lse = out[0], lse[0]
    elif layout == "bshd":
        out = out.swapaxes(-3, -2)
    return (out, lse) if return_lse else out


def _weights(
    xp, q, k, v, dtype, work, *, bias=None, mask=None, scale=None, causal=False,
    query_offset=None, window=None, softcap=0.0, sinks=None, alibi_slopes=None,
    query_lengths=None, key_lengths=None, layout="bhsd", **_ignored,
):  # fmt: skip
    """P = softmax(scores), what it was made of, and the rows that have no part in it.

    q, k and v with all batch axes and a head of k for each of q; `slope` is the
    softcap's derivative.
    """

    def rounded(x):
        return x.astype(dtype, copy=False).astype(work, copy=False)

    def matmul(a, b):
        return rounded(xp.matmul(a, b))

    q, k, v = (_heads_first(x, layout).astype(work, copy=False) for x in (q, k, v))
    heads, seqlen_q, head_dim = q.shape[-3:]
    seqlen_k = k.shape[-2]
    group = heads // k.shape[-3] if heads else 1
    k, v = (xp.repeat(x, group, axis=-3) for x in (k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (xp.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    scale = head_dim**-0.5 if scale is None else scale

    def of_batch(lengths, size):
        """Lengths clamped to [0, size] against (heads, seqlen_q, seqlen_k)."""
        lengths = xp.broadcast_to(lengths, batch).astype(np.int64)
        return xp.clip(lengths, 0, size)[..., None, None, None]

    i = xp.arange(seqlen_q)[:, None]
    j = xp.arange(seqlen_k)[None, :]
    visible = xp.ones((*batch, heads, seqlen_q, seqlen_k), bool)
    length_q = length_k = None
    if query_lengths is not None:
        length_q = of_batch(query_lengths, seqlen_q)
        visible &= i < length_q
    if key_lengths is not None:
        length_k = of_batch(key_lengths, seqlen_k)
        visible &= j < length_k
    if query_offset is None:
        offset = (seqlen_k if length_k is None else length_k) - (
            seqlen_q if length_q is None else length_q
        )
    elif isinstance(query_offset, (int, np.integer)):
        offset = int(query_offset)
    else:
        offset = xp.broadcast_to(query_offset, batch).astype(np.int64)
        offset = offset[..., None, None, None]
    distance = j - (i + offset)
    left, right = window if isinstance(window, (tuple, list)) else (window, window)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if causal:
        visible &= distance <= 0
    if mask is not None:
        visible &= mask

    with np.errstate(all="ignore"):
        s = rounded(matmul(q, k.swapaxes(-1, -2)) * work(scale))
        slope = None
        if softcap:
            tanh = rounded(xp.tanh(rounded(s / work(softcap))))
            slope = rounded(1 - tanh * tanh)
            s = rounded(work(softcap) * tanh)
        if bias is not None:
            s = rounded(s + bias.astype(work))
        if alibi_slopes is not None:
            slopes = xp.broadcast_to(alibi_slopes.astype(work), (*batch, heads))
            s = rounded(s - slopes[..., None, None] * abs(distance).astype(work))
        s = xp.where(visible, s, -xp.inf).astype(work, copy=False)
        seen = s != -xp.inf

        if seqlen_k:
            m = s.max(axis=-1, keepdims=True)
        else:
            m = xp.full((*s.shape[:-1], 1), -xp.inf, work)
        if sinks is not None:
            sinks = xp.broadcast_to(sinks, (heads,)).astype(work)[:, None, None]
            m = xp.maximum(m, sinks)
        m = xp.where(m == -xp.inf, work(0), m)
        p = xp.where(seen, rounded(xp.exp(rounded(s - m))), work(0))
        total = rounded(p.sum(axis=-1, keepdims=True))
        if sinks is not None:
            total = rounded(total + xp.exp(sinks - m))
        lse = (m + xp.log(total))[..., 0]
        p = rounded(p / total)
        p_sink = None if sinks is None else rounded(xp.exp(sinks - m) / total)[..., 0]

    blind = ~seen.any(axis=-1)
    lse = xp.where(blind, -xp.inf if sinks is None else sinks[..., 0], lse)
    padded = None
    if length_q is not None:
        padded = xp.broadcast_to((i >= length_q)[..., 0], lse.shape)
        lse = xp.where(padded, -xp.inf, lse)
    return SimpleNamespace(
        q=q, k=k, v=v, scale=scale, p=p, p_sink=p_sink, slope=slope, lse=lse,
        seen=seen, blind=blind, padded=padded,
    )  # fmt: skip


def _heads_first(x, layout):
    if x.ndim == 2:
        return x[None]
    return x if layout == "bhsd" else x.swapaxes(-3, -2)


def _times_values(xp, p, seen, v, matmul):
    """p @ v, where a key that is not seen adds nothing, not even 0 * NaN."""
    finite = xp.isfinite(v)
    out = matmul(p, xp.where(finite, v, 0).astype(v.dtype, copy=False))
    nonfinite_keys = ~finite.all(axis=-1)
    for j in range(v.shape[-2]):
        if bool(nonfinite_keys[..., j].any()):
            nonfinite = xp.where(finite[..., j, :], 0, v[..., j, :])
            term = p[..., j, None] * nonfinite[..., None, :]
            use = seen[..., j, None] & ~finite[..., j, :][..., None, :]
            out = xp.where(use, out + term, out)
    return out


def merge_attention_states(outs, lses, *, axis=0, **_ignored):
    """Float64 (out, lse) of the union of the keys of all parts."""
    outs, lses = to_host(outs), to_host(lses)
    axis = np.lib.array_utils.normalize_axis_index(axis, lses.ndim)
    outs, lses = np.moveaxis(outs, axis, 0), np.moveaxis(lses, axis, 0)
    with np.errstate(all="ignore"):
        m = np.max(lses, axis=0, initial=-np.inf)
        m = np.where(m == -np.inf, 0, m)
        weights = np.exp(lses - m)
        total = weights.sum(axis=0)
        lse = m + np.log(total)
        shares = (weights / np.where(total == 0, 1, total))[..., None]
        out = np.where(lses[..., None] == -np.inf, 0, shares * outs).sum(axis=0)
    return out, lse


# --- the unfused computation in the dtype of the input -------------------------------


def _namespace(x):
    return sys.modules["cupy"] if arrays.is_cupy(x) else np


def _work_dtype(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def plain_attention(q, k, v, **options):
    """Attention by matmul, softmax, matmul, each step rounded to the dtype of `q`."""
    work = _work_dtype(q.dtype)
    return _attention(_namespace(q), q, k, v, q.dtype, work, **options)
