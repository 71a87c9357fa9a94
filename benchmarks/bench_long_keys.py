"""How the error of attention grows with the number of keys, where all values are alike.

    python benchmarks/bench_long_keys.py --json benchmarks/results/long_keys_h200.json

All scores of a row are equal and the values lie between 1 and 2, so that what each
step of a sum rounds goes into numbers of its full size. The same for dv over queries.
No times.
"""

import numpy as np
import timing

import cupyflash
from cupyflash import _console

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_HEAD_DIMS = (64, 128)
_QUERIES = (1, 128, 2048)
_KEYS = {True: (4096, 65_536, 1_048_576), False: (4096, 65_536)}
_QUERIES_OF_DV = {True: (4096, 65_536, 524_288), False: (4096,)}
_KEYS_OF_DV = 256


def arrays(xp, rng, dtype, head_dim, seqlen_q, seqlen_k):
    """q, k, v of one head and dout; all scores are alike, values and dout random."""

    def of(x):
        return xp.asarray(x.astype(dtype)[None, None])

    q = np.full((seqlen_q, head_dim), 0.3)
    k = np.full((seqlen_k, head_dim), 0.7 / head_dim**0.5)
    v = 1 + rng.random((seqlen_k, head_dim))
    dout = 1 + rng.random((seqlen_q, head_dim))
    return of(q), of(k), of(v), of(dout)


def exact_sum(x):
    """Sums over rows, in extended precision on the host."""
    x = x if isinstance(x, np.ndarray) else x.get()
    return x.astype(np.longdouble).sum(axis=2, keepdims=True)


def largest_error(x, exact):
    """The largest error, relative to the largest entry."""
    x = x if isinstance(x, np.ndarray) else x.get()
    return float(abs(x.astype(np.longdouble) - exact).max() / exact.max())


def rows(xp, on_gpu, dtype):
    """The error of out, then that of dv, at each length."""
    rng = np.random.default_rng(0)
    name = dtype
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    for head_dim in _HEAD_DIMS:
        for n in _KEYS[on_gpu]:
            for seqlen_q in _QUERIES:
                q, k, v, _ = arrays(xp, rng, dtype, head_dim, seqlen_q, n)
                exact = exact_sum(v) / n
                yield {
                    "result": "out",
                    "dtype": name,
                    "head_dim": head_dim,
                    "seqlen_q": seqlen_q,
                    "seqlen_k": n,
                    "kernel": cupyflash.explain("attention", q, k, v).kernel,
                    "error": largest_error(cupyflash.attention(q, k, v), exact),
                }
        for n in _QUERIES_OF_DV[on_gpu]:
            q, k, v, dout = arrays(xp, rng, dtype, head_dim, n, _KEYS_OF_DV)
            out, lse = cupyflash.attention(q, k, v, return_lse=True)
            call = (dout, q, k, v, out, lse)
            yield {
                "result": "dv",
                "dtype": name,
                "head_dim": head_dim,
                "seqlen_q": n,
                "seqlen_k": _KEYS_OF_DV,
                "kernel": cupyflash.explain("attention_vjp", *call).kernel,
                "error": largest_error(
                    cupyflash.attention_vjp(*call).dv, exact_sum(dout) / _KEYS_OF_DV
                ),
            }


def main():
    """Measure, print the table and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    xp, on_gpu = timing.backend(args)
    found = [row for dtype in _DTYPES for row in rows(xp, on_gpu, dtype)]
    heads = ("result", "dtype", "head_dim", "seqlen_q", "seqlen_k", "kernel", "error")
    _console.table(
        heads,
        [(*map(str, list(row.values())[:-1]), f"{row['error']:.2e}") for row in found],
    )
    timing.save(args.json, "long_keys", on_gpu, rows=found)


if __name__ == "__main__":
    main()
