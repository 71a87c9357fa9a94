"""The softmax family on CuPy arrays.

A call that was made before, with the same shapes, strides, dtypes and options, goes
straight from a dictionary to the launch; any other passes the checks of
`_softmax_problem` and leaves a plan behind.
"""

import dataclasses

import cupy
import numpy as np

from cupyflash import (
    _arrays,
    _gpu,
    _graphs,
    _layout,
    _softmax_kernels,
    _softmax_layout,
    _softmax_problem,
    _softmax_tiers,
    _softmax_turn,
)

_plans = _gpu.PlanCache()

_VECTOR = _softmax_tiers.VECTOR_BYTES


# --- calls ---------------------------------------------------------------------------


def softmax(function, x, axis, where, scale, dtype, out, method):
    """softmax or log_softmax of a CuPy array."""
    try:
        # The classes tell True from 1, which the checks do as well.
        at = x.data.ptr
        onto = at if out is None else out.data.ptr
        key = (function, x.shape, x.strides, x.dtype, x.data.device_id, axis,
               axis.__class__, scale, scale.__class__, dtype, method,
               where if where is None else _facts(where),
               out if out is None else _facts(out),
               (at | onto) % _VECTOR)  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # not a CuPy array, or not hashable
        key = plan = None
    if plan is not None:
        # A mask that is absent has some address, too: it is never read.
        pointers = at, at if where is None else where.data.ptr
        if out is None or plan.may_write(onto, pointers):
            return plan(out, pointers)
    return _planned(
        key, _softmax_problem.softmax, function, x, axis, where, scale, dtype, out,
        method,
    )  # fmt: skip


def logsumexp(a, axis, b, keepdims, return_sign, where, out):
    """logsumexp of a CuPy array."""
    try:
        at = a.data.ptr
        # No element may begin within another, which the checks look at.
        key = ("logsumexp", a.shape, a.strides, a.dtype, a.data.device_id,
               at % _VECTOR, axis, axis.__class__, keepdims, keepdims.__class__,
               return_sign, return_sign.__class__,
               b if b is None else (*_facts(b), b.data.ptr % _VECTOR),
               where if where is None else _facts(where),
               out if out is None else (*_facts(out), out.data.ptr % _VECTOR),
               )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None
    if plan is not None:
        pointers = (at, at if b is None else b.data.ptr,
                    at if where is None else where.data.ptr)  # fmt: skip
        if out is None or plan.may_write(out.data.ptr, pointers):
            return plan(out, pointers)
    return _planned(
        key, _softmax_problem.logsumexp, a, axis, b, keepdims, return_sign, where, out
    )


def vjp(function, y, dy, axis, scale, out):
    """softmax_vjp or log_softmax_vjp of CuPy arrays."""
    try:
        pointers = y_at, dy_at = y.data.ptr, dy.data.ptr
        onto = y_at if out is None else out.data.ptr
        key = (function, _facts(y), _facts(dy), axis, axis.__class__, scale,
               scale.__class__, out if out is None else _facts(out),
               (y_at | dy_at | onto) % _VECTOR)  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None
    if plan is not None:
        if out is None or plan.may_write(onto, pointers):
            return plan(out, pointers)
    return _planned(key, _softmax_problem.vjp, function, y, dy, axis, scale, out)


def _facts(x):
    """What a plan depends on; an AttributeError for what is not a CuPy array."""
    return x.shape, x.strides, x.dtype, x.data.device_id


@_graphs.keeps_memory
def _planned(key, check, *arguments):
    """Check a call, run it, and keep its plan under `key`."""
    return _checked(key, *check(*arguments))


def unplanned(check, *arguments):
    """Check a call and run it."""
    return _planned(None, check, *arguments)


def _checked(key, problem, operands):
    """Run a problem that has passed the checks, and keep its plan under `key`."""
    if problem.is_complex:
        with operands.x.device:
            return _run_complex(problem, operands)
    inputs = _inputs(problem, operands)
    pointers = tuple((inputs[0] if x is None else x).data.ptr for x in inputs)
    unfit: tuple[str, ...] = ()
    while True:
        plan = _plan_of(problem, inputs, operands.out, unfit)
        try:
            result = plan(operands.out, pointers)
            break
        except _gpu.DoesNotFitError:
            unfit += (plan.row.name,)  # the next row, then
    if key is not None:
        _plans.put(key, plan)
    return result


