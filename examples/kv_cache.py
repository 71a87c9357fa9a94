"""
A cache of keys and values
==========================

Step-by-step generation with a cache, compared with all steps at once. Each step brings
one query. The cache has more room than it uses, and ``key_lengths`` says how much of it
counts. With ``causal=True`` and no ``query_offset``, the last query lines up with the
last key.

Run it: ``python examples/kv_cache.py``
"""

import numpy as np
from _support import xp

import cupyflash

BATCH, HEADS, KV_HEADS, STEPS, ROOM, DIM = 2, 8, 2, 20, 64, 32

rng = np.random.default_rng(0)


def normal(*shape):
    """Random float32 numbers, where they will be used."""
    return xp.asarray(rng.standard_normal(shape, dtype=np.float32))


q = normal(BATCH, HEADS, STEPS, DIM)
k, v = normal(BATCH, KV_HEADS, STEPS, DIM), normal(BATCH, KV_HEADS, STEPS, DIM)

# NaN in the unused part of the cache would be seen if anything read it.
k_cache = xp.full((BATCH, KV_HEADS, ROOM, DIM), xp.nan, dtype=xp.float32)
v_cache = k_cache.copy()
lengths = xp.zeros(BATCH, dtype=xp.int32)

steps = []
for t in range(STEPS):
    k_cache[:, :, t], v_cache[:, :, t] = k[:, :, t], v[:, :, t]
    lengths += 1
    steps.append(
        cupyflash.attention(
            q[:, :, t : t + 1], k_cache, v_cache, key_lengths=lengths, causal=True
        )
    )

by_steps = xp.concatenate(steps, axis=2)
at_once = cupyflash.attention(q, k, v, causal=True)
difference = float(abs(by_steps - at_once).max())
print(f"{xp.__name__}: {STEPS} steps, largest difference {difference:.1e}")
assert difference < 1e-5
