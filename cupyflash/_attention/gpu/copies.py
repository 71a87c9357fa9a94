"""Copies of q, k and v before another plan, where kernels need them."""

import math
from typing import Any

import cupy

from cupyflash._attention.gpu import copy_config
from cupyflash._attention.gpu.plan import BasePlan
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core import arrays as _arrays
from cupyflash._core import strides as _strides
from cupyflash._cuda import graphs, launch, structs, tensor_map


class CopyingPlan(BasePlan):
    """Copies of q, k and v, as far as they need them, before another plan."""

    def __init__(self, problem, operands, plan, fit, copies):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.plan = plan
        self.launches = (*(copy.launch for copy in copies.values()), *plan.launches)
        self.num_splits = plan.num_splits
        self.takes_arrays = plan.takes_arrays
        self.copies = [copies.get(name) for name in "qkv"]
        self.views = {name: getattr(fit, name) for name in copies}

    def _copied(self, arrays):
        """q, k and v, copied where that is needed."""
        ready = tuple(
            x if copy is None else copy(x)
            for x, copy in zip(arrays, self.copies, strict=True)
        )
        graphs.keep_if_capturing(ready)
        return ready

    def __call__(self, arrays, offset):
        """Copy and launch; `arrays` as they stand in a call."""
        return self.plan((*self._copied(arrays[:3]), *arrays[3:]), offset)

    def run(self, operands, offset):
        """The same for checked operands."""
        made = dict(zip("qkv", self._copied(operands[:3]), strict=True))
        views = {
            name: cupy.ndarray(x.shape, x.dtype, made[name].data, x.strides)
            for name, x in self.views.items()
        }
        return self.plan.run(operands._replace(**views), offset)


# Queries from which a copy for TMA takes less time than it saves, and bytes
# of each such copy that are allowed a byte of out.
_COPIES_FROM = 256
_MOST_COPIED = 4


class Copy:
    """Copies of an array that has this shape and these strides, in elements.

    The shape is that without axes that are broadcast; rows of the copy are whole
    vectors of 16 bytes.
    """

    def __init__(self, x, shape: tuple[int, ...], strides: tuple[int, ...]):
        *rows, num_columns = shape
        *row_strides, column_stride = strides
        self.shape = (*rows, _strides.whole_vectors(num_columns, x.itemsize))
        self.dtype = x.dtype
        size, (steps,) = _strides.collapse(rows, [row_strides])
        fields: dict[str, Any] = {
            "num_rows": math.prod(rows),
            "num_columns": num_columns,
            "column_stride": column_stride,
            "by_columns": bool(size) and column_stride != 1 and abs(steps[-1]) == 1,
            "size": size or (1,),
            "stride": [steps or (0,)],
        }
        dims = len(fields["size"])
        dtype = copy_config.copy_params_dtype(dims)
        self.params = structs.pack_bytes(fields, dtype)
        config = copy_config.copy_config(
            _arrays.dtype_name(x),
            dims,
            num_columns,
            math.prod(self.shape) * x.itemsize // 16,
        )
        device_id = x.data.device_id
        self.launch = launch.Launch(
            config.variant, config.grid, config.block, device_id
        )

    def __call__(self, x):
        """A copy of an array, which has the pointer of that one."""
        copy = cupy.ndarray(self.shape, self.dtype)
        self.launch.enqueue(x.data.ptr, copy.data.ptr, self.params)
        return copy


def may_copy(problem: AttentionProblem) -> bool:
    """Whether copies for TMA may pay."""
    in_16_bits = problem.dtype in ("float16", "bfloat16")
    by_method = problem.method in ("auto", "tiled")
    return in_16_bits and by_method and problem.seqlen_q >= _COPIES_FROM


def made_to_fit(
    arrays: dict[str, Any], for_tma: tuple[str, ...], most_bytes: float
) -> tuple[dict[str, Any], dict[str, Copy]]:
    """Arrays with a contiguous last axis, as if copied where they must be; the copies.

    Those named in `for_tma` become readable to it, as far as that takes copies
    of at most so many bytes each. No place in memory is known yet: pointers are 0.
    """
    copies, views = {}, {}
    for name, x in arrays.items():
        itemsize = x.itemsize
        own = [
            1 if step == 0 else n for n, step in zip(x.shape, x.strides, strict=True)
        ]
        own[-1] = x.shape[-1]
        columns = _strides.whole_vectors(own[-1], itemsize)
        size = math.prod(own[:-1]) * columns * itemsize
        fits = x.size == 0 or x.shape[-1] == 1 or x.strides[-1] == itemsize
        if fits and name in for_tma and size <= most_bytes:
            unsupported_reason = tensor_map.unsupported_reason(
                x.data.ptr, x.shape, x.strides, itemsize
            )
            fits = unsupported_reason is None
        if fits:
            continue
        taken = tuple(
            0 if n == 1 else s // itemsize for n, s in zip(own, x.strides, strict=True)
        )
        copies[name] = Copy(x, tuple(own), taken)
        steps = [math.prod((*own[axis + 1 : -1], columns)) for axis in range(x.ndim)]
        steps[-1] = 1
        strides = tuple(
            0 if n == 1 else step * itemsize for n, step in zip(own, steps, strict=True)
        )
        views[name] = cupy.ndarray(x.shape, x.dtype, launch.NULL, strides)
    return views, copies


def most_copied(problem: AttentionProblem) -> int:
    """Bytes that a copy for TMA may have."""
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    return _MOST_COPIED * rows * problem.head_dim_v * 2
