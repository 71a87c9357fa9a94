"""What every row of the gradients of attention must keep, at a head dimension."""

import numpy as np
from accuracy import to_host
from placing import place
from test_attention_vjp import agree, gradients, inputs

import cupyflash

# Batch axes of q, and of k and v.
BATCHES = (
    ((), ()),
    ((3,), (1,)),
    ((1,), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3), (1, 3)),
    ((2, 3), (2, 1)),
    ((1, 3), (2, 1)),
    ((2, 1, 2, 2), (2, 3, 1, 2)),
    ((3,), ()),
)


def poison(cupy, shape):
    """Leaves NaN in the memory that the next arrays are made of."""
    size = 4 * int(np.prod(shape))
    for n in (size, size, size, 4 * size):
        cupy.full(n, np.nan, np.float32)


def copy_always(monkeypatch):
    """Let calls of any length have copies for TMA."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu
    from cupyflash._attention.gpu import copies
    from cupyflash._attention.gpu import forward as attention_gpu
    from cupyflash._cuda import plan_cache

    monkeypatch.setattr(copies, "_COPIES_FROM", 1)
    for module in (attention_gpu, attention_vjp_gpu):
        monkeypatch.setattr(module, "_plans", plan_cache.PlanCache())


def check(
    row, cupy, rng, dtype, dims=(64, 64), heads=(2, 1), seqlens=(65, 70), **options
):
    """Compare with the oracle; the row of the table must be `row`."""
    batch = options.pop("batch", (2,))
    q = (*batch, heads[0], seqlens[0], dims[0])
    k = (*options.pop("batch_k", batch), heads[1], seqlens[1], dims[0])
    arrays = inputs(rng, dtype, q=q, k=k, head_dim_v=dims[1])
    if options.get("layout") == "bshd":
        arrays = tuple(np.ascontiguousarray(x.swapaxes(-3, -2)) for x in arrays)
    placed = [place(cupy, x) for x in arrays]
    given = {
        n: place(cupy, x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
        if n not in ("deterministic", "forms")
    }
    out, lse = cupyflash.attention(*placed[:3], return_lse=True, **given)
    told = cupyflash.explain("attention_vjp", placed[3], *placed[:3], out, lse, **given)
    assert told.kernel == row, told.refused
    poison(cupy, q)
    return agree(cupy, *arrays, **options)


def strides(cupy, rng, dtype, form, head_dim):
    """Those that a tensor map has, and those that are left to the next row."""
    arrays = inputs(rng, dtype, q=(2, 4, 150, head_dim), k=(2, 2, 140, head_dim))
    dlse = rng.normal(size=(2, 4, 150)).astype(np.float32)
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse", "dlse"), form)
    agree(cupy, *arrays, forms=forms, dlse=dlse, causal=True)


def what_is_not_seen_never_leaks(cupy, rng, dtype, bad, head_dim, first=60, **more):
    """Queries that see no key, keys that no query sees: numbers as if they were 0."""
    last = 200 - first
    shapes = {"q": (2, 2, 200, head_dim), "k": (2, 2, last + 10, head_dim)}
    q, k, v, dout = inputs(rng, dtype, **shapes)
    options = {"causal": True, "query_offset": -first, **more}
    clean = gradients(cupy, q, k, v, dout, **options)
    k[:, :, last:], v[:, :, last:] = bad, bad
    q[:, :, :first], dout[:, :, :first] = bad, bad
    dlse = np.zeros((2, 2, 200), np.float32)
    grads = agree(cupy, q, k, v, dout, dlse=dlse, **options)
    for a, b in zip(clean[:3], grads[:3], strict=True):
        a, b = to_host(a).astype(np.float64), to_host(b).astype(np.float64)
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(a).max())
    assert not to_host(grads.dq)[:, :, :first].any()
    assert not to_host(grads.dk)[:, :, last:].any()


def padding_may_hold_anything(cupy, rng, bad, head_dim, dtype="float16"):
    """Behind lengths on the device."""
    shapes = {"q": (2, 2, 100, head_dim), "k": (2, 2, 120, head_dim)}
    q, k, v, dout = inputs(rng, dtype, **shapes)
    lengths = {"query_lengths": np.array([70, 100]), "key_lengths": np.array([120, 33])}
    q[0, :, 70:], dout[0, :, 70:] = bad, bad
    k[1, :, 33:], v[1, :, 33:] = bad, bad
    grads = agree(cupy, q, k, v, dout, **lengths)
    assert all(np.isfinite(to_host(x).astype(np.float32)).all() for x in grads[:3])
    assert not to_host(grads.dq)[0, :, 70:].any()
    assert not to_host(grads.dk)[1, :, 33:].any()


def nan_stays_where_it_is_seen(cupy, rng, dtype, head_dim):
    """In the gradients of its own head, and of keys that its query sees."""
    shape = (1, 2, 300, head_dim)
    q, k, v, dout = inputs(rng, dtype, q=shape, k=shape)
    q[0, 0, 250] = np.nan
    grads = agree(cupy, q, k, v, dout, causal=True)
    dq, dk = to_host(grads.dq), to_host(grads.dk)
    assert np.isnan(dq[0, 0, 250].astype(np.float32)).all()
    assert np.isfinite(dq[0, 1].astype(np.float32)).all()
    assert np.isfinite(dk[0, 0, 251:].astype(np.float32)).all()


def gradients_of_every_size(cupy, rng, size, head_dim):
    """float16 has few exponents; what flows in may be scaled by a power of two."""
    shapes = {"q": (1, 2, 300, head_dim), "k": (1, 2, 250, head_dim)}
    q, k, v, dout = inputs(rng, "float16", **shapes)
    dout = (dout.astype(np.float32) * size).astype(np.float16)
    v = (v.astype(np.float32) / 8).astype(np.float16)
    q = (q.astype(np.float32) / 8).astype(np.float16)
    agree(cupy, q, k, v, dout)


def from_graph(cupy, call, shape):
    """The results of a call of which a graph is launched several times."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        captured = call()
        graph = stream.end_capture()
        for _ in range(3):
            poison(cupy, shape)
            graph.launch(stream)
        stream.synchronize()
    return captured


def a_call_can_be_captured(cupy, rng, head_dim, dtype="bfloat16"):
    """And its graph launched again and again, whatever memory held before."""
    shapes = {"q": (2, 4, 300, head_dim), "k": (2, 2, 300, head_dim)}
    q, k, v, dout = (place(cupy, x) for x in inputs(rng, dtype, **shapes))
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)

    def call():
        return cupyflash.attention_vjp(dout, q, k, v, out, lse, causal=True)

    expected = [to_host(x) for x in call()[:3]]
    for a, b in zip(expected, from_graph(cupy, call, q.shape)[:3], strict=True):
        a, b = a.astype(np.float32), to_host(b).astype(np.float32)
        np.testing.assert_allclose(a, b, atol=0.01 * np.abs(a).max())
