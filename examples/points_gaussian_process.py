"""
A Gaussian process by conjugate gradients
=========================================

The mean of a Gaussian process is the solution of a linear system with its kernel
matrix. The matrix is never stored: :class:`cupyflash.points.KernelOperator` multiplies
by it, and SciPy's ``cg`` does the rest, helped by a preconditioner of a few columns.
Here two thirds of an image's pixels are missing, and the process fills them in from the
positions of the others.

Data: ``coins`` from scikit-image, of the Brooklyn Museum, with no known copyright
restrictions. Compared with: scikit-learn's ``GaussianProcessRegressor``, which
factorises the matrix. Run it: ``python examples/points_gaussian_process.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from skimage import data
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from cupyflash import points

SIDE = choose(tiny=24, cpu=96, gpu=300)
PEERS = choose(tiny=[100, 150], cpu=[500, 1500], gpu=[1500, 5000])
KERNEL = {"kernel": "matern32", "bandwidth": 6.0}
NOISE = 0.01

# %%
# Known pixels and their places
# -----------------------------

image = data.coins()[20 : 20 + SIDE, 20 : 20 + SIDE] / 255.0
places = np.stack(np.indices(image.shape), axis=-1).reshape(-1, 2).astype(float)
known = np.random.default_rng(0).random(len(places)) < 1 / 3
x, target = places[known], image.reshape(-1)[known]
centre = target.mean()

# %%
# The solution
# ------------


def solve(x, target):
    """Weights of the kernels round all x, and the number of products."""
    if xp is np:
        from scipy.sparse.linalg import cg
    else:
        from cupyx.scipy.sparse.linalg import cg
    matrix, steps = points.KernelOperator(x, x, diagonal=NOISE, **KERNEL), []
    found, info = cg(
        matrix,
        target,
        M=matrix.preconditioner(200, rng=0),
        callback=steps.append,
        rtol=1e-6,
    )
    assert info == 0
    return found, len(steps)


(weights, steps), seconds = timed(solve, xp.asarray(x), xp.asarray(target - centre))
print(f"{device_name()}: {len(x):,} points, {steps} products, {seconds:.2f} s")
filled = centre + to_numpy(
    points.kernel_sum(xp.asarray(places), xp.asarray(x), weights, **KERNEL)
)
left = np.abs(filled - image.reshape(-1))[~known].mean()
print(f"missing pixels are off by {left:.3f}; their mean would be off by "
      f"{np.abs(image.reshape(-1) - centre)[~known].mean():.3f}")  # fmt: skip

# %%
# Compared with scikit-learn
# --------------------------
# On some of the pixels. A factorisation takes time with the cube of their number and
# memory with the square, but it is a single, very fast operation of LAPACK. On two
# cores it took 0.8 s for 3,071 points and 22 s for 11,857. The operator took 10 s for
# 3,071, and for 11,857 a single product takes 0.6 s, of which a solution needs
# hundreds. So on a CPU **use scikit-learn while its matrix fits in memory**, at every
# size. It also gives you standard deviations and learns the bandwidth. The operator is
# for what does not fit: 50,000 points would need a matrix of 20 GB.

process = GaussianProcessRegressor(
    Matern(6.0, "fixed", nu=1.5), alpha=NOISE, optimizer=None
)
for size in PEERS:
    some = x[:size], target[:size] - centre
    _, theirs = host_timed(process.fit, *some)
    expected = process.predict(places[:500])
    (few, _), ours = timed(solve, *map(xp.asarray, some))
    found = points.kernel_sum(
        xp.asarray(places[:500]), xp.asarray(some[0]), few, **KERNEL
    )
    error = np.abs(to_numpy(found) - expected).max()
    print(f"{len(some[0]):,} points: {ours:.2f} s, scikit-learn {theirs:.2f} s, "
          f"predictions differ by {error:.1e}")  # fmt: skip
    assert error < 1e-3

# %%
# The picture
# -----------

holes = np.where(known.reshape(image.shape), image, np.nan)
fig, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for axis, shown, title in zip(
    axes,
    (holes, filled.reshape(image.shape), image),
    ("known", "filled in", "as it was"),
    strict=True,
):
    axis.imshow(shown, cmap="gray", vmin=0, vmax=1)
    axis.set_title(title)
    axis.set_axis_off()
plt.show()
