"""
4 Tiled attention
=================

Attention is softmax between two matrix products: :math:`S = Q K^T / \\sqrt{d}`,
:math:`P = \\mathrm{softmax}(S)`, :math:`O = P V`. Computed one after another, two
matrices of N x N numbers go to memory and come back.
"""

# %%
# The matrices that never exist
# -----------------------------
import _measured as measured
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import softmax as scipy_softmax

import cupyflash
from cupyflash._cli import measure

for n in (1024, 4096, 16384, 65536):
    print(f"N = {n:5}: S takes {4 * n**2 / 1e9:8.3f} GB in float32, and P as much")

# %%
# The recurrence of the last page takes in one key after the other and stores neither.
# But one query against one key is a poor use of any machine: each key is read again for
# every query. So take a tile of queries against a tile of keys.
#
# Five steps
# ----------
# 1. *Anchor*: a tile of Q is loaded and stays.
# 2. *Stream*: tiles of K and V pass through. Only one tile of S exists at a time.
# 3. *Rescale*: the maximum of each row may rise; sum and output are corrected.
# 4. *Fuse*: the exponentials go straight into the product with V, and are dropped.
# 5. *Write*: the output is divided by its sum and written once, along with lse.
#
# The function counts the numbers that it requests from memory.


def tiled(q, k, v, block_m=64, block_n=64):
    n, head_dim = q.shape
    out, lse = np.empty_like(q), np.empty(n, q.dtype)
    scale = np.float32(head_dim**-0.5)
    moved = 0
    for i in range(0, n, block_m):
        queries = q[i : i + block_m] * scale  # 1 anchor
        m = np.full((len(queries), 1), -np.inf, np.float32)
        d = np.zeros_like(m)
        o = np.zeros_like(queries)
        moved += queries.size
        for j in range(0, n, block_n):
            keys, values = k[j : j + block_n], v[j : j + block_n]  # 2 stream
            s = queries @ keys.T
            moved += keys.size + values.size

            m_new = np.maximum(m, s.max(axis=1, keepdims=True))  # 3 rescale
            correction = np.exp(m - m_new)
            m = m_new

            p = np.exp(s - m)  # 4 fuse
            d = d * correction + p.sum(axis=1, keepdims=True)
            o = o * correction + p @ values
        out[i : i + block_m] = o / d  # 5 write
        lse[i : i + block_m] = (m + np.log(d))[:, 0]
        moved += o.size + len(o)
    return out, lse, moved


N, D = 4096, 64
q, k, v, _ = measured.teaching_case(N, D)
out, lse, moved = tiled(q, k, v)
own_out, recomputed_lse = cupyflash.attention(q, k, v, method="tiled", return_lse=True)
print(f"{(N // 64) ** 2} tiles of 64 x 64; at any time {64 * 64 * 4 // 1024} KiB of S")
print(f"out differs by {np.abs(out - own_out).max():.0e} from cupyflash's,", end=" ")
print(f"lse by {np.abs(lse - recomputed_lse).max():.0e}")
assert np.allclose(out, own_out, atol=1e-6)
assert np.allclose(lse, recomputed_lse, atol=1e-5)

# %%
# The division comes last, once per row: between the tiles o is kept without its
# denominator. lse, the logarithm of the denominator, is all that a gradient needs to
# compute P again, and what joins results over parts of the keys.
#
# .. raw:: html
#
#    <iframe src="../../_static/steps.html#tiled" title="Tiled attention in steps"
#            style="width: 100%; height: 690px; border: 1px solid #8888"></iframe>
#
# Counting the traffic
# --------------------
# Each tile of queries reads all keys and values, so larger tiles read them less often.
# With S and P in memory, S is written once and read three times by safe softmax, P is
# written and read, and the two products and the scale do the rest; the table in
# ``cuda_src/attention/README.md`` has 8 N^2 in all.

