"""Gradients of the reductions, as reductions of the same kind.

With C_ij the gradient by d2_ij, which is a sum of kernels -dK/d(d2) times values,

    dx_i = 2 s^2 (x_i sum_j C_ij - sum_j C_ij y_j)
    dy_j = 2 s^2 (y_j sum_i C_ij - sum_i C_ij x_i)
    dh   = -2 s^3 sum_ij C_ij (x_i - y_j)^2

s being 1 / h, the bandwidth of an axis. Sums over i are reductions with x and y
exchanged. These terms cancel, so NumPy computes them in float64. A GPU sums up
differences.
"""

from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._points import api, kernels
from cupyflash._points.problem import PointsProblem

_MOST_EXPONENT = 256  # of a bandwidth whose inverse can be multiplied with itself


class PointsGrads(NamedTuple):
    """Gradients, each with the shape of its array; None for what was not given.

    Attributes
    ----------
    dx, dy : ndarray
        With respect to the points.
    dvalues : ndarray
        With respect to `b` or `v`.
    dlog_weights : ndarray
        With respect to the logarithms of the weights.
    dbandwidth : ndarray
        With respect to the bandwidth: one number, or one per axis.
    """

    dx: Any
    dy: Any
    dvalues: Any
    dlog_weights: Any
    dbandwidth: Any


def backward(problem, given, dout=None, dlse=None, out=None, lse=None):
    """The gradients of a problem, and of its results as far as they are known."""
    if problem.backend != "numpy":
        on_gpu = api.gpu_gradients()
        return PointsGrads(*on_gpu.backward(problem, given, dout, dlse, out, lse))
    dtype = problem.dtype
    # Of a gradient more is lost to cancellation than of a sum.
    problem, dout, dlse, out, lse = _widened(problem, dout, dlse, out, lse)
    problem, unit = _in_units(problem)
    problem = _centred(problem)
    if problem.reduction == "kernel_sum":
        grads = _of_sum(problem, dout)
    else:
        grads = _of_mean(problem, dout, dlse, out, lse)
    rows, columns, dvalues, dlog_weights = grads
    s2 = np.asarray(np.array(problem.scale) ** 2, dtype=problem.dtype)
    of_x, x_y, y_y = rows
    of_y, y_x = columns
    squares = (
        (of_x * problem.x**2).sum(axis=-2) - 2 * (problem.x * x_y).sum(axis=-2)
    ) + y_y.sum(axis=-2)
    dbandwidth = -2 * s2 * np.asarray(problem.scale, dtype=problem.dtype) * squares
    dbandwidth = dbandwidth * unit
    dbandwidth = dbandwidth.sum(axis=tuple(range(dbandwidth.ndim - 1)))
    if not given.bandwidth:
        dbandwidth = dbandwidth.sum()
    found = PointsGrads(
        _arrays.sum_to(2 * s2 * (problem.x * of_x - x_y) * unit, given.x),
        _arrays.sum_to(2 * s2 * (problem.y * of_y - y_x) * unit, given.y),
        None if given.values is None else _of_values(dvalues, given.values),
        None
        if given.log_weights is None
        else _arrays.sum_to(dlog_weights, given.log_weights),
        dbandwidth,
    )
    return PointsGrads(
        *(x if x is None else np.asarray(x).astype(dtype, copy=False) for x in found)
    )


def _widened(problem, *arrays):
    def widen(x):
        return None if x is None else np.asarray(x, np.float64)

    names = ("x", "y", "values", "log_weights")
    operands = {name: widen(getattr(problem, name)) for name in names}
    return problem.of(dtype="float64", **operands), *map(widen, arrays)


def _in_units(problem):
    """The same problem with bandwidths whose squares are numbers, and the unit."""
    width = np.array(problem.bandwidth)
    exponent = np.frexp(width)[1] - 1
    if not (np.abs(exponent) > _MOST_EXPONENT).any():
        return problem, 1.0
    unit = np.ldexp(1.0, -np.clip(exponent, -1000, 1000))
    width = width * unit
    changed = problem.of(
        x=problem.x * unit,
        y=problem.y * unit,
        bandwidth=tuple(width.tolist()),
        scale=tuple((1.0 / width).tolist()),
    )
    return changed, unit


def _centred(problem):
    """The same problem with the clouds round the origin."""
    if problem.num_y == 0:
        return problem
    centre = problem.y.mean(axis=-2, keepdims=True)
    return problem.of(x=problem.x - centre, y=problem.y - centre)


def _of_values(gradient, shape):
    """A gradient of columns of values, or of a vector of one."""
    return _arrays.sum_to(gradient if len(shape) > 1 else gradient[..., 0], shape)


def _outer(a, b):
    """Of each point all products of a column of `a` and one of `b`, side by side."""
    products = a[..., :, None] * b[..., None, :]
    return products.reshape(*products.shape[:-2], a.shape[-1] * b.shape[-1])


