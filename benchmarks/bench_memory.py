"""The memory that attention takes beside its inputs and its result, against N.

    python benchmarks/bench_memory.py --json benchmarks/results/memory_h200.json

One head, d = 64, float32, and ``tiled`` in float16, too; lse is returned. No times.
"""

import numpy as np
import scipy.special
import timing

import cupyflash
from cupyflash._cli import console, measure

HEAD_DIM = 64
# Powers of two up to this N; one matrix of N x N numbers takes at most so much.
_LARGEST = {True: 131_072, False: 8_192}
_MATRIX_BYTES = 5 << 30
_TILED = ("tiled", "tiled, float16")


def call_of(name, softmax, q, k, v):
    """Attention by one of the methods, or by product, softmax, product."""
    if name == "unfused":
        scale = np.float32(HEAD_DIM**-0.5)
        return lambda: softmax((q @ k.T) * scale, axis=-1) @ v
    method, _, dtype = name.partition(", ")
    q, k, v = (x.astype(dtype or x.dtype) for x in (q, k, v))
    return lambda: cupyflash.attention(q, k, v, method=method, return_lse=True)


def rows(xp, on_gpu, softmax):
    """Extra bytes of each method at each N."""
    rng = np.random.default_rng(0)
    n = 512
    while n <= _LARGEST[on_gpu]:
        q, k, v = (
            xp.asarray(rng.standard_normal((n, HEAD_DIM), dtype=np.float32))
            for _ in range(3)
        )
        names = ("unfused", "naive", "safe", "online", *_TILED)
        if 4 * n * n > _MATRIX_BYTES:
            names = _TILED
        elif n > _LARGEST[on_gpu] // 4:  # online takes its time, and no memory
            names = ("unfused", "naive", "safe", *_TILED)
        for name in names:
            call = call_of(name, softmax, q, k, v)
            extra = measure.peak_memory(call, on_gpu=on_gpu)
            if on_gpu:
                xp.get_default_memory_pool().free_all_blocks()
            yield {"n": n, "method": name, "extra_bytes": extra}
        n *= 2


def main():
    """Measure, print the table and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    xp, on_gpu = timing.backend(args)
    if on_gpu:
        from cupyx.scipy.special import softmax
    else:
        softmax = scipy.special.softmax
    found = list(rows(xp, on_gpu, softmax))
    console.table(
        ("N", "method", "extra, MiB"),
        [
            (str(row["n"]), row["method"], f"{row['extra_bytes'] / 2**20:.2f}")
            for row in found
        ],
    )
    timing.save(args.json, "memory", on_gpu, head_dim=HEAD_DIM, rows=found)


if __name__ == "__main__":
    main()
