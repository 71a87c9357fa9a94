"""The formulas in extended precision on the host, slow and plain.

They share no code with the package, its own reference included, which is tested against
them. `real` is the type that they are computed in; float64, ten times as fast, is
exact enough to judge results of narrower types (test_accuracy.py).
"""

from dataclasses import dataclass
from typing import Any

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
def softmax(x, axis=None, where=None, scale=1.0, real=np.longdouble):
    """exp(scale x) / sum exp(scale x) over the selected entries; 0 elsewhere."""
    z = wide(x, real) * real(scale)
    axes, selected = _axes(axis, z.ndim), _selected(z, where)
    if z.size == 0:
        return z
    z = np.where(selected, z, -np.inf)
    p = np.where(selected, np.exp(z - z.max(axes, keepdims=True)), 0)
    total = p.sum(axes, keepdims=True)
    return np.where(selected, p / np.where(total == 0, 1, total), 0)


@np.errstate(all="ignore")
def log_softmax(x, axis=None, where=None, scale=1.0, real=np.longdouble):
    """scale x - log sum exp(scale x) over the selected entries; -inf elsewhere."""
    z = wide(x, real) * real(scale)
    axes, selected = _axes(axis, z.ndim), _selected(z, where)
    if z.size == 0:
        return z
    z = np.where(selected, z, -np.inf)
    m = z.max(axes, keepdims=True)
    shifted = z - np.where(np.isfinite(m), m, 0)
    terms = np.exp(shifted)
    total = terms.sum(axes, keepdims=True)
    # Of a row with one large term the others make up the log.
    rest = np.where(terms == 1, 0, terms).sum(axes, keepdims=True)
    log = np.where(total < 1.5, np.log1p(rest), np.log(total))
    log = np.where(total < 0.5, np.log(total), log)
    return np.where(selected, shifted - log, -np.inf)


@np.errstate(all="ignore")
def logsumexp(a, axis=None, b=None, keepdims=False, where=None, real=np.longdouble):
    """(log |sum b exp(a)|, sign) over the selected entries."""
    z = wide(a, real)
    b = np.ones_like(z) if b is None else wide(b, real)
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
def softmax_vjp(y, dy, axis=None, scale=1.0, real=np.longdouble):
    y, dy = wide(y, real), wide(dy, real)
    inner = (y * dy).sum(_axes(axis, y.ndim), keepdims=True)
    return real(scale) * y * (dy - inner)


@np.errstate(all="ignore")
def log_softmax_vjp(y, dy, axis=None, scale=1.0, real=np.longdouble):
    y = wide(y, real)
    dy = np.broadcast_to(wide(dy, real), y.shape)
    total = dy.sum(_axes(axis, y.ndim), keepdims=True)
    dx = real(scale) * (dy - np.exp(y) * total)
    return np.where(np.isneginf(y), 0, dx)


def heads_first(x, layout):
    """`x` as (..., heads, seqlen, dim)."""
    if x.ndim == 2:
        return x[None]
    return x if layout == "bhsd" else x.swapaxes(-3, -2)


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


@dataclass
class Head:
    """One query head of one entry of the batch: matrices, and what its scores need.

    Head by head, the scores of a large problem stay in the cache.
    """

    q: Any
    k: Any
    v: Any
    scale: Any
    softcap: float
    bias: Any  # None, or what broadcasts to the scores
    alibi: Any  # None, or what is added to the scores
    sink: Any  # -inf where there is none
    seen: Any
    alive: Any  # rows that are not padding, as a column
    growth: float  # of the error of a score, by how its columns are summed up

    def scores(self):
        """(scores, -inf where masks hide; the softcap's slope, or None)."""
        s, slope = self.scale * (self.q @ self.k.T), None
        if self.softcap > 0:
            cap = type(self.scale)(self.softcap)
            slope = 1 / np.cosh(s / cap) ** 2
            s = cap * np.tanh(s / cap)
        for term in (self.bias, self.alibi):
            s = s if term is None else s + term
        return np.where(self.seen, s, -np.inf), slope

    def size(self, s, slope):
        """The largest sum of |terms| of a score that counts."""
        size = self.growth * np.abs(self.scale) * (np.abs(self.q) @ np.abs(self.k).T)
        if slope is not None:
            size = size * slope + self.softcap
        for term in (self.bias, self.alibi):
            size = size if term is None else size + np.abs(term)
        counts = (s != -np.inf) & np.isfinite(size)
        return float(size.max(initial=0, where=counts))

    def softmax(self, s):
        """(weights, of sinks, sum of exponentials, lse) of each row."""
        m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), self.sink)
        m = np.where(m == -np.inf, 0, m)
        e = np.where(s != -np.inf, np.exp(s - m), 0)
        of_sink = np.exp(self.sink - m)
        total = e.sum(-1, keepdims=True) + of_sink
        lse = np.where(self.alive, np.log(total) + m, -np.inf)
        some = np.where(total == 0, 1, total)
        return np.where(s != -np.inf, e / some, 0), of_sink / some, total, lse


