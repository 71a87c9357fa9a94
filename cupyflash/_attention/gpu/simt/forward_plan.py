"""Plans of attention that hold the scores in memory."""

import cupy

from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.config import OPTIONS, columns_apart
from cupyflash._attention.gpu.plan import BasePlan
from cupyflash._core import arrays as _arrays
from cupyflash._cuda import graphs, launch, structs

_NULL = launch.NULL


class UnfusedPlan(BasePlan):
    """naive and safe: S and P in memory, cupy.matmul for both products."""

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.problem = problem
        self.scores_dtype = row.scores_dtype(problem)
        fields = attention_params.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        self.params = structs.pack(fields, attention_params.params_dtype(batch_dims))
        self.launches = tuple(
            launch.Launch(config.variant, config.grid, config.block, self.device_id)
            for config in row.configs(problem, batch_dims, device)
        )

    def run(self, operands, offset):
        """Two matmuls, each followed by a launch."""
        problem = self.problem
        if graphs.is_capturing():
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
