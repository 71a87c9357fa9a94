"""Kernel regression of 20,000 noisy points, as one call of attention.

Run it: python examples/kernel_regression.py

The Nadaraya-Watson estimate at x is the mean of all y_j with the weights
exp(-|x - x_j|^2 / (2 h^2)). Expanding the square leaves, up to a factor that all j
share, exp(x . x_j / h^2 - |x_j|^2 / (2 h^2)): a softmax over scaled dot products plus a
bias for each key. The matrix of all pairs is never made.

Then the width is learned, as a matrix of its own for the plane: attention_vjp gives the
gradient of the leave-one-out error in float64, which is compared with finite
differences.
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


# --- learn the width -----------------------------------------------------------------

few = 1500
x, y = points[:few], values[:few]
others = ~xp.eye(few, dtype=bool)  # each point is estimated from all others


def error_and_gradient(metric):
    """Mean squared leave-one-out error with distances |(x - x_j) metric|."""
    z = x @ metric
    options = {"scale": 1.0, "bias": -(z**2).sum(axis=1) / 2, "mask": others}
    out, lse = cupyflash.attention(z, z, y, return_lse=True, **options)
    dout = 2 * (out - y) / few
    grads = cupyflash.attention_vjp(dout, z, z, y, out, lse, need_dbias=True, **options)
    dz = grads.dq + grads.dk - grads.dbias[:, None] * z
    return ((out - y) ** 2).mean(), x.T @ dz


metric = xp.eye(2) / 0.3
error, gradient = error_and_gradient(metric)
step = 1e-5
for i, j in np.ndindex(2, 2):
    moved = xp.zeros((2, 2))
    moved[i, j] = step
    ends = [error_and_gradient(metric + sign * moved)[0] for sign in (1, -1)]
    difference = float(ends[0] - ends[1]) / (2 * step)
    assert abs(difference - float(gradient[i, j])) < 1e-8, (i, j, difference)
print("the gradient agrees with finite differences to 1e-8")

print(f"leave-one-out error with width 0.3: {float(error):.4f}")
for _ in range(25):
    error, gradient = error_and_gradient(metric)
    metric -= 400 * gradient
widths = 1 / np.linalg.svd(metric if xp is np else metric.get())[1]
print(f"with widths {widths[0]:.3f} and {widths[1]:.3f}, learned: {float(error):.4f}")