# The arrays that a kernel reads, in the order of its parameters.
_INPUTS = {
    "softmax": ("x", "where"),
    "log_softmax": ("x", "where"),
    "logsumexp": ("x", "b", "where"),
    "softmax_vjp": ("x", "dy"),
    "log_softmax_vjp": ("x", "dy"),
}


def _inputs(problem, operands):
    """The operands of _INPUTS."""
    return tuple(getattr(operands, name) for name in _INPUTS[problem.function])


def describe(problem, operands):
    """What would be launched; nothing is, and nothing is compiled."""
    if problem.is_complex:
        return {"kernel": "array operations of CuPy", "reason": "complex numbers"}
    plan = _plan_of(problem, _inputs(problem, operands), operands.out)
    if not plan.launches:
        return {"kernel": "none", "reason": "there is nothing to compute"}
    return {
        "kernel": plan.row.name,
        "refused": plan.refused,
        "launches": [_gpu.describe(launch) for launch in plan.all_launches()],
    }


# --- plans ---------------------------------------------------------------------------


class _Plan:
    """All of a call but its arrays."""

    def __init__(self, problem, inputs, out, unfit=()):
        self.device_id = inputs[0].data.device_id
        self.launches = ()
        self._scratch_bytes = 0
        self.turn = None  # the launch of a copy and what it is told
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
            new = _new_strides(shape, order)
            given = new if out is None else _layout.element_strides(out)
            if out is not None and problem.function != "logsumexp":
                given = self._strides_written(shape, new, given, out)
            strides = {
                name: _strides(problem, x)
                for name, x in zip(_INPUTS[problem.function], inputs, strict=True)
            }
            strides["out"] = _over_rows(problem, given)
            full = [name for name in ("x", "dy", "out") if name in strides]
            if problem.function == "logsumexp":
                strides["sign"] = _over_rows(problem, new)
                full.remove("out")
            # A mask is read element by element.
            arrays = (*inputs[: len(full) - 1], None if self.turn else out)
            starts = [x.data.ptr % _VECTOR for x in arrays if x is not None]
            layout = _softmax_layout.of(
                problem.shape, problem.axes, strides, full, is_aligned=not any(starts)
            )
            self._set_launches(dataclasses.replace(problem, layout=layout), unfit)

    def _set_launches(self, problem, unfit):
        """Choose the kernel and pack what it is told of the layout."""
        device = _gpu.device(self.device_id)
        self.row, self.refused = _softmax_kernels.select(problem, device, unfit=unfit)
        layout = problem.layout
        is_sum = problem.function == "logsumexp"
        fields = {
            "num_rows": problem.num_rows,
            "row_length": problem.row_length,
            **({"returns_sign": problem.return_sign} if is_sum else {}),
            **_scales(problem),
            "outer_size": layout.outer_size,
            "outer_stride": tuple(layout.outer_strides.values()),
            "reduced_size": layout.reduced_size,
            "reduced_stride": tuple(layout.reduced_strides.values()),
        }
        self._layout = _gpu.pack_bytes(fields, _struct(fields))
        steps = self.row.steps(problem, device)
        self.launches = tuple(
            _gpu.Launch(step.variant, step.grid, step.block, self.device_id)
            for step in steps
        )
        self._scratch_bytes = max(step.scratch for step in steps)

    def _strides_written(self, shape, new, given, out):
        """Strides that kernels write with: `given`, or `new` and a copy turns them."""
        if not _softmax_turn.is_worth(shape, new, given, out.itemsize):
            return given
        turn = _softmax_turn.Turn(shape, (new, given), out.itemsize)
        launch = _gpu.Launch(turn.variant, turn.grid, turn.block, self.device_id)
        self.turn = launch, _gpu.pack_bytes(turn.fields, turn.dtype)
        return new

    def all_launches(self):
        """In their order, the copy that turns the result among them."""
        return self.launches if self.turn is None else (*self.launches, self.turn[0])

    def _set_bounds(self, problem, inputs, out):
        """How far from the pointer of `out` that of an input makes the two overlap."""
        out_first, out_end = _layout.address_range(out)
        in_place = problem.function != "logsumexp"
        self._too_near = []
        for i, x in enumerate(inputs):
            if x is not None:
                first, end = _layout.address_range(x)
                is_same = in_place and _facts(x) == _facts(out)
                self._too_near.append((i, out_first - end, out_end - first, is_same))

    def may_write(self, out, pointers):
        """Whether `out` is clearly apart from each input, or the very same elements.

        What is neither, such as two interleaved views, is left to the full check.
        """
        for i, low, high, is_same in self._too_near:
            distance = pointers[i] - out
            if low < distance < high and (distance or not is_same):
                return False
        return True

    def __call__(self, out, pointers):
        """Launch on the current stream; pointers in the order of the parameters."""
        if _gpu.current_device() != self.device_id:
            with cupy.cuda.Device(self.device_id):
                return self(out, pointers)
        if out is None:
            out = self._new()
        if self.turn is None:
            self._launch(*pointers, out.data.ptr)
        else:
            self._launch_and_turn(pointers, out)
        return out

    def _launch_and_turn(self, pointers, out):
        """By way of memory that lies as the input does."""
        near = cupy.cuda.alloc(out.size * out.itemsize)
        _graphs.keep_if_capturing(near)
        self._launch(*pointers, near.ptr)
        turn, fields = self.turn
        turn.enqueue(near.ptr, out.data.ptr, fields)

    def _launch(self, *pointers):
        if self._scratch_bytes:
            scratch = cupy.cuda.alloc(self._scratch_bytes)
            pointers += (scratch.ptr,)
            _graphs.keep_if_capturing(scratch)
        for launch in self.launches:
            launch.enqueue(*pointers, self._layout)

    def _new(self):
        new = cupy.ndarray(self._shape, self._dtype)
        return new if self._back is None else new.transpose(self._back)


