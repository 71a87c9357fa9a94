"""
Colour transfer by optimal transport
====================================

The colours of one photograph move to those of another, each as little as possible:
entropic optimal transport between two clouds of colours in the RGB cube, with squared
distances as costs. Sinkhorn's iteration in the log domain alternates

.. math:: f_i = -\\varepsilon \\log \\frac{1}{n} \\sum_j
          \\exp\\frac{g_j - |x_i - y_j|^2}{\\varepsilon}

and the same for *g*, with the clouds swapped. With the square expanded, the sum is the
softmax denominator of attention between *x* and *y* with a bias for each *y*, so its
logarithm is the lse. The plan, with an entry for each pair of colours, is never built.
A colour then moves to the mean of its targets: attention with colours as values.

This page writes the iteration out. :func:`cupyflash.points.sinkhorn` has it ready-made.

Data: ``china.jpg`` by danielbuechele and ``flower.jpg`` by vultilion, both from Flickr
and under CC BY 2.0, as scikit-learn has them; the colours of the first are changed
here. Compared with: POT. Run it: ``python examples/colour_transfer.py``
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import ot
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from sklearn.datasets import load_sample_image

import cupyflash

NUM = choose(tiny=300, cpu=1500, gpu=50_000)  # colours drawn from each photograph
STEP = choose(tiny=8, cpu=3, gpu=1)  # every so many pixels of the picture
EPSILON = 0.01  # in units of squared colours, which span [0, 1]
# Coarse to fine: a few steps with a larger epsilon spare many with the small one.
SCHEDULE = [0.3] * 5 + [0.1] * 10 + [0.03] * 20 + [EPSILON] * 65

# %%
# Sinkhorn's iteration
# --------------------
# Colours are centred in the middle of the cube, for float32.


def soft_minimum(x, y, potential, epsilon):
    """-epsilon log mean_j exp((potential_j - |x_i - y_j|^2) / epsilon), for all i."""
    bias = (potential - (y**2).sum(axis=1)) / epsilon
    nothing = xp.zeros((len(y), 1), y.dtype)  # only the lse is wanted
    _, lse = cupyflash.attention(
        x, y, nothing, scale=2 / epsilon, bias=bias, return_lse=True
    )
    return (x**2).sum(axis=1) - epsilon * (lse - math.log(len(y)))


def sinkhorn(x, y, schedule):
    """Potentials of x and y, and how far the weights of y were off at each step."""
    f, g, off = xp.zeros(len(x), x.dtype), xp.zeros(len(y), y.dtype), []
    for epsilon in schedule:
        new = soft_minimum(y, x, f, epsilon)
        off.append(abs(xp.exp((g - new) / epsilon) - 1).mean())
        g = new
        f = soft_minimum(x, y, g, epsilon)
    return f, g, xp.stack(off)


def move(x, y, g):
    """Where colours x go: the mean of y under the plan, also for x that is new."""
    bias = (g - (y**2).sum(axis=1)) / EPSILON
    return cupyflash.attention(x, y, y, scale=2 / EPSILON, bias=bias)


# %%
# Two photographs
# ---------------
# The plan is found for colours drawn at random, and then applied to every pixel.

rng = np.random.default_rng(0)
source, target = (
    load_sample_image(name)[::STEP, ::STEP] / np.float32(255) - np.float32(0.5)
    for name in ("china.jpg", "flower.jpg")
)
x, y = (
    xp.asarray(rng.permutation(image.reshape(-1, 3))[:NUM])
    for image in (source, target)
)
(f, g, off), seconds = timed(sinkhorn, x, y, SCHEDULE)
moved, move_seconds = timed(move, xp.asarray(source.reshape(-1, 3)), y, g)

pairs = len(x) * len(y)
print(f"{device_name()}: {len(x):,} colours to {len(y):,}, epsilon {EPSILON}")
print(f"a plan would have {pairs:.1e} entries, {pairs * 4 / 2**30:.2f} GiB in float32")
print(f"{len(SCHEDULE)} iterations       {seconds:8.3f} s")
print(f"{source[..., 0].size:,} pixels moved {move_seconds:8.3f} s")
print(f"weights are off by {float(off[-1]):.1e} of themselves, in the mean")

figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
result = to_numpy(moved).reshape(source.shape)
for axis, image, title in zip(
    axes.flat, (source, target, result), ("source", "colours", "moved"), strict=False
):
    axis.imshow(np.clip(image + 0.5, 0, 1))
    axis.set_title(title)
    axis.set_axis_off()
axes[1, 1].semilogy(np.arange(1, len(off)), to_numpy(off)[1:])
axes[1, 1].set(xlabel="iteration", ylabel="weights are off by")

# %%
# The same numbers as POT
# -----------------------
# The same iteration on fewer colours. POT keeps costs and plan as matrices in float64;
# ours runs in float32 and in float64. POT's default, ``method="sinkhorn"``, works with
# exponentials instead of logarithms, and multiplies by one matrix in each step. As long
# as that matrix fits in memory, and epsilon is not so small that its entries vanish, it
# is the fastest, and you should use it. For 50,000 colours the matrix would take 20 GB,
# and then the method above is the one that works.

few, steps = min(NUM, 800), 20
x64, y64 = (to_numpy(z[:few]).astype(np.float64) for z in (x, y))
weights = np.full(few, 1 / few)


def plan_of_pot(method):
    """The plan, as a matrix."""
    costs = ot.dist(x64, y64, "sqeuclidean")
    return ot.sinkhorn(
        weights,
        weights,
        costs,
        EPSILON,
        method=method,
        numItermax=steps,
        stopThr=0,
        warn=False,
    )


_, default_seconds = host_timed(plan_of_pot, "sinkhorn")
plan, peer_seconds = host_timed(plan_of_pot, "sinkhorn_log")
expected = plan @ y64 / plan.sum(axis=1, keepdims=True)


def ours(dtype):
    """The same from first to last."""
    a, b = xp.asarray(x64, dtype), xp.asarray(y64, dtype)
    _, potential, _ = sinkhorn(a, b, [EPSILON] * steps)
    return move(a, b, potential)


print(f"{few} colours, {steps} iterations:")
print(
    f"  POT: {default_seconds:.3f} s by default, {peer_seconds:.3f} s with logarithms"
)
for dtype, bound in ((np.float32, 1e-3), (np.float64, 1e-10)):
    result, seconds = timed(ours, dtype)
    error = abs(to_numpy(result) - expected).max()
    name = np.dtype(dtype).name
    print(f"  {name}: {seconds:.3f} s, largest difference of a colour {error:.1e}")
    assert error < bound

plt.show()
