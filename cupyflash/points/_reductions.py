"""Log-sums, sums and means over all pairs of two clouds."""

from typing import Any, Literal, overload

from cupyflash._core.typing import Array, Precision
from cupyflash._points import api, gradients
from cupyflash._points import problem as points_problem
from cupyflash._points.gradients import PointsGrads


def logsumexp(
    x: Array,
    y: Array,
    log_weights: Array = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    precision: Precision = "float32",
) -> Any:
    """Logarithm of a sum of kernels, ``log sum_j w_j K(x_i, y_j)``.

    Parameters
    ----------
    x : ndarray, shape (..., N, D)
        Points at which the sum is taken; NumPy or CuPy.
    y : ndarray, shape (..., M, D)
        Points that are summed over. Leading axes broadcast.
    log_weights : ndarray, shape (..., M), optional
        Natural logarithms of the weights; 0 by default, -inf leaves a point out.
    kernel : str or function, default "gaussian"
        With d the distance of two points in bandwidths: "gaussian" ``exp(-d**2 / 2)``,
        "laplacian" ``exp(-d)``, "cauchy" ``1 / (1 + d**2)``, "matern32"
        ``(1 + sqrt(3) d) exp(-sqrt(3) d)``, "matern52"
        ``(1 + sqrt(5) d + 5 d**2 / 3) exp(-sqrt(5) d)``, or "inverse_multiquadric"
        ``1 / sqrt(1 + d**2)``. Or a function of one argument called ``d2``, the squared
        distance in bandwidths, of NumPy functions; it must be positive.
    bandwidth : float or array of float, shape (D,), default 1.0
        Unit of the distances, one for all axes or one per axis, in host memory.
    precision : {"float32", "tf32"}, default "float32"
        For float32 input, "tf32" allows tensor cores on a GPU to round coordinates to
        11 bits.

    Returns
    -------
    ndarray, shape (..., N)
        float64 if any array is of float64 or integers, else float32. -inf where there
        is no point.

    Raises
    ------
    ValueError
        If shapes do not agree, or the bandwidth is not above 0.
    TypeError
        If NumPy and CuPy arrays are mixed, or an array does not hold real numbers.

    Notes
    -----
    Differences are taken before squaring where products would lose digits, so the
    clouds may lie anywhere: float32 results are within 2e-6 of the exact ones, and two
    units in the last place, float64 results within 1e-13 of 1 plus their size. Tiles of
    points too far apart to matter are skipped. Points whose squared distance in
    bandwidths overflows are infinitely far apart.

    "tf32" affects the gaussian kernel of float32 points in 9 dimensions or more, on
    a GPU; other calls ignore it. Coordinates are measured from c, midway between the
    means of the two clouds, and rounded. This changes the logarithm of a kernel by at
    most ``e * d + e**2 / 2`` with ``e = 2**-11 * (|x_i - c| + |y_j - c|)``, where d is
    the distance of the two points and all lengths are in bandwidths. Rows of x more
    than 18 bandwidths from c are computed as in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> x, y = np.zeros((1, 2)), np.array([[0.0, 0.0], [3.0, 4.0]])
    >>> points.logsumexp(x, y, kernel="laplacian").round(4)
    array([0.0067])
    """
    problem, _ = points_problem.points(
        "logsumexp", x, y, log_weights, None, kernel, bandwidth, precision=precision
    )
    return api.run(problem)[1]


def kernel_sum(
    x: Array,
    y: Array,
    b: Array,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    precision: Precision = "float32",
) -> Any:
    """Sum of kernels times values, ``sum_j K(x_i, y_j) b_j``.

    Parameters
    ----------
    x : ndarray, shape (..., N, D)
        Points at which the sum is taken; NumPy or CuPy.
    y : ndarray, shape (..., M, D)
        Points that are summed over. Leading axes broadcast.
    b : ndarray, shape (..., M, V) or (M,)
        Values of any sign.
    kernel : str or function, default "gaussian"
        As in `logsumexp`; also "energy", ``-d``, and functions of any sign.
    bandwidth : float or array of float, shape (D,), default 1.0
        Unit of the distances, one for all axes or one per axis, in host memory.
    precision : {"float32", "tf32"}, default "float32"
        As in `logsumexp`.

    Returns
    -------
    ndarray, shape (..., N, V), or (..., N) where `b` is a vector
        float64 if any array is of float64 or integers, else float32.

    Raises
    ------
    ValueError, TypeError
        As in `logsumexp`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> x, y = np.zeros((1, 2)), np.array([[0.0, 0.0], [3.0, 4.0]])
    >>> points.kernel_sum(x, y, np.array([1.0, -2.0]), kernel="energy")
    array([10.])
    """
    problem, is_vector = points_problem.points(
        "kernel_sum",
        x,
        y,
        None,
        b,
        kernel,
        bandwidth,
        values_name="b",
        precision=precision,
    )
    return api.run(problem, is_vector)[0]


