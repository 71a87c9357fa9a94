"""Tests of two samples for the same distribution: energy distance, MMD."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core.typing import Array
from cupyflash._points import problem as points_problem
from cupyflash.points._reductions import kernel_sum

# Permutations that are summed up at once: columns of b.
_COLUMNS = 64


class TwoSampleTest(NamedTuple):
    """Result of a permutation test.

    Attributes
    ----------
    statistic : float
        For the samples as given.
    pvalue : float
        Share of the permutations, including the original one, whose statistic is at
        least as large.
    null_distribution : ndarray, shape (permutations,)
        Statistics of the permutations.
    """

    statistic: Any
    pvalue: Any
    null_distribution: Any


def energy_distance(
    x: Array,
    y: Array,
    *,
    permutations: int = 0,
    rng: Any = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Any:
    """Energy distance of two samples, ``sqrt(2 E|X-Y| - E|X-X'| - E|Y-Y'|)``.

    As described in [1]_.

    For one-dimensional samples this is `scipy.stats.energy_distance`.

    Parameters
    ----------
    x, y : ndarray, shapes (N, D) and (M, D)
        The samples; NumPy or CuPy.
    permutations : int, default 0
        If positive, test whether both come from the same distribution.
    rng : int or numpy.random.Generator, optional
        For drawing the permutations.
    progress : callable, optional
        Called as ``progress(done, permutations)``.

    Returns
    -------
    ndarray of shape (), or TwoSampleTest
        The latter if `permutations` is positive.

    Raises
    ------
    ValueError, TypeError
        As in `kernel_sum`. ValueError also for a sample without points.

    Notes
    -----
    Let b be 1 / N for the points of x and -1 / M for those of y. The square is
    ``b @ K @ b`` with the kernel -d, and each permutation is one column of b.

    References
    ----------
    .. [1] G. J. Székely and M. L. Rizzo, "Energy statistics: a class of statistics
       based on distances", Journal of Statistical Planning and Inference 143, 2013.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> round(float(points.energy_distance(np.array([[0.0]]), np.array([[2.0]]))), 3)
    2.0
    """
    xp, z, num_x = _joined(x, y)
    num_y = len(z) - num_x
    # Distances grow with the points: of points below 1 no square overflows or is lost.
    # The exponent is even, since that of the result is half of it.
    _, exponent = xp.frexp(abs(z).max() if z.size else xp.zeros((), z.dtype))
    exponent += exponent % 2
    z = xp.ldexp(z, -exponent)

    def statistic(inside):
        b = xp.where(inside, 1 / num_x, -1 / num_y).astype(z.dtype)
        square = (b * kernel_sum(z, z, b, kernel="energy")).sum(axis=0)
        return xp.ldexp(xp.sqrt(xp.maximum(square, 0.0)), exponent // 2)

    return _tested(xp, statistic, num_x, len(z), permutations, rng, progress)


def mmd(
    x: Array,
    y: Array,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    unbiased: bool = True,
    permutations: int = 0,
    rng: Any = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Any:
    """Squared maximum mean discrepancy of two samples.

    As described in [1]_.

    Parameters
    ----------
    x, y : ndarray, shapes (N, D) and (M, D)
        The samples; NumPy or CuPy.
    kernel, bandwidth
        As in `kernel_sum`.
    unbiased : bool, default True
        Leave out the pairs of a point with itself, so that the expected value is 0 for
        samples from the same distribution. Otherwise the square is never negative.
    permutations : int, default 0
        If positive, test whether both come from the same distribution.
    rng : int or numpy.random.Generator, optional
        For drawing the permutations.
    progress : callable, optional
        Called as ``progress(done, permutations)``.

    Returns
    -------
    ndarray of shape (), or TwoSampleTest
        The latter if `permutations` is positive.

    Raises
    ------
    ValueError, TypeError
        As in `kernel_sum`. ValueError also for samples with fewer than 1 point, or 2
        if `unbiased`.

    References
    ----------
    .. [1] Arthur Gretton et al., "A kernel two-sample test", JMLR 13, 2012.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(200, 2)), rng.normal(size=(200, 2)) + 1
    >>> points.mmd(x, y, permutations=99, rng=0).pvalue
    0.01
    """
    unbiased = _arrays.check_bool("unbiased", unbiased)
    xp, z, num_x = _joined(x, y, 2 if unbiased else 1)
    num_y = len(z) - num_x
    options = {"kernel": kernel, "bandwidth": bandwidth}
    ones = xp.ones(len(z), z.dtype)
    whole = kernel_sum(z, z, ones, **options)
    # K of a point with itself, the same for all.
    own = kernel_sum(z[:1], z[:1], ones[:1], **options)[0]

    def statistic(inside):
        u = inside.astype(z.dtype)
        sums = kernel_sum(z, z, u, **options)
        within_x = (u * sums).sum(axis=0)
        across = ((1 - u) * sums).sum(axis=0)
        within_y = ((1 - u) * whole[:, None]).sum(axis=0) - across
        pairs_x, pairs_y = num_x**2, num_y**2
        if unbiased:
            within_x, within_y = within_x - num_x * own, within_y - num_y * own
            pairs_x, pairs_y = pairs_x - num_x, pairs_y - num_y
        return within_x / pairs_x + within_y / pairs_y - 2 * across / (num_x * num_y)

    return _tested(xp, statistic, num_x, len(z), permutations, rng, progress)


def _joined(x, y, fewest=1):
    """Both samples in one array, and the size of the first."""
    xp, given = points_problem.adopt(2, x=x, y=y)
    x, y = given["x"], given["y"]
    points_problem.check_clouds(x, y)
    if x.ndim != 2 or y.ndim != 2 or min(len(x), len(y)) < fewest:
        raise ValueError(
            f"x and y must have shape (points, D), with at least {fewest} points, got "
            f"{x.shape} and {y.shape}"
        )
    return xp, xp.concatenate([x, y]), len(x)


def _tested(xp, statistic, num_x, count, permutations, rng, progress):
    """The statistic of the first points against the others, and its test."""
    permutations = points_problem.count("permutations", permutations)
    inside = np.arange(count) < num_x
    observed = statistic(xp.asarray(inside)[:, None])[0]
    if permutations == 0:
        return observed
    rng = np.random.default_rng(rng)
    found = []
    for start in range(0, permutations, _COLUMNS):
        number = min(_COLUMNS, permutations - start)
        drawn = np.stack([rng.permutation(inside) for _ in range(number)], axis=1)
        found.append(statistic(xp.asarray(drawn)))
        if progress is not None:
            progress(start + number, permutations)
    null = xp.concatenate(found)
    # Equal statistics, but for the last digits, count.
    near = 8 * float(np.finfo(null.dtype).eps) * xp.abs(observed)
    larger = int((null >= observed - near).sum())
    pvalue = (larger + 1) / (permutations + 1)
    # Of points that are NaN nothing is known.
    known = bool(xp.isfinite(observed) & xp.isfinite(null).all())
    return TwoSampleTest(observed, pvalue if known else math.nan, null)
