"""
2 Safe softmax, and its three sweeps
====================================

A factor in numerator and denominator cancels. With :math:`e^{-m}` as the factor,

.. math:: y_i = \\frac{e^{x_i}}{\\sum_j e^{x_j}}
              = \\frac{e^{x_i - m}}{\\sum_j e^{x_j - m}}

for any :math:`m`. If :math:`m` is the largest score of the row, every exponent is at
most 0: no exponential is larger than 1, and the sum lies between 1 and N. Nothing can
overflow, and nothing can be divided by 0.
"""

# %%
# Three sweeps
# ------------
# The maximum must be known before the first exponential, and the sum before the first
# weight. So the row is read three times.
import _measured as measured
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import softmax as scipy_softmax

import cupyflash


def safe(x):
    m = -np.inf
    for score in x:  # first sweep
        m = max(m, score)
    d = 0.0
    for score in x:  # second sweep
        d += np.exp(score - m)
    return np.array([np.exp(score - m) / d for score in x])  # third sweep


x = np.array([1000.0, 999.0, -1000.0])
print(safe(x))
assert np.allclose(safe(x), cupyflash.softmax(x, method="safe"))

# %%
# Counting the traffic
# --------------------
# Softmax does little arithmetic with each score. Its time should then be the time of
# moving numbers. How many does each method move? Here the blocks of cupyflash's CPU
# back end are watched as they copy scores in and weights out.

x = np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float32)
moved = {}
for method in measured.METHODS:
    with measured.counted() as count:
        cupyflash.softmax(x, axis=-1, method=method)
    moved[method] = (count["read"] + count["written"]) / x.size
    reads, writes = count["read"] / x.size, count["written"] / x.size
    print(f"{method:6}  reads {reads:.0f} N, writes {writes:.0f} N")

assert moved == {"naive": 3, "safe": 4, "online": 3, "tiled": 2}

# %%
# Safety costs one sweep: 4 N instead of 3 N. The next page wins it back with the online
# recurrence. ``tiled`` moves 2 N, which is the least possible: each score is
# read, each weight is written.
#
# What moving costs on a GPU
# --------------------------
# If moving numbers were all that mattered, the time of a method would follow from the
# time of a copy, which moves 2 N. Both were measured in one run, for arrays of 16384 x
# 4096 float32:

report = measured.newest("softmax")
case = "16384 x 4096 float32"
took = {r["provider"]: 1e6 * r["seconds"] for r in report["rows"] if r["case"] == case}
expected = {method: took["copy"] * moved[method] / 2 for method in moved}
print(measured.source(report))
for method, time in expected.items():
    print(f"{method:6}  by its traffic {time:4.0f} us, measured {took[method]:4.0f} us")

# What the text below says of this card.
assert took["safe"] < expected["safe"]
assert took["safe"] < took["naive"]
assert all(took[method] > expected[method] for method in ("naive", "online"))

fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
at = np.arange(len(moved))
ax.bar(at - 0.2, expected.values(), 0.4, label="by its traffic")
ax.bar(at + 0.2, [took[method] for method in moved], 0.4, label="measured")
ax.axhline(took["copy"], color="gray", lw=1, ls="--", label="a copy")
ax.set_xticks(at, moved)
ax.set(ylabel="microseconds", title=f"Softmax of {case}, {report['machine']['gpu']}")
ax.legend()

# %%
# ``tiled`` comes close to what its traffic allows. ``safe`` is faster than its 4 N, so
# not all of its sweeps can have gone to memory: a row of 4096 scores fits in a cache.
# ``naive`` and ``online`` are slower than their 3 N: something other than traffic
# holds them up. On this card ``naive`` takes longer than ``safe``, although it asks for
# less. Counting sweeps alone would have said the opposite.
#
# The GPU can tell us, because it counts the bytes that its memory moves. A profiler
# read those counters while each method ran once on arrays of the same size.

dram = measured.newest("dram")
print(measured.source(dram))
read = {}
for row in dram["rows"]:
    if row["operation"] == "softmax":
        one_way = row["least_bytes"] / 2
        reads, writes = row["read_bytes"] / one_way, row["written_bytes"] / one_way
        read[row["method"]] = reads
        print(f"{row['method']:6}  reads {reads:.2f} N, writes {writes:.2f} N")

# They ask for their input two and three times, but memory delivers it less often.
assert read["online"] < 1.1
assert read["safe"] < 1.5 < read["naive"] < 2

# %%
# Memory moves far less than the kernels ask for: ``safe`` asks for 3 N, and the later
# sweeps mostly find their row in a cache. Only ``naive`` often misses it, although it
# makes one sweep less. So at this length the sweeps cost instructions and waiting more
# than bytes. Where rows are too long for a cache, they cost bytes as well.
#
# What it costs on a CPU
# ----------------------

*_, scores = measured.teaching_case(4096)
exact = scipy_softmax(scores.astype(np.float64), axis=-1)
calls = measured.by_method(cupyflash.softmax, scores, axis=-1)
calls["SciPy"] = lambda: scipy_softmax(scores, axis=-1)
rows = measured.measure(calls, exact, of_each=True)
measured.print_rows(rows)
measured.check_claims(rows, plain="safe")

# %%
# A core takes a few rows at a time, and they stay in its cache between the sweeps. So
# the three sweeps of safe softmax are not three sweeps of memory on a CPU either.
#
# The errors tell a second story. The rounding error of :math:`x - m` becomes a relative
# error of the weight, and it grows with the spread of the row. The safe methods of
# cupyflash compute the difference in float64 on a CPU, and keep its rounding error as a
# second number on a GPU.
