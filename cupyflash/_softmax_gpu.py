"""The softmax family on CuPy arrays.

A call that was made before, with the same shapes, strides, dtypes and options, goes
straight from a dictionary to the launch; any other passes the checks of
`_softmax_problem` and leaves a plan behind.
"""

import cupy
import numpy as np

from cupyflash import _arrays, _gpu, _layout, _softmax_kernels, _softmax_problem

_plans = _gpu.PlanCache()


# --- calls ---------------------------------------------------------------------------


def softmax(function, x, axis, where, scale, dtype, out, method):
    """softmax or log_softmax of a CuPy array."""
    try:
        # The classes tell True from 1, which the checks do as well.
        key = (function, x.shape, x.strides, x.dtype, x.data.device_id, axis,
               axis.__class__, scale, scale.__class__, dtype, method,
               where if where is None else _facts(where),
               out if out is None else _facts(out))  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # not a CuPy array, or not hashable
        key = plan = None
    if plan is not None and (out is None or plan.may_write(out, x, where)):
        # An absent mask is never read: x stands in for its pointer.
        return plan(out, x, x if where is None else where)
    problem, operands = _softmax_problem.softmax(
        function, x, axis, where, scale, dtype, out, method
    )
    return _checked(key, problem, operands)


def logsumexp(a, axis, b, keepdims, return_sign, where, out):
    """logsumexp of a CuPy array."""
    try:
        key = ("logsumexp", a.shape, a.strides, a.dtype, a.data.device_id, axis,
               axis.__class__, keepdims, keepdims.__class__, return_sign,
               return_sign.__class__, b if b is None else _facts(b),
               where if where is None else _facts(where),
               out if out is None else _facts(out))  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None
    if plan is not None and (out is None or plan.may_write(out, a, b, where)):
        return plan(out, a, a if b is None else b, a if where is None else where)
    problem, operands = _softmax_problem.logsumexp(
        a, axis, b, keepdims, return_sign, where, out
    )
    return _checked(key, problem, operands)


def vjp(function, y, dy, axis, scale, out):
    """softmax_vjp or log_softmax_vjp of CuPy arrays."""
    try:
        key = (function, _facts(y), _facts(dy), axis, axis.__class__, scale,
               scale.__class__, out if out is None else _facts(out))  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None
    if plan is not None and (out is None or plan.may_write(out, y, dy)):
        return plan(out, y, dy)
    problem, operands = _softmax_problem.vjp(function, y, dy, axis, scale, out)
    return _checked(key, problem, operands)


def _facts(x):
    """What a plan depends on; an AttributeError for what is not a CuPy array."""
    return x.shape, x.strides, x.dtype, x.data.device_id


def run(problem, operands):
    """Compute a checked problem."""
    return _checked(None, problem, operands)


def _checked(key, problem, operands):
    """Run a problem that has passed the checks, and keep its plan under `key`."""
    if problem.is_complex:
        with operands.x.device:
            return _run_complex(problem, operands)
    inputs = _inputs(problem, operands)
    plan = _plan_of(problem, inputs, operands.out)
    result = plan(operands.out, *(inputs[0] if x is None else x for x in inputs))
    if key is not None:
        _plans.put(key, plan)
    return result


def _inputs(problem, operands):
    """The arrays that a kernel reads, in the order of its parameters."""
    if problem.function == "logsumexp":
        return operands.x, operands.b, operands.where
    if problem.function.endswith("_vjp"):
        return operands.x, operands.dy
    return operands.x, operands.where


def describe(problem, operands):
    """What would be launched; nothing is, and nothing is compiled."""
    if problem.is_complex:
        return {"kernel": "array operations of CuPy", "reason": "complex numbers"}
    plan = _plan_of(problem, _inputs(problem, operands), operands.out)
    if plan.launch is None:
        return {"kernel": "none", "reason": "there is nothing to compute"}
    variant = plan.launch.variant
    return {
        "kernel": plan.row.name,
        "refused": plan.refused,
        "source": f"cuda_src/{variant.source}",
        "grid": plan.launch.grid,
        "block": plan.launch.block,
        "shared_memory": variant.smem,
        "defines": dict(variant.defines),
    }


