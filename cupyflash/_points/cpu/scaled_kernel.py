"""The kernel matrix of transport, scaled by potentials, where it is small enough."""

import numpy as np

from cupyflash._core import threads
from cupyflash._points.cpu.weights import LEAST

# Up to this many bytes the matrix is kept.
MOST_BYTES = 512 << 20
_BLOCK = 64, 1024  # rows that are made at once, and columns that are summed at once
# Potentials may leave those of the matrix by exp() of this; what its entries and sums
# have lost below their smallest numbers does not count then.
_FARTHEST = {"float32": 20.0, "float64": 150.0}
_SUMS = {"float32": (1e-20, 1e20), "float64": (1e-200, 1e200)}


def kept(x, y, epsilon, squared_diameter, tol):
    """A `ScaledKernel` whose sums show no error beside `tol`, or None.

    The points are near 0, and the squared diameter is that of both clouds.
    """
    rounding = 64 * 2.0**-53 * (1 + squared_diameter / epsilon)
    if x.dtype == np.float32:
        rounding += 1e-6
    size = len(x) * len(y) * x.dtype.itemsize
    if not rounding < tol or not 0 < size <= MOST_BYTES:
        return None
    return ScaledKernel(x, y, epsilon)


class ScaledKernel:
    """The matrix ``exp((f_i + g_j - |x_i - y_j|**2) / epsilon)``.

    As in the stabilized iteration of B. Schmitzer, "Stabilized sparse scaling
    algorithms for entropy regularized transport problems", 2019: multiplied with
    vectors that scale it to other potentials, made anew where these are too far away.
    """

    def __init__(self, x, y, epsilon):
        self.epsilon, self.dtype = epsilon, x.dtype
        self.points = [z.astype(np.float64) for z in (x, y)]
        self.matrix = np.empty((len(x), len(y)), x.dtype)
        self.at = None

    def log_sums(self, axis, potentials, weights):
        """log sum over `axis` of ``w exp((p - |x - y|**2) / epsilon)``, or None.

        None where that is out of the range in which the matrix has digits.

        Parameters
        ----------
        axis : {0, 1}
            The cloud that is summed over.
        potentials : list of ndarray
            Of both clouds.
        weights : ndarray
            Of the cloud that is summed over.
        """
        own, farthest = 1 - axis, _FARTHEST[self.dtype.name]
        moved = self.moved(potentials)
        if moved is None or any(np.abs(m).max() > farthest for m in moved):
            self.make(potentials)
            moved = self.moved(potentials)
        sums = self.sums(axis, (weights * np.exp(moved[axis])).astype(self.dtype))
        least, most = _SUMS[self.dtype.name]
        if not (sums.min() > least and sums.max() < most):
            return None
        return np.log(sums) - self.at[own] / self.epsilon

    def moved(self, potentials):
        """By how much potentials have left those of the matrix, in epsilons."""
        if self.at is None:
            return None
        pairs = zip(potentials, self.at, strict=True)
        return [(now.astype(np.float64) - at) / self.epsilon for now, at in pairs]

    def make(self, potentials):
        """The matrix at these potentials."""
        self.at = [p.astype(np.float64) for p in potentials]
        x, y = self.points
        terms = [
            (at - np.einsum("id,id->i", z, z))[:, None] / self.epsilon
            for z, at in zip(self.points, self.at, strict=True)
        ]
        x = np.concatenate([x * (2 / self.epsilon), terms[0], np.ones((len(x), 1))], 1)
        y = np.concatenate([y, np.ones((len(y), 1)), terms[1]], 1).T

        def run(start, scratch):
            rows = self.matrix[start : start + _BLOCK[0]]
            scores = scratch.array("scores", rows.shape, np.float64)
            np.matmul(x[start : start + _BLOCK[0]], y, out=scores)
            np.maximum(scores, LEAST, out=scores)
            np.exp(scores, out=rows, casting="same_kind", dtype=self.dtype)

        self.in_threads(run, range(0, len(x), _BLOCK[0]))

    def sums(self, axis, v):
        """The product with a vector, in blocks that no number of threads changes."""
        matrix = self.matrix if axis == 1 else self.matrix.T
        step = _BLOCK[axis == 0]
        out = np.empty(len(matrix), self.dtype)

        def run(start, _):
            np.matmul(matrix[start : start + step], v, out=out[start : start + step])

        self.in_threads(run, range(0, len(matrix), step))
        return out

    def in_threads(self, run, starts):
        threads.for_each_with_blas(run, starts, threads.num_cores())
