"""Mean shift: clusters as the hills of a density."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core.typing import Array
from cupyflash._points import problem as points_problem
from cupyflash.points._reductions import mean

# A seed that moves less than this part of a bandwidth has arrived, as in scikit-learn.
_STILL = 1e-3
# Iterations from one look at the seeds to the next.
_LOOK = 5


class MeanShift(NamedTuple):
    """Result of `mean_shift`.

    Attributes
    ----------
    cluster_centers : ndarray, shape (clusters, D)
        The densest first.
    labels : ndarray of int, shape (N,)
        The cluster of each point.
    iterations : int
        How many it took.
    """

    cluster_centers: Any
    labels: Any
    iterations: int


def _flat(d2):
    return np.where(d2 <= 1.0, 1.0, 0.0)


def mean_shift(
    x: Array,
    bandwidth: float,
    *,
    seeds: Array = None,
    kernel: Any = "gaussian",
    cluster_all: bool = True,
    max_iter: int = 300,
    progress: Callable[[int, float], Any] | None = None,
) -> MeanShift:
    """Cluster points by the peaks of their density.

    As described in [1]_.

    Each seed moves to the mean of the points around it, weighted by a kernel, until it
    stops moving. Among seeds that end up within a bandwidth of each other, the one with
    the highest density becomes a centre.

    Parameters
    ----------
    x : ndarray, shape (N, D)
        The points; NumPy or CuPy.
    bandwidth : float
        Bandwidth of the kernel.
    seeds : ndarray, shape (S, D), optional
        Where to start; all points by default.
    kernel : str or function, default "gaussian"
        As in `mean`; "flat" counts the points within a bandwidth, as scikit-learn's
        `MeanShift` does.
    cluster_all : bool, default True
        Assign points that are farther than a bandwidth from every centre to the nearest
        one. Otherwise their label is -1.
    max_iter : int, default 300
        Largest number of iterations.
    progress : callable, optional
        Called as ``progress(iteration, largest move in bandwidths)``.

    Returns
    -------
    MeanShift
        Named tuple of cluster_centers, labels and iterations.

    Raises
    ------
    ValueError, TypeError
        As in `mean`. ValueError also if there are no points, or some are not finite.

    Notes
    -----
    All seeds move together, with one `mean` per iteration; convergence is checked every
    fifth iteration.

    References
    ----------
    .. [1] D. Comaniciu and P. Meer, "Mean shift: a robust approach toward feature space
       analysis", IEEE PAMI 24, 2002.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> x = np.array([[0.0], [0.1], [5.0], [5.2], [5.4]])
    >>> found = points.mean_shift(x, 1.0)
    >>> found.cluster_centers.round(2), found.labels
    (array([[5.2 ],
           [0.05]]), array([1, 1, 0, 0, 0]))
    """
    xp, given = points_problem.adopt(1, x=x, seeds=seeds)
    x = given["x"]
    at: Any = given.get("seeds", x)
    points_problem.check_clouds(x, at)
    if x.ndim != 2 or at.ndim != 2 or 0 in x.shape or 0 in at.shape:
        raise ValueError(
            f"x and seeds must have shape (points, D), with at least one point, got "
            f"{x.shape} and {at.shape}"
        )
    for name, cloud in (("x", x), ("seeds", at)):
        points_problem.check_finite(name, cloud)
    bandwidth = _arrays.finite_number("bandwidth", bandwidth)
    cluster_all = _arrays.check_bool("cluster_all", cluster_all)
    max_iter = points_problem.count("max_iter", max_iter)
    if not callable(kernel):
        choices = *points_problem.POSITIVE_KERNELS, "flat"
        _arrays.check_choice("kernel", kernel, choices)
    kernel = _flat if kernel == "flat" else kernel
    done, moved = 0, math.inf
    while True:
        new, lse = mean(at, x, x, kernel=kernel, bandwidth=bandwidth, return_lse=True)
        # A seed with no point round it stays.
        new = xp.where(xp.isfinite(lse)[:, None], new, at)
        if done >= max_iter:
            break
        done += 1
        step, at = new - at, new
        if done % _LOOK == 0 or done == max_iter or xp is np:
            moved = math.sqrt(float((step * step).sum(axis=1).max())) / bandwidth
            if progress is not None:
                progress(done, moved)
            if moved <= _STILL:
                break
    centres = _centres(xp, at, lse, bandwidth)
    labels = _labels(xp, x, centres, bandwidth, cluster_all)
    return MeanShift(centres, labels, done)


def _centres(xp, at, lse, bandwidth):
    """Of seeds within a bandwidth of each other the one with the largest density."""
    order = xp.argsort(-lse)
    left, found = at[order], []
    left = left[xp.isfinite(lse[order])]
    while len(left):
        found.append(left[0])
        gaps = left - left[0]
        left = left[(gaps * gaps).sum(axis=1) > bandwidth * bandwidth]
    if not found:
        raise ValueError("no seed has a point within its bandwidth: pass a larger one")
    return xp.stack(found)


def _labels(xp, x, centres, bandwidth, cluster_all):
    """The nearest centre of each point."""
    labels = xp.zeros(len(x), np.int64)
    nearest = xp.full(len(x), np.inf)
    for place, centre in enumerate(centres):
        gap = x - centre
        d2 = (gap * gap).sum(axis=1)
        closer = d2 < nearest
        labels = xp.where(closer, place, labels)
        nearest = xp.where(closer, d2, nearest)
    if cluster_all:
        return labels
    return xp.where(nearest <= bandwidth * bandwidth, labels, -1)