def _kernel_sum(problem, kernel, x, y, values):
    return _run(problem, "kernel_sum", kernel, x, y, values)[0]


def _run(problem, reduction, kernel, x, y, values, **more):
    """A reduction over other clouds, by another kernel."""
    more = {"log_weights": None, **more}
    return api.run(
        problem.of(
            reduction=reduction,
            kernel=kernel,
            x=x,
            y=y,
            num_x=x.shape[-2],
            num_y=y.shape[-2],
            num_values=values.shape[-1],
            values=values,
            **more,
        )
    )


# --- sums -----------------------------------------------------------------------------


def _of_sum(problem: PointsProblem, dout):
    x, y, b = problem.x, problem.y, problem.values
    slope, factor = kernels.slope_of(problem.kernel)
    width = problem.dim

    def moments(to, of, values, weights, others):
        """-sum of C, and of C times the columns of `others`."""
        ones = np.ones((*of.shape[:-1], 1), of.dtype)
        terms = _outer(values, np.concatenate([ones, *others], axis=-1))
        sums = _kernel_sum(problem, slope, to, of, terms)
        sums = sums.reshape(*to.shape[:-1], values.shape[-1], 1 + width * len(others))
        return -factor * (weights[..., :, None] * sums).sum(axis=-2)

    of_rows = moments(x, y, b, dout, (y, y * y))
    of_columns = moments(y, x, dout, b, (x,))
    rows = of_rows[..., :1], of_rows[..., 1 : 1 + width], of_rows[..., 1 + width :]
    columns = of_columns[..., :1], of_columns[..., 1:]
    return rows, columns, _kernel_sum(problem, problem.kernel, y, x, dout), None


# --- means and log-sums ---------------------------------------------------------------


def _of_mean(problem: PointsProblem, dout, dlse, out, lse):
    """A log-sum is a mean of no columns, with a gradient of its lse alone."""
    x, y, v, width = problem.x, problem.y, problem.values, problem.dim
    if lse is None or (out is None and v is not None):
        out, lse = api.run(problem.of(return_lse=True))
    if v is None:
        v, out, dout = y[..., :0], x[..., :0], x[..., :0]
    through = np.zeros(lse.shape, problem.dtype) if dlse is None else dlse
    through = (through - (dout * out).sum(axis=-1))[..., None]
    weights = problem.log_weights
    if weights is None:
        weights = np.zeros(y.shape[:-1], problem.dtype)
    # A row that sees no point has no gradient.
    inverse = np.where(lse > -np.inf, -lse, -np.inf)
    slope, factor = kernels.slope_of(problem.kernel)

    def weighted(kernel, to, of, log_of, log_to, values):
        """Sum of exp(log_of + log_to) K times values."""
        return _weighted(problem, kernel, to, of, log_of, log_to, values)

    ones = np.ones((*y.shape[:-1], 1), y.dtype)
    terms = np.concatenate([ones, y, y * y], axis=-1)
    count = terms.shape[-1]
    sums = weighted(
        slope, x, y, weights, inverse, np.concatenate([terms, _outer(v, terms)], -1)
    )
    sums = sums.reshape(*sums.shape[:-1], 1 + v.shape[-1], count)
    by = np.concatenate([through, dout], axis=-1)[..., :, None]
    of_rows = -factor * (by * sums).sum(axis=-2)

    ones = np.ones((*x.shape[:-1], 1), x.dtype)
    terms = np.concatenate([ones, x], axis=-1)
    gradients = np.concatenate([through, dout], axis=-1)
    by = np.concatenate([np.ones((*y.shape[:-1], 1), y.dtype), v], axis=-1)
    sums = weighted(slope, y, x, inverse, weights, _outer(gradients, terms))
    sums = sums.reshape(*sums.shape[:-1], gradients.shape[-1], width + 1)
    of_columns = -factor * (by[..., :, None] * sums).sum(axis=-2)

    of_weights = weighted(problem.kernel, y, x, inverse, weights, gradients)
    rows = of_rows[..., :1], of_rows[..., 1 : 1 + width], of_rows[..., 1 + width :]
    columns = of_columns[..., :1], of_columns[..., 1:]
    return rows, columns, of_weights[..., 1:], (by * of_weights).sum(axis=-1)


def _weighted(problem, kernel, to, of, log_of, log_to, values):
    """Sum over `of` of exp(log_of + log_to) K times values, for each of `to`."""
    if kernel.log is not None and kernel.expression is None:
        more = {"log_weights": log_of, "return_lse": True}
        means, lse = _run(problem, "mean", kernel, to, of, values, **more)
        return np.exp(lse + log_to)[..., None] * means
    # The derivative of a function may have either sign.
    top = log_of.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    scaled = np.exp(log_of - top)[..., None] * values
    return np.exp(top + log_to)[..., None] * _kernel_sum(
        problem, kernel, to, of, scaled
    )
