"""Calls of everything, in shapes that a number decides."""

import zlib

import numpy as np
from accuracy import dtype_of
from placing import place

import cupyflash


class Inputs:
    """Arrays whose sizes and values follow `seed`.

    What is compiled does not: one kernel of a kind serves all seeds.
    """

    def __init__(self, cupy, seed, name):
        self.cupy, self.seed = cupy, seed
        self.n = 100 + 8 * (seed % 16)  # queries, and keys where nothing else is said
        self._rng = np.random.default_rng([seed, zlib.crc32(name.encode())])

    def normal(self, shape, dtype="float32"):
        """Random numbers on the device."""
        values = self._rng.normal(size=shape)
        return place(self.cupy, values.astype(dtype_of(dtype)))

    def qkv(self, dtype, seqlen_q, seqlen_k, dims=(64, 64, 64)):
        """q, k and v of grouped heads."""
        lengths, heads = (seqlen_q, seqlen_k, seqlen_k), (4, 2, 2)
        shapes = [(2, h, n, d) for h, n, d in zip(heads, lengths, dims, strict=True)]
        return [self.normal(shape, dtype) for shape in shapes]


# --- softmax -------------------------------------------------------------------------


def _softmax(function, shape, dtype="float32", axis=-1, **options):
    """What makes a call of the softmax family; a shape of the seed, or of all."""

    def build(inputs):
        size = shape(inputs.seed) if callable(shape) else shape
        x = inputs.normal(size, dtype)
        args = (x, x) if function.endswith("_vjp") else (x,)
        return lambda: getattr(cupyflash, function)(*args, axis=axis, **options)

    return build


def _weighted(inputs):
    x, b = (inputs.normal((30, 1000)) for _ in "xb")
    return lambda: cupyflash.logsumexp(x, -1, b=b, return_sign=True)


# --- attention -----------------------------------------------------------------------


def _attention(dtype, seqlens=None, dims=(64, 64, 64), **options):
    """What makes a call of attention; lengths of the seed unless said."""

    def build(inputs):
        q, k, v = inputs.qkv(dtype, *(seqlens or (lambda n: (n, n)))(inputs.n), dims)
        return lambda: cupyflash.attention(q, k, v, return_lse=True, **options)

    return build


# (heads, queries, keys, columns) of entries, and their dtype. There are as many heads
# as any card has multiprocessors: kernels of short entries take no fewer.
_ENTRIES = {
    "short": (lambda seed: (2, 10 + seed % 7, 10 + seed % 7, 32), "bfloat16"),
    "tiny": (lambda seed: (2, 3 + seed % 2, 4, 8), "float32"),
    "one query": (lambda seed: (4, 1, 90 + seed % 16, 64), "float16"),
    "several queries": (lambda seed: (1, 4 + seed % 5, 100 + seed % 12, 64), "float64"),
    "few rows": (lambda seed: (1, 8 + seed % 9, 100 + seed % 12, 64), "bfloat16"),
    "few keys": (lambda seed: (1, 40 + seed % 9, 12 + seed % 5, 32), "float64"),
}


def _entries(kind):
    """q, k and v of many entries."""
    size, dtype = _ENTRIES[kind]

    def build(inputs):
        heads, seqlen_q, seqlen_k, dim = size(inputs.seed)
        return [
            inputs.normal((200, heads, n, dim), dtype)
            for n in (seqlen_q, seqlen_k, seqlen_k)
        ]

    return build


def _entries_attention(kind):
    def build(inputs):
        q, k, v = _entries(kind)(inputs)
        return lambda: cupyflash.attention(q, k, v, return_lse=True)

    return build


def _entries_vjp(kind):
    def build(inputs):
        q, k, v = _entries(kind)(inputs)
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        dout = inputs.normal(out.shape, out.dtype.name)
        return lambda: cupyflash.attention_vjp(dout, q, k, v, out, lse)[:3]

    return build


def _with_lengths(inputs):
    q, k, v = inputs.qkv("bfloat16", inputs.n, inputs.n)
    lengths = inputs.cupy.asarray([inputs.n, inputs.n - 30])
    return lambda: cupyflash.attention(
        q, k, v, return_lse=True, causal=True, key_lengths=lengths
    )


def _attention_vjp(dtype, dims=(64, 64, 64), has_bias=False, precision="float32"):
    """What makes a call of attention_vjp."""

    def build(inputs):
        n = inputs.n
        q, k, v = inputs.qkv(dtype, n, n, dims)
        options = {"precision": precision}
        if has_bias:
            options["bias"] = inputs.normal((n, n), dtype)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        dout = inputs.normal(out.shape, dtype)

        def call():
            grads = cupyflash.attention_vjp(
                dout, q, k, v, out, lse, need_dbias=has_bias, deterministic=True,
                **options,
            )  # fmt: skip
            return tuple(x for x in grads if x is not None)

        return call

    return build


