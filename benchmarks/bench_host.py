"""What a call costs the host, in microseconds, and what first use costs.

    python benchmarks/bench_host.py --json benchmarks/results/host_h100.json

Small inputs, warm caches, the device running behind: what remains is Python. First use
is measured in fresh processes, with an empty and with a filled kernel cache; every row
of the tables in `bench_first.py`.
"""

import functools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import scipy.special
import timing

import cupyflash
from cupyflash._cli import console
from cupyflash._core import threads

ROOT = Path(__file__).resolve().parent.parent

_KERNEL = """
extern "C" __global__ void nothing(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
"""

# Turns, and calls in each: few enough that the queue of launches never fills up.
_TURNS, _CALLS = 25, 100

# First use, in a process of its own; prints seconds.
_FIRST_USE = """
import time, cupy, numpy
import cupyflash
x = cupy.asarray(numpy.ones({shape}, numpy.{dtype}))
lse = cupy.zeros({shape}[:-1], numpy.float64 if x.dtype == "f8" else numpy.float32)
cupy.cuda.Device().synchronize()
start = time.perf_counter()
{call}
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""
_FIRST_VJP = "cupyflash.attention_vjp(x, x, x, x, x, lse)"
_FIRST_CALLS = {
    "softmax": ("(32, 128)", "float32", "cupyflash.softmax(x, axis=-1)"),
    "attention": ("(1, 2, 64, 64)", "float32", "cupyflash.attention(x, x, x)"),
    **{
        f"{name}, {dtype}": (shape, dtype, call)
        for name, shape, call in (
            ("softmax of rows of 4096", "(64, 4096)", "cupyflash.softmax(x, -1)"),
            ("softmax of rows of 2^20", "(2, 2**20)", "cupyflash.softmax(x, -1)"),
            ("softmax of columns of 1024", "(1024, 512)", "cupyflash.softmax(x, 0)"),
            ("logsumexp", "(64, 4096)", "cupyflash.logsumexp(x, -1)"),
            ("softmax_vjp", "(64, 4096)", "cupyflash.softmax_vjp(x, x, -1)"),
            ("attention, d 64", "(1, 2, 512, 64)", "cupyflash.attention(x, x, x)"),
            ("attention, d 128", "(1, 2, 512, 128)", "cupyflash.attention(x, x, x)"),
            ("attention_vjp, d 64", "(1, 2, 512, 64)", _FIRST_VJP),
            ("attention_vjp, d 128", "(1, 2, 512, 128)", _FIRST_VJP),
        )
        for dtype in ("float16", "float32", "float64")
    },
}


def numpy_calls():
    """Small calls of the NumPy back end, and SciPy's."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 128)).astype(np.float32)
    q = rng.standard_normal((1, 2, 64, 64)).astype(np.float32)
    return {
        "softmax, NumPy": lambda: cupyflash.softmax(x, axis=-1),
        "scipy.special.softmax": lambda: scipy.special.softmax(x, axis=-1),
        "attention, NumPy": lambda: cupyflash.attention(q, q, q),
    }


def cupy_calls(cupy):
    """Small calls on the GPU, ours and others'."""
    import cupyx.scipy.special

    rng = np.random.default_rng(0)
    x = cupy.asarray(rng.standard_normal((32, 128)).astype(np.float32))
    out = cupy.empty_like(x)
    q = cupy.asarray(rng.standard_normal((1, 2, 64, 64)).astype(np.float16))
    attention_out = cupy.empty_like(q)
    kernel = cupy.RawKernel(_KERNEL, "nothing")
    size = np.int32(x.size)
    kernel((16,), (256,), (x, out, size))
    # The least that a launch can cost: all arguments ready, nothing looked up.
    words = np.array([x.data.ptr, out.data.ptr, x.size])
    addresses = words.ctypes.data + 8 * np.arange(3)
    ready = functools.partial(
        cupy.cuda.driver.launchKernel,
        *(kernel.kernel.ptr, 16, 1, 1, 256, 1, 1, 0, 0, addresses.ctypes.data, 0),
    )
    scores = (1, 2, 64, 64)
    bias = cupy.asarray(rng.standard_normal(scores).astype(np.float16))
    mask = cupy.asarray(rng.random(scores) < 0.8)
    lengths = cupy.asarray([40], np.int32)
    slopes = cupy.asarray([0.5, 0.25], np.float32)
    where = cupy.asarray(rng.random(x.shape) < 0.8)
    out_lse = cupyflash.attention(q, q, q, return_lse=True)
    attention = cupyflash.attention
    calls = {
        "softmax, where=": lambda: cupyflash.softmax(x, axis=-1, where=where),
        "softmax, scale=": lambda: cupyflash.softmax(x, axis=-1, scale=0.5),
        "attention_vjp": lambda: cupyflash.attention_vjp(q, q, q, q, *out_lse),
        "softmax": lambda: cupyflash.softmax(x, axis=-1),
        "softmax, out=": lambda: cupyflash.softmax(x, axis=-1, out=out),
        "log_softmax": lambda: cupyflash.log_softmax(x, axis=-1),
        "logsumexp": lambda: cupyflash.logsumexp(x, axis=-1),
        "softmax_vjp": lambda: cupyflash.softmax_vjp(x, x, axis=-1),
        "attention": lambda: attention(q, q, q),
        "attention, causal": lambda: attention(q, q, q, causal=True),
        "attention, out=": lambda: attention(q, q, q, out=attention_out),
        "attention, bias=": lambda: attention(q, q, q, bias=bias),
        "attention, mask=": lambda: attention(q, q, q, mask=mask),
        "attention, key_lengths=": lambda: attention(q, q, q, key_lengths=lengths),
        "attention, window=": lambda: attention(q, q, q, window=(16, 0)),
        "attention, softcap=": lambda: attention(q, q, q, softcap=20.0),
        "attention, alibi_slopes=": lambda: attention(q, q, q, alibi_slopes=slopes),
        "attention, return_lse=": lambda: attention(q, q, q, return_lse=True),
        "cupyx softmax": lambda: cupyx.scipy.special.softmax(x, axis=-1),
        "RawKernel launch": lambda: kernel((16,), (256,), (x, out, size)),
        "driver launch, all ready": lambda: (ready(), words, addresses),
        "cupy.empty": lambda: cupy.empty((32, 128), np.float32),
        "cupy.add": lambda: cupy.add(x, x),
    }
    torch = timing.optional("torch")
    if torch is not None:
        t, tq = timing.to_torch(torch, x), timing.to_torch(torch, q)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        t_out, t_mask = torch.empty_like(t), timing.to_torch(torch, mask)
        t_bias = timing.to_torch(torch, bias)
        calls["torch.softmax"] = lambda: torch.softmax(t, dim=-1)
        calls["torch.softmax, out="] = lambda: torch.softmax(t, dim=-1, out=t_out)
        calls["torch SDPA"] = lambda: sdpa(tq, tq, tq)
        calls["torch SDPA, causal"] = lambda: sdpa(tq, tq, tq, is_causal=True)
        calls["torch SDPA, bias"] = lambda: sdpa(tq, tq, tq, attn_mask=t_bias)
        calls["torch SDPA, mask"] = lambda: sdpa(tq, tq, tq, attn_mask=t_mask)
    return calls


