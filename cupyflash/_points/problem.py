"""Arguments of the reductions -> a problem of plain numbers, and views.

All errors of the caller are raised here, before anything is allocated or launched.
"""

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._points import kernels

PRECISIONS = ("float32", "tf32")
REDUCTIONS = ("logsumexp", "kernel_sum", "mean")


@dataclass(frozen=True, eq=False)
class PointsProblem:
    """What is asked, and the arrays: views of the batch's shape, in one dtype.

    The kernel is one of d2, the sum over the axes of ``(scale * (x - y)) ** 2``.
    """

    reduction: str  # one of REDUCTIONS
    backend: str  # "numpy" or "cupy"
    batch: tuple[int, ...]  # leading axes, broadcast
    num_x: int
    num_y: int
    dim: int
    num_values: int  # columns of `values`, 0 without
    dtype: str  # of the arrays and the results: "float32" or "float64"
    kernel: kernels.Kernel
    scale: tuple[float, ...]  # 1 / bandwidth of each axis
    x: Any  # batch + (num_x, dim)
    y: Any  # batch + (num_y, dim)
    log_weights: Any = None  # batch + (num_y,)
    values: Any = None  # batch + (num_y, num_values): b of a sum, v of a mean
    return_lse: bool = False  # of a mean
    bandwidth: tuple[float, ...] = ()  # of each axis, of which scale is rounded
    precision: str = "float32"  # of PRECISIONS
    wide_lse: bool = False  # log-sums in float64 whatever `dtype`; on a GPU

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of sums and means."""
        return (*self.batch, self.num_x, self.num_values)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sums."""
        return (*self.batch, self.num_x)

    @property
    def isotropic(self) -> bool:
        """Whether all axes have one bandwidth."""
        return len(set(self.scale)) <= 1

    def of(self, **changes: Any) -> "PointsProblem":
        """The same problem but for some fields."""
        return replace(self, **changes)


def _floats(name, x):
    """Refuse what holds no real numbers."""
    if _arrays.dtype_name(x) not in _arrays.FLOATS and x.dtype.kind not in "biu":
        raise TypeError(
            f"{name} must hold real numbers ({', '.join(_arrays.FLOATS)}, integers or "
            f"bool), got {x.dtype}"
        )


