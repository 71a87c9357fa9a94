"""The CuPy back end of points: a checked problem becomes a plan, and is launched."""

import math
from fractions import Fraction
from typing import Any

import cupy
import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._cuda import graphs, plan_cache, runtime
from cupyflash._cuda import launch as _launch
from cupyflash._points.gpu import clouds, config, functions, registry
from cupyflash._points.gpu.config import Pairs
from cupyflash._points.gpu.plan import PointsPlan

_plans = plan_cache.PlanCache()


@graphs.keeps_memory
def compute(problem) -> tuple[Any, Any]:
    """(out, lse) of a problem on CuPy arrays; None where there is none."""
    with cupy.cuda.Device(problem.x.data.device_id):
        return _compute(problem)


def _compute(problem):
    has_out, has_lse = problem.reduction != "logsumexp", _has_lse(problem)
    dtype = _arrays.to_dtype(problem.dtype)
    if not (math.prod(problem.batch) and problem.num_x and problem.num_y):
        # The sum of nothing.
        out = cupy.zeros(problem.out_shape, dtype) if has_out else None
        of_lse = np.float64 if problem.wide_lse else dtype
        lse = cupy.full(problem.lse_shape, -np.inf, of_lse) if has_lse else None
        return out, lse
    if has_out and not problem.num_values:
        lse = None
        if has_lse:
            parts = problem.of(reduction="logsumexp", values=None)
            _, lse = _compute(parts)
        return cupy.zeros(problem.out_shape, dtype), lse
    if math.prod(problem.batch) > config.MOST_ENTRIES:
        return _in_slabs(problem)
    pairs = pairs_of(problem)
    x, y, scales = _coordinates(problem, pairs)
    weights = _flat(problem.log_weights, pairs, pairs.num_keys)
    values = _flat(problem.values, pairs, pairs.num_keys, pairs.num_columns)
    x_order = y_order = None
    if pairs.is_sorted:
        x_order, y_order = (clouds.order(_scaled(z, scales)) for z in (x, y))
    device_id = x.data.device_id
    key = pairs, device_id
    plan = _plans.get(key)
    if plan is None:
        plan = PointsPlan(pairs, device_id)
        _plans.put(key, plan)
    operands = x, y, weights, values, x_order, y_order, scales
    results = plan([0 if a is None else a.data.ptr for a in operands])
    for a in operands:
        graphs.keep_if_capturing(a)
    found = dict(zip(plan.results, results, strict=True))
    out, lse = found.get("out"), found.get("lse")
    return (
        None if out is None else out.reshape(problem.out_shape),
        None if lse is None else lse.reshape(problem.lse_shape),
    )


def _in_slabs(problem):
    """A long batch, so many entries at a time."""
    batch = math.prod(problem.batch)
    arrays = {}
    for name, axes in (("x", 2), ("y", 2), ("log_weights", 1), ("values", 2)):
        a = getattr(problem, name)
        arrays[name] = a if a is None else a.reshape(batch, *a.shape[a.ndim - axes :])
    outs, lses = [], []
    for first in range(0, batch, config.MOST_ENTRIES):
        some = slice(first, first + config.MOST_ENTRIES)
        part = {n: a if a is None else a[some] for n, a in arrays.items()}
        out, lse = _compute(problem.of(batch=part["x"].shape[:1], **part))
        outs.append(out)
        lses.append(lse)

    def joined(parts, shape):
        return None if parts[0] is None else cupy.concatenate(parts).reshape(shape)

    return joined(outs, problem.out_shape), joined(lses, problem.lse_shape)


def _has_lse(problem):
    return problem.reduction == "logsumexp" or (
        problem.reduction == "mean" and problem.return_lse
    )


def pairs_of(problem) -> Pairs:
    """The numbers of a problem."""
    more: dict[str, Any] = {}
    if problem.kernel.expression is not None:
        is_log = problem.reduction != "kernel_sum"
        text, numbers = functions.of(problem.kernel, is_log)
        more = {"function": text, "numbers": numbers}
    scaled = problem.dim > 0 and not _is_plain(problem)
    is_wide = problem.dtype == "float64"
    weights = problem.log_weights
    if weights is not None and weights.dtype != problem.dtype:
        more["weights_dtype"] = weights.dtype.name
    if problem.wide_lse and not is_wide:
        more["lse_dtype"] = "float64"
    pairs = Pairs(
        reduction=problem.reduction,
        batch=math.prod(problem.batch),
        num_rows=problem.num_x,
        num_keys=problem.num_y,
        dim=max(problem.dim, 1),
        num_columns=problem.num_values,
        dtype=problem.dtype,
        kernel=problem.kernel.name,
        scale=1.0 if scaled or not problem.dim else problem.scale[0],
        coord_dtype="float64" if scaled else problem.dtype,
        return_lse=_has_lse(problem),
        precision=problem.precision,
        bandwidth=0.0 if scaled or not problem.dim else problem.bandwidth[0],
        has_axis_scales=scaled and is_wide,
        **more,
    )
    return clouds.sorted_where_worth(pairs)


def _is_plain(problem):
    """Whether one factor of d2, of a size that float32 squares, is all the scale."""
    return problem.isotropic and 1e-15 < problem.scale[0] < 1e15


def _scaled(x, scales):
    return x if scales is None else x * scales[0]


def _coordinates(problem, pairs):
    """Both clouds, (batch, points, axes) and contiguous, and scales of their axes.

    float32 is scaled here, in float64, and float64 where kernels have taken the
    difference of two points: a digit of either would be one of a narrow kernel.
    """
    found, scales = [], None
    if pairs.has_axis_scales:
        widths = map(Fraction, problem.bandwidth)
        lost = [
            float(1 / w - Fraction(s))
            for w, s in zip(widths, problem.scale, strict=True)
        ]
        scales = cupy.asarray([problem.scale, lost])
    for x in (problem.x, problem.y):
        if not problem.dim:
            x = cupy.zeros((*x.shape[:-1], 1), x.dtype)
        elif scales is None and not _is_plain(problem):
            x = x.astype(np.float64) * cupy.asarray(problem.scale)
        found.append(_flat(x, pairs, x.shape[-2], pairs.dim))
    return *found, scales


def _flat(x, pairs, *shape):
    """An array with one axis for the batch, contiguous; None stays so."""
    if x is None:
        return None
    return cupy.ascontiguousarray(x).reshape(pairs.batch, *shape)


def _precision(row, pairs):
    """What coordinates are rounded to, for explain()."""
    if row is registry.PRODUCTS and row.parts(pairs) == 1:
        return "tf32: coordinates from the middle of the clouds, rounded to 11 bits"
    return pairs.dtype


def describe(problem) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    pairs = pairs_of(problem)
    device_id = problem.x.data.device_id
    row, refused = registry.select(pairs, runtime.device(device_id))
    plan = PointsPlan(pairs, device_id)
    return {
        "kernel": row.name,
        "refused": refused,
        "precision": _precision(row, pairs),
        "sorted along a curve": pairs.is_sorted,
        "launches": [_launch.describe(launch) for launch in plan.launches],
    }