def host_seconds(calls, synchronize):
    """What a warm call costs the host: {name: (median, best)} of turns.

    The calls take turns, since a host has faster and slower minutes.
    """
    for call in calls.values():
        for _ in range(20):
            call()
    synchronize()
    times = {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times[name].append((time.perf_counter() - start) / _CALLS)
            synchronize()
    return {name: (median(found), min(found)) for name, found in times.items()}


def in_process(code, **environment):
    """What a fresh interpreter prints, as a number."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | environment,
    )
    return float(done.stdout.split()[-1])


def import_rows():
    """Seconds of import, the median of five processes."""
    code = (
        "import sys, time; start = time.perf_counter(); import {}; "
        "seconds = time.perf_counter() - start; "
        "assert 'cupy' not in sys.modules or '{}' == 'cupy'; print(seconds)"
    )
    after_numpy = (
        "import time, numpy; start = time.perf_counter(); import cupyflash; "
        "print(time.perf_counter() - start)"
    )
    codes = {
        "import numpy": code.format("numpy", "numpy"),
        "import cupyflash": code.format("cupyflash", "cupyflash"),
        "import cupyflash, after numpy": after_numpy,
    }
    for name, text in codes.items():
        in_process(text)  # fills __pycache__
        seconds = sorted(in_process(text) for _ in range(5))[2]
        yield {"what": name, "seconds": seconds}


def first_use_rows():
    """Seconds of the first call, with an empty and a filled kernel cache."""
    with ThreadPoolExecutor(max(1, threads.num_cores() // 4)) as pool:
        for found in pool.map(_first_use, _FIRST_CALLS):
            yield from found


def _first_use(name):
    """The two rows of a call, each in a process of its own."""
    shape, dtype, call = _FIRST_CALLS[name]
    code = _FIRST_USE.format(shape=shape, dtype=dtype, call=call)
    with tempfile.TemporaryDirectory() as folder:
        return [
            {
                "what": f"first {name}, {state}",
                "seconds": in_process(code, CUPY_CACHE_DIR=folder),
            }
            for state in ("cold", "from the disk cache")
        ]


def main():
    """Measure, print the table and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--warm", action="store_true", help="warm calls alone")
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    groups = [(numpy_calls(), lambda: None)]
    if on_gpu:
        groups.append((cupy_calls(xp), xp.cuda.Device().synchronize))
    rows = []
    for calls, synchronize in groups:
        calls = {name: call for name, call in calls.items() if args.only in name}
        for name, (seconds, best) in host_seconds(calls, synchronize).items():
            rows.append({"what": name, "seconds": seconds, "best": best})
    console.table(
        ("warm call", "microseconds", "best turn"),
        [
            (row["what"], f"{row['seconds'] * 1e6:.1f}", f"{row['best'] * 1e6:.1f}")
            for row in rows
        ],
    )
    once = []
    if not args.warm:
        once += [*import_rows(), *(first_use_rows() if on_gpu else ())]
    if once:
        console.table(
            ("once", "milliseconds"),
            [(row["what"], f"{row['seconds'] * 1e3:.1f}") for row in once],
        )
    timing.save(args.json, "host", on_gpu, calls=rows, once=once)


if __name__ == "__main__":
    main()