def count(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int from `least` on; ValueError, TypeError."""
    number = _arrays.index(name, value, "an int")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number


# Kernels by name of which a mean can be taken.
POSITIVE_KERNELS = kernels.POSITIVE


def check_finite(name: str, x: Any) -> None:
    """Refuse NaN and infinities; on a GPU that waits for the device."""
    if not bool((abs(x) < np.inf).all()):
        raise ValueError(f"{name} must be finite, but contains NaN or infinity")


def compute_dtype(arrays: dict[str, Any]) -> str:
    """float32 for 16-bit and float32 alone, float64 once anything else takes part."""
    names = {_arrays.dtype_name(x) for x in arrays.values()}
    return "float32" if names <= set(_arrays.FLOATS[:3]) else "float64"


def adopt(num_needed: int, **given: Any) -> tuple[Any, dict[str, Any]]:
    """The namespace and the arrays of a call, in the dtype that it is computed in."""
    weak = {
        name
        for name, x in given.items()
        if isinstance(x, numbers.Real) and not isinstance(x, np.generic)
    }
    xp, arrays = _arrays.adopt_all(num_needed, **given)
    arrays = {name: x for name, x in arrays.items() if x is not None}
    for name, x in arrays.items():
        _floats(name, x)
    dtype = compute_dtype({n: x for n, x in arrays.items() if n not in weak})
    return xp, {
        name: x if x.dtype == dtype else x.astype(dtype) for name, x in arrays.items()
    }


def bandwidths(bandwidth: Any, dim: int) -> tuple[tuple[float, ...], ...]:
    """The bandwidth of each axis, and 1 over it; ValueError, TypeError."""
    if _arrays.lives_on_gpu(bandwidth):
        raise TypeError(
            "bandwidth must be a number, or one per axis, in host memory, got a GPU "
            "array: pass cupy.asnumpy(bandwidth)"
        )
    given = np.asarray(bandwidth)
    # NumPy makes objects of integers of more than 64 bits, and what is beside them.
    if given.dtype == object and isinstance(bandwidth, (int, list, tuple)):
        if all(isinstance(h, (int, float)) for h in given.flat):
            try:
                given = given.astype(np.float64)
            except OverflowError:
                raise ValueError("bandwidth is too large for float64") from None
    if given.dtype.kind not in "biuf" or given.dtype.kind == "b":
        raise TypeError(
            f"bandwidth must be a real number, or one per axis, got {bandwidth!r}"
        )
    if given.shape not in ((), (dim,)):
        raise ValueError(
            f"bandwidth must be a number, or have shape ({dim},), one per axis of the "
            f"points, got shape {given.shape}"
        )
    widths = np.broadcast_to(given.astype(np.float64), (dim,))
    wrong = ~(np.isfinite(widths) & (widths > 0))
    if wrong.any() or (dim == 0 and not given > 0):
        raise ValueError(f"bandwidth must be finite and above 0, got {bandwidth!r}")
    scale = tuple((1.0 / widths).tolist())
    if not all(map(math.isfinite, scale)):
        raise ValueError(f"bandwidth is too small for float64, got {bandwidth!r}")
    return tuple(widths.tolist()), scale


def _check_points(name, x):
    if x.ndim < 2:
        one = f" (one axis: {name}[:, None])" if x.ndim == 1 else ""
        raise ValueError(
            f"{name} must have shape (..., points, dimensions), got {x.shape}{one}"
        )


def check_clouds(x: Any, y: Any) -> None:
    """Refuse clouds that differ in their number of dimensions."""
    _check_points("x", x)
    _check_points("y", y)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"x and y must have the same number of dimensions (last axis), got "
            f"{x.shape} and {y.shape}"
        )


def leading_axes(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common leading axes; a ValueError that names the arguments."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"leading axes do not broadcast: {listed}") from None


def check_precision(precision: Any, dtype: str) -> str:
    """`precision`, if it is one that a call in this dtype can have; ValueError."""
    _arrays.check_choice("precision", precision, PRECISIONS)
    if precision == "tf32" and dtype != "float32":
        raise ValueError(f"precision='tf32' is for float32 inputs, got {dtype}")
    return precision


def points(
    reduction: str,
    x: Any,
    y: Any,
    log_weights: Any = None,
    values: Any = None,
    kernel: Any = "gaussian",
    bandwidth: Any = 1.0,
    return_lse: bool = False,
    values_name: str = "v",
    precision: str = "float32",
) -> tuple[PointsProblem, bool]:
    """A checked problem; and whether values, and so the result, are a vector."""
    given = {"x": x, "y": y}
    if reduction != "logsumexp":
        given[values_name] = values
    xp, arrays = adopt(len(given), **given, log_weights=log_weights)
    x, y = arrays["x"], arrays["y"]
    check_clouds(x, y)
    num_x, (num_y, dim) = x.shape[-2], y.shape[-2:]
    shapes = {"x": x.shape[:-2], "y": y.shape[:-2]}
    weights, values = arrays.get("log_weights"), arrays.get(values_name)
    is_vector = values is not None and values.ndim == 1
    if values is not None:
        if values.ndim == 0 or values.shape[0 if is_vector else -2] != num_y:
            raise ValueError(
                f"{values_name} must have shape (..., {num_y}, columns), one row "
                f"per point of y, or ({num_y},), got {values.shape}"
            )
        values = values[:, None] if is_vector else values
        shapes[values_name] = values.shape[:-2]
    if weights is not None:
        if weights.ndim and weights.shape[-1] not in (1, num_y):
            raise ValueError(
                f"log_weights must have shape (..., {num_y}), one per point of y, "
                f"got {weights.shape}"
            )
        shapes["log_weights"] = weights.shape[:-1]
    batch = leading_axes(**shapes)
    widths, scale = bandwidths(bandwidth, dim)
    problem = PointsProblem(
        reduction=reduction,
        backend="numpy" if xp is np else "cupy",
        batch=batch,
        num_x=num_x,
        num_y=num_y,
        dim=dim,
        num_values=0 if values is None else values.shape[-1],
        dtype=x.dtype.name,
        kernel=kernels.find(kernel, reduction),
        scale=scale,
        x=xp.broadcast_to(x, (*batch, num_x, dim)),
        y=xp.broadcast_to(y, (*batch, num_y, dim)),
        log_weights=None
        if weights is None
        else xp.broadcast_to(weights, (*batch, num_y)),
        values=None
        if values is None
        else xp.broadcast_to(values, (*batch, *values.shape[-2:])),
        return_lse=_arrays.check_bool("return_lse", return_lse),
        bandwidth=widths,
        precision=check_precision(precision, x.dtype.name),
    )
    return problem, is_vector


class Given(NamedTuple):
    """Shapes of what the caller gave, which gradients are summed up to."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    values: tuple[int, ...] | None
    log_weights: tuple[int, ...] | None
    bandwidth: tuple[int, ...]


def _shape(x):
    return None if x is None else tuple(np.shape(x))


def gradients(
    reduction: str,
    x: Any,
    y: Any,
    log_weights: Any,
    values: Any,
    kernel: Any,
    bandwidth: Any,
    values_name: str = "v",
    **results: Any,
) -> tuple[PointsProblem, Given, dict[str, Any]]:
    """A checked problem, the shapes of its gradients, and what is known of its results.

    `results` are out, lse and their gradients by name; the first must be there.
    """
    problem, is_vector = points(
        reduction, x, y, log_weights, values, kernel, bandwidth, False, values_name
    )
    given = Given(*map(_shape, (x, y, values, log_weights, bandwidth)))
    first = next(iter(results))
    if results[first] is None:
        raise TypeError(f"{first} must be an array, got None; it is not optional")
    _, arrays = _arrays.adopt_all(1, x=x, **results)
    found: dict[str, Any] = {}
    for name in results:
        array = arrays[name]
        if array is None:
            found[name] = None
            continue
        _floats(name, array)
        of_lse = name.endswith("lse")
        shape = problem.lse_shape if of_lse or is_vector else problem.out_shape
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if is_vector and not of_lse:
            array = array[..., None]
        found[name] = array.astype(problem.dtype, copy=False)
    return problem, given, found
