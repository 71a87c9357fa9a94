"""The CuPy back end of merge_attention_states."""

import math
from typing import Any

from cupyflash import (
    _arrays,
    _attention_kernels,
    _attention_params,
    _attention_problem,
    _gpu,
    _graphs,
    _layout,
)

_plans = _gpu.PlanCache()


class MergePlan:
    """The merge kernel for arrays of given shapes, and strides in elements."""

    def __init__(self, problem, device_id, outs, lses, out, out_dtype=None):
        self.device_id = device_id
        _gpu.device(self.device_id)  # refuses cards that are too old
        outs_part, *outs_rows, outs_col = outs
        lses_part, *lses_rows = lses
        *out_rows, out_col = out
        shape, rows = _layout.collapse(problem.shape, [outs_rows, lses_rows, out_rows])
        shape = shape or (1,)
        fields = {
            "num_rows": math.prod(problem.shape),
            "num_parts": problem.num_parts,
            "head_dim_v": problem.head_dim_v,
            "outs_part": outs_part,
            "outs_col": outs_col,
            "lses_part": lses_part,
            "out_col": out_col,
            "size": shape,
            "stride": [steps or (0,) for steps in rows],
        }
        dims = len(shape)
        self.params = _gpu.pack_bytes(
            fields, _attention_kernels.merge_params_dtype(dims)
        )
        config = _attention_kernels.merge_config(problem, dims, out_dtype)
        self.launch = _gpu.Launch(
            config.variant, config.grid, config.block, self.device_id
        )

    def __call__(self, outs, lses, out, lse):
        """Launch; `lse` may be None."""
        pointers = (0 if x is None else x.data.ptr for x in (outs, lses, out, lse))
        self.launch.enqueue(*pointers, self.params)


def _plan_of(problem, operands):
    """The plan of a call of merge_attention_states."""
    outs, lses, out = operands
    steps = (
        _attention_params.contiguous_strides(outs.shape[1:])
        if out is None
        else _layout.element_strides(out)
    )
    of_parts = _layout.element_strides(outs), _layout.element_strides(lses)
    return MergePlan(problem, outs.data.device_id, *of_parts, steps)


@_graphs.keeps_memory
def merge(outs, lses, axis, out) -> tuple[Any, Any]:
    """merge_attention_states of arrays on a GPU, or lists of them: (out, lse)."""
    first = outs[0] if isinstance(outs, (list, tuple)) else outs
    with _arrays.adopt(first).device:  # a list becomes one array there
        return _merge(*_attention_problem.merge(outs, lses, axis, out))


def _merge(problem, operands):
    outs, lses, out = operands
    device_id = outs.data.device_id
    steps = None if out is None else out.strides
    key = problem, device_id, outs.strides, lses.strides, steps
    plan = _plans.get(key)
    if plan is None:
        plan = _plan_of(problem, operands)
        _plans.put(key, plan)
    if out is None:
        out = _gpu.empty((*problem.shape, problem.head_dim_v), problem.dtype)
    lse = _gpu.empty(problem.shape, problem.lse_dtype)
    if lse.size:
        plan(outs, lses, out, lse)
    return out, lse


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    launch = _plan_of(problem, operands).launch
    return {"kernel": "merge", "launches": [_gpu.describe(launch)]}
