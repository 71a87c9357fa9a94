"""The CuPy back end of merge_attention_states."""

import math
from typing import Any

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import combine_config
from cupyflash._attention.gpu import params as attention_params
from cupyflash._core import arrays, strides
from cupyflash._cuda import graphs, plan_cache, runtime, structs
from cupyflash._cuda import launch as _launch

_plans = plan_cache.PlanCache()


class MergePlan:
    """The merge kernel for arrays of given shapes, and strides in elements."""

    def __init__(self, problem, device_id, outs, lses, out, out_dtype=None):
        self.device_id = device_id
        runtime.device(self.device_id)  # refuses cards that are too old
        outs_part, *outs_rows, outs_col = outs
        lses_part, *lses_rows = lses
        *out_rows, out_col = out
        shape, rows = strides.collapse(problem.shape, [outs_rows, lses_rows, out_rows])
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
        self.params = structs.pack_bytes(
            fields, combine_config.merge_params_dtype(dims)
        )
        config = combine_config.merge_config(problem, dims, out_dtype)
        self.launch = _launch.Launch(
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
        attention_params.contiguous_strides(outs.shape[1:])
        if out is None
        else strides.element_strides(out)
    )
    of_parts = strides.element_strides(outs), strides.element_strides(lses)
    return MergePlan(problem, outs.data.device_id, *of_parts, steps)


@graphs.keeps_memory
def merge(outs, lses, axis, out) -> tuple[Any, Any]:
    """merge_attention_states of arrays on a GPU, or lists of them: (out, lse)."""
    first = outs[0] if isinstance(outs, (list, tuple)) else outs
    with arrays.adopt(first).device:  # a list becomes one array there
        return _merge(*attention_problem.merge(outs, lses, axis, out))


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
        out = _launch.empty((*problem.shape, problem.head_dim_v), problem.dtype)
    lse = _launch.empty(problem.shape, problem.lse_dtype)
    if lse.size:
        plan(outs, lses, out, lse)
    return out, lse


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    launch = _plan_of(problem, operands).launch
    return {"kernel": "merge", "launches": [_launch.describe(launch)]}
