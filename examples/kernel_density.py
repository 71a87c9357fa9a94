"""
Density of colours, and its peaks
=================================

Which colours is a photograph made of? Its pixels are points in the colour cube, and a
kernel density says how crowded each place is:

.. math:: p(x) = \\frac{1}{n (h \\sqrt{2\\pi})^3} \\sum_j
          \\exp\\left(-\\frac{|x - y_j|^2}{2h^2}\\right)

Attention with all points as keys and as values gives the mean *m(x)* of the points
under these weights, and the log of its denominator is the log density up to known
terms. The gradient of the log density is :math:`(m(x) - x) / h^2`, so it comes for
free. Moving each point to its mean over and over climbs to the peaks (mean shift).

Data: ``china.jpg`` by danielbuechele, from Flickr and under CC BY 2.0, as scikit-learn
has it. Compared with: scikit-learn's ``KernelDensity`` at its default and with a
tolerance, and SciPy's ``gaussian_kde``. Run it: ``python examples/kernel_density.py``
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.stats import gaussian_kde
from sklearn.datasets import load_sample_image
from sklearn.neighbors import KernelDensity

import cupyflash

SIZES = choose(tiny=[200], cpu=[1000, 10_000], gpu=[1000, 10_000, 100_000])
CLIMBERS = choose(tiny=50, cpu=300, gpu=2000)
PEERS = 1000  # points at which the others are asked; their time grows with them

# %%
# The density and its gradient
# ----------------------------
# Colours are whitened, so that one width suits all directions. The width is given by
# Scott's rule, the default of ``gaussian_kde``.

pixels = load_sample_image("china.jpg").reshape(-1, 3) / 255.0
root = np.linalg.cholesky(np.cov(pixels.T))
white = np.linalg.solve(root, (pixels - pixels.mean(axis=0)).T).T
white = np.random.default_rng(0).permutation(white)


def log_density(points, data, width):
    """Log density at each point, and its gradient."""
    bias = -(data**2).sum(axis=1) / (2 * width**2)
    mean, lse = cupyflash.attention(
        points, data, data, scale=width**-2, bias=bias, return_lse=True
    )
    n, d = data.shape
    norm = np.log(n) + d * np.log(width * np.sqrt(2 * np.pi))
    density = lse - (points**2).sum(axis=1) / (2 * width**2) - norm
    return density, (mean - points) / width**2


# %%
# Compared with other libraries
# -----------------------------
# All in float64. The others give no gradient. A tree lumps far points together, so with
# a tolerance it can skip work where the kernels are narrow. In one or two dimensions,
# if three digits are enough, try the tree first. Without a tolerance, and in more
# dimensions, it has to visit nearly all pairs, and the exact sum is faster.


def peers(data, points, width):
    """Log density at some points by other libraries, each with its seconds."""

    def tree(rtol):
        return KernelDensity(bandwidth=width, rtol=rtol).fit(data).score_samples(points)

    return {
        "KernelDensity": host_timed(tree, 0.0),
        "KernelDensity(rtol=1e-3)": host_timed(tree, 1e-3),
        # It whitens again, by the covariance of these points.
        "gaussian_kde": host_timed(lambda: gaussian_kde(data.T).logpdf(points.T)),
    }


print(device_name())
for n in SIZES:
    host, width = np.ascontiguousarray(white[:n]), n ** (-1 / 7)
    data = xp.asarray(host)
    (ours, _), seconds = timed(log_density, data, data, width)
    some = host[:PEERS]
    print(f"{n:,} points: {seconds:.3f} s with the gradient")
    for name, (theirs, peer_seconds) in peers(host, some, width).items():
        error = abs(theirs - to_numpy(ours)[: len(some)]).max()
        scaled = peer_seconds * n / len(some)
        print(f"  {name}: {scaled:.3f} s, log density differs by {error:.1e}")
        assert error < {"KernelDensity": 1e-10, "gaussian_kde": 0.5}.get(name, 1e-2)

# %%
# The palette
# -----------
# Some pixels climb to their peaks. The places where they meet are the main colours of
# the photograph.

width = SIZES[-1] ** (-1 / 7)
data = xp.asarray(white[: SIZES[-1]])
place = data[:CLIMBERS]
heights = []
for _ in range(30):
    density, gradient = log_density(place, data, width)
    heights.append(float(density.mean()))
    place = place + width**2 * gradient
assert all(b > a - 1e-9 for a, b in pairwise(heights))

found = to_numpy(place)
_, first, counts = np.unique(
    np.round(found / width), axis=0, return_index=True, return_counts=True
)
largest = first[counts.argsort()[::-1][:8]]
palette = np.clip(found[largest] @ root.T + pixels.mean(axis=0), 0, 1)
fig, axes = plt.subplots(
    1, 2, figsize=(9, 3), layout="constrained", width_ratios=[2, 1]
)
axes[0].imshow(load_sample_image("china.jpg"))
axes[0].set_axis_off()
axes[1].imshow(palette[:, None], aspect="auto")
axes[1].set_title("peaks, most visited first")
axes[1].set_axis_off()
plt.show()
