"""Kernel density estimates with the interface of SciPy's."""

import functools
import math
from typing import Any

import numpy as np
from scipy import linalg, stats

from cupyflash._core import arrays as _arrays
from cupyflash._core.typing import Array
from cupyflash.points._reductions import kernel_sum, logsumexp, mean


@functools.cache
def _cupy():
    return _arrays.import_cupy()


def _real(name, x):
    if x.dtype.kind == "c":
        raise TypeError(f"{name} must hold real numbers, got {x.dtype}")
    return x


def _whitened(covariance, columns, middle):
    """Columns multiplied by the inverse Cholesky factor of a covariance.

    In long doubles: rounding the factor alone would cost densities their last digits.
    """
    a = np.array(covariance, np.longdouble)
    rows = columns - middle.astype(np.longdouble)
    for k in range(len(a)):
        root = np.sqrt(a[k, k])
        a[k:, k] /= root
        rows[k] /= root
        a[k + 1 :, k + 1 :] -= np.outer(a[k + 1 :, k], a[k + 1 :, k])
        rows[k + 1 :] -= np.outer(a[k + 1 :, k], rows[k])
    return rows


class GaussianKDE(stats.gaussian_kde):
    """Kernel density estimate with Gaussian kernels of the data's full covariance.

    This is a subclass of `scipy.stats.gaussian_kde` [1]_ [2]_ with the same attributes,
    methods and arguments, plus `gradient`. Densities, and integrals over other
    estimates, are computed without storing a matrix. If the data are a CuPy array, so
    are the points that you pass and the results that you get.

    Parameters
    ----------
    dataset : ndarray, shape (d, n) or (n,)
        The data, one column per point.
    bw_method : {"scott", "silverman"}, float or callable, optional
        Factor on the standard deviation of the data; "scott" by default.
    weights : ndarray, shape (n,), optional
        Weights of the points; all equal by default.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As in SciPy, for wrong shapes and for data in a subspace.
    TypeError
        For complex data or points, and for masked arrays.

    Notes
    -----
    Points are first multiplied by the inverse Cholesky factor of the covariance, so
    that the kernels have a bandwidth of 1. On NumPy, densities at the dataset itself
    (the same array object) take half the time. The covariance is kept on the host, so
    creating an estimate from CuPy arrays waits for the device.

    References
    ----------
    .. [1] David W. Scott, "Multivariate density estimation", Wiley, 1992.
    .. [2] Bernard W. Silverman, "Density estimation for statistics and data analysis",
       Chapman and Hall, 1986.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> kde = points.GaussianKDE([-1.0, 0.0, 1.0])
    >>> kde([0.0, 5.0]).round(4)
    array([0.3182, 0.    ])
    """

    def __init__(self, dataset: Array, bw_method: Any = None, weights: Array = None):
        _arrays.refuse_lossy("dataset", dataset)
        _arrays.refuse_lossy("weights", weights)
        if not _arrays.lives_on_gpu(dataset):
            _real("dataset", np.asarray(dataset))
            super().__init__(dataset, bw_method, weights)
            return
        cupy = _cupy()
        self.dataset = cupy.atleast_2d(_real("dataset", _arrays.adopt(dataset)))
        if self.dataset.size <= 1:
            raise ValueError("dataset must have more than one element")
        self.d, self.n = self.dataset.shape
        if self.d > self.n:
            raise ValueError(
                f"dataset has {self.d} dimensions and {self.n} points, one per "
                "column: pass its transpose?"
            )
        if weights is None:
            weights = cupy.ones(self.n)
        weights = cupy.asarray(_arrays.adopt(weights), dtype=np.float64)
        if weights.shape != (self.n,):
            raise ValueError(
                f"weights must have shape ({self.n},), got {weights.shape}"
            )
        self._weights = weights / weights.sum()
        squares = float((self._weights**2).sum())
        self._neff = 1 / squares
        gap = self.dataset - (self.dataset @ self._weights)[:, None]
        covariance = (gap * self._weights) @ gap.T / (1 - squares)
        self._data_covariance = cupy.asnumpy(covariance)
        self._data_cho_cov = linalg.cholesky(self._data_covariance, lower=True)
        self.set_bandwidth(bw_method)

    def _xp(self):
        return _cupy() if _arrays.is_cupy(self.dataset) else np

    def _points(self, points):
        """Points as columns, and the dtype of their densities."""
        xp = self._xp()
        _arrays.refuse_lossy("points", points)
        if (xp is not np) != _arrays.lives_on_gpu(points):
            raise TypeError(
                "the dataset and the points must both be NumPy or both be CuPy arrays: "
                "pass cupy.asarray(points) or cupy.asnumpy(points)"
            )
        columns = xp.atleast_2d(_real("points", xp.asarray(points)))
        d, m = columns.shape
        if d != self.d:
            if d != 1 or m != self.d:
                raise ValueError(
                    f"points have dimension {d}, dataset has dimension {self.d}"
                )
            columns = columns.reshape(self.d, 1)
        return columns, np.result_type(columns.dtype, self.covariance.dtype, np.float64)

    def _whitened(self, columns, covariance=None):
        """Rows of points in units of a covariance, from the middle of the data."""
        xp = self._xp()
        covariance = self.covariance if covariance is None else covariance
        middle = self.dataset.mean(axis=1)[:, None]
        if xp is np:
            white = _whitened(covariance, np.asarray(columns), np.asarray(middle))
        else:
            factor = linalg.cholesky(covariance, lower=True)
            white = self._solve(factor, columns.astype(np.float64) - middle)
        with np.errstate(over="ignore"):  # points where densities are 0
            return xp.ascontiguousarray(white.T, dtype=np.float64)

    def _solve(self, factor, columns, trans=0):
        """Columns multiplied by the inverse of a lower triangle, or its transpose."""
        solve = linalg.solve_triangular
        if self._xp() is not np:
            from cupyx.scipy.linalg import solve_triangular as solve
        return solve(self._xp().asarray(factor), columns, trans=trans, lower=True)

    def _clouds(self, columns):
        """Points and data; one array where they are."""
        y = self._whitened(self.dataset)
        same = columns.shape == self.dataset.shape and _arrays.same_view(
            columns, self.dataset
        )
        return (y if same else self._whitened(columns)), y

    def evaluate(self, points: Array) -> Any:
        """Density at some points.

        Parameters
        ----------
        points : ndarray, shape (d, m) or (m,)

        Returns
        -------
        ndarray, shape (m,)
        """
        columns, dtype = self._points(points)
        x, y = self._clouds(columns)
        sums = kernel_sum(x, y, self._xp().asarray(self.weights, dtype=np.float64))
        return (sums * math.exp(-0.5 * self.log_det)).astype(dtype)

    __call__ = evaluate

    def pdf(self, x: Array) -> Any:
        """Density at some points, as `evaluate`."""
        return self.evaluate(x)

    def logpdf(self, x: Array) -> Any:
        """Logarithm of the density at some points, however small.

        Parameters
        ----------
        x : ndarray, shape (d, m) or (m,)

        Returns
        -------
        ndarray, shape (m,)
        """
        columns, dtype = self._points(x)
        x, y = self._clouds(columns)
        return (logsumexp(x, y, self._log_weights()) - 0.5 * self.log_det).astype(dtype)

    def _log_weights(self):
        xp = self._xp()
        with np.errstate(divide="ignore"):
            return xp.log(xp.asarray(self.weights, dtype=np.float64))

    def gradient(self, points: Array, log: bool = False) -> Any:
        """Gradient of the density at some points, or of its logarithm.

        Parameters
        ----------
        points : ndarray, shape (d, m) or (m,)
        log : bool, default False
            Return the gradient of the logarithm, also called the score.

        Returns
        -------
        ndarray, shape (d, m)
        """
        xp = self._xp()
        columns, dtype = self._points(points)
        x, y = self._clouds(columns)
        target, lse = mean(x, y, y, self._log_weights(), return_lse=True)
        slope = self._solve(self.cho_cov, (target - x).T, trans=1).astype(dtype)
        return slope if log else slope * xp.exp(lse - 0.5 * self.log_det)

    def integrate_gaussian(self, mean: Array, cov: Array) -> Any:
        """Integral of the density times a Gaussian.

        Parameters
        ----------
        mean : ndarray, shape (d,)
        cov : ndarray, shape (d, d)
            In host memory.

        Returns
        -------
        float, or a CuPy array of shape ()
        """
        xp = self._xp()
        mean, cov = xp.atleast_1d(xp.squeeze(xp.asarray(mean))), np.atleast_2d(cov)
        if mean.shape != (self.d,):
            raise ValueError(f"mean does not have dimension {self.d}")
        if cov.shape != (self.d, self.d):
            raise ValueError(f"covariance does not have dimension {self.d}")
        return self._overlap(mean[:, None], xp.ones(1), cov)

    def integrate_kde(self, other: "stats.gaussian_kde") -> Any:
        """Integral of the product with another estimate."""
        if other.d != self.d:
            raise ValueError("KDEs are not the same dimensionality")
        return self._overlap(other.dataset, other.weights, other.covariance)

    def _overlap(self, columns, weights, covariance):
        """Sum of weights times densities blurred by a covariance."""
        both = self.covariance + covariance
        factor = linalg.cholesky(both, lower=True)
        x, y = (self._whitened(z, both) for z in (columns, self.dataset))
        sums = kernel_sum(x, y, self._xp().asarray(self.weights, dtype=np.float64))
        return (weights @ sums) / np.prod(np.diagonal(factor) * math.sqrt(2 * math.pi))

    def integrate_box_1d(self, low: float, high: float) -> Any:
        """Integral of a density of one dimension between two bounds."""
        if self._xp() is np:
            return super().integrate_box_1d(low, high)
        if self.d != 1:
            raise ValueError("integrate_box_1d() only handles 1D pdfs")
        from cupyx.scipy import special as on_device

        width = math.sqrt(self.covariance[0, 0])
        upper, lower = ((z - self.dataset[0]) / width for z in (high, low))
        return self._weights @ (on_device.ndtr(upper) - on_device.ndtr(lower))

    def integrate_box(
        self, low_bounds: Any, high_bounds: Any, maxpts: int | None = None, **options
    ) -> Any:
        """Integral of the density over a box; takes SciPy's options, such as rng."""
        if self._xp() is np:
            return super().integrate_box(low_bounds, high_bounds, maxpts, **options)
        if self.d == 1:
            return self.integrate_box_1d(*map(float, (low_bounds, high_bounds)))
        raise NotImplementedError(
            "integrate_box of several dimensions takes a dataset in host memory: make "
            "an estimate of cupy.asnumpy(dataset)"
        )

    def resample(self, size: int | None = None, seed: Any = None) -> Any:
        """Draw points from the density.

        Parameters
        ----------
        size : int, optional
            How many; by default the effective number of points.
        seed : int, RandomState or Generator, optional
            Of NumPy; an int or a `cupy.random.RandomState` for CuPy arrays.

        Returns
        -------
        ndarray, shape (d, size)
        """
        if self._xp() is np:
            return super().resample(size, seed)
        cupy = _cupy()
        size = int(self.neff) if size is None else size
        rng = seed
        if not hasattr(seed, "standard_normal"):
            rng = cupy.random.RandomState(seed)
        places = cupy.searchsorted(cupy.cumsum(self._weights), rng.random_sample(size))
        noise = rng.standard_normal((self.d, size))
        centres = self.dataset[:, cupy.minimum(places, self.n - 1)]
        return centres + cupy.asarray(self.cho_cov) @ noise

    def marginal(self, dimensions: Any) -> "GaussianKDE":
        """The estimate of some of the dimensions."""
        dims = np.atleast_1d(dimensions)
        if not np.issubdtype(dims.dtype, np.integer):
            raise ValueError(
                "Elements of `dimensions` must be integers, the indices of what is kept"
            )
        kept = np.where(dims < 0, dims + self.d, dims)
        if len(np.unique(kept)) != len(kept):
            raise ValueError("All elements of `dimensions` must be unique.")
        wrong = (kept < 0) | (kept >= self.d)
        if wrong.any():
            raise ValueError(
                f"Dimensions {dims[wrong]} are invalid for a distribution in {self.d} "
                "dimensions"
            )
        return GaussianKDE(
            self.dataset[kept.tolist()], self.covariance_factor(), self.weights
        )
