"""Reductions over all pairs of two clouds of points, and what is made of them.

Sums and log-sums of kernels, weighted means, kernel density, optimal transport: the
matrix of all pairs is never stored. For NumPy and CuPy arrays.
"""

from cupyflash._points.gradients import PointsGrads
from cupyflash.points._reductions import (
    kernel_sum,
    kernel_sum_vjp,
    logsumexp,
    logsumexp_vjp,
    mean,
    mean_vjp,
)
from cupyflash.points._sinkhorn import Plan, Transport, sinkhorn

__all__ = [
    "Plan",
    "PointsGrads",
    "Transport",
    "kernel_sum",
    "kernel_sum_vjp",
    "logsumexp",
    "logsumexp_vjp",
    "mean",
    "mean_vjp",
    "sinkhorn",
]
