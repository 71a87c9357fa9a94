"""Sums over all pairs of points, plainly and in long doubles."""

import math

import numpy as np

# The kernels of points, written once more from their definitions, by distance.
KERNELS = {
    "gaussian": lambda d: np.exp(-(d**2) / 2),
    "laplacian": lambda d: np.exp(-d),
    "cauchy": lambda d: 1 / (1 + d**2),
    "matern32": lambda d: (1 + math.sqrt(3) * d) * np.exp(-math.sqrt(3) * d),
    "matern52": lambda d: (
        (1 + math.sqrt(5) * d + 5 * d**2 / 3) * np.exp(-math.sqrt(5) * d)
    ),
    "inverse_multiquadric": lambda d: 1 / np.sqrt(1 + d**2),
    "energy": lambda d: -d,
}
LOGS = {
    "gaussian": lambda d: -(d**2) / 2,
    "laplacian": lambda d: -d,
    "cauchy": lambda d: -np.log1p(d**2),
    "matern32": lambda d: np.log1p(math.sqrt(3) * d) - math.sqrt(3) * d,
    "matern52": lambda d: np.log1p(math.sqrt(5) * d + 5 * d**2 / 3) - math.sqrt(5) * d,
    "inverse_multiquadric": lambda d: -np.log1p(d**2) / 2,
}
POSITIVE = tuple(LOGS)


def distances(x, y, bandwidth=1.0):
    """Of all pairs, in bandwidths."""
    x, y = np.asarray(x, np.longdouble), np.asarray(y, np.longdouble)
    gaps = (x[..., :, None, :] - y[..., None, :, :]) / bandwidth
    return np.sqrt((gaps * gaps).sum(axis=-1))


def logsumexp(x, y, log_weights=None, kernel="gaussian", bandwidth=1.0):
    """(weights of all pairs below their row's largest, lse)."""
    with np.errstate(all="ignore"):
        scores = LOGS[kernel](distances(x, y, bandwidth))
        if log_weights is not None:
            scores = scores + np.asarray(log_weights, np.longdouble)[..., None, :]
        largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        largest = np.where(np.isfinite(largest), largest, 0.0)
        weights = np.exp(scores - largest)
        return weights, largest[..., 0] + np.log(weights.sum(axis=-1))


def mean(x, y, v, log_weights=None, kernel="gaussian", bandwidth=1.0):
    """Weighted mean; 0 where a row has no weight."""
    weights, _ = logsumexp(x, y, log_weights, kernel, bandwidth)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ np.asarray(v, np.longdouble) / np.where(total == 0, 1.0, total)


def kernel_sum(x, y, b, kernel="gaussian", bandwidth=1.0):
    """Sum of kernels times values."""
    pairs = KERNELS[kernel](distances(x, y, bandwidth))
    return pairs @ np.asarray(b, np.longdouble)


# Errors that are promised: of lse beside 2 ulp, of sums and means of the largest.
PROMISED = {"float32": 2e-6, "float64": 1e-13}


def assert_lse(actual, exact):
    """Assert that a log-sum is within what is promised."""
    assert actual.shape == exact.shape
    with np.errstate(invalid="ignore"):
        ulp = np.spacing(np.abs(exact).astype(actual.dtype)).astype(np.float64)
        bound = PROMISED[actual.dtype.name] + 2 * np.where(np.isfinite(ulp), ulp, 0.0)
        error = np.abs(actual - exact)
    good = (error <= bound) | (actual == exact)
    assert good.all(), (error[~good].max(), exact[~good])


def assert_sums(actual, exact, lse=0.0):
    """Assert that sums, or means beside these log-sums, are within what is promised.

    A rounding of a score is one of its weight.
    """
    assert actual.shape == exact.shape
    largest = np.abs(exact).max(initial=0.0)
    error = np.abs(actual - exact).max(initial=0.0)
    scores = np.abs(lse, where=np.isfinite(lse), out=np.zeros_like(exact[..., 0]))
    rounding = 2 * np.spacing(scores.max(initial=0.0).astype(np.float64))
    bound = PROMISED[actual.dtype.name] + rounding
    assert error <= bound * largest, error / largest