assert moved == 2 * N * D + N + 2 * N**2 * D // 64
in_memory = 4 * N * D + 8 * N**2
print(f"with S and P in memory: {in_memory / 1e6:6.1f} million numbers")
for block in (1, 16, 64, 128):
    count = 2 * N * D + N + 2 * N**2 * D // block
    print(f"tiles of {block:3} queries:  {count / 1e6:6.1f} million numbers")

# %%
# A tile of one query, which is ``online``, moves far more than the matrices would:
# saving memory is not yet saving traffic. At 64 queries the traffic is a quarter.
#
# The order of the loops
# ----------------------
# The first FlashAttention had keys outside and queries inside. Then o, m and the sum of
# every query go back to memory for each tile of keys. With queries outside
# (FlashAttention-2) they stay on the chip, and tiles of queries need nothing from
# each other, so all of them can run at once.

tiles = N // 64
keys_outside = 2 * N * D + tiles * (N * D + 2 * N * D + 4 * N)
print(f"keys outside:    {keys_outside / 1e6:.1f} million numbers")
print(f"queries outside: {moved / 1e6:.1f} million numbers")

# %%
# Memory that does not grow with the square
# -----------------------------------------
sizes = (512, 1024, 2048, 4096)
extra = {"safe": [], "tiled": []}
for n in sizes:
    arrays = measured.teaching_case(n, D)[:3]
    for method, found in extra.items():
        call = measured.by_method(cupyflash.attention, *arrays)[method]
        found.append(measure.peak_memory(call, on_gpu=False) / 2**20)

fig, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
for method, found in extra.items():
    ax.plot(sizes, found, "o-", label=method)
ax.plot(sizes, [2 * 4 * n**2 / 2**20 for n in sizes], "k:", label="S and P")
ax.set(xscale="log", yscale="log", xlabel="N", ylabel="extra memory, MiB")
ax.set_title("Attention of one head, d = 64, float32, CPU")
ax.legend()
growth = {m: found[-1] / found[0] for m, found in extra.items()}
print(f"N times {sizes[-1] // sizes[0]}:", end=" ")
print(", ".join(f"{m} takes {g:.0f} times the memory" for m, g in growth.items()))
assert extra["safe"][-1] > 2 * 4 * sizes[-1] ** 2 / 2**20

# %%
# What it costs
# -------------
# The teaching case on the machine that built this page, compared with three separate
# calls. The error is the largest one relative to the largest output.

exact = cupyflash.attention(*(x.astype(np.float64) for x in (q, k, v)))


def three_calls():
    s = (q @ k.T) * np.float32(D**-0.5)
    return scipy_softmax(s, axis=-1) @ v


calls = measured.by_method(cupyflash.attention, q, k, v)
calls["three calls"] = three_calls
rows = measured.measure(calls, exact, of_each=False)
measured.print_rows(rows)
measured.check_claims(rows, plain="three calls")
measured.check_claims(rows, plain="safe")

# %%
# And on the GPU:

demo = measured.newest("demo")
on_gpu = measured.ladder(demo, "attention")
print(measured.source(demo))
measured.print_rows(on_gpu)
measured.check_claims(on_gpu, plain="matmul, CuPy, matmul")
measured.check_claims(on_gpu, plain="safe")

# %%
# What the memory of that card moved for one head of N = 16384, by its own counters:

dram = measured.newest("dram")
print(measured.source(dram))
n, head_dim = dram["shapes"]["attention"]
for row in dram["rows"]:
    if row["operation"] == "attention":
        moved = (row["read_bytes"] + row["written_bytes"]) / 1e6
        print(f"{row['method']:6}  {moved:8.1f} MB in {row['kernels']} kernels")
print(f"one matrix of scores is {4 * n**2 / 1e6:.1f} MB")

# %%
# The inputs fit in a cache of this card, and with ``online`` and ``tiled`` little else
# exists. ``naive`` and ``safe`` move S and P to memory and back several times.
#
# So the claim about memory holds, and is even too modest: the ratio grows with N. The
# claim about speed depends on the machine and on what you compare with. On this card it
# holds as well, with the help of hardware made for matrix products, which is the
# subject of the last page.
