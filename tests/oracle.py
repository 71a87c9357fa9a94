"""The formulas in extended precision on the host, slow and plain.

They share no code with the package, its own reference included, which is tested against
them.
"""

import numpy as np
from accuracy import wide


def _axes(axis, ndim):
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(a % ndim for a in axes)


def _selected(x, where):
    where = True if where is None else np.asarray(where)
    return np.broadcast_to(where, x.shape)


@np.errstate(all="ignore")
def softmax(x, axis=None, where=None, scale=1.0):
    """exp(scale x) / sum exp(scale x) over the selected entries; 0 elsewhere."""
    z = wide(x) * np.longdouble(scale)
    axes, selected = _axes(axis, z.ndim), _selected(z, where)
    if z.size == 0:
        return z
    z = np.where(selected, z, -np.inf)
    p = np.where(selected, np.exp(z - z.max(axes, keepdims=True)), 0)
    total = p.sum(axes, keepdims=True)
    return np.where(selected, p / np.where(total == 0, 1, total), 0)


@np.errstate(all="ignore")
def log_softmax(x, axis=None, where=None, scale=1.0):
    """scale x - log sum exp(scale x) over the selected entries; -inf elsewhere."""
    z = wide(x) * np.longdouble(scale)
    axes, selected = _axes(axis, z.ndim), _selected(z, where)
    if z.size == 0:
        return z
    z = np.where(selected, z, -np.inf)
    m = z.max(axes, keepdims=True)
    shifted = z - np.where(np.isfinite(m), m, 0)
    total = np.exp(shifted).sum(axes, keepdims=True)
    return np.where(selected, shifted - np.log(total), -np.inf)


@np.errstate(all="ignore")
def logsumexp(a, axis=None, b=None, keepdims=False, where=None):
    """(log |sum b exp(a)|, sign) over the selected entries."""
    z = wide(a)
    b = np.ones_like(z) if b is None else wide(b)
    z, b = np.broadcast_arrays(z, b)
    axes, used = _axes(axis, z.ndim), _selected(z, where) & (b != 0)
    z = np.where(used, z, -np.inf)
    m = z.max(axes, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, 0)
    terms = np.where(used, b * np.exp(z - m), 0)
    total = terms.sum(axes, keepdims=True)
    # The largest terms stand apart: beside them log1p keeps what the small ones add.
    largest = used & (z == m)
    top = np.where(largest, terms, 0).sum(axes, keepdims=True)
    rest = np.where(largest, 0, terms).sum(axes, keepdims=True)
    beside = np.log(np.abs(top)) + np.log1p(rest / top)
    log = np.where((top > 0) & (top + rest > 0), beside, np.log(np.abs(total)))
    result, sign = log + m, np.sign(total)
    if z.size == 0:
        sign = np.full_like(sign, -1)  # as SciPy has it: the sign of -inf
    if not keepdims:
        result, sign = result.squeeze(axes), sign.squeeze(axes)
    return result, sign


@np.errstate(all="ignore")
def softmax_vjp(y, dy, axis=None, scale=1.0):
    y, dy = wide(y), wide(dy)
    inner = (y * dy).sum(_axes(axis, y.ndim), keepdims=True)
    return np.longdouble(scale) * y * (dy - inner)


@np.errstate(all="ignore")
def log_softmax_vjp(y, dy, axis=None, scale=1.0):
    y = wide(y)
    dy = np.broadcast_to(wide(dy), y.shape)
    total = dy.sum(_axes(axis, y.ndim), keepdims=True)
    dx = np.longdouble(scale) * (dy - np.exp(y) * total)
    return np.where(np.isneginf(y), 0, dx)


def heads_first(x, layout):
    """`x` as (..., heads, seqlen, dim)."""
    if x.ndim == 2:
        return x[None]
    return x if layout == "bhsd" else x.swapaxes(-3, -2)


def _matmul(a, b, real):
    """The product in `real`; float64 goes through BLAS."""
    return np.matmul(a.astype(real), b.astype(real))


def visible(
    batch, heads, seqlen_q, seqlen_k, mask, causal, query_offset, window, query_lengths,
    key_lengths,
):  # fmt: skip
    """(what each query may see, where query 0 stands) by the masks, not by values."""
    qlen = np.broadcast_to(seqlen_q if query_lengths is None else query_lengths, batch)
    klen = np.broadcast_to(seqlen_k if key_lengths is None else key_lengths, batch)
    qlen = np.clip(qlen.astype(np.int64), 0, seqlen_q)[..., None, None, None]
    klen = np.clip(klen.astype(np.int64), 0, seqlen_k)[..., None, None, None]
    if query_offset is None:
        offset = klen - qlen
    else:
        offset = np.broadcast_to(query_offset, batch).astype(np.int64)
        offset = offset[..., None, None, None]
    i = np.arange(seqlen_q)[:, None]
    j = np.arange(seqlen_k)[None, :]
    distance = j - (i + offset)
    seen = (i < qlen) & (j < klen)
    if causal:
        seen = seen & (distance <= 0)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        if left is not None:
            seen = seen & (distance >= -left)
        if right is not None:
            seen = seen & (distance <= right)
    seen = np.broadcast_to(seen, (*batch, heads, seqlen_q, seqlen_k))
    if mask is not None:
        seen = seen & np.broadcast_to(mask, seen.shape)
    return seen, distance, (i < qlen)


