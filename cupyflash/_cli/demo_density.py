"""Exact kernel density and its gradient: every point attends to every other.

The density at x of a Gaussian kernel of width h over points y_j is

    p(x) = 1 / (n (h sqrt(2 pi))^d)  sum_j exp(-|x - y_j|^2 / 2 h^2)

and the gradient of its logarithm is (m(x) - x) / h^2, where m(x) is the mean of the y_j
under the same weights. Attention with the points as keys and as values returns m(x),
and the log of its denominator is log p(x) but for known terms.
"""

import numpy as np

from cupyflash._attention.api import attention

DIMENSIONS = 6


def sample(rng, number):
    """Points of a mixture of eight normals, (number, 6), whitened: covariance 1."""
    centres = 2 * rng.standard_normal((8, DIMENSIONS))
    points = centres[rng.integers(8, size=number)]
    points += rng.standard_normal((number, DIMENSIONS))
    points -= points.mean(axis=0)
    root = np.linalg.cholesky(np.cov(points.T))
    return np.ascontiguousarray(np.linalg.solve(root, points.T).T)


def scott(points):
    """Scott's rule, as scipy.stats.gaussian_kde applies it to whitened points."""
    number, dimensions = points.shape
    return number ** (-1 / (dimensions + 4))


def log_density(points, data, width):
    """Log density at `points` and its gradient, in float64 on NumPy or CuPy."""
    number, dimensions = data.shape
    bias = -(data**2).sum(axis=1) / (2 * width**2)
    mean, lse = attention(
        points, data, data, scale=width**-2, bias=bias, return_lse=True
    )
    known = (points**2).sum(axis=1) / (2 * width**2)
    norm = np.log(number) + dimensions * np.log(width * np.sqrt(2 * np.pi))
    return lse - known - norm, (mean - points) / width**2


def by_scikit_learn(points, data, width, rtol=0.0):
    """Log density by sklearn.neighbors.KernelDensity."""
    from sklearn.neighbors import KernelDensity

    return KernelDensity(bandwidth=width, rtol=rtol).fit(data).score_samples(points)


def by_scipy(points, data, width):
    """Log density by scipy.stats.gaussian_kde."""
    from scipy.stats import gaussian_kde

    # gaussian_kde scales the covariance of the data, here 1, by the square of this
    # factor.
    return gaussian_kde(data.T, bw_method=width).logpdf(points.T)