class _LogsumexpPlan(_Plan):
    """One result a row, and its sign if that is asked for."""

    def __init__(self, problem, inputs, out, unfit=()):
        super().__init__(problem, inputs, out, unfit)
        self._returns_sign = problem.return_sign

    def __call__(self, out, pointers):
        if _gpu.current_device() != self.device_id:
            with cupy.cuda.Device(self.device_id):
                return self(out, pointers)
        if out is None:
            out = self._new()
        sign = self._new() if self._returns_sign else out
        if self.launches:
            self._launch(*pointers, out.data.ptr, sign.data.ptr)
        else:  # the sum of nothing: SciPy takes the sign of -inf
            out.fill(-np.inf)
            if self._returns_sign:
                sign.fill(-1)
        return (out, sign) if self._returns_sign else out


def _plan_of(problem, inputs, out, unfit=()):
    """A plan by any row of the table but those named in `unfit`."""
    kind = _LogsumexpPlan if problem.function == "logsumexp" else _Plan
    return kind(problem, inputs, out, unfit)


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


def _scales(problem):
    """The scale, and for a softmax its two factors, which its numbers can hold."""
    if problem.function == "logsumexp":
        return {}
    if problem.function.endswith("_vjp"):
        return {"scale": problem.scale}
    key_factor, factor = _softmax_problem.split_scale(problem.scale)
    most = float(np.finfo(problem.compute_dtype).max)
    return {
        "scale": problem.scale,
        "key_factor": key_factor,
        "factor": min(factor, most),
    }


def _struct(fields):
    """The dtype of the kernels' layout_t: int64 throughout, but for the scales."""
    return np.dtype([
        (name, np.float64 if isinstance(value, float) else np.int64, np.shape(value))
        for name, value in fields.items()
    ])  # fmt: skip


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
        # What is subtracted has no part in a sum that is infinite, or none.
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
