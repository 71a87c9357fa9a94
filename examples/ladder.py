"""
The four methods
================

How much memory each needs, and where the naive one breaks.

Run it: ``python examples/ladder.py``
"""

import tracemalloc

import numpy as np
from _support import choose

import cupyflash

METHODS = ("naive", "safe", "online", "tiled")
N, DIM = choose(tiny=512, cpu=2048, gpu=2048), 64

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((N, DIM), dtype=np.float32) for _ in range(3))
print(f"attention of {N} x {N}, one matrix of scores is {N * N * 4 / 2**20:.0f} MiB")
for method in METHODS:
    tracemalloc.start()
    out = cupyflash.attention(q, k, v, method=method)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"  {method:<7} takes {(peak - out.nbytes) / 2**20:6.1f} MiB besides its result"
    )

x = np.array([12.0, 0.0], np.float16)
print("softmax of [12, 0] in float16")
for method in METHODS:
    with np.errstate(all="ignore"):
        print(f"  {method:<7} {cupyflash.softmax(x, method=method)}")

print(cupyflash.explain("attention", q, k, v))
