"""One call of everything, in shapes that a number decides."""

import numpy as np
from accuracy import dtype_of
from placing import place

import cupyflash


def calls(cupy, seed):
    """{name: a function without arguments}; shapes and values follow `seed`.

    What is compiled does not: one kernel of a kind serves all seeds.
    """
    rng = np.random.default_rng(seed)

    def normal(shape, dtype):
        return place(cupy, rng.normal(size=shape).astype(dtype_of(dtype)))

    def attended(dtype, seqlen_q, seqlen_k, **options):
        q, k, v = (normal((2, 4, n, 64), dtype) for n in (seqlen_q, seqlen_k, seqlen_k))
        return lambda: cupyflash.attention(q, k, v, return_lse=True, **options)

    n = 100 + 8 * (seed % 16)
    x = normal((30 + seed % 7, 1000), "float32")
    short, wide = normal((200 + seed, 37), "float32"), normal((9, 64, 40), "float32")
    long = normal((2, 400_000), "float32")
    q, k, v, dout = (normal((1, 2, m, 64), "bfloat16") for m in (n, n, n, n))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    f32 = [a.astype(np.float32) for a in (q, k, v, dout)]
    out32, lse32 = cupyflash.attention(*f32[:3], return_lse=True)
    lengths = cupy.asarray([n, n - 30])
    outs, lses = cupy.stack([out32, out32 + 1]), cupy.stack([lse32, lse32])
    return {
        "softmax": lambda: cupyflash.softmax(x, -1),
        "softmax of short rows": lambda: cupyflash.softmax(short, -1),
        "softmax of columns": lambda: cupyflash.softmax(wide, 1),
        "softmax of long rows": lambda: cupyflash.softmax(long, -1),
        "log_softmax": lambda: cupyflash.log_softmax(x, -1),
        "logsumexp": lambda: cupyflash.logsumexp(x, -1),
        "softmax_vjp": lambda: cupyflash.softmax_vjp(x, x, -1),
        "attention bfloat16": attended("bfloat16", n, n + 40),
        "attention of one query": attended("float16", 1, 2000 + n),
        "attention float32": attended("float32", n, n),
        "attention float64": attended("float64", n, n),
        "attention online": attended("float32", n, n, method="online"),
        "attention with lengths": attended(
            "bfloat16", n, n, causal=True, key_lengths=lengths
        ),
        "attention_vjp bfloat16": lambda: cupyflash.attention_vjp(
            dout, q, k, v, out, lse, deterministic=True
        )[:3],
        "attention_vjp float32": lambda: cupyflash.attention_vjp(
            f32[3], *f32[:3], out32, lse32
        )[:3],
        "merge": lambda: cupyflash.merge_attention_states(outs, lses),
    }


# Those that call cuBLAS are not promised in a graph, and are not here.
NAMES = (
    "softmax", "softmax of short rows", "softmax of columns", "softmax of long rows",
    "log_softmax", "logsumexp", "softmax_vjp", "attention bfloat16",
    "attention of one query", "attention float32", "attention float64",
    "attention online", "attention with lengths", "attention_vjp bfloat16",
    "attention_vjp float32", "merge",
)  # fmt: skip


def arrays(result):
    """The arrays of a result."""
    return list(result) if isinstance(result, tuple) else [result]


def bits(x):
    """The bytes of an array, as numbers that can be compared."""
    kind = {2: "u2", 4: "u4", 8: "u8"}[x.dtype.itemsize]
    return x.ravel(order="K").view(kind)


def clear(x):
    """Zero a contiguous array, in the order of the current stream."""
    x.data.memset_async(0, x.nbytes)


def same(result, expected):
    """Whether two results hold the same bytes."""
    return all(
        a.shape == b.shape and bool((bits(a) == bits(b)).all())
        for a, b in zip(arrays(result), arrays(expected), strict=True)
    )
