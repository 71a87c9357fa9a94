"""Reductions over all pairs of two clouds of points, and what is made of them.

Sums and log-sums of kernels, weighted means, kernel density, optimal transport: the
matrix of all pairs is never stored. For NumPy and CuPy arrays.
"""

from cupyflash.points._reductions import kernel_sum, logsumexp, mean

__all__ = [
    "kernel_sum",
    "logsumexp",
    "mean",
]
