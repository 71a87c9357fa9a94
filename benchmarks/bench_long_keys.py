"""How the error of attention and of its gradients grows with the length of their sums.

    python benchmarks/bench_long_keys.py --json benchmarks/results/long_keys_h200.json

All scores of a row are equal and all terms of a sum have one sign, so that what each
step of it rounds goes into numbers of its full size. Terms are random between 1 and 2,
or all alike: then every step rounds the same way. out and dq are sums over keys, dk and
dv over queries. No times.
"""

import itertools

import numpy as np
import timing

import cupyflash
from cupyflash._cli import console

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_HEAD_DIMS = (64, 128, 192)
_KINDS = ("random", "alike")
_LENGTHS = {True: (4096, 32_768, 65_536, 1_048_576), False: (4096, 65_536)}
# Rows of the other kind than those that are summed.
_QUERIES = {"out": (1, 128, 2048), "dq": (1, 128)}
_KEYS = {"dk": (256,), "dv": (256,)}


def terms(xp, rng, kind, length, head_dim, dtype):
    """What is summed: rows of numbers from 1 to 2."""
    x = 1 + rng.random_sample((1 if kind == "alike" else length, head_dim))
    return xp.broadcast_to(x, (length, head_dim)).astype(dtype)


def exact_sum(x):
    """Sums over rows as long doubles: those of high parts are exact, the rest small."""
    x = x.astype("float64")
    high = (x * 2.0**20).round() / 2.0**20
    return sum(
        np.asarray(part if isinstance(part, np.ndarray) else part.get(), np.longdouble)
        for part in (high.sum(axis=0), (x - high).sum(axis=0))
    )


def problem(xp, rng, result, kind, length, other, head_dim, dtype):
    """dout, q, k, v, and the exact result; the first of these only for gradients."""

    def full(rows, value):
        return xp.full((rows, head_dim), value)

    x = terms(xp, rng, kind, length, head_dim, dtype)
    total = exact_sum(x)
    scale = 1 / np.longdouble(head_dim) ** 0.5
    if result == "out":
        given, exact = (None, full(other, 0.25), full(length, 0.125), x), total / length
    elif result == "dv":
        given = x, full(length, 0.25), full(other, 0.125), full(other, 1)
        exact = total / other
    elif result == "dk":
        # q makes no difference to scores, since k is 0; dP is 0 but for one key.
        v = full(other, 0)
        v[0] = 1
        given = full(length, 1), x, full(other, 0), v
        exact = total * head_dim * scale / other * (1 - 1 / np.longdouble(other))
    else:
        # dP is 1 or -1 by turns, and so is the sign of k; q is 0.
        sign = xp.where(xp.arange(length) % 2, -1, 1)[:, None]
        v = full(length, 0)
        v[:, :1] = sign
        given = full(other, 1), full(other, 0), x.astype("float64") * sign, v
        exact = total * scale / length
    return tuple(x if x is None else x.astype(dtype) for x in given), exact


def largest_error(x, exact):
    """The largest error, relative to the largest entry."""
    x = x if isinstance(x, np.ndarray) else x.get()
    x = x.astype(np.float64).astype(np.longdouble)
    return float(abs(x - exact).max() / abs(exact).max())


def found(result, given, exact, method):
    """The kernel, and the error of the result."""
    dout, q, k, v = (x if x is None else x[None, None] for x in given)
    how = {"method": method}
    if result == "out":
        kernel = cupyflash.explain("attention", q, k, v, **how).kernel
        return kernel, largest_error(cupyflash.attention(q, k, v, **how)[0, 0], exact)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    call = (dout, q, k, v, out, lse)
    kernel = cupyflash.explain("attention_vjp", *call, **how).kernel
    gradient = getattr(cupyflash.attention_vjp(*call, **how), result)[0, 0]
    return kernel, largest_error(gradient[:1] if result == "dk" else gradient, exact)


def cases(on_gpu, dtypes=_DTYPES, head_dims=_HEAD_DIMS):
    """(result, dtype, head_dim, terms, length, other, method)."""
    for result, dtype, head_dim, kind in itertools.product(
        ("out", "dq", "dk", "dv"), dtypes, head_dims, _KINDS
    ):
        for length in _LENGTHS[on_gpu]:
            for other in {**_QUERIES, **_KEYS}[result]:
                yield result, dtype, head_dim, kind, length, other, "auto"
            if result == "out" and head_dim == head_dims[0]:
                yield result, dtype, head_dim, kind, length, 1, "online"


def row(xp, rng, result, name, head_dim, kind, length, other, method):
    """The kernel and the error of a case."""
    dtype = name
    if name == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    given, exact = problem(xp, rng, result, kind, length, other, head_dim, dtype)
    kernel, error = found(result, given, exact, method)
    return {
        "result": result,
        "dtype": name,
        "head_dim": head_dim,
        "terms": kind,
        "length": length,
        "others": other,
        "kernel": kernel,
        "error": error,
    }


def main():
    """Measure, print the table and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=_DTYPES)
    parser.add_argument("--head-dims", nargs="+", type=int, default=_HEAD_DIMS)
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    rng = xp.random.RandomState(0)
    table = []
    for case in cases(on_gpu, args.dtypes, args.head_dims):
        if args.only in " ".join(map(str, case)):
            table.append(row(xp, rng, *case))
            timing.save(args.json, "long_keys", on_gpu, rows=table)
    console.table(
        tuple(table[0]),
        [(*map(str, list(row.values())[:-1]), f"{row['error']:.2e}") for row in table],
    )


if __name__ == "__main__":
    main()
