"""Kernel matrices as linear operators."""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator

from cupyflash._core import arrays as _arrays
from cupyflash._core.typing import Array
from cupyflash._points import problem as points_problem
from cupyflash.points._reductions import kernel_sum


class _Products:
    """The products of a kernel matrix; a base of the operators of both libraries."""

    def _describe(self, x, y, kernel, bandwidth, diagonal):
        self.x, self.y = x, y
        self.kernel, self.bandwidth, self.diagonal = kernel, bandwidth, diagonal

    @property
    def _namespace(self):
        return _arrays.import_cupy() if _arrays.is_cupy(self.x) else np

    def _product(self, x, y, v):
        v = self._namespace.asarray(v)
        if v.dtype.kind == "c":
            return self._product(x, y, v.real) + 1j * self._product(x, y, v.imag)
        v = v.astype(x.dtype)
        out = kernel_sum(x, y, v, kernel=self.kernel, bandwidth=self.bandwidth)
        return out + self.diagonal * v if self.diagonal else out

    def _matvec(self, v):
        return self._product(self.x, self.y, v.reshape(-1))

    def _matmat(self, v):
        return self._product(self.x, self.y, v)

    def _rmatvec(self, v):
        return self._product(self.y, self.x, v.reshape(-1))

    def _rmatmat(self, v):
        return self._product(self.y, self.x, v)

    def _adjoint(self):
        return KernelOperator(
            self.y,
            self.x,
            kernel=self.kernel,
            bandwidth=self.bandwidth,
            diagonal=self.diagonal,
        )

    _transpose = _adjoint

    def preconditioner(self, rank: int = 100, rng: Any = None) -> Any:
        """Inverse of ``C W^-1 C^T + diagonal``, to pass to `cg` as ``M=``.

        This is Nyström's approximation [1]_: `rank` points are drawn at random. C holds
        the kernels between all points and these, W those among these.

        Parameters
        ----------
        rank : int, default 100
            How many columns of N numbers to store.
        rng : int or numpy.random.Generator, optional
            For drawing the points.

        Returns
        -------
        LinearOperator

        Raises
        ------
        ValueError
            If there is no `diagonal`, x is not y, or `rank` is below 1.

        References
        ----------
        .. [1] Z. Frangella, J. A. Tropp and M. Udell, "Randomized Nyström
           preconditioning", SIAM Journal on Matrix Analysis and Applications 44, 2023.
        """
        if self.x is not self.y or not self.diagonal > 0:
            raise ValueError(
                "a preconditioner needs the matrix of a single cloud, "
                "KernelOperator(x, x), with diagonal above 0, got diagonal "
                f"{self.diagonal}"
            )
        xp, count = self._namespace, len(self.x)
        rank = min(points_problem.count("rank", rank, 1), count)
        chosen = np.sort(np.random.default_rng(rng).permutation(count)[:rank])
        landmarks = self.x[xp.asarray(chosen)]
        unit = xp.eye(rank, dtype=self.x.dtype)
        options = {"kernel": self.kernel, "bandwidth": self.bandwidth}
        columns = kernel_sum(self.x, landmarks, unit, **options).astype(np.float64)
        small = kernel_sum(landmarks, landmarks, unit, **options).astype(np.float64)
        # Woodbury's identity, in a basis where W is diagonal.
        values, vectors = xp.linalg.eigh(small)
        floor = values[-1] * rank * float(np.finfo(self.x.dtype).eps)
        values = xp.maximum(values, floor)
        factor = columns @ (vectors / xp.sqrt(values))
        inner = factor.T @ factor + self.diagonal * xp.eye(rank)
        dtype = self.x.dtype
        apply = _Inverse(factor, inner, self.diagonal, dtype)
        operator = LinearOperator if xp is np else _cupyx().LinearOperator
        return operator(
            (count, count), matvec=apply, rmatvec=apply, matmat=apply, dtype=dtype
        )


@dataclass(frozen=True, eq=False)
class _Inverse:
    """Products with the inverse of ``factor @ factor.T + diagonal``."""

    factor: Any
    inner: Any
    diagonal: float
    dtype: Any

    def __call__(self, v):
        xp = _arrays.import_cupy() if _arrays.is_cupy(self.factor) else np
        v = v.astype(np.float64)
        inside = xp.linalg.solve(self.inner, self.factor.T @ v)
        return ((v - self.factor @ inside) / self.diagonal).astype(self.dtype)


