"""Gradients of the reductions on CuPy arrays: sums of differences of points.

With c_ij the gradient by d2_ij, dx_i = 2 s^2 sum_j c_ij (x_i - y_j), and dy_j the
same with x and y exchanged. float32 keeps its digits in them; of x_i sum_j c_ij less
sum_j c_ij y_j it loses some.
"""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import cupy
import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._cuda import graphs, plan_cache
from cupyflash._points import kernels
from cupyflash._points.gpu import clouds, config, dispatch
from cupyflash._points.gpu.gradient_plan import MomentsPlan
from cupyflash._points.gpu.moments import Moments

_plans = plan_cache.PlanCache()


class _Side(NamedTuple):
    """A cloud with what its points bring to c_ij, (batch, points, ...) and contiguous.

    That is exp(terms) of a mean, and a product of values.
    """

    points: Any
    terms: Any  # float64; None: all 0
    values: Any
    order: Any  # along a curve, or None


@graphs.keeps_memory
def backward(problem, given, dout=None, dlse=None, out=None, lse=None):
    """(dx, dy, dvalues, dlog_weights, dbandwidth), each with the shape of its array."""
    with cupy.cuda.Device(problem.x.data.device_id):
        return _backward(problem, given, dout, dlse, out, lse)


def _backward(problem, given, dout, dlse, out, lse):
    if not (math.prod(problem.batch) and problem.num_x and problem.num_y):
        dtype = _arrays.to_dtype(problem.dtype)
        return [None if s is None else cupy.zeros(s, dtype) for s in given]
    if problem.reduction == "kernel_sum":
        row_terms = key_terms = None
        row_values, key_values = dout, problem.values
    else:
        row_values, key_values, row_terms = _of_mean(problem, dout, dlse, out, lse)
        key_terms = problem.log_weights
    per_axis = bool(given.bandwidth)
    dx, dy, squares = _moments(
        problem, row_terms, key_terms, row_values, key_values, per_axis
    )
    dvalues, dlog_weights = _of_values(
        problem, given, row_terms, row_values, key_values
    )
    scale = np.array(problem.scale if per_axis else problem.scale[:1])
    _, factor = kernels.slope_of(problem.kernel)
    dbandwidth = _sized(2 * factor * scale, squares)
    found = (
        _arrays.sum_to(dx, given.x),
        _arrays.sum_to(dy, given.y),
        dvalues,
        dlog_weights,
        dbandwidth if per_axis else dbandwidth.sum(),
    )
    return [x if x is None else x.astype(problem.dtype, copy=False) for x in found]


def _sized(numbers, x):
    """x times a number of each axis, the last one of x."""
    numbers = np.asarray(numbers)
    if (numbers == numbers.flat[:1]).all():
        return x * (numbers.flat[0] if numbers.size else 1.0)
    return x * cupy.asarray(numbers, dtype=x.dtype)


def _of_mean(problem, dout, dlse, out, lse):
    """(values of x, values of y, terms of x) of a mean, or of a log-sum."""
    y, v = problem.y, problem.values
    if lse is None or (out is None and v is not None):
        # A weight has the digits of exp(-lse).
        out, lse = dispatch.compute(problem.of(return_lse=True, wide_lse=True))
    through = cupy.zeros(lse.shape) if dlse is None else dlse.astype(np.float64)
    if v is not None:
        through = through - (dout.astype(np.float64) * out).sum(axis=-1)
    row_values = through.astype(problem.dtype)[..., None]
    key_values = cupy.ones((*y.shape[:-1], 1), y.dtype)
    if v is not None:
        row_values = cupy.concatenate([row_values, dout], axis=-1)
        key_values = cupy.concatenate([key_values, v], axis=-1)
    lse = lse.astype(np.float64)
    # A row that sees no point has no gradient.
    return row_values, key_values, cupy.where(lse > -np.inf, -lse, -np.inf)


# --- points ---------------------------------------------------------------------------


def _moments(problem, row_terms, key_terms, row_values, key_values, per_axis):
    """dx, dy, and sums of squares of differences in bandwidths of all pairs."""
    columns = row_values.shape[-1]
    shape = problem.batch
    if not (problem.dim and columns):
        zeros = (cupy.zeros(z.shape, z.dtype) for z in (problem.x, problem.y))
        return *zeros, cupy.zeros(problem.dim if per_axis else 1)
    slope, factor = kernels.slope_of(problem.kernel)
    pairs, scales = _pairs_of(problem, slope, columns)
    rows = _side(problem.x, row_terms, row_values, pairs, scales)
    keys = _side(problem.y, key_terms, key_values, pairs, scales)
    is_plain = pairs.scale != 1.0 or set(problem.scale) == {1.0}
    scale = problem.scale[0] if is_plain else 1.0
    of_pair = -2 * factor * scale * scale
    dx, squares = _run(
        Moments(pairs, 2 if per_axis else 1, of_pair), rows, keys, scales
    )
    turned = replace(pairs, num_rows=pairs.num_keys, num_keys=pairs.num_rows)
    dy, _ = _run(Moments(turned, 0, of_pair), keys, rows, scales)
    if not is_plain:
        dx, dy = (_sized(problem.scale, z) for z in (dx, dy))
    squares = squares.sum(axis=(0, 1)) * (scale * scale)
    return dx.reshape(*shape, *dx.shape[1:]), dy.reshape(*shape, *dy.shape[1:]), squares


