"""What the gradients of attention are measured against; see _reference/forward.py.

`attention_vjp` takes the arguments of the public function but makes out and lse itself,
all scores in memory, in a wider type; `plain_attention_vjp` is the same unfused in the
dtype of the input.
"""

import numpy as np

from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._core import arrays
from cupyflash._reference import forward as reference


def attention_vjp(dout, q, k, v, **options):
    """Float64 gradients; those of bias and sinks wherever these are given."""
    for name, value in options.items():
        if isinstance(value, (list, np.ndarray)) or arrays.is_cupy(value):
            options[name] = reference.to_host(value)
    exact = reference._wider(q)
    dout, q, k, v = (reference.to_host(x).astype(exact) for x in (dout, q, k, v))
    grads = _gradients(np, dout, q, k, v, exact, exact, **options)
    return AttentionGrads(*(None if x is None else reference._narrow(x) for x in grads))


def plain_attention_vjp(dout, q, k, v, **options):
    """Gradients by matmul and softmax, each step rounded to the dtype of `q`."""
    work = reference._work_dtype(q.dtype)
    xp = reference._namespace(q)
    return _gradients(xp, dout, q, k, v, q.dtype, work, **options)


def _gradients(xp, dout, q, k, v, dtype, work, *, layout="bhsd", dlse=None, **options):
    """Gradients with P and dS in memory."""

    def rounded(x):
        return x.astype(dtype, copy=False).astype(work, copy=False)

    shapes = (q.shape, k.shape, v.shape)
    w = reference._weights(xp, q, k, v, dtype, work, layout=layout, **options)
    dout = reference._heads_first(dout, layout).astype(work, copy=False)
    rows_without = w.blind if w.padded is None else w.blind | w.padded
    dout = xp.where(rows_without[..., None], 0, dout)
    with np.errstate(all="ignore"):
        dp = rounded(xp.matmul(dout, w.v.swapaxes(-1, -2)))
        inner = xp.where(w.p == 0, 0, w.p * dp)
        delta = rounded(inner.sum(axis=-1))
        if dlse is not None:
            dlse = dlse if dlse.ndim > 1 else dlse[None]
            if w.padded is not None:
                dlse = xp.where(w.padded, 0, dlse)
            delta = delta - dlse.astype(work)
        ds = xp.where(w.seen, rounded(w.p * rounded(dp - delta[..., None])), 0)
        p = xp.where(w.seen, w.p, 0)
        dbias = ds
        if w.slope is not None:
            ds = xp.where(w.seen, rounded(ds * w.slope), 0)
        scale = work(w.scale)

        def product(a, b):
            """A @ b, where pairs that are not seen add nothing."""
            b = xp.where(xp.isfinite(b), b, 0).astype(b.dtype, copy=False)
            return xp.matmul(a, b)

        dq = scale * product(ds, w.k)
        dk = scale * product(ds.swapaxes(-1, -2), w.q)
        dv = product(p.swapaxes(-1, -2), dout)
    heads = w.q.shape[-3]
    made = []
    for x, shape in zip((dq, dk, dv), shapes, strict=True):
        matrix = len(shape) == 2
        own_heads = 1 if matrix else shape[-3 if layout == "bhsd" else -2]
        if heads:
            group = heads // own_heads
            x = x.reshape(*x.shape[:-3], own_heads, group, *x.shape[-2:]).sum(axis=-3)
        x = x if layout == "bhsd" or matrix else x.swapaxes(-3, -2)
        made.append(arrays.sum_to(x, shape).astype(dtype, copy=False))
    bias, sinks = options.get("bias"), options.get("sinks")
    if bias is not None:
        dbias = arrays.sum_to(dbias, bias.shape).astype(_own(bias, dtype), copy=False)
    if sinks is not None:
        terms = w.p_sink * delta
        if w.padded is not None:
            terms = xp.where(w.padded, 0, terms)
        total = -terms.sum(axis=(*range(terms.ndim - 2), terms.ndim - 1))
        sinks = arrays.sum_to(total, sinks.shape).astype(_own(sinks, dtype), copy=False)
    return AttentionGrads(*made, dbias if bias is not None else None, sinks)


def _own(x, dtype):
    """The dtype of a gradient of `x`: its own, or the wider one of a reference."""
    return dtype if dtype == np.longdouble else x.dtype