@np.errstate(all="ignore")
def attention(
    q,
    k,
    v,
    *,
    bias=None,
    mask=None,
    scale=None,
    causal=False,
    query_offset=None,
    window=None,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
    query_lengths=None,
    key_lengths=None,
    layout="bhsd",
    real=np.longdouble,
):
    """(out, lse, size): `size` is the largest sum of |terms| of a score that counts.

    Scores carry a rounding error in proportion to `size`, in whatever way they are
    computed.
    """
    matrices = all(x.ndim == 2 for x in (q, k, v))
    q, k, v = (heads_first(wide(x).astype(real), layout) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    heads, seqlen_q, head_dim = q.shape[-3:]
    seqlen_k = k.shape[-2]
    group = heads // max(k.shape[-3], 1)
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scale = real(head_dim) ** real(-0.5) if scale is None else real(scale)

    seen, distance, alive = visible(
        batch, heads, seqlen_q, seqlen_k, mask, causal, query_offset, window,
        query_lengths, key_lengths,
    )  # fmt: skip
    s = scale * _matmul(q, k.swapaxes(-1, -2), real)
    size = np.abs(scale) * _matmul(np.abs(q), np.abs(k).swapaxes(-1, -2), real)
    if softcap > 0:
        tanh = np.tanh(s / real(softcap))
        s = real(softcap) * tanh
        size = size * (1 - tanh**2) + real(softcap)
    if bias is not None:
        s = s + wide(bias).astype(real)
        size = size + np.abs(wide(bias).astype(real))
    if alibi_slopes is not None:
        slopes = np.broadcast_to(wide(alibi_slopes).astype(real), (*batch, heads))
        alibi = -slopes[..., None, None] * np.abs(distance).astype(real)
        s, size = s + alibi, size + np.abs(alibi)
    s = np.where(seen, s, -np.inf)
    counts = s != -np.inf

    m = s.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = np.broadcast_to(wide(sinks).astype(real), (heads,))[:, None, None]
        sink = np.broadcast_to(sink, m.shape)
        m = np.maximum(m, sink)
    m = np.where(m == -np.inf, 0, m)
    p = np.where(counts, np.exp(s - m), 0)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - m)
    lse = (np.log(total) + m)[..., 0]
    p = np.where(counts, p / np.where(total == 0, 1, total), 0)

    # What is not finite in v reaches the rows that count its key, and no other.
    out = _matmul(p, np.where(np.isfinite(v), v, 0), real)
    hits = [
        np.matmul(counts.astype(np.float32), bad.astype(np.float32)) > 0
        for bad in (np.isnan(v), np.isposinf(v), np.isneginf(v))
    ]
    out = np.where(hits[1], np.inf, np.where(hits[2], -np.inf, out))
    out = np.where(hits[0] | (hits[1] & hits[2]), np.nan, out)
    out = np.where(np.isnan(total), np.nan, out)

    alive = np.broadcast_to(alive, (*batch, heads, seqlen_q, 1))
    out = np.where(alive & counts.any(-1, keepdims=True), out, 0)
    lse = np.where(alive[..., 0], lse, -np.inf)
    size = np.where(counts & np.isfinite(size), size, 0).max(initial=0)
    if matrices:
        return out[0], lse[0], float(size)
    if layout == "bshd":
        out = out.swapaxes(-3, -2)
    return out, lse, float(size)


@np.errstate(all="ignore")
def merge(outs, lses, axis=0):
    """(out, lse) of parts stacked on `axis`."""
    outs, lses = wide(outs), wide(lses)
    axis = axis % lses.ndim
    if lses.shape[axis] == 0:
        lse = lses.sum(axis) - np.inf
        return np.zeros(lse.shape + outs.shape[-1:], np.longdouble), lse
    m = lses.max(axis, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)
    weights = np.exp(lses - m)
    total = weights.sum(axis, keepdims=True)
    share = weights / np.where(total == 0, 1, total)
    used = np.where(np.isneginf(lses)[..., None], 0, outs)
    return (share[..., None] * used).sum(axis), (np.log(total) + m).squeeze(axis)