def _pairs_of(problem, slope, columns):
    """The numbers of a call, and scales of axes that have their own."""
    function: dict[str, Any] = {}
    if slope.expression is not None:
        text, numbers = dispatch.functions.of(slope, False)
        function = {"function": text, "numbers": numbers}
    small, large = min(problem.scale), max(problem.scale)
    is_moderate = 1e-15 < small and large < 1e15  # squares are numbers of float32
    is_plain = is_moderate and small == large
    has_axis_scales = not is_plain and (is_moderate or problem.dtype == "float64")
    pairs = config.Pairs(
        reduction="kernel_sum" if problem.reduction == "kernel_sum" else "mean",
        batch=math.prod(problem.batch),
        num_rows=problem.num_x,
        num_keys=problem.num_y,
        dim=problem.dim,
        num_columns=columns,
        dtype=problem.dtype,
        kernel=slope.name,
        scale=problem.scale[0] if is_plain else 1.0,
        coord_dtype=problem.dtype if is_plain or has_axis_scales else "float64",
        bandwidth=problem.bandwidth[0] if is_plain else 0.0,
        has_axis_scales=has_axis_scales,
        weights_dtype="float64",
        **function,
    )
    scales = None
    if not is_plain:
        widths = map(Fraction, problem.bandwidth)
        lost = [
            float(1 / w - Fraction(s))
            for w, s in zip(widths, problem.scale, strict=True)
        ]
        scales = cupy.asarray([problem.scale, lost])
    return clouds.sorted_where_worth(pairs), scales


def _side(points, terms, values, pairs, scales):
    order = None
    shape = pairs.batch, points.shape[-2]
    points = cupy.ascontiguousarray(points).reshape(*shape, pairs.dim)
    scaled = points if scales is None else points * scales[0]
    if pairs.is_sorted:
        order = clouds.order(scaled)
    if scales is not None and not pairs.has_axis_scales:
        points = scaled
    if terms is not None:
        terms = cupy.ascontiguousarray(terms, dtype=np.float64).reshape(shape)
    values = cupy.ascontiguousarray(values, dtype=pairs.dtype)
    return _Side(points, terms, values.reshape(*shape, pairs.num_columns), order)


def _run(moments, rows, keys, scales):
    """The moments of `rows`, and their squares or None; a long batch in slabs."""
    pairs = moments.pairs
    if pairs.batch > config.MOST_ENTRIES:
        found = []
        for first in range(0, pairs.batch, config.MOST_ENTRIES):
            some = slice(first, first + config.MOST_ENTRIES)
            parts = [
                _Side(*(a if a is None else a[some] for a in side))
                for side in (rows, keys)
            ]
            fewer = replace(pairs, batch=parts[0].points.shape[0])
            found.append(_run(moments._replace(pairs=fewer), *parts, scales))
        return [
            None if parts[0] is None else cupy.concatenate(parts)
            for parts in zip(*found, strict=True)
        ]
    device_id = rows.points.data.device_id
    plan = _plans.get((moments, device_id))
    if plan is None:
        plan = MomentsPlan(moments, device_id)
        _plans.put((moments, device_id), plan)
    if not pairs.has_axis_scales:
        scales = None
    operands = [a for pair in zip(rows, keys, strict=True) for a in pair] + [scales]
    found = plan([0 if a is None else a.data.ptr for a in operands])
    for a in operands:
        graphs.keep_if_capturing(a)
    return found if moments.squares else (*found, None)


# --- values and weights ---------------------------------------------------------------


def _of_values(problem, given, row_terms, row_values, key_values):
    """Gradients by values and by log weights, None for what was not given."""

    def turned(reduction, values, **more):
        return dispatch.compute(
            problem.of(
                reduction=reduction,
                x=problem.y,
                y=problem.x,
                num_x=problem.num_y,
                num_y=problem.num_x,
                num_values=values.shape[-1],
                values=values,
                **more,
            )
        )

    def sum_to_values(gradient):
        of_vector = len(given.values) == 1
        return _arrays.sum_to(gradient[..., 0] if of_vector else gradient, given.values)

    if problem.reduction == "kernel_sum":
        out, _ = turned("kernel_sum", row_values)
        return sum_to_values(out), None
    if given.values is None and given.log_weights is None:
        return None, None
    # Sums of the rows' weights at each of y are means of these times all of them.
    more = {"log_weights": row_terms, "return_lse": True, "wide_lse": True}
    means, lse = turned("mean", row_values, **more)
    if problem.log_weights is not None:
        lse = lse + problem.log_weights
    sums = cupy.exp(lse)[..., None] * means
    dvalues = dlog_weights = None
    if given.values is not None:
        dvalues = sum_to_values(sums[..., 1:])
    if given.log_weights is not None:
        of_all = (key_values * sums).sum(axis=-1)
        dlog_weights = _arrays.sum_to(of_all, given.log_weights)
    return dvalues, dlog_weights