def heads_of(
    q, k, v, real, *, bias=None, mask=None, scale=None, causal=False,
    query_offset=None, window=None, softcap=0.0, sinks=None, alibi_slopes=None,
    query_lengths=None, key_lengths=None, growth=1,
):  # fmt: skip
    """(place in the batch and head, Head), one by one, of heads-first arrays."""
    q, k, v = (wide(x, real) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    heads, seqlen_q, head_dim = q.shape[-3:]
    seqlen_k, group = k.shape[-2], heads // max(k.shape[-3], 1)
    scale = real(head_dim) ** real(-0.5) if scale is None else real(scale)
    seen, distance, alive = visible(
        batch, heads, seqlen_q, seqlen_k, mask, causal, query_offset, window,
        query_lengths, key_lengths,
    )  # fmt: skip
    distance = np.broadcast_to(distance, (*batch, 1, seqlen_q, seqlen_k))
    alive = np.broadcast_to(alive, (*batch, 1, seqlen_q, 1))
    bias = None if bias is None else np.broadcast_to(wide(bias, real), seen.shape)
    sinks = np.broadcast_to(-np.inf if sinks is None else wide(sinks, real), heads)
    slopes = alibi_slopes
    if slopes is not None:
        slopes = np.broadcast_to(wide(slopes, real), (*batch, heads))
    for at in np.ndindex(*batch, heads):
        *entry, head = at
        alibi = None
        if slopes is not None:
            alibi = -slopes[at] * np.abs(distance[(*entry, 0)])
        yield (
            at,
            Head(
                q=q[at],
                k=k[(*entry, head // group)],
                v=v[(*entry, head // group)],
                scale=scale,
                softcap=softcap,
                bias=None if bias is None else bias[at],
                alibi=alibi,
                sink=real(sinks[head]),
                seen=seen[at],
                alive=alive[(*entry, 0)],
                growth=growth,
            ),
        )


@np.errstate(all="ignore")
def attention(q, k, v, *, layout="bhsd", real=np.longdouble, **options):
    """(out, lse, size): `size` is the largest sum of |terms| of a score that counts.

    Scores carry a rounding error in proportion to `size`, in whatever way they are
    computed; `growth` times that where many columns make one sum (fuzz.growth_of_sums).
    """
    matrices = all(x.ndim == 2 for x in (q, k, v))
    q, k, v = (heads_first(x, layout) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    out = np.zeros((*batch, *q.shape[-3:-1], v.shape[-1]), real)
    lse = np.zeros(out.shape[:-1], real)
    largest = 0.0
    for at, head in heads_of(q, k, v, real, **options):
        s, slope = head.scores()
        counts = s != -np.inf
        p, _, total, of_row = head.softmax(s)
        values = np.where(np.isnan(total), np.nan, _times_values(p, counts, head.v))
        out[at] = np.where(head.alive & counts.any(-1, keepdims=True), values, 0)
        lse[at] = of_row[..., 0]
        largest = max(largest, head.size(s, slope))
    if matrices:
        return out[0], lse[0], largest
    if layout == "bshd":
        out = out.swapaxes(-3, -2)
    return out, lse, largest


def _times_values(p, counts, v):
    """The rows of p v; what is not finite in v reaches those that count its key."""
    finite = np.isfinite(v)
    if finite.all():
        return p @ v
    out = p @ np.where(finite, v, 0)
    nan, high, low = (
        counts.astype(np.float32) @ bad.astype(np.float32) > 0
        for bad in (np.isnan(v), np.isposinf(v), np.isneginf(v))
    )
    out = np.where(high, np.inf, np.where(low, -np.inf, out))
    return np.where(nan | (high & low), np.nan, out)


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
    dout, q, k, v, *, dlse=None, layout="bhsd", real=np.longdouble, **options
):
    """({name: gradient}, {name: sum of the sizes of its terms}, lse, size).

    Rounding errors of a gradient are in proportion to those sums; lse and size are
    those of attention().
    """
    own = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    matrices = all(x.ndim == 2 for x in (q, k, v))
    q, k, v, dout = (heads_first(x, layout) for x in (q, k, v, dout))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads, kv_heads = q.shape[-3], k.shape[-3]
    rows = (*batch, heads, q.shape[-2])
    dout = np.broadcast_to(wide(dout, real), (*rows, v.shape[-1]))
    down = np.zeros(()) if dlse is None else wide(dlse, real)
    down = np.broadcast_to(down, rows)[..., None]
    shapes = {
        "dq": (*batch, *q.shape[-3:]),
        "dk": (*batch, kv_heads, *k.shape[-2:]),
        "dv": (*batch, kv_heads, *v.shape[-2:]),
        "dsinks": rows,
    }
    if options.get("bias") is not None:
        shapes["dbias"] = (*rows, k.shape[-2])
    exact, sizes = ({n: np.zeros(s, real) for n, s in shapes.items()} for _ in "es")
    lse, largest = np.zeros(rows, real), 0.0
    for at, head in heads_of(q, k, v, real, **options):
        of_keys = (*at[:-1], at[-1] // (heads // kv_heads))
        s, slope = head.scores()
        p, p_sink, _, of_row = head.softmax(s)
        lse[at] = of_row[..., 0]
        largest = max(largest, head.size(s, slope))
        weights = p, np.where(head.alive, p_sink, 0), s != -np.inf, slope
        found = _gradients(head, *weights, dout[at], down[at])
        for made, of_head in zip((exact, sizes), found, strict=True):
            for name in shapes:
                place = of_keys if name in ("dk", "dv") else at
                made[name][place] += of_head[name]

    def to_own(made):
        found = {}
        for name, shape in own.items():
            x = made[name]
            x = x if layout == "bhsd" or len(shape) == 2 else x.swapaxes(-3, -2)
            found[name] = _sum_to(x, shape)
        for name in ("bias", "sinks"):
            if options.get(name) is not None:
                x = made[f"d{name}"]
                x = x if name == "bias" else np.moveaxis(x, -2, -1)
                found[f"d{name}"] = _sum_to(x, options[name].shape)
        return found

    if matrices:
        lse = lse[0]
    return to_own(exact), to_own(sizes), lse, largest


def _gradients(head, p, p_sink, seen, slope, dout, down):
    """Gradients of a head, and the sums of the sizes of their terms."""
    # A row that sees no key takes nothing from dout.
    dout = np.where(seen.any(-1, keepdims=True), dout, 0)
    down = np.where(head.alive, down, 0)
    # What is not finite in dout reaches the keys that its row sees, and no other.
    finite = np.isfinite(dout)
    reached = False
    if not finite.all():
        reached = seen.T.astype(np.float32) @ (~finite).astype(np.float32) > 0
    q, k, v = (np.where(np.isfinite(x), x, 0) for x in (head.q, head.k, head.v))

    def gradients(dout, q, k, v, down, scale, sign):
        """With sign = -1; with +1, and sizes in place of numbers, sums of sizes."""
        dp = dout @ v.T
        delta = (p * dp).sum(-1, keepdims=True) + sign * down
        ds = np.where(seen, p * (dp + sign * delta), 0)
        # The softcap's derivative, 1 - tanh^2, has an error in proportion to 1.
        dx = ds
        if slope is not None and sign < 0:
            dx = np.where(seen, ds * slope, 0)
        dv = p.T @ np.where(finite, dout, 0)
        return {
            "dq": scale * (dx @ k),
            "dk": scale * (dx.T @ q),
            "dv": np.where(reached, np.nan, dv),
            "dbias": ds,
            "dsinks": sign * (p_sink * delta)[..., 0],
        }

    arrays = (dout, q, k, v, down, head.scale)
    return gradients(*arrays, -1), gradients(*map(np.abs, arrays), 1)