# --- plans ---------------------------------------------------------------------------


class _Plan:
    """All of a call but its arrays."""

    def __init__(self, problem, inputs, out):
        self.device_id = inputs[0].data.device_id
        self.launch = None
        self._dtype = _arrays.to_dtype(problem.dtypes["out"])
        shape, order = problem.result_shape, range(len(problem.result_shape))
        if problem.function != "logsumexp":
            order = _order_of_memory(inputs[0])
        # A new result is allocated in this shape and then transposed.
        self._shape = tuple(shape[axis] for axis in order)
        self._back = None
        if list(order) != sorted(order):
            self._back = tuple(int(axis) for axis in np.argsort(order))
        if out is not None:
            self._set_bounds(problem, inputs, out)
        if problem.num_rows and problem.row_length:
            strides = [_strides(problem, x) for x in inputs]
            new = _new_strides(shape, order)
            given = new if out is None else _layout.element_strides(out)
            strides.append(_over_rows(problem, given))
            if problem.function == "logsumexp":
                strides.append(_over_rows(problem, new))  # of the sign
            self._set_launch(problem, strides)

    def _set_launch(self, problem, strides):
        """Choose the kernel and pack what it is told of the layout."""
        self.row, self.refused = _softmax_kernels.select(
            problem, _gpu.device(self.device_id)
        )
        outer = [a for a in range(len(problem.shape)) if a not in problem.axes]
        outer_size, outer_strides = _collapsed(problem.shape, outer, strides)
        size, reduced_strides = _collapsed(problem.shape, problem.axes, strides)
        fields = {
            "num_rows": problem.num_rows,
            "row_length": problem.row_length,
            "returns_sign": problem.return_sign,
            "scale": problem.scale,
            "outer_size": outer_size,
            "outer_stride": outer_strides,
            "reduced_size": size,
            "reduced_stride": reduced_strides,
        }
        if problem.function == "logsumexp":
            del fields["scale"]
        else:
            del fields["returns_sign"]
        self._layout = _gpu.pack(fields, _struct(fields))
        cut = self.row.cut(problem)
        self.launch = _gpu.Launch(
            self.row.variant(problem, len(outer_size), len(size)),
            (cut.num_blocks(problem.num_rows), 1, 1),
            (cut.num_threads, 1, 1),
            self.device_id,
        )

    def _set_bounds(self, problem, inputs, out):
        """First and last byte of each array from its pointer, for `may_write`."""
        self._out_bounds = _bounds(out)
        self._input_bounds = [x if x is None else _bounds(x) for x in inputs]
        in_place = problem.function != "logsumexp"
        self._may_be_out = [
            in_place and x is not None and _facts(x) == _facts(out) for x in inputs
        ]

    def may_write(self, out, *inputs):
        """Whether `out` is clearly apart from each input, or the very same elements.

        What is neither, such as two interleaved views, is left to the full check.
        """
        start = out.data.ptr
        low, high = self._out_bounds
        low += start
        high += start
        i = 0
        for x in inputs:
            if x is not None:
                x_start = x.data.ptr
                if x_start != start or not self._may_be_out[i]:
                    x_low, x_high = self._input_bounds[i]
                    if x_start + x_high > low and high > x_start + x_low:
                        return False
            i += 1
        return True

    def __call__(self, out, *inputs):
        """Launch on the current stream; `inputs` in the order of the parameters."""
        if _gpu.current_device() != self.device_id:
            with cupy.cuda.Device(self.device_id):
                return self(out, *inputs)
        if out is None:
            out = self._new()
        if self.launch is not None:
            self.launch(*inputs, out, self._layout)
        return out

    def _new(self):
        new = cupy.ndarray(self._shape, self._dtype)
        return new if self._back is None else new.transpose(self._back)


class _LogsumexpPlan(_Plan):
    """One result a row, and its sign if that is asked for."""

    def __init__(self, problem, inputs, out):
        super().__init__(problem, inputs, out)
        self._returns_sign = problem.return_sign

    def __call__(self, out, *inputs):
        if _gpu.current_device() != self.device_id:
            with cupy.cuda.Device(self.device_id):
                return self(out, *inputs)
        if out is None:
            out = self._new()
        sign = self._new() if self._returns_sign else out
        if self.launch is not None:
            self.launch(*inputs, out, sign, self._layout)
        else:  # the sum of nothing: SciPy takes the sign of -inf
            out.fill(-np.inf)
            if self._returns_sign:
                sign.fill(-1)
        return (out, sign) if self._returns_sign else out