def _merge(inputs):
    outs, lses = inputs.normal((2, 1, 2, inputs.n, 64)), inputs.normal((2, 1, 2, 300))
    lses = lses[..., : inputs.n]
    return lambda: cupyflash.merge_attention_states(outs, lses)


# Those that call cuBLAS are not promised in a graph, and are not here.
_BUILDERS = {
    "softmax": _softmax("softmax", lambda seed: (30 + seed % 7, 1000)),
    "softmax of short rows": _softmax("softmax", lambda seed: (200 + seed, 37)),
    "softmax of short whole rows": _softmax("softmax", lambda seed: (301 + seed, 32)),
    "softmax of columns": _softmax("softmax", (9, 64, 40), axis=1),
    "softmax of long columns": _softmax("softmax", (3, 40_001, 32), axis=1),
    "softmax in two passes": _softmax("softmax", (10, 17_001, 32), "float64", axis=1),
    "softmax of long rows": _softmax("softmax", (2, 400_000)),
    "softmax of longer rows": _softmax("softmax", (2, 700_001)),
    "softmax of longest rows": _softmax("softmax", (2, 1_100_001)),
    "log_softmax": _softmax("log_softmax", lambda seed: (30 + seed % 7, 1000)),
    "logsumexp": _softmax("logsumexp", lambda seed: (30 + seed % 7, 1000)),
    "logsumexp of columns": _softmax("logsumexp", (6, 64, 40), axis=1),
    "logsumexp of one element": _softmax(
        "logsumexp", lambda seed: (1, 2000 + seed), axis=0
    ),
    "logsumexp of many columns": _softmax(
        "logsumexp", (8, 1000, 512), "float64", axis=1
    ),
    "logsumexp with weights": _weighted,
    "softmax_vjp": _softmax("softmax_vjp", lambda seed: (30 + seed % 7, 1000)),
    "logsumexp of short rows": _softmax("logsumexp", lambda seed: (2000 + seed, 10)),
    "softmax_vjp of short rows": _softmax(
        "softmax_vjp", lambda seed: (2000 + seed, 10)
    ),
    "softmax_vjp of columns": _softmax("softmax_vjp", (6, 64, 40), axis=1),
    "softmax_vjp of long rows": _softmax("softmax_vjp", (2, 300_001)),
    "log_softmax_vjp of longer rows": _softmax(
        "log_softmax_vjp", (2, 700_001), "float64"
    ),
    "attention bfloat16": _attention("bfloat16", lambda n: (n, n + 40)),
    "attention of one query": _attention("float16", lambda n: (1, 2000 + n)),
    "attention float32": _attention("float32"),
    "attention float32, few queries": _attention("float32", lambda n: (20, 500 + n)),
    "attention tf32": _attention("float32", precision="tf32"),
    "attention float64": _attention("float64"),
    "attention float32, many keys": _attention("float32", lambda n: (n, 2000 + n)),
    "attention float64, many keys": _attention("float64", lambda n: (n, 2000 + n)),
    "attention of wide heads": _attention("bfloat16", dims=(576, 576, 512)),
    "attention of wide heads, many keys": _attention(
        "bfloat16", lambda n: (n, 2000 + n), (320, 320, 320)
    ),
    "attention of short entries": _entries_attention("short"),
    "attention of tiny entries": _entries_attention("tiny"),
    "attention of one query an entry": _entries_attention("one query"),
    "attention of few keys": _entries_attention("few keys"),
    "attention online": _attention("float32", method="online"),
    "attention with lengths": _with_lengths,
    "attention_vjp bfloat16": _attention_vjp("bfloat16"),
    "attention_vjp float32": _attention_vjp("float32"),
    "attention_vjp float64": _attention_vjp("float64"),
    "attention_vjp of wide heads": _attention_vjp("bfloat16", (200, 200, 136)),
    "attention_vjp of wide float64 heads": _attention_vjp("float64", (200, 200, 136)),
    "attention_vjp of odd heads": _attention_vjp("bfloat16", (65, 65, 65)),
    "attention_vjp of short entries": _entries_vjp("short"),
    "attention_vjp of tiny entries": _entries_vjp("tiny"),
    "attention_vjp of one query an entry": _entries_vjp("one query"),
    "attention_vjp of several queries": _entries_vjp("several queries"),
    "attention_vjp of few rows": _entries_vjp("few rows"),
    "attention_vjp of few keys": _entries_vjp("few keys"),
    "attention_vjp with a bias": _attention_vjp("bfloat16", has_bias=True),
    "merge": _merge,
}
NAMES = tuple(_BUILDERS)


def call(cupy, seed, name):
    """A function without arguments."""
    return _BUILDERS[name](Inputs(cupy, seed, name))


def calls(cupy, seed):
    """{name: a function without arguments}."""
    return {name: call(cupy, seed, name) for name in NAMES}


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
