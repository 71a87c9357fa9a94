"""Kernel regression of 20,000 noisy points, as one call of attention.

Run it: python examples/kernel_regression.py

The Nadaraya-Watson estimate at x is the mean of all y_j with the weights
exp(-|x - x_j|^2 / (2 h^2)). Expanding the square leaves, up to a factor that all j
share, exp(x . x_j / h^2 - |x_j|^2 / (2 h^2)): a softmax over scaled dot products plus a
bias for each key. The matrix of all pairs is never made.
"""

import numpy as np

import cupyflash

try:
    import cupy

    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np

rng = np.random.default_rng(0)
points = xp.asarray(rng.uniform(-1, 1, (20_000, 2)))
truth = xp.sin(4 * points[:, 0]) * xp.cos(3 * points[:, 1])
noise = xp.asarray(rng.standard_normal(len(points)))
values = (truth + 0.5 * noise)[:, None]

width = 0.07
estimate = cupyflash.attention(
    points,
    points,
    values,
    scale=1 / width**2,
    bias=-(points**2).sum(axis=1) / (2 * width**2),
)[:, 0]


def root_mean_square(x):
    """Size of an error."""
    return float(xp.sqrt((x**2).mean()))


print(f"{xp.__name__}: {len(points)} points, {len(points) ** 2:.1e} pairs")
print(f"error of the points:     {root_mean_square(0.5 * noise):.3f}")
print(f"error of the regression: {root_mean_square(estimate - truth):.3f}")