class KernelOperator(_Products, LinearOperator):
    """Matrix of kernels of two clouds as a linear operator, never stored.

    ``A @ v`` is ``kernel_sum(x, y, v) + diagonal * v``, computed in the dtype of the
    points. `v` may have any dtype, even a complex one. With NumPy arrays you get a
    `scipy.sparse.linalg.LinearOperator` for SciPy's solvers, with CuPy arrays that of
    `cupyx.scipy` for CuPy's.

    Parameters
    ----------
    x, y : ndarray, shapes (N, D) and (M, D)
        The clouds; NumPy or CuPy.
    kernel, bandwidth
        As in `kernel_sum`.
    diagonal : float, default 0.0
        Added to the diagonal (N must equal M), such as the noise of a Gaussian process
        or the strength of a ridge regression.

    Raises
    ------
    ValueError, TypeError
        As `kernel_sum`.

    Examples
    --------
    A Gaussian process through four points:

    >>> import numpy as np
    >>> from scipy.sparse.linalg import cg
    >>> from cupyflash import points
    >>> x = np.arange(4.0)[:, None]
    >>> A = points.KernelOperator(x, x, diagonal=1e-3)
    >>> weights, info = cg(A, np.sin(x[:, 0]), M=A.preconditioner(4))
    >>> (A @ weights - np.sin(x[:, 0])).round(4) + 0.0
    array([0., 0., 0., 0.])
    """

    def __new__(cls, x: Array, *args: Any, **kwargs: Any) -> Any:
        """An operator of the library that the arrays are of."""
        if cls is KernelOperator and _arrays.lives_on_gpu(x):
            return _on_gpu()(x, *args, **kwargs)
        return super().__new__(cls)

    def __getnewargs__(self):  # of copies and pickles
        return self.x, self.y

    def __init__(
        self,
        x: Array,
        y: Array,
        *,
        kernel: Any = "gaussian",
        bandwidth: Any = 1.0,
        diagonal: float = 0.0,
    ):
        _initialise(self, LinearOperator, x, y, kernel, bandwidth, diagonal)

    # What help() shows: __new__ lets subclasses take other arguments.
    __signature__ = inspect.Signature(
        list(inspect.signature(__init__).parameters.values())[1:]
    )


def _initialise(self, base, x, y, kernel, bandwidth, diagonal):
    same = x is y
    _, given = points_problem.adopt(2, x=x, y=y)
    x, y = given["x"], given["x"] if same else given["y"]
    if x.ndim > 2 or y.ndim > 2:
        raise ValueError(f"x and y must have two axes, got {x.shape} and {y.shape}")
    points_problem.points(
        "kernel_sum", x, y, None, y[:, :1], kernel, bandwidth, values_name="b"
    )
    diagonal = _arrays.finite_number("diagonal", diagonal)
    if diagonal and len(x) != len(y):
        raise ValueError(
            f"diagonal needs as many points in x as in y, got {len(x)} and {len(y)}"
        )
    self._describe(x, y, kernel, bandwidth, diagonal)
    base.__init__(self, x.dtype, (len(x), len(y)))


def _cupyx():
    from cupyx.scipy.sparse import linalg

    return linalg


def _on_gpu():
    """The same operator on CuPy's base."""
    base = _cupyx().LinearOperator

    def __init__(self, x, y, *, kernel="gaussian", bandwidth=1.0, diagonal=0.0):
        _initialise(self, base, x, y, kernel, bandwidth, diagonal)

    def __reduce__(self):
        options = self.kernel, self.bandwidth, self.diagonal
        return _rebuilt, (self.x, self.y, *options)

    body = {"__init__": __init__, "__reduce__": __reduce__}
    return type("KernelOperator", (_Products, base), body)


def _rebuilt(x, y, kernel, bandwidth, diagonal):
    """A copy of an operator whose class has no place in a module."""
    return KernelOperator(x, y, kernel=kernel, bandwidth=bandwidth, diagonal=diagonal)
