"""The four methods on the teaching case, N = 4096 and d = 64."""

import functools
import warnings

import numpy as np

from cupyflash._attention.api import attention
from cupyflash._cli import bench_cases, console, measure
from cupyflash._reference import forward as reference
from cupyflash._softmax.api import softmax

N, HEAD_DIM = 4096, 64

# exp(x) of the largest finite float16, 65504, is at x = 11.0899.
OVERFLOW = (10.0, 11.0, 11.08, 11.1, 12.0)


def inputs(xp):
    """q, k, v and the scores of q and k, in float32."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((N, HEAD_DIM)).astype(np.float32) for _ in range(3))
    scores = (q @ k.T) * np.float32(HEAD_DIM**-0.5)
    return tuple(xp.asarray(x) for x in (q, k, v, scores))


def softmax_rows(xp, on_gpu):
    """A row for each method: softmax over the rows of the scores."""
    *_, scores = inputs(xp)
    exact = reference.softmax(scores, axis=-1)
    bind, methods = functools.partial, bench_cases.METHODS
    calls = {m: bind(softmax, scores, axis=-1, method=m) for m in methods}
    plain = bench_cases.library_softmax(xp)
    calls["SciPy" if xp is np else "CuPy"] = bind(plain, scores, axis=-1)
    return _measure_all(calls, exact, on_gpu, relative_to_each=True)


def attention_rows(xp, on_gpu):
    """A row for each method: attention of one head."""
    q, k, v, _ = inputs(xp)
    exact = reference.attention(q, k, v)
    bind, methods = functools.partial, bench_cases.METHODS
    calls = {m: bind(attention, q, k, v, method=m) for m in methods}
    plain = bench_cases.library_softmax(xp)

    def unfused():
        s = xp.matmul(q, k.T) * np.float32(HEAD_DIM**-0.5)
        return xp.matmul(plain(s, axis=-1), v)

    calls["matmul, SciPy, matmul" if xp is np else "matmul, CuPy, matmul"] = unfused
    return _measure_all(calls, exact, on_gpu, relative_to_each=False)


def overflow_rows(xp):
    """Softmax of ``[x, 0]`` in float16, naive and tiled, for growing x."""
    rows = []
    for x in OVERFLOW:
        row = xp.asarray(np.array([x, 0.0], np.float16))
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            naive, tiled = (
                reference.to_host(softmax(row, method=m)).tolist()
                for m in ("naive", "tiled")
            )
        rows.append({"x": x, "naive": naive, "tiled": tiled})
    return rows


def _measure_all(calls, exact, on_gpu, relative_to_each):
    """Error, extra memory and time of each call, as rows of plain numbers."""
    rows = {}
    for name, call in console.progress(calls.items(), "measuring", len(calls)):
        if on_gpu:
            call()  # memory held by compiling does not count
        run = measure.run_once(call, on_gpu=on_gpu)
        error = np.abs(reference.to_host(run.result) - exact)
        error = error / (exact if relative_to_each else np.abs(exact).max())
        rows[name] = {
            "method": name,
            "extra_bytes": run.extra_bytes,
            "max_error": float(error.max()),
        }
    timings = measure.interleaved(calls, on_gpu=on_gpu, turns=3, warm=True)
    for name, timing in timings.items():
        rows[name]["seconds"] = timing.seconds
    return list(rows.values())
