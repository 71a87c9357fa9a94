"""
Density of colours with SciPy's interface
=========================================

:class:`cupyflash.points.GaussianKDE` is ``scipy.stats.gaussian_kde`` on sums that skip
nothing and store nothing of the matrix of all pairs, and that take CuPy arrays, too.
What it adds is the gradient of the density, which leads from each colour of a
photograph to the next crowded one.

Data: ``china.jpg`` of scikit-learn. Peers: SciPy's ``gaussian_kde`` and scikit-learn's
``KernelDensity``. Run it: ``python examples/points_density.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.stats import gaussian_kde
from sklearn.datasets import load_sample_image
from sklearn.neighbors import KernelDensity

from cupyflash import points

SIZE = choose(tiny=300, cpu=8000, gpu=200_000)
PEERS = min(SIZE, 1000)  # points at which the others are asked

# %%
# The log density of each pixel
# -----------------------------

pixels = load_sample_image("china.jpg").reshape(-1, 3) / 255.0
pixels = np.random.default_rng(0).permutation(pixels)[:SIZE].T
kde = points.GaussianKDE(xp.asarray(pixels))
ours, seconds = timed(kde.logpdf, kde.dataset)
print(f"{device_name()}: {SIZE:,} points at {SIZE:,} points in {seconds:.2f} s")

# %%
# Beside other libraries
# ----------------------
# scikit-learn's kernels are round: it is given whitened colours.

theirs = gaussian_kde(pixels)
some = pixels[:, :PEERS]
white = np.linalg.solve(theirs.cho_cov, pixels)
tree = KernelDensity(bandwidth=1.0).fit(white.T)
shift = np.log(np.diag(theirs.cho_cov)).sum()
for name, call in {
    "gaussian_kde": lambda: theirs.logpdf(some),
    "KernelDensity": lambda: tree.score_samples(white.T[:PEERS]) - shift,
}.items():
    result, took = host_timed(call)
    error = np.abs(result - to_numpy(ours)[:PEERS]).max()
    print(f"{name}: {took * SIZE / PEERS:.2f} s, differs by {error:.1e}")
    assert error < 1e-9

# %%
# Where the gradient leads
# ------------------------
# A step along the gradient of the log density, by the kernel's covariance, is a step
# of mean shift: it never goes down.

place = kde.dataset[:, : min(SIZE, 500)]
covariance = xp.asarray(kde.covariance)
heights = [kde.logpdf(place)]
for _ in range(20):
    place = place + covariance @ kde.gradient(place, log=True)
    heights.append(kde.logpdf(place))
heights = to_numpy(xp.stack(heights))
assert (np.diff(heights, axis=0) > -1e-9).all()

start, end = pixels[:, : heights.shape[1]], np.clip(to_numpy(place), 0, 1)
fig, axes = plt.subplots(1, 2, figsize=(8, 3.5), sharex=True, sharey=True)
for axis, at, title in zip(
    axes, (start, end), ("pixels", "after 20 steps"), strict=True
):
    axis.scatter(at[0], at[2], c=np.clip(at.T, 0, 1), s=12)
    axis.set(title=title, xlabel="red", ylabel="blue")
plt.show()
