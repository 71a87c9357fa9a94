"""Arguments of the softmax family -> a problem of plain numbers, and views.

All errors of the caller are raised here, before anything is allocated or launched.
"""

import functools
import math
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core import strides
from cupyflash._softmax.memory_layout import Layout

FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "softmax_vjp", "log_softmax_vjp")


@dataclass(frozen=True)
class SoftmaxProblem:
    """A call, without the arrays."""

    function: str  # one of FUNCTIONS
    backend: str  # "numpy" or "cupy"
    shape: tuple[int, ...]  # of x, with b and where broadcast in
    axes: tuple[int, ...]  # reduced, sorted, not negative
    dtypes: dict[str, str | None]  # of each operand by name; "out" among them
    compute_dtype: str  # of maxima, exponentials and sums
    scale: float = 1.0
    keepdims: bool = True
    return_sign: bool = False
    method: str = "auto"
    layout: Layout | None = None  # on the GPU, once `out` is known

    @property
    def row_length(self) -> int:
        """Elements per sum."""
        return prod(self.shape[a] for a in self.axes)

    @property
    def num_rows(self) -> int:
        """The number of sums."""
        return prod(n for a, n in enumerate(self.shape) if a not in self.axes)

    @property
    def reduced_shape(self) -> tuple[int, ...]:
        """Shape with one number per row, with the reduced axes kept as ones."""
        return tuple(1 if a in self.axes else n for a, n in enumerate(self.shape))

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result of the function."""
        if self.function != "logsumexp":
            return self.shape
        if self.keepdims:
            return self.reduced_shape
        return tuple(n for a, n in enumerate(self.shape) if a not in self.axes)

    @property
    def is_complex(self) -> bool:
        return self.compute_dtype.startswith("complex")


class SoftmaxOperands(NamedTuple):
    """The arrays of a call, all of the problem's shape (broadcast views, no copies).

    `x` is the input, or `y` of a vjp. `out` is the array that the caller gave, or None;
    for logsumexp it has the result's shape.
    """

    x: Any
    dy: Any = None
    b: Any = None
    where: Any = None
    out: Any = None


def compute_dtype(*names: str) -> str:
    """float32 for 16-bit and float32, float64 if anything else takes part."""
    if any(n.startswith("complex") for n in names):
        return "complex128"
    return "float32" if all(n in _arrays.FLOATS[:3] for n in names) else "float64"


@functools.lru_cache(maxsize=64)
def split_scale(scale: float) -> tuple[float, float]:
    """Split a scale into a factor of x and one, at least 1, of differences.

    scale * x itself would be rounded, by more than 1 if it is large. The first factor
    is a power of two of at most 1, which is exact, with the sign of the scale; or 0.
    """
    if scale == 0:
        return 0.0, 1.0
    unit = min(1.0, math.ldexp(1, math.frexp(scale)[1] - 1))
    return math.copysign(unit, scale), abs(scale) / unit


_LOG2_E = "1.44269504088896340735992468100189213742664595415299"


@functools.lru_cache(maxsize=64)
def exponent_unit(factor: float, dtype: str) -> tuple[float, float]:
    """factor * log2(e) as a number of `dtype`, and its relative rounding error.

    Kernels multiply it by up to 32; it is clamped so that this does not overflow.
    """
    from fractions import Fraction  # slow to import, and few calls need it

    most = float(np.finfo(dtype).max) / 64
    exact = Fraction(min(factor, most)) * Fraction(_LOG2_E)
    unit = float(np.dtype(dtype).type(float(exact)))
    return unit, float(exact / Fraction(unit) - 1)


_COMPLEX = ("complex64", "complex128")


def _check_numeric(name, x):
    dtype = _arrays.dtype_name(x)
    if dtype in _arrays.FLOATS + _COMPLEX or x.dtype.kind in "biu":
        return
    if x.dtype.kind in "fc":  # extended precision, which no sum supports
        known = _arrays.FLOATS if x.dtype.kind == "f" else _COMPLEX
        raise TypeError(
            f"{name} has dtype {dtype}; convert it to one of {', '.join(known)}"
        )
    raise TypeError(
        f"{name} must hold numbers ({', '.join(_arrays.FLOATS)}, integers, bool or "
        f"complex), got {x.dtype}; convert it to one of them"
    )


def _natural_dtype(*arrays):
    """The result dtype of NumPy's promotion, with bool and integers as float64."""
    names = {_arrays.dtype_name(x) if _is_inexact(x) else "float64" for x in arrays}
    if len(names) == 1:
        return names.pop()
    if "bfloat16" in names:  # bfloat16 joins float16 only in float32
        names = {"float32" if n in ("bfloat16", "float16") else n for n in names}
    return np.result_type(*names).name


def _with_number(x, number):
    """The dtype of an array and a Python number, which can only widen to complex."""
    if not isinstance(number, complex) or x.dtype.kind == "c":
        return _arrays.dtype_name(x)
    return "complex128" if x.dtype == np.float64 else "complex64"


def _is_inexact(x):
    return _arrays.dtype_name(x) in _arrays.FLOATS or x.dtype.kind == "c"


def _check_where(where, shape):
    """`where` as a view of `shape`; TypeError, ValueError."""
    if where is None:
        return None
    if where.dtype != np.bool_:
        raise TypeError(f"where must be bool, got {_arrays.dtype_name(where)}")
    return _arrays.broadcast_view("where", where, shape)


