"""Complex numbers, by array operations of CuPy."""

import cupy
import numpy as np


def _run_complex(problem, operands):
    """The formulas of SciPy in array operations; not worth a kernel."""
    x, where, axes = operands.x.astype(np.complex128), operands.where, problem.axes
    if problem.function == "logsumexp":
        return _complex_logsumexp(problem, x, operands)
    out = operands.out
    if out is None:
        out = cupy.empty(problem.shape, problem.dtypes["out"])
    if out.size == 0:
        return out
    is_log = problem.function == "log_softmax"
    if problem.scale != 1:
        x.real *= problem.scale  # by parts: inf * (scale + 0j) would have a NaN
        x.imag *= problem.scale
    if where is not None:
        x = cupy.where(where, x, -np.inf)
    if problem.method != "naive":
        m = x.max(axis=axes, keepdims=True)
        x = x - (cupy.where(cupy.isfinite(m), m, 0) if is_log else m)
    e = cupy.exp(x)
    if where is not None:
        e = cupy.where(where, e, 0)
    total = e.sum(axis=axes, keepdims=True)
    y = x - cupy.log(total) if is_log else e / total
    out[...] = y if where is None else cupy.where(where, y, -np.inf if is_log else 0)
    return out


# Subtracted from the scores if the sum of large weights overflows; then none does.
_MORE = 45.0


def _parts_times(weight, e):
    """weight * e, part by part if it is real: inf * (weight + 0j) would have a NaN."""
    if weight is None or weight.dtype.kind == "c":
        return e if weight is None else weight * e
    product = cupy.empty(np.broadcast_shapes(weight.shape, e.shape), np.complex128)
    product.real, product.imag = weight * e.real, weight * e.imag
    return product


def _complex_logsumexp(problem, x, operands):
    """log sum b exp(x), shifted by the largest real part; or log |sum| and phase."""
    dtype = np.dtype(problem.dtypes["out"])
    shape = problem.result_shape
    weight, where = operands.b, operands.where
    if where is not None:
        weight = where.astype(float) if weight is None else cupy.where(where, weight, 0)
    if problem.row_length == 0:
        log, phase = cupy.full(shape, -np.inf), cupy.full(shape, -1)
    else:
        absent = cupy.zeros(1, bool) if weight is None else weight == 0
        x = cupy.where(absent, -np.inf, x)
        m = x.real.max(axis=problem.axes, keepdims=True)
        m = cupy.where(cupy.isfinite(m), m, 0)
        e = cupy.where(absent, 0, _parts_times(weight, cupy.exp(x - m)))
        total = e.sum(axis=problem.axes, keepdims=True)
        if weight is not None:
            large = ~cupy.isfinite(cupy.abs(total))
            less = _parts_times(weight, cupy.exp(x - (m + _MORE)))
            less = cupy.where(absent, 0, less).sum(axis=problem.axes, keepdims=True)
            large &= cupy.isfinite(cupy.abs(less))
            total = cupy.where(large, less, total)
            m = m + cupy.where(large, _MORE, 0.0)
        # Nothing may be subtracted in an infinite sum.
        infinite = ~cupy.isfinite(total)
        plain = _parts_times(weight, cupy.exp(x))
        plain = cupy.where(absent, 0, plain).sum(axis=problem.axes, keepdims=True)
        total = cupy.where(infinite, plain, total)
        size = cupy.abs(total)
        log = cupy.log(size) + cupy.where(infinite, 0, m)
        phase = cupy.where(size == 0, 0, total / size)
        is_real = cupy.isinf(total.real) & (total.imag == 0)
        phase = cupy.where(is_real, cupy.sign(total.real), phase).reshape(shape)
        if not problem.return_sign:
            log = log + 1j * cupy.angle(total)
            log = cupy.where(infinite, cupy.log(total), log)
        log = log.reshape(shape)
    out = operands.out
    if out is None:
        real = dtype if not problem.return_sign else np.empty(0, dtype).real.dtype
        out = cupy.empty(shape, real)
    out[...] = log
    return (out, phase.astype(dtype)) if problem.return_sign else out