@overload
def mean(
    x: Array,
    y: Array,
    v: Array,
    log_weights: Array = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    precision: Precision = "float32",
    return_lse: Literal[False] = False,
) -> Any: ...
@overload
def mean(
    x: Array,
    y: Array,
    v: Array,
    log_weights: Array = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    precision: Precision = "float32",
    return_lse: Literal[True],
) -> tuple[Any, Any]: ...
@overload
def mean(
    x: Array,
    y: Array,
    v: Array,
    log_weights: Array = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    precision: Precision = "float32",
    return_lse: bool = False,
) -> Any | tuple[Any, Any]: ...
def mean(
    x: Array,
    y: Array,
    v: Array,
    log_weights: Array = None,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    precision: Precision = "float32",
    return_lse: bool = False,
) -> Any:
    """Mean of values, weighted by kernels.

    ``sum_j w_j K(x_i, y_j) v_j / sum_j w_j K(x_i, y_j)``, the estimator of Nadaraya and
    Watson [1]_ [2]_.

    Parameters
    ----------
    x : ndarray, shape (..., N, D)
        Points at which the mean is taken; NumPy or CuPy.
    y : ndarray, shape (..., M, D)
        Points that the values belong to. Leading axes broadcast.
    v : ndarray, shape (..., M, V) or (M,)
        Values.
    log_weights : ndarray, shape (..., M), optional
        Natural logarithms of the weights; 0 by default, -inf leaves a point out.
    kernel, bandwidth, precision
        As in `logsumexp`.
    return_lse : bool, default False
        Also return the logarithm of the denominator, as `logsumexp` does.

    Returns
    -------
    out : ndarray, shape (..., N, V), or (..., N) where `v` is a vector
        0 where there is no point.
    lse : ndarray, shape (..., N)
        Only with `return_lse`.

    Raises
    ------
    ValueError, TypeError
        As in `logsumexp`.

    References
    ----------
    .. [1] E. A. Nadaraya, "On estimating regression", Theory of Probability and its
       Applications 9, 1964.
    .. [2] Geoffrey S. Watson, "Smooth regression analysis", Sankhya A 26, 1964.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> y = np.array([[0.0], [1.0]])
    >>> points.mean(np.array([[0.5], [100.0]]), y, np.array([2.0, 4.0]))
    array([3., 4.])
    """
    problem, is_vector = points_problem.points(
        "mean",
        x,
        y,
        log_weights,
        v,
        kernel,
        bandwidth,
        return_lse,
        precision=precision,
    )
    out, lse = api.run(problem, is_vector)
    return (out, lse) if return_lse else out


def logsumexp_vjp(
    dlse: Array,
    x: Array,
    y: Array,
    log_weights: Array = None,
    *,
    lse: Array = None,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
) -> PointsGrads:
    """Gradients of `logsumexp`.

    Parameters
    ----------
    dlse : ndarray, shape (..., N)
        Gradient of a loss with respect to the result.
    x, y, log_weights, kernel, bandwidth
        As passed to `logsumexp`.
    lse : ndarray, shape (..., N), optional
        Its result; recomputed if not given.

    Returns
    -------
    PointsGrads
        Named tuple of dx, dy, dvalues (None), dlog_weights and dbandwidth, each of
        the shape of its array.

    Notes
    -----
    Where a kernel has a cusp, coinciding points contribute no gradient to each other.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> x, y = np.zeros((1, 1)), np.array([[1.0]])
    >>> points.logsumexp_vjp(np.ones(1), x, y).dx
    array([[1.]])
    """
    problem, given, results = points_problem.gradients(
        "logsumexp", x, y, log_weights, None, kernel, bandwidth, dlse=dlse, lse=lse
    )
    return gradients.backward(problem, given, **results)


def kernel_sum_vjp(
    dout: Array,
    x: Array,
    y: Array,
    b: Array,
    *,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
) -> PointsGrads:
    """Gradients of `kernel_sum`.

    Parameters
    ----------
    dout : ndarray, of the shape of the result
        Gradient of a loss with respect to the result.
    x, y, b, kernel, bandwidth
        As passed to `kernel_sum`.

    Returns
    -------
    PointsGrads
        Named tuple of dx, dy, dvalues (with respect to `b`), dlog_weights (None) and
        dbandwidth, each with the shape of its array.

    Notes
    -----
    Where a kernel has a cusp, coinciding points contribute no gradient to each other.
    """
    problem, given, results = points_problem.gradients(
        "kernel_sum", x, y, None, b, kernel, bandwidth, values_name="b", dout=dout
    )
    return gradients.backward(problem, given, **results)


def mean_vjp(
    dout: Array,
    x: Array,
    y: Array,
    v: Array,
    log_weights: Array = None,
    *,
    out: Array = None,
    lse: Array = None,
    dlse: Array = None,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
) -> PointsGrads:
    """Gradients of `mean`.

    Parameters
    ----------
    dout : ndarray, of the shape of the result
        Gradient of a loss with respect to the result.
    x, y, v, log_weights, kernel, bandwidth
        As passed to `mean`.
    out, lse : ndarray, optional
        What `mean` returned with `return_lse`; recomputed if not given.
    dlse : ndarray, shape (..., N), optional
        Gradient of the loss with respect to lse.

    Returns
    -------
    PointsGrads
        Named tuple of dx, dy, dvalues (with respect to `v`), dlog_weights and
        dbandwidth, each with the shape of its array.

    Notes
    -----
    Where a kernel has a cusp, coinciding points contribute no gradient to each other.
    """
    problem, given, results = points_problem.gradients(
        "mean",
        x,
        y,
        log_weights,
        v,
        kernel,
        bandwidth,
        dout=dout,
        dlse=dlse,
        out=out,
        lse=lse,
    )
    return gradients.backward(problem, given, **results)