def softmax(
    function, x, axis, where, scale, dtype, out, method
) -> tuple[SoftmaxProblem, SoftmaxOperands]:
    """Check a call of softmax or log_softmax."""
    _arrays.check_out_is_array(out)
    xp, a = _arrays.adopt_all(x=x, where=where, out=out)
    x, where, out = a["x"], a["where"], a["out"]
    _check_numeric("x", x)
    axes = strides.normalize_axes(axis, x.ndim)
    scale = _arrays.finite_number("scale", scale)
    where = _check_where(where, x.shape)
    _arrays.check_method(method)
    result = _result_dtype(x, dtype, out)
    if out is not None:
        inputs = {"where": where}
        if not _arrays.same_view(out, x):  # out=x is allowed
            inputs["x"] = x
        _arrays.check_out(out, x.shape, (result,), inputs)
    problem = SoftmaxProblem(
        function=function,
        backend=xp.__name__,
        shape=x.shape,
        axes=axes,
        dtypes={
            "x": _arrays.dtype_name(x),
            "where": None if where is None else "bool",
            "out": result,
        },
        compute_dtype=compute_dtype(_arrays.dtype_name(x), result),
        scale=scale,
        method=method,
    )
    return problem, SoftmaxOperands(x, where=where, out=out)


def _result_dtype(x, dtype, out):
    """Name of the output dtype: `dtype`, else that of `out`, else that of `x`."""
    if x.dtype.kind == "c":
        own = _arrays.dtype_name(x)
        if dtype is not None and not _is_dtype(dtype, own):
            raise TypeError(f"dtype must be {own} for complex x, got {dtype}")
        return own
    if dtype is not None:
        return _arrays.float_dtype("dtype", dtype).name
    if out is not None:
        return _arrays.float_dtype("out", out.dtype).name
    return _natural_dtype(x)


def _is_dtype(dtype, name):
    try:
        return np.dtype(dtype).name == name
    except TypeError:
        return False


def logsumexp(
    a, axis, b, keepdims, return_sign, where, out
) -> tuple[SoftmaxProblem, SoftmaxOperands]:
    """Check a call of logsumexp."""
    _arrays.check_out_is_array(out)
    weak = b if type(b) in (bool, int, float, complex) else None
    xp, arrays = _arrays.adopt_all(a=a, b=b, where=where, out=out)
    x, b, where, out = (arrays[n] for n in ("a", "b", "where", "out"))
    _check_numeric("a", x)
    shape = x.shape
    if b is not None:
        _check_numeric("b", b)
        try:
            shape = np.broadcast_shapes(x.shape, b.shape)
        except ValueError:
            raise ValueError(
                f"b has shape {b.shape}, which does not broadcast with a of shape "
                f"{x.shape}"
            ) from None
        b = _arrays.broadcast_view("b", b, shape)
        x = _arrays.broadcast_view("a", x, shape)
    axes = strides.normalize_axes(axis, len(shape))
    where = _check_where(where, shape)
    for name, flag in (("keepdims", keepdims), ("return_sign", return_sign)):
        _arrays.check_bool(name, flag)
    result = _natural_dtype(x) if b is None else _natural_dtype(x, b)
    if weak is not None and _is_inexact(x):
        result = _with_number(x, weak)
        if xp is not np:  # GPU kernels have one dtype of sums for both
            b = b.astype(result)
    problem = SoftmaxProblem(
        function="logsumexp",
        backend=xp.__name__,
        shape=shape,
        axes=axes,
        dtypes={
            "x": _arrays.dtype_name(x),
            "b": None if b is None else _arrays.dtype_name(b),
            "where": None if where is None else "bool",
            "out": result,
        },
        compute_dtype=compute_dtype(result),
        keepdims=bool(keepdims),
        return_sign=bool(return_sign),
    )
    if out is not None:
        _arrays.check_out(
            out, problem.result_shape, (result,), {"a": x, "b": b, "where": where}
        )
    return problem, SoftmaxOperands(x, b=b, where=where, out=out)


def vjp(function, y, dy, axis, scale, out) -> tuple[SoftmaxProblem, SoftmaxOperands]:
    """Check a call of softmax_vjp or log_softmax_vjp; `dy` may broadcast to `y`."""
    _arrays.check_out_is_array(out)
    xp, a = _arrays.adopt_all(2, y=y, dy=dy, out=out)
    y, dy, out = a["y"], a["dy"], a["out"]
    for name, x in (("y", y), ("dy", dy)):
        _check_numeric(name, x)
        if x.dtype.kind == "c":
            raise TypeError(f"{name} must be real, got {_arrays.dtype_name(x)}")
    axes = strides.normalize_axes(axis, y.ndim)
    scale = _arrays.finite_number("scale", scale)
    dy = _arrays.broadcast_view("dy", dy, y.shape)
    result = _natural_dtype(y, dy)
    if out is not None:
        inputs = {"y": y, "dy": dy}
        others = {n: x for n, x in inputs.items() if not _arrays.same_view(out, x)}
        _arrays.check_out(out, y.shape, (result,), others)
    problem = SoftmaxProblem(
        function=function,
        backend=xp.__name__,
        shape=y.shape,
        axes=axes,
        dtypes={
            "x": _arrays.dtype_name(y),
            "dy": _arrays.dtype_name(dy),
            "out": result,
        },
        compute_dtype=compute_dtype(
            _arrays.dtype_name(y), _arrays.dtype_name(dy), result
        ),
        scale=scale,
    )
    return problem, SoftmaxOperands(y, dy=dy, out=out)
