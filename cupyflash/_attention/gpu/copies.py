"""Plans that put something before or behind another: copies, and parts of the keys."""

import cupy

from cupyflash import (
    _attention_merge_gpu,
    _attention_params,
    _attention_problem,
    _attention_views,
    _graphs,
    _layout,
)
from cupyflash._attention_plans import BasePlan, arrays_of


class PartsPlan(BasePlan):
    """A plan of `kind` over parts of the keys, and the kernel that merges results."""

    takes_arrays = True

    def __init__(self, kind, row, problem, operands, device, parts):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.num_splits = parts[0]
        self.parts = kind(
            row,
            *_attention_views.in_parts(problem, operands, *parts),
            device,
        )
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q)
        merged = _attention_problem.MergeProblem(
            problem.backend,
            self.num_splits,
            shape,
            problem.head_dim_v,
            self.parts.out_dtype.name,
            problem.compute_dtype,
            in_sums=True,
        )
        steps = _attention_params.new_out_strides(problem)
        if operands.out is not None:
            steps = _layout.element_strides(operands.out)
        of_parts = (
            _attention_params.contiguous_strides((self.num_splits, *shape, *more))
            for more in ((problem.head_dim_v,), ())
        )
        self.merge = _attention_merge_gpu.MergePlan(
            merged, self.device_id, *of_parts, steps, problem.dtype
        )
        self.launches = (*self.parts.launches, self.merge.launch)

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        out, lse = arrays[3], self.new_lse()
        if out is None:
            out = self.new_out()
        outs, lses = self.parts((*arrays[:3], None, *arrays[4:]), offset)
        _graphs.keep_if_capturing((outs, lses))
        self.merge(outs, lses, out, lse)
        return out, lse

    def run(self, operands, offset):
        """Launch for checked operands."""
        return self(arrays_of(operands), offset)


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
        _graphs.keep_if_capturing(ready)
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
