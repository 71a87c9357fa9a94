"""The plan of attention with scores in memory."""

import cupy

from cupyflash._attention.gpu.config import FORWARD_CALL, columns_apart
from cupyflash._attention.gpu.copies import copies_alone
from cupyflash._attention.gpu.functions import packed
from cupyflash._attention.gpu.plan import addresses, arrays_of, pack_params
from cupyflash._core import arrays as _arrays
from cupyflash._cuda import graphs
from cupyflash._cuda.launch import Launch
from cupyflash._cuda.launch_sequence import LaunchSequence


class UnfusedPlan:
    """naive and safe: S and P in memory, cupy.matmul for both products.

    CuPy launches cuBLAS between the two kernels, so this is not a LaunchSequence.
    """

    def __init__(self, row, problem, operands, device, device_id, results, copies):
        self.problem, self.results = problem, results
        self.scores_dtype = row.scores_dtype(problem)
        self.params, batch_dims, _ = pack_params(problem, operands)
        self.copies = None
        if copies:
            self.copies = LaunchSequence(device_id, FORWARD_CALL, *copies_alone(copies))
        self.views = {name: getattr(operands, name) for name in copies}
        self.kernels = [
            Launch(config, device_id)
            for config in row.configs(problem, batch_dims, device)
        ]
        before = self.copies.launches if self.copies else ()
        self.launches = (*before, *self.kernels)

    def __call__(self, operands, offset):
        """Two matmuls, each followed by a launch."""
        problem = self.problem
        if graphs.is_capturing():
            raise NotImplementedError(
                f"method={problem.method!r} multiplies by cuBLAS, which CuPy does not "
                "allow while a CUDA graph is captured; 'auto', 'tiled' and 'online' "
                "can be captured"
            )
        functions = packed(problem, operands.functions)
        pointers = (*addresses(arrays_of(operands)), offset, functions)
        q, k, v = operands[:3]
        if self.copies:
            copied = zip(self.views.items(), self.copies(pointers), strict=True)
            views = {
                name: cupy.ndarray(x.shape, x.dtype, copy.data, x.strides)
                for (name, x), copy in copied
            }
            q, k, v = operands._replace(**views)[:3]
        out, lse = (x if x is None else x.maker()() for x in self.results.values())
        if operands.given_out is not None:
            out = operands.given_out
        softmax, values = self.kernels
        s = self._raw_scores(_fold_group(q, problem), k)
        params = self.params
        if functions:
            params = params.params + functions
        softmax.enqueue(*addresses((s, lse)), *pointers[3:-1], params)
        o = self._matmul(s, v)  # s is P by now
        values.enqueue(*addresses((s, o, v, out)), params)
        return out, lse

    def _raw_scores(self, q, k):
        """q k^T; for wide heads the sum of the products of some columns at a time."""
        k = k.swapaxes(-1, -2)
        # The naive method rounds each step to 16 bits, and would round each part as
        # well.
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
    """Query heads that share a head of k, as rows of one matrix."""
    rows = problem.group_size * problem.seqlen_q
    shape = (*problem.batch, problem.num_kv_heads, rows, problem.head_dim)
    return q if problem.group_size == 1 else q.reshape(shape)
