"""The CuPy back end of merge_attention_states."""

import math
from typing import Any

import numpy as np

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import combine_config
from cupyflash._attention.gpu import params as attention_params
from cupyflash._core import arrays, strides
from cupyflash._cuda import graphs, kernel, plan_cache, runtime
from cupyflash._cuda import launch as _launch
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.launch_sequence import LaunchSequence, Result, Steps

_plans = plan_cache.PlanCache()


def combine_launch(
    problem, outs, lses, out, out_dtype=None, out_lse_dtype=None, few=False
) -> tuple[LaunchConfig, bytes]:
    """The kernel that combines states with strides in elements, and its parameters."""
    outs_split, *outs_rows, outs_col = outs
    lses_split, *lses_rows = lses
    *out_rows, out_col = out
    shape, rows = strides.collapse(problem.shape, [outs_rows, lses_rows, out_rows])
    shape = shape or (1,)
    fields = {
        "num_rows": math.prod(problem.shape),
        "num_parts": problem.num_parts,
        "head_dim_v": problem.head_dim_v,
        "outs_part": outs_split,
        "outs_col": outs_col,
        "lses_part": lses_split,
        "out_col": out_col,
        "rows": (shape, [steps or (0,) for steps in rows]),
    }
    dims = len(shape)
    params = combine_config.COMBINE_PARAMS.pack(fields, kRowDims=dims, kArrays=3)
    if few:
        return combine_config.few_config(problem, dims), params
    return combine_config.parts_config(problem, dims, out_dtype, out_lse_dtype), params


def combine_splits(
    problem, operands, states, out_lse_dtype=None, columns=None
) -> tuple[LaunchConfig, bytes]:
    """The same for `states` of a call over splits of its keys, back to back.

    Their rows are `columns` apart, by default one behind the other.
    """
    shape = (states.num_parts, *states.shape)
    columns = states.head_dim_v if columns is None else columns
    return combine_launch(
        states,
        attention_params.contiguous_strides((*shape, columns)),
        attention_params.contiguous_strides(shape),
        attention_params.out_strides(problem, operands),
        problem.dtype,
        out_lse_dtype,
    )


def _plan_of(problem, operands):
    """The plan of a call of merge_attention_states."""
    outs, lses, out = operands
    device_id = outs.data.device_id
    device = runtime.device(device_id)
    steps = (
        attention_params.contiguous_strides(outs.shape[1:])
        if out is None
        else strides.element_strides(out)
    )
    of_splits = strides.element_strides(outs), strides.element_strides(lses)
    itemsize = outs.itemsize
    few = combine_config.is_few(
        problem,
        (of_splits[0][-1], steps[-1]),
        (
            *(itemsize * n for n in (*of_splits[0][:-1], *steps[:-1])),
            outs.data.ptr,
            0 if out is None else out.data.ptr,
        ),
    )
    config, params = combine_launch(problem, *of_splits, steps, few=few)
    shape = (*problem.shape, problem.head_dim_v)
    results: dict[str, Result | None] = {
        "out": Result(shape, arrays.to_dtype(problem.dtype)),
        "lse": Result(problem.shape, np.dtype(problem.lse_dtype)),
    }
    kernel.check_results(results, device)
    launches = [(config, ("outs", "lses", "out", "lse", params))]
    if not math.prod(problem.shape):
        launches = []
    return LaunchSequence(device_id, ("outs", "lses"), results, Steps(launches))


@graphs.keeps_memory
def merge(outs, lses, axis, out) -> tuple[Any, Any]:
    """merge_attention_states of arrays on a GPU, or lists of them: (out, lse)."""
    first = outs[0] if isinstance(outs, (list, tuple)) else outs
    with arrays.adopt(first).device:  # a list becomes one array there
        return _merge(*attention_problem.merge(outs, lses, axis, out))


def _merge(problem, operands):
    outs, lses, out = operands
    # The alignment decides whether rows are read by vectors.
    of_out = None if out is None else (out.strides, out.data.ptr % 16)
    given = outs.strides, outs.data.ptr % 16, lses.strides
    key = problem, outs.data.device_id, *given, of_out
    plan = _plans.get(key)
    if plan is None:
        plan = _plan_of(problem, operands)
        _plans.put(key, plan)
    out, lse = plan((outs.data.ptr, lses.data.ptr), out)
    return out, lse


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    launches = _plan_of(problem, operands).launches
    return {"kernel": "merge", "launches": [_launch.describe(x) for x in launches]}
