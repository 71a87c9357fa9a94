"""
Kernel regression of a photograph
=================================

One pixel in ten of a photograph is known, and kernel regression fills in the others.
The Nadaraya-Watson estimate at *x* is the mean of all known values with the weights

.. math:: \\exp(-|x - x_j|^2 / (2 h^2)).

Expanding the square leaves, up to a factor that all *j* share,
:math:`\\exp(x \\cdot x_j / h^2 - |x_j|^2 / (2 h^2))`: a softmax over scaled dot
products with a bias for each key. The matrix of all pairs is never made.

Data: ``skimage.data.chelsea()``. Peers: scikit-learn, SciPy.
Run it: ``python examples/kernel_regression.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.interpolate import griddata
from skimage import data, metrics, transform
from sklearn.neighbors import KNeighborsRegressor

import cupyflash

HEIGHT, WIDTH = choose(tiny=(30, 45), cpu=(100, 150), gpu=(300, 450))
WIDTHS = np.array([0.6, 0.8, 1.0, 1.3, 1.7, 2.2, 3.0])  # of the kernel, in pixels

clean = transform.resize(data.chelsea(), (HEIGHT, WIDTH), anti_aliasing=True)
rng = np.random.default_rng(0)
known = rng.choice(HEIGHT * WIDTH, HEIGHT * WIDTH // 10, replace=False)

# %%
# Points
# ------
# Positions in pixels, from the middle of the image, in float64: the expanded square is
# a difference of large numbers where the image is much larger than the kernel.

grid = np.stack(np.indices((HEIGHT, WIDTH)), axis=-1).reshape(-1, 2)
everywhere = xp.asarray(grid - (np.array([HEIGHT, WIDTH]) - 1) / 2)
points = everywhere[xp.asarray(known)]
values = xp.asarray(clean.reshape(-1, 3)[known])


def regress(x, h):
    """The estimate at each x, and the log of the sum of its weights."""
    bias = -(points**2).sum(axis=1) / (2 * h**2)
    mean, lse = cupyflash.attention(
        x, points, values, scale=1 / h**2, bias=bias, return_lse=True
    )
    return mean, lse - (x**2).sum(axis=1) / (2 * h**2)


# %%
# The width, by leaving one out
# -----------------------------
# At a known point the point itself has weight 1, and exp(lse) is the sum of all. So the
# estimate without it needs no other pass.


def leave_one_out_error(h):
    """Mean squared error at the known points, each estimated from the others."""
    mean, lse = regress(points, h)
    own = xp.minimum(xp.exp(-lse), 1 - 1e-9)[:, None]
    others = (mean - own * values) / (1 - own)
    return float(((others - values) ** 2).mean())


errors = [leave_one_out_error(h) for h in WIDTHS]
best = WIDTHS[np.argmin(errors)]

(estimate, _), seconds = timed(regress, everywhere, best)
ours = to_numpy(estimate).reshape(clean.shape)
nearest = griddata(
    to_numpy(points), to_numpy(values), to_numpy(everywhere), method="nearest"
).reshape(clean.shape)


def quality(image):
    """PSNR in dB."""
    return metrics.peak_signal_noise_ratio(clean, image, data_range=1)


print(f"{device_name()}: {HEIGHT * WIDTH * len(known):.1e} pairs, h = {best} pixels")
print(f"SciPy, nearest neighbour  {quality(nearest):6.2f} dB")
print(f"cupyflash                 {quality(ours):6.2f} dB  {seconds:.3f} s")

figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
sparse = np.ones_like(clean)
sparse.reshape(-1, 3)[known] = to_numpy(values)
for axis, image, title in zip(
    axes.flat,
    (sparse, nearest, ours),
    (
        "known: one in ten",
        f"nearest: {quality(nearest):.1f} dB",
        f"kernel regression: {quality(ours):.1f} dB",
    ),
    strict=False,
):
    axis.imshow(np.clip(image, 0, 1))
    axis.set_title(title)
    axis.set_axis_off()
axes[1, 1].plot(WIDTHS, np.sqrt(errors), "o-")
axes[1, 1].set(xlabel="h, pixels", ylabel="error, leaving one out")

# %%
# The same numbers as scikit-learn
# --------------------------------
# A regressor of nearest neighbours with all points as neighbours, weighted by the
# kernel, is the same estimate.

few = rng.choice(HEIGHT * WIDTH, 500, replace=False)
peer = KNeighborsRegressor(
    n_neighbors=len(known),
    weights=lambda distance: np.exp(-(distance**2) / (2 * best**2)),
    algorithm="brute",
).fit(to_numpy(points), to_numpy(values))
expected, peer_seconds = host_timed(peer.predict, to_numpy(everywhere)[few])
difference = abs(ours.reshape(-1, 3)[few] - expected).max()
print(f"scikit-learn              500 pixels in {peer_seconds:.3f} s")
print(f"largest difference: {difference:.1e}")
assert difference < 1e-9

plt.show()
