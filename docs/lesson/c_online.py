"""
3 Online softmax: two sweeps
============================

Maximum and sum can be found in one sweep. The sum is kept under the maximum so far, and
corrected when that changes (Milakov and Gimelshein, 2018).
"""

# %%
# The recurrence
# --------------
# After :math:`j` scores, let
#
# .. math:: m_j = \max_{i \le j} x_i, \qquad d_j = \sum_{i \le j} e^{x_i - m_j}.
#
# The maximum is easy: :math:`m_j = \max(m_{j-1}, x_j)`. In the sum, split off the last
# term, and rewrite the others with the old maximum:
#
# .. math:: d_j = \sum_{i < j} e^{x_i - m_{j-1}} \, e^{m_{j-1} - m_j} + e^{x_j - m_j}.
#
# The sum that is left is :math:`d_{j-1}`, so
#
# .. math:: d_j = d_{j-1} \, e^{m_{j-1} - m_j} + e^{x_j - m_j}.
#
# It starts with :math:`m_0 = -\infty` and :math:`d_0 = 0`. Every exponent is at most 0,
# and one term of the sum is 1, so :math:`1 \le d_j \le j`: the recurrence is as safe as
# the sweep that it saves.
import _measured as measured
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import softmax as scipy_softmax

import cupyflash


def online_states(x):
    """(m, d) after each score."""
    m, d = -np.inf, 0.0
    for score in x:
        m_new = max(m, score)
        d = d * np.exp(m - m_new) + np.exp(score - m_new)
        m = m_new
        yield m, d


def online(x):
    *_, (m, d) = online_states(x)  # first sweep
    return np.exp(x - m) / d  # second sweep


x = np.array([1.0, 3.0, -2.0, 2.5, 6.0, 4.0, 6.0, -1.0])
for score, (m, d) in zip(x, online_states(x), strict=True):
    print(f"x = {score:4.1f}   m = {m:.1f}   d = {d:.4f}")
assert np.allclose(online(x), cupyflash.softmax(x, method="online"))
assert np.isclose(m + np.log(d), cupyflash.logsumexp(x))

# %%
# Where the maximum rises, the sum so far shrinks; in between, it only grows.

walk = np.cumsum(np.random.default_rng(4).standard_normal(120) + 0.1)
states = np.array(list(online_states(walk)))
fig, (top, bottom) = plt.subplots(2, figsize=(7, 4), sharex=True, layout="constrained")
top.plot(walk, ".", ms=4, label="x")
top.step(np.arange(len(walk)), states[:, 0], where="post", label="m")
top.legend()
bottom.plot(states[:, 1], color="tab:green", label="d")
rises = np.flatnonzero(np.diff(states[:, 0]) > 0) + 1
bottom.plot(rises, states[rises, 1], "v", color="tab:red", label="rescaled")
bottom.set_xlabel("scores read")
bottom.legend()

# %%
# Step by step
# ------------
# Use the arrow keys to go forward and back. You can type in your own numbers.
#
# .. raw:: html
#
#    <iframe src="../../_static/steps.html#online" title="Online softmax in steps"
#            style="width: 100%; height: 600px; border: 1px solid #8888"></iframe>
#
# Parts can be merged
# -------------------
# A step does not have to take just one score. Two parts of a row, each with its
# :math:`(m, d)`, are joined by the same formula. So threads can work on parts of a row
# and combine them at the end, in any order.


def merge(a, b):
    m = max(a[0], b[0])
    return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)


parts = [list(online_states(part))[-1] for part in np.split(walk, 4)]
left_to_right = merge(merge(merge(parts[0], parts[1]), parts[2]), parts[3])
as_a_tree = merge(merge(parts[3], parts[1]), merge(parts[2], parts[0]))
for way, (m, d) in {"in turn": left_to_right, "as a tree": as_a_tree}.items():
    print(f"{way:9}  m = {m:.6f}   d = {d:.6f}")
assert np.allclose(left_to_right, states[-1])
assert np.allclose(as_a_tree, states[-1])

# %%
# Why two sweeps, and when one is enough
# --------------------------------------
# The first weight, :math:`e^{x_1 - m_N} / d_N`, needs the last score. It cannot be
# written before all of the row was read, so the row is read again: N results wait for
# two numbers.
#
# Attention does not want the weights. It wants :math:`o = \sum_j y_j v_j`, which is one
# vector however long the row is, and a vector can be corrected as d is:
#
# .. math:: o_j = o_{j-1} \, \frac{d_{j-1} \, e^{m_{j-1} - m_j}}{d_j}
#           + \frac{e^{x_j - m_j}}{d_j} \, v_j.
#
# The first factor takes the old denominator out and puts the new one in. After each key
# :math:`o_j` is the exact attention over the keys so far, and the weights were never
# stored. This is ``method="online"`` of attention: one sweep.


def online_attention(q, keys, values):
    m, d, o = -np.inf, 0.0, np.zeros(values.shape[1])
    for k, v in zip(keys, values, strict=True):
        s = q @ k / np.sqrt(len(q))
        m_new = max(m, s)
        kept, added = d * np.exp(m - m_new), np.exp(s - m_new)
        d = kept + added
        o = o * (kept / d) + v * (added / d)
        m = m_new
    return o


q, k, v = np.random.default_rng(1).standard_normal((3, 50, 8))
for seen in (1, 10, 50):
    mine = online_attention(q[0], k[:seen], v[:seen])
    own = cupyflash.attention(q[:1], k[:seen], v[:seen], method="online")[0]
    print(f"{seen:2} keys: largest difference {np.abs(mine - own).max():.0e}")
    assert np.allclose(mine, own)

# %%
# What it costs
# -------------
# A saved sweep should show most with a few long rows: 16 rows of a million scores.

scores = np.random.default_rng(2).standard_normal((16, 2**20), dtype=np.float32)
exact = scipy_softmax(scores.astype(np.float64), axis=-1)
calls = measured.by_method(cupyflash.softmax, scores, axis=-1)
calls["SciPy"] = lambda: scipy_softmax(scores, axis=-1)
rows = measured.measure(calls, exact, of_each=True)
measured.print_rows(rows)
measured.check_claims(rows, plain="safe")
measured.check_claims(rows, plain="safe", fused="online")

# %%
# And on the GPU, 64 rows of a million:

report = measured.newest("softmax")
case = "64 x 1048576 float32"
print(measured.source(report))
timed = [r for r in report["rows"] if r["case"] == case and r.get("seconds")]
for r in timed:
    name, time = r["provider"], 1e6 * r["seconds"]
    print(f"{name:6} {time:7.0f} us, {r['of_copy']:4.0%} of a copy's speed")
seconds = {r["provider"]: r["seconds"] for r in timed}
faster = seconds["safe"] / seconds["online"]
print(f"online : safe, {faster:.2f} times faster for {4 / 3:.2f} times less traffic")

# %%
# On these rows, too long for the chip, online softmax does pay on the GPU. ``tiled``
# cannot hold them either, but it reads each part a second time while the L2 cache still
# has it. On a CPU the sweep that online softmax saves is cheap, and the correction is
# not.
#
# So softmax by itself gains little. The recurrence is worth the trouble for what it
# makes possible on the next page.
