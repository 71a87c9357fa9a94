"""Plans of attention: everything but the arrays, ready to be launched."""

from typing import Any

import cupy
import numpy as np

from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.config import OPTIONS
from cupyflash._core import arrays as _arrays
from cupyflash._core import strides
from cupyflash._cuda import launch, structs

_SUM = np.dtype(
    "complex128"
)  # two float64: row_lse_t of a part (attention/score/score.cuh)


class BasePlan:
    """What all calls of one kind share; the arrays come with the call.

    A call's arrays stand in the order q, k, v, out, then OPTIONS.
    """

    launches: tuple[Any, ...] = ()
    num_splits = 1  # parts that the keys are split into
    takes_arrays = False  # whether it can be called with the arrays of a call

    def __init__(self, problem, operands, device_id):
        self.device_id = device_id
        self.set_shapes(problem)
        self.out_dtype = _arrays.to_dtype(problem.dtype)
        of_parts = problem.keys_of_part is not None
        self.lse_dtype = _SUM if of_parts else np.dtype(problem.compute_dtype)
        self.offset = attention_params.launch_offset(problem)
        arrays = operands.q, operands.k, operands.v, operands.out
        arrays += tuple(getattr(operands, name) for name in OPTIONS)
        # How far from the pointer of `out` that of an input makes their spans meet.
        self.too_near = []
        if operands.out is not None:
            out_first, out_end = strides.address_range(operands.out)
            for place, x in enumerate(arrays):
                if x is not None and place != 3:
                    first, end = strides.address_range(x)
                    self.too_near.append((place, out_first - end, out_end - first))

    def set_shapes(self, problem):
        """Those of out and lse of a call; None for lse if it is not asked for."""
        self.out_shape = problem.out_shape
        self.lse_shape = problem.lse_shape if problem.return_lse else None

    def may_overlap(self, arrays):
        """Whether the span of `out` meets that of an input; the checks decide then."""
        out = arrays[3].data.ptr
        for place, low, high in self.too_near:
            if low < arrays[place].data.ptr - out < high:
                return True
        return False

    def new_out(self):
        return cupy.ndarray(self.out_shape, self.out_dtype)

    def new_lse(self):
        return cupy.ndarray(self.lse_shape, self.lse_dtype) if self.lse_shape else None


class EmptyPlan(BasePlan):
    """A result without elements: nothing is launched."""

    def run(self, operands, offset):
        """The empty arrays."""
        out = operands.given_out
        return self.new_out() if out is None else out, self.new_lse()


def arrays_of(operands):
    """The arrays of a call in the order of plans."""
    arrays = (operands.q, operands.k, operands.v, operands.given_out)
    return arrays + tuple(getattr(operands, name) for name in OPTIONS)


def address(x):
    """The pointer of an array, 0 for one that is absent."""
    return 0 if x is None else x.data.ptr


class FusedPlan(BasePlan):
    """One kernel over q, k and v."""

    takes_arrays = True

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        fields = attention_params.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        dtype = attention_params.params_dtype(batch_dims)
        self.params = structs.pack_bytes(fields, dtype)
        self.launches = tuple(
            launch.Launch(config.variant, config.grid, config.block, self.device_id)
            for config in row.configs(problem, batch_dims, device)
        )
        self.launch = self.launches[0]
        absent = all(getattr(operands, name) is None for name in OPTIONS)
        self.no_options = (0,) * len(OPTIONS) if absent else None

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [address(x) for x in arrays[4:]]
        self.launch.enqueue(
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            out.data.ptr,
            address(lse),
            *options,
            offset,
            self.params,
        )
        return out, lse

    def run(self, operands, offset):
        """Launch for checked operands."""
        return self(arrays_of(operands), offset)
