"""Plans of attention: everything but the arrays, ready to be launched."""

from typing import Any

import cupy
import numpy as np

from cupyflash import _arrays, _attention_params, _gpu, _graphs, _layout
from cupyflash._attention_rows import OPTIONS, columns_apart

_NULL = _gpu.NULL
_SUM = np.dtype("complex128")  # two float64: row_lse_t of a part (score.cuh)


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
        self.offset = _attention_params.launch_offset(problem)
        arrays = operands.q, operands.k, operands.v, operands.out
        arrays += tuple(getattr(operands, name) for name in OPTIONS)
        # How far from the pointer of `out` that of an input makes their spans meet.
        self.too_near = []
        if operands.out is not None:
            out_first, out_end = _layout.address_range(operands.out)
            for place, x in enumerate(arrays):
                if x is not None and place != 3:
                    first, end = _layout.address_range(x)
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
        fields = _attention_params.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        dtype = _attention_params.params_dtype(batch_dims)
        self.params = _gpu.pack_bytes(fields, dtype)
        self.launches = tuple(
            _gpu.Launch(config.variant, config.grid, config.block, self.device_id)
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


class MmaPlan(FusedPlan):
    """The mma kernel; of float32, keys and values that another kernel has split."""

    def __init__(self, row, problem, operands, device):
        super().__init__(row, problem, operands, device)
        is_prepared = len(self.launches) > 1
        self.images_bytes = row.images(problem, device) if is_prepared else 0

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [address(x) for x in arrays[4:]]
        images = 0
        if self.images_bytes:
            memory = cupy.cuda.alloc(self.images_bytes)
            images = memory.ptr
            _graphs.keep_if_capturing(memory)
            self.launches[1].enqueue(
                images, k.data.ptr, v.data.ptr, *options, offset, self.params
            )
        self.launch.enqueue(
            images,
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


class UnfusedPlan(BasePlan):
    """naive and safe: S and P in memory, cupy.matmul for both products."""

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.problem = problem
        self.scores_dtype = row.scores_dtype(problem)
        fields = _attention_params.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        self.params = _gpu.pack(fields, _attention_params.params_dtype(batch_dims))
        self.launches = tuple(
            _gpu.Launch(config.variant, config.grid, config.block, self.device_id)
            for config in row.configs(problem, batch_dims, device)
        )

    def run(self, operands, offset):
        """Two matmuls, each followed by a launch."""
        problem = self.problem
        if _graphs.is_capturing():
            raise NotImplementedError(
                f"method={problem.method!r} multiplies by cuBLAS, which CuPy does not "
                "allow while a CUDA graph is captured; 'auto', 'tiled' and 'online' "
                "can be captured"
            )
        out, lse = operands.given_out, self.new_lse()
        if out is None:
            out = self.new_out()
        options = [getattr(operands, name) for name in OPTIONS]
        softmax, values = self.launches

        s = self._raw_scores(_fold_group(operands.q, problem), operands.k)
        softmax(
            s,
            _NULL if lse is None else lse,
            *[_NULL if x is None else x for x in options],
            offset,
            self.params,
        )
        o = self._matmul(s, operands.v)  # s has become P
        values(s, o, operands.v, out, self.params)
        return out, lse

    def _raw_scores(self, q, k):
        """q k^T; of wide heads a sum of products of some columns at a time."""
        k = k.swapaxes(-1, -2)
        # Steps of the naive method round to 16 bits, and so would each part.
        if self.scores_dtype != self.problem.compute_dtype:
            return self._matmul(q, k)
        first, *others = columns_apart(q.shape[-1])
        s = self._matmul(q[..., first], k[..., first, :])
        for columns in others:
            s += self._matmul(q[..., columns], k[..., columns, :])
        return s

    def _matmul(self, a, b):
        """a @ b in the dtype of the scores, contiguous; sums in float32 at least."""
        shape = (*a.shape[:-1], b.shape[-1])
        if a.shape[-1] == 0 or 0 in shape:
            return cupy.zeros(shape, _arrays.to_dtype(self.scores_dtype))
        # cuBLAS through CuPy has no bfloat16: round float32 products instead.
        work = "float32" if self.scores_dtype == "bfloat16" else self.scores_dtype
        product = cupy.matmul(a.astype(work, copy=False), b.astype(work, copy=False))
        return cupy.ascontiguousarray(
            product.astype(_arrays.to_dtype(self.scores_dtype), copy=False)
        )


def _fold_group(q, problem):
    """Query heads that share a head of k as rows of one matrix."""
    rows = problem.group_size * problem.seqlen_q
    shape = (*problem.batch, problem.num_kv_heads, rows, problem.head_dim)
    return q if problem.group_size == 1 else q.reshape(shape)
