"""Sums over all pairs of two point clouds, and tools built on them.

Sums and log-sums of kernels, weighted means, kernel density, optimal transport: the
matrix of all pairs is never stored. For NumPy and CuPy arrays.
"""

import importlib
from typing import Any

from cupyflash._points.gradients import PointsGrads
from cupyflash.points._mean_shift import MeanShift, mean_shift
from cupyflash.points._reductions import (
    kernel_sum,
    kernel_sum_vjp,
    logsumexp,
    logsumexp_vjp,
    mean,
    mean_vjp,
)
from cupyflash.points._sinkhorn import (
    Divergence,
    Plan,
    Transport,
    sinkhorn,
    sinkhorn_divergence,
)
from cupyflash.points._two_samples import TwoSampleTest, energy_distance, mmd

__all__ = [
    "Divergence",
    "GaussianKDE",
    "KernelOperator",
    "MeanShift",
    "Plan",
    "PointsGrads",
    "Transport",
    "TwoSampleTest",
    "energy_distance",
    "kernel_sum",
    "kernel_sum_vjp",
    "logsumexp",
    "logsumexp_vjp",
    "mean",
    "mean_shift",
    "mean_vjp",
    "mmd",
    "sinkhorn",
    "sinkhorn_divergence",
]

# What stands on modules of SciPy that take long to import.
_LATER = {"GaussianKDE": "_kde", "KernelOperator": "_operator"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module = importlib.import_module(f"cupyflash.points.{_LATER[name]}")
        globals()[name] = found = getattr(module, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