def _plan_of(problem, inputs, out):
    kind = _LogsumexpPlan if problem.function == "logsumexp" else _Plan
    return kind(problem, inputs, out)


# --- strides -------------------------------------------------------------------------


def _order_of_memory(x):
    """Axes of `x` from the widest stride to the narrowest."""
    return sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))


def _new_strides(shape, order):
    """Strides of a new array whose axes lie in memory in this order."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _strides(problem, x):
    """Strides of an operand of the problem's shape; an absent one does not move."""
    return (0,) * len(problem.shape) if x is None else _layout.element_strides(x)


def _over_rows(problem, strides):
    """Strides of a result over the problem's shape: 0 where it was reduced."""
    if problem.function != "logsumexp":
        return strides
    if problem.keepdims:
        return tuple(0 if axis in problem.axes else s for axis, s in enumerate(strides))
    kept = iter(strides)
    return tuple(
        0 if axis in problem.axes else next(kept) for axis in range(len(problem.shape))
    )


def _collapsed(shape, axes, strides):
    """The given axes as few as can be, at least one: sizes and strides an operand.

    No result depends on the order of axes among themselves, so they go by the strides
    of the first operand: what lies together in memory becomes one axis.
    """
    axes = sorted(axes, key=lambda axis: [-abs(s[axis]) for s in strides])
    size, collapsed = _layout.collapse(
        [shape[axis] for axis in axes], [[s[axis] for axis in axes] for s in strides]
    )
    return (size, collapsed) if size else ((1,), [(0,)] * len(strides))


def _struct(fields):
    """The dtype of the kernels' layout_t: int64 throughout, but for the scale."""
    return np.dtype([
        (name, np.float64 if name == "scale" else np.int64, np.shape(value))
        for name, value in fields.items()
    ])  # fmt: skip


def _bounds(x):
    """First byte and the one past the last, from the pointer of `x`."""
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    if x.size == 0:
        return 0, 0
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + x.itemsize


# --- complex numbers -----------------------------------------------------------------


def _run_complex(problem, operands):
    """The formulas of SciPy in array operations: no kernel is worth its while here."""
    x, where, axes = operands.x.astype(np.complex128), operands.where, problem.axes
    if problem.function == "logsumexp":
        return _complex_logsumexp(problem, x, operands)
    out = operands.out
    if out is None:
        out = cupy.empty(problem.shape, problem.dtypes["out"])
    if out.size == 0:
        return out
    is_log = problem.function == "log_softmax"
    x = x * problem.scale
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


def _complex_logsumexp(problem, x, operands):
    """log sum b exp(x), shifted by the largest real part; or log |sum| and phase."""
    dtype = np.dtype(problem.dtypes["out"])
    shape = problem.result_shape
    weight = 1 if operands.b is None else operands.b.astype(np.complex128)
    if operands.where is not None:
        weight = cupy.where(operands.where, weight, 0)
    if problem.row_length == 0:
        log, phase = cupy.full(shape, -np.inf), cupy.full(shape, -1)
    else:
        absent = cupy.equal(weight, 0)
        x = cupy.where(absent, -np.inf, x)
        m = x.real.max(axis=problem.axes, keepdims=True)
        m = cupy.where(cupy.isfinite(m), m, 0)
        e = cupy.where(absent, 0, weight * cupy.exp(x - m))
        total = e.sum(axis=problem.axes, keepdims=True)
        size = cupy.abs(total)
        log = (cupy.log(size) + m).reshape(shape)
        phase = cupy.where(size == 0, 0, total / size).reshape(shape)
        if not problem.return_sign:
            log = log + 1j * cupy.angle(total).reshape(shape)
    out = operands.out
    if out is None:
        real = dtype if not problem.return_sign else np.empty(0, dtype).real.dtype
        out = cupy.empty(shape, real)
    out[...] = log
    return (out, phase.astype(dtype)) if problem.return_sign else out
