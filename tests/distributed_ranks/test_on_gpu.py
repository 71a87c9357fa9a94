"""The ring on NumPy and CuPy arrays, with ranks that are threads on one card."""

import numpy as np
import pytest
import thread_ranks
from accuracy import assert_as_accurate, dtype_of, to_host

import cupyflash
from cupyflash import distributed

CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
}
SHAPES = {  # heads, heads of keys, head_dim
    "bfloat16": (4, 2, 128),
    "float32": (2, 2, 64),
}


def own_stream(xp):
    if xp is np:
        import contextlib

        return contextlib.nullcontext()
    return xp.cuda.Stream(non_blocking=True)


def over_ranks(comm, xp, arrays, options):
    """(out, lse, dq, dk, dv), put together; twice, to compare bits."""
    causal = options.get("causal", False)
    with own_stream(xp):
        parts = [distributed.shard(x, comm, causal=causal) for x in arrays]
        found = []
        for _ in range(2):
            q, k, v, dout = parts
            out, lse = distributed.attention(q, k, v, comm, return_lse=True, **options)
            grads = distributed.attention_vjp(
                dout, q, k, v, out, lse, comm, deterministic=True, **options
            )
            whole = [
                distributed.unshard(x, comm, axis, causal=causal)
                for x, axis in ((out, -2), (lse, -1), *((g, -2) for g in grads[:3]))
            ]
            found.append([to_host(x) for x in whole])
        for one, other in zip(*found, strict=True):
            assert one.tobytes() == other.tobytes()
        return found[0]


@pytest.mark.parametrize("dtype", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_on_one_card(xp, case, dtype):
    size, seqlen = {"full": 3, "causal": 4, "window": 2}[case], 500
    heads, kv_heads, head_dim = SHAPES[dtype]
    rng = np.random.default_rng(0)
    host = [
        rng.normal(size=(1, n, seqlen, head_dim)) for n in (heads, kv_heads, kv_heads,
                                                            heads)
    ]  # fmt: skip
    arrays = [xp.asarray(x.astype(dtype_of(dtype))) for x in host]
    options = CASES[case]
    if xp is not np:
        xp.cuda.Device().synchronize()
    found = thread_ranks.run(size, over_ranks, xp, arrays, options)
    q, k, v, dout = arrays
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    plain = [out, lse, *cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)[:3]]
    wide = [to_host(x).astype(np.float64) for x in arrays]
    q, k, v, dout = wide
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    exact = [out, lse, *cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)[:3]]
    for got in found:
        for one, standard, truth in zip(got, plain, exact, strict=True):
            assert_as_accurate(one, to_host(standard), truth)
