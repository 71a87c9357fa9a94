"""Plans over parts of the keys, whose results are combined."""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import combine
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.plan import BasePlan, arrays_of
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core import strides as _strides
from cupyflash._cuda import graphs


class PartsPlan(BasePlan):
    """A plan of `kind` over parts of the keys, and the kernel that merges results."""

    takes_arrays = True

    def __init__(self, kind, row, problem, operands, device, parts):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.num_splits = parts[0]
        self.parts = kind(
            row,
            *in_parts(problem, operands, *parts),
            device,
        )
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q)
        merged = attention_problem.MergeProblem(
            problem.backend,
            self.num_splits,
            shape,
            problem.head_dim_v,
            self.parts.out_dtype.name,
            problem.compute_dtype,
            in_sums=True,
        )
        steps = attention_params.new_out_strides(problem)
        if operands.out is not None:
            steps = _strides.element_strides(operands.out)
        of_parts = (
            attention_params.contiguous_strides((self.num_splits, *shape, *more))
            for more in ((problem.head_dim_v,), ())
        )
        self.merge = combine.MergePlan(
            merged, self.device_id, *of_parts, steps, problem.dtype
        )
        self.launches = (*self.parts.launches, self.merge.launch)

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        out, lse = arrays[3], self.new_lse()
        if out is None:
            out = self.new_out()
        outs, lses = self.parts((*arrays[:3], None, *arrays[4:]), offset)
        graphs.keep_if_capturing((outs, lses))
        self.merge(outs, lses, out, lse)
        return out, lse

    def run(self, operands, offset):
        """Launch for checked operands."""
        return self(arrays_of(operands), offset)


def in_parts(
    problem: AttentionProblem, operands, num_parts: int, keys_of_part: int
) -> tuple[AttentionProblem, Any]:
    """The call over parts of the keys, a new first axis of the batch, without out."""

    def spread(x):
        if x is None:
            return None
        return cupy.ndarray((num_parts, *x.shape), x.dtype, x.data, (0, *x.strides))

    parts = replace(
        problem,
        batch=(num_parts, *problem.batch),
        keys_of_part=keys_of_part,
        layout="bhsd",
        heads_axis=True,
        return_lse=True,
    )
    names = set(operands._fields) - {"out", "given_out", "sinks"}
    views = {name: spread(getattr(operands, name)) for name in names}
    return parts, operands._replace(out=None, given_out=None, **views)