def _sum_to(x, shape):
    """Sums over the axes that broadcasting `shape` added or stretched."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    stretched = tuple(a for a, n in enumerate(shape) if n == 1 != x.shape[a])
    return x.sum(stretched, keepdims=True)


@np.errstate(all="ignore")
def attention_vjp(
    dout,
    q,
    k,
    v,
    *,
    bias=None,
    mask=None,
    scale=None,
    causal=False,
    query_offset=None,
    window=None,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
    query_lengths=None,
    key_lengths=None,
    layout="bhsd",
    dlse=None,
    real=np.longdouble,
):
    """({name: gradient}, {name: sum of the sizes of its terms}).

    Rounding errors of a gradient are in proportion to those sums.
    """
    own = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    q, k, v, dout = (heads_first(wide(x).astype(real), layout) for x in (q, k, v, dout))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads, kv_heads, head_dim = q.shape[-3], k.shape[-3], q.shape[-1]
    group = heads // max(kv_heads, 1)
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    scale = real(head_dim) ** real(-0.5) if scale is None else real(scale)
    seen, distance, alive = visible(
        batch, heads, q.shape[-2], k.shape[-2], mask, causal, query_offset, window,
        query_lengths, key_lengths,
    )  # fmt: skip
    alive = np.broadcast_to(alive, (*batch, heads, q.shape[-2], 1))

    s = scale * _matmul(q, k.swapaxes(-1, -2), real)
    slope = np.ones_like(s)
    if softcap > 0:
        slope = 1 / np.cosh(s / real(softcap)) ** 2
        s = real(softcap) * np.tanh(s / real(softcap))
    if bias is not None:
        s = s + wide(bias).astype(real)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(wide(alibi_slopes).astype(real), (*batch, heads))
        s = s - slopes[..., None, None] * np.abs(distance).astype(real)
    s = np.where(seen, s, -np.inf)
    seen = s != -np.inf
    sink = np.full((heads, 1, 1), -np.inf, real)
    if sinks is not None:
        sink = np.broadcast_to(wide(sinks).astype(real), (heads,))[:, None, None]
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)
    total = np.where(seen, np.exp(s - m), 0).sum(-1, keepdims=True) + np.exp(sink - m)
    total = np.where(total == 0, 1, total)
    p = np.where(seen, np.exp(s - m) / total, 0)
    p_sink = np.where(alive, np.exp(sink - m) / total, 0)

    # A row that sees no key takes nothing from dout.
    dout = np.where(seen.any(-1, keepdims=True), dout, 0)
    down = np.zeros(p_sink.shape, real)
    if dlse is not None:
        down = (wide(dlse).astype(real) if dlse.ndim > 1 else wide(dlse)[None])[
            ..., None
        ]
        down = np.where(alive, down, 0)

    # What is not finite in dout reaches the keys that its row sees, and no other.
    reached = np.matmul(
        seen.swapaxes(-1, -2).astype(np.float32),
        (~np.isfinite(dout)).astype(np.float32),
    )
    reached = reached > 0

    def gradients(dout, q, k, v, down, sign):
        """With sign = -1; with +1, and sizes in place of numbers, sums of sizes."""
        q, k, v = (np.where(np.isfinite(x), x, 0) for x in (q, k, v))
        dp = _matmul(dout, v.swapaxes(-1, -2), real)
        delta = (p * dp).sum(-1, keepdims=True) + sign * down
        ds = np.where(seen, p * (dp + sign * delta), 0)
        # The softcap's derivative, 1 - tanh^2, has an error in proportion to 1.
        dx = np.where(seen, ds * slope, 0) if sign < 0 else ds
        factor = scale if sign < 0 else np.abs(scale)
        return {
            "dq": factor * _matmul(dx, k, real),
            "dk": factor * _matmul(dx.swapaxes(-1, -2), q, real),
            "dv": np.where(
                reached,
                np.nan,
                _matmul(p.swapaxes(-1, -2), np.where(np.isfinite(dout), dout, 0), real),
            ),
            "dbias": ds,
            "dsinks": sign * (p_sink * delta)[..., 0],
        }

    def to_own(found):
        made = {}
        for name, shape in own.items():
            x = found[name]
            if name != "dq" and heads:
                x = x.reshape(*batch, kv_heads, group, *x.shape[-2:]).sum(-3)
            elif name != "dq":
                x = np.zeros((*batch, kv_heads, *x.shape[-2:]), real)
            x = x if layout == "bhsd" or len(shape) == 2 else x.swapaxes(-3, -2)
            made[name] = _sum_to(x, shape)
        if bias is not None:
            made["dbias"] = _sum_to(found["dbias"], bias.shape)
        if sinks is not None:
            terms = np.moveaxis(found["dsinks"], -2, -1)
            made["dsinks"] = _sum_to(terms, sinks.shape)
        return made

    exact = to_own(gradients(dout, q, k, v, down, -1))
    sizes = to_own(gradients(*(np.abs(x) for x in (dout, q, k, v, down)), 1))
    return exact, sizes
