"""
Density of colours with SciPy's interface
=========================================

:class:`cupyflash.points.GaussianKDE` is a drop-in replacement for
``scipy.stats.gaussian_kde``. Its sums are exact, it never stores the matrix of all
pairs, and it takes CuPy arrays too. It also has the gradient of the density, which
leads from each colour of a photograph to the nearest crowded one.

Data: ``china.jpg`` by danielbuechele, from Flickr and under CC BY 2.0, as scikit-learn
has it. Compared with: SciPy's ``gaussian_kde``, and scikit-learn's ``KernelDensity`` at
its default and with a tolerance. Run it: ``python examples/points_density.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.stats import gaussian_kde
from sklearn.datasets import load_sample_image
from sklearn.neighbors import KernelDensity

from cupyflash import points

SIZES = choose(tiny=[300], cpu=[1000, 8000], gpu=[1000, 8000, 200_000])
PEERS = 1000  # points at which the others are evaluated; their time grows with them

# %%
# The log density of each pixel
# -----------------------------
# At each size, all points are compared with all points. scikit-learn's kernels are
# round, so it gets whitened colours. With a tolerance it may stop early; that helps
# where kernels are narrow and three digits are enough, and is worth a try there.

image = load_sample_image("china.jpg").reshape(-1, 3) / 255.0
image = np.random.default_rng(0).permutation(image).T


def peers(pixels):
    """Functions that give the log density at some points by other libraries."""
    theirs = gaussian_kde(pixels)
    white = np.linalg.solve(theirs.cho_cov, pixels).T
    shift = np.log(np.diag(theirs.cho_cov)).sum()

    def tree(rtol):
        density = KernelDensity(bandwidth=1.0, rtol=rtol).fit(white)
        return density.score_samples(white[:PEERS]) - shift

    return {
        "gaussian_kde": lambda: theirs.logpdf(pixels[:, :PEERS]),
        "KernelDensity": lambda: tree(0.0),
        "KernelDensity(rtol=1e-3)": lambda: tree(1e-3),
    }


for size in SIZES:
    pixels = image[:, :size]
    kde = points.GaussianKDE(xp.asarray(pixels))
    ours, seconds = timed(kde.logpdf, kde.dataset)
    print(f"{device_name()}, {size:,} points: {seconds:.3f} s")
    for name, call in peers(pixels).items():
        result, took = host_timed(call)
        error = np.abs(result - to_numpy(ours)[:PEERS]).max()
        print(f"  {name}: {took * size / len(result):.3f} s, differs by {error:.1e}")
        assert error < (1e-9 if "rtol" not in name else 1e-2)

# %%
# Where the gradient leads
# ------------------------
# A step along the gradient of the log density, times the kernel's covariance, is a step
# of mean shift, and never lowers the density.

place = kde.dataset[:, :500]
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
