"""Plans of the softmax family: all of a call but its arrays."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core import strides as core_strides
from cupyflash._cuda import runtime
from cupyflash._cuda.launch_sequence import LaunchSequence, Result, Steps
from cupyflash._softmax import memory_layout
from cupyflash._softmax import problem as softmax_problem
from cupyflash._softmax.gpu import config as softmax_config
from cupyflash._softmax.gpu import registry as softmax_registry
from cupyflash._softmax.gpu import transpose
from cupyflash._softmax.gpu.heuristics import on_chip

VECTOR = on_chip.VECTOR_BYTES


def layout_of(x):
    """What a plan depends on; an AttributeError for what is not a CuPy array."""
    return x.shape, x._c_contiguous or x.strides, x.dtype, x.data.device_id


# The arrays that a kernel reads, in the order of its parameters.
INPUTS = {
    "softmax": ("x", "where"),
    "log_softmax": ("x", "where"),
    "logsumexp": ("x", "b", "where"),
    "softmax_vjp": ("x", "dy"),
    "log_softmax_vjp": ("x", "dy"),
}


def inputs_of(problem, operands):
    """The operands of INPUTS."""
    return tuple(getattr(operands, name) for name in INPUTS[problem.function])


class Planned(NamedTuple):
    """The launches of a problem, the kernel that was chosen, and what was refused."""

    sequence: LaunchSequence
    row: softmax_registry.SoftmaxKernel | None = None  # None: nothing is launched
    refused: tuple[tuple[str, str], ...] = ()


def make_plan(problem, inputs, out, unfit=()) -> Planned:
    """A plan by any kernel of the table but those named in `unfit`."""
    device_id = inputs[0].data.device_id
    is_sum = problem.function == "logsumexp"
    shape, order = problem.result_shape, range(len(problem.result_shape))
    if not is_sum:
        order = _order_of_memory(inputs[0])
    # A new result is allocated in this shape and then transposed.
    result = Result(
        tuple(shape[axis] for axis in order),
        _arrays.to_dtype(problem.dtypes["out"]),
        _inverse(order),
    )
    results = {"out": result}
    if is_sum and problem.return_sign:
        results["sign"] = result
    row, refused, steps = None, (), Steps([])
    if problem.num_rows and problem.row_length:
        device = runtime.device(device_id)
        new = _new_strides(shape, order)
        given = new if out is None else core_strides.element_strides(out)
        # Kernels write with the strides `given`, or with `new` and a copy follows.
        written, into = given, "out"
        if out is not None and not is_sum:
            if transpose.is_worth(shape, new, given, out.itemsize):
                written, into = new, "untransposed"
        layout = _layout(problem, inputs, out if into == "out" else None, written, new)
        problem = dataclasses.replace(problem, layout=layout)
        row, refused = softmax_registry.select(problem, device, unfit=unfit)
        steps = _steps(row.configs(problem, device), problem, into)
        if into != "out":
            config, params = transpose.transpose_launch(
                shape, (new, given), out.itemsize
            )
            arguments = (into, "out", params)
            steps = Steps(
                [*steps.launches, (config, arguments)],
                {into: out.size * out.itemsize, **steps.scratch},
            )
    elif is_sum:  # the sum of nothing: SciPy takes the sign of -inf
        fills = {"out": -np.inf, "sign": -1}
        results = {name: x._replace(fill=fills[name]) for name, x in results.items()}
    names = INPUTS[problem.function]
    sequence = LaunchSequence(
        device_id, names, {**results}, steps, inputs, out, in_place=not is_sum
    )
    return Planned(sequence, row, refused)


def _layout(problem, inputs, out, written, new):
    """How the problem's arrays lie in memory; `out` is one that is written directly."""
    names = INPUTS[problem.function]
    strides = {
        name: _strides(problem, x) for name, x in zip(names, inputs, strict=True)
    }
    strides["out"] = _over_rows(problem, written)
    full = [name for name in ("x", "dy", "out") if name in strides]
    if problem.function == "logsumexp":
        strides["sign"] = _over_rows(problem, new)
        full.remove("out")
    # A mask is read element by element.
    arrays = (*inputs[: len(full) - 1], out)
    starts = [x.data.ptr % VECTOR for x in arrays if x is not None]
    return memory_layout.of(
        problem.shape, problem.axes, strides, full, is_aligned=not any(starts)
    )


def _steps(configs, problem, into) -> Steps:
    """The launches of a kernel, all with the same arguments."""
    layout = problem.layout
    is_sum = problem.function == "logsumexp"
    fields = {
        "num_rows": problem.num_rows,
        "row_length": problem.row_length,
        **({"returns_sign": problem.return_sign} if is_sum else {}),
        **_scales(problem),
        "outer": (layout.outer_size, tuple(layout.outer_strides.values())),
        "reduced": (layout.reduced_size, tuple(layout.reduced_strides.values())),
    }
    sign = ("sign" if problem.return_sign else into,) if is_sum else ()
    size = max(config.scratch for config in configs)
    scratch = {"scratch": size} if size else {}
    packed = softmax_config.LAYOUTS[problem.function].pack(
        fields,
        OUTER_AXES=len(layout.outer_size),
        REDUCED_AXES=len(layout.reduced_size),
        kNumArrays=len(layout.outer_strides),
    )
    arguments = (*INPUTS[problem.function], into, *sign, *scratch, packed)
    return Steps([(config, arguments) for config in configs], scratch)


def _inverse(order):
    """The axes that put those in `order` back, or None if they are in place."""
    if list(order) == sorted(order):
        return None
    return tuple(int(axis) for axis in np.argsort(order))


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
