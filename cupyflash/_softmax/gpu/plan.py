"""Plans of the softmax family: all of a call but its arrays."""

import dataclasses
import math

import cupy
import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core import strides as core_strides
from cupyflash._cuda import graphs, runtime, structs
from cupyflash._cuda import launch as cuda_launch
from cupyflash._softmax import memory_layout
from cupyflash._softmax import problem as softmax_problem
from cupyflash._softmax.gpu import registry as softmax_registry
from cupyflash._softmax.gpu import transpose
from cupyflash._softmax.gpu.heuristics import on_chip

_VECTOR = on_chip.VECTOR_BYTES


def _facts(x):
    """What a plan depends on; an AttributeError for what is not a CuPy array."""
    return x.shape, x.strides, x.dtype, x.data.device_id


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
            given = new if out is None else core_strides.element_strides(out)
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
            layout = memory_layout.of(
                problem.shape, problem.axes, strides, full, is_aligned=not any(starts)
            )
            self._set_launches(dataclasses.replace(problem, layout=layout), unfit)

    def _set_launches(self, problem, unfit):
        """Choose the kernel and pack what it is told of the layout."""
        device = runtime.device(self.device_id)
        self.row, self.refused = softmax_registry.select(problem, device, unfit=unfit)
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
        self._layout = structs.pack_bytes(fields, _struct(fields))
        steps = self.row.steps(problem, device)
        self.launches = tuple(
            cuda_launch.Launch(step.variant, step.grid, step.block, self.device_id)
            for step in steps
        )
        self._scratch_bytes = max(step.scratch for step in steps)

    def _strides_written(self, shape, new, given, out):
        """Strides that kernels write with: `given`, or `new` and a copy turns them."""
        if not transpose.is_worth(shape, new, given, out.itemsize):
            return given
        turn = transpose.Turn(shape, (new, given), out.itemsize)
        launch = cuda_launch.Launch(turn.variant, turn.grid, turn.block, self.device_id)
        self.turn = launch, structs.pack_bytes(turn.fields, turn.dtype)
        return new

    def all_launches(self):
        """In their order, the copy that turns the result among them."""
        return self.launches if self.turn is None else (*self.launches, self.turn[0])

    def _set_bounds(self, problem, inputs, out):
        """How far from the pointer of `out` that of an input makes the two overlap."""
        out_first, out_end = core_strides.address_range(out)
        in_place = problem.function != "logsumexp"
        self._too_near = []
        for i, x in enumerate(inputs):
            if x is not None:
                first, end = core_strides.address_range(x)
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
        if runtime.current_device() != self.device_id:
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
        graphs.keep_if_capturing(near)
        self._launch(*pointers, near.ptr)
        turn, fields = self.turn
        turn.enqueue(near.ptr, out.data.ptr, fields)

    def _launch(self, *pointers):
        if self._scratch_bytes:
            scratch = cupy.cuda.alloc(self._scratch_bytes)
            pointers += (scratch.ptr,)
            graphs.keep_if_capturing(scratch)
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
        if runtime.current_device() != self.device_id:
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
    return (0,) * len(problem.shape) if x is None else core_strides.element_strides(x)


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
    """The scale, and for a softmax what its kernels make of it, in their numbers."""
    if problem.function == "logsumexp":
        return {}
    if problem.function.endswith("_vjp"):
        return {"scale": problem.scale}
    key_factor, factor = softmax_problem.split_scale(problem.scale)
    numbers = np.finfo(problem.compute_dtype)
    least, most = float(numbers.tiny), float(numbers.max)
    if 0 < abs(key_factor) < least:  # or -inf times it would be NaN
        key_factor = math.copysign(least, key_factor)
        factor = max(abs(problem.scale) / least, least)
    unit, unit_rest = softmax_problem.exponent_unit(factor, problem.compute_dtype)
    return {
        "scale": problem.scale,
        "key_factor": key_factor,
        "factor": min(factor, most),
        "unit": unit,
        "unit_rest": unit_rest,
    }


def _struct(fields):
    """The dtype of the kernels' layout_t: int64 throughout, but for the scales."""
    return np.dtype([
        (name, np.float64 if isinstance(value, float) else np.int64, np.shape(value))
        for name, value in fields.items()
    ])  # fmt: skip
