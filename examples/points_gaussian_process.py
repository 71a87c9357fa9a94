"""
A Gaussian process by conjugate gradients
=========================================

The mean of a Gaussian process solves a linear system of its kernel matrix. The matrix
is never made: :class:`cupyflash.points.KernelOperator` multiplies by it, and SciPy's
``cg`` does the rest, helped by a preconditioner of a few columns. Here two thirds of an
image's pixels are missing, and the process, of the places of the others, fills them in.

Data: ``coins`` of scikit-image. Peer: scikit-learn's ``GaussianProcessRegressor``,
which factorises the matrix. Run it: ``python examples/points_gaussian_process.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from skimage import data
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from cupyflash import points

SIDE = choose(tiny=24, cpu=96, gpu=300)
PEER = choose(tiny=150, cpu=1500, gpu=5000)
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

        tolerance = {"rtol": 1e-6}
    else:
        from cupyx.scipy.sparse.linalg import cg

        tolerance = {"tol": 1e-6}
    matrix, steps = points.KernelOperator(x, x, diagonal=NOISE, **KERNEL), []
    found, info = cg(
        matrix,
        target,
        M=matrix.preconditioner(200, rng=0),
        callback=steps.append,
        **tolerance,
    )
    assert info == 0
    return found, len(steps)


(weights, steps), seconds = timed(solve, xp.asarray(x), xp.asarray(target - centre))
print(f"{device_name()}: {len(x):,} points, {steps} products, {seconds:.2f} s")
filled = centre + to_numpy(
    points.kernel_sum(xp.asarray(places), xp.asarray(x), weights, **KERNEL)
)
left = np.abs(filled - image.reshape(-1))[~known].mean()
print(f"missing pixels are off by {left:.3f}, the mean by "
      f"{np.abs(image.reshape(-1) - centre)[~known].mean():.3f}")  # fmt: skip

# %%
# Beside scikit-learn
# -------------------
# On some of the pixels: its matrix has their number squared.

process = GaussianProcessRegressor(
    Matern(6.0, "fixed", nu=1.5), alpha=NOISE, optimizer=None
)
some = x[:PEER], target[:PEER] - centre
_, theirs = host_timed(process.fit, *some)
expected = process.predict(places[:500])
(few, _), ours = timed(solve, *map(xp.asarray, some))
found = points.kernel_sum(xp.asarray(places[:500]), xp.asarray(some[0]), few, **KERNEL)
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
