"""
1 Naive softmax, and where it breaks
====================================

Softmax turns a row of scores :math:`x` into weights that are positive and sum to one:

.. math:: y_i = \\frac{e^{x_i}}{\\sum_j e^{x_j}}

You would probably code it exactly like that. This page does, and finds out where it
breaks.
"""

# %%
# The formula
# -----------
import warnings

import _measured as measured
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import softmax as scipy_softmax

import cupyflash

warnings.filterwarnings("ignore", category=RuntimeWarning)


def textbook(x):
    e = np.exp(x)
    return e / e.sum()


x = np.array([1.0, 3.0, -2.0, 2.5])
print(textbook(x).round(4))
print(cupyflash.softmax(x, method="naive").round(4))
assert np.allclose(textbook(x), cupyflash.softmax(x, method="naive"))

# %%
# ``method="naive"`` is this formula, each step in the dtype of its input.
#
# The largest number
# ------------------
# The weights lie between 0 and 1, but the exponentials on the way do not. Every dtype
# has a largest finite number, and the exponential reaches it early.

for dtype in (np.float16, np.float32, np.float64):
    largest = np.finfo(dtype).max
    limit = np.log(largest.astype(np.longdouble))
    print(f"{dtype.__name__:8} exp(x) is finite up to x = {float(limit):.4f}")

# %%
# Past that point both the numerator and the sum are infinite, and their quotient is not
# a number. The other methods have no such limit.

print("softmax of [x, 0] in float16")
for big in (10, 11, 11.08, 11.1, 12):
    row = np.array([big, 0], np.float16)
    naive = cupyflash.softmax(row, method="naive")
    tiled = cupyflash.softmax(row, method="tiled")
    print(f"  x = {big:5}   naive {naive!s:23} tiled {tiled}")

assert np.isnan(cupyflash.softmax(np.float16([11.1, 0]), method="naive")[0])
assert np.isnan(cupyflash.softmax(np.float32([88.8, 0]), method="naive")[0])
assert np.isfinite(cupyflash.softmax(np.float32([88.7, 0]), method="naive")[0])

# %%
# The same on a GPU, from a run of ``make demo`` there (None is NaN):

demo = measured.newest("demo")
print(measured.source(demo))
for row in demo["ladder"]["overflow"]:
    print(f"  x = {row['x']:5}   naive {row['naive']!s:31} tiled {row['tiled']}")

# %%
# The sum breaks earlier
# ----------------------
# A sum of N exponentials overflows before a single one does: at equal scores its limit
# is :math:`\log(\mathrm{max}) - \log N`. Now each numerator is finite and the
# denominator is not, so the result is 0: wrong, and with no NaN to show it.

row = np.full(4096, 3, np.float16)
print("4096 scores of 3, float16:", cupyflash.softmax(row, method="naive")[:3])
print("what it should be        :", cupyflash.softmax(row, method="safe")[:3])

# %%
# At the other end, all exponentials of a row can vanish. Then 0 is divided by 0.

row = np.full(4, -20, np.float16)
print("four scores of -20, float16:", cupyflash.softmax(row, method="naive"))

# %%
# How far can a row of N equal scores go? The dots come from trying ``naive``,
# the lines from the formula.


def naive_is_right(score, n, dtype):
    y = cupyflash.softmax(np.full(n, score, dtype), method="naive")
    return bool(np.allclose(y, 1 / n, rtol=0.01, atol=0))


def largest_score(n, dtype, low=-1.0, high=100.0):
    for _ in range(16):
        middle = (low + high) / 2
        inside = naive_is_right(middle, n, dtype)
        low, high = (middle, high) if inside else (low, middle)
    return low


lengths = 4 ** np.arange(0, 8)
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
for dtype in (np.float16, np.float32):
    found = [largest_score(n, dtype) for n in lengths]
    formula = np.log(float(np.finfo(dtype).max)) - np.log(lengths)
    (line,) = ax.plot(lengths, formula, label=f"{dtype.__name__}, formula")
    ax.plot(lengths, found, "o", color=line.get_color(), label="found by trying")
    assert np.allclose(found, formula, atol=0.05)
ax.set(xscale="log", xlabel="scores in the row, N", ylabel="largest score")
ax.set_title("The largest score for which naive softmax is right")
ax.legend()

# %%
# What it costs
# -------------
# Four methods on the scores of 2048 queries and keys. The error is the largest one
# relative to each weight, against float64; extra memory is what a call holds besides
# its input and its result.

*_, scores = measured.teaching_case(2048)
exact = scipy_softmax(scores.astype(np.float64), axis=-1)
calls = measured.by_method(cupyflash.softmax, scores, axis=-1)
calls["SciPy"] = lambda: scipy_softmax(scores, axis=-1)
rows = measured.measure(calls, exact, of_each=True)
measured.print_rows(rows)
measured.check_claims(rows, plain="naive")

# %%
# And on the GPU, at 4096 x 4096:

print(measured.source(demo))
on_gpu = measured.ladder(demo, "softmax")
measured.print_rows(on_gpu)
measured.check_claims(on_gpu, plain="naive")

# %%
# All four work row by row and need next to no memory. Softmax alone has no memory to
# save, so the second claim can only be about attention. And on this card naive softmax
# is not even the fastest: it gives up safety for nothing. The next page makes it safe.
