"""Plans of attention: everything but the arrays, ready to be launched."""

from typing import Any

import numpy as np

from cupyflash._attention.functions import Taken
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.config import OPTIONS, OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.functions import with_functions
from cupyflash._core import arrays as _arrays
from cupyflash._cuda.launch_sequence import LaunchSequence, Result, Steps


class AttentionPlan(LaunchSequence):
    """The launches of a call of attention() or attention_vjp()."""

    num_splits = 1  # of the keys
    offset = 0  # the argument, if that of the call is not an int
    dscore: tuple[str, ...] = ()  # names of arrays whose gradients come last
    taken: tuple[Taken, ...] = ()  # functions whose arrays are options


def addresses(arrays: Any) -> list[Any]:
    """Pointers of arrays, 0 for one that is absent."""
    return [0 if x is None else x.data.ptr for x in arrays]


def facts(x: Any) -> tuple[Any, ...]:
    """What a plan depends on in an array; AttributeError if it is not CuPy's."""
    data = x.data
    # The alignment decides whether TMA can read it.
    return x.shape, x._c_contiguous or x.strides, x.dtype, data.device_id, data.ptr % 16


def arrays_of(operands: Any) -> tuple[Any, ...]:
    """The arrays of checked operands, in the order of AttentionCall."""
    return (*operands[:3], *(getattr(operands, name) for name in OPTIONS))


def results_of(problem, names=("out", "lse")) -> dict[str, Result | None]:
    """out and lse, None for an lse that is not requested."""
    dtype = _arrays.to_dtype(problem.dtype)
    lse = Result(problem.lse_shape, np.dtype(problem.compute_dtype))
    results = Result(problem.out_shape, dtype), lse if problem.return_lse else None
    return dict(zip(names, results, strict=True))


def pack_params(problem, operands) -> tuple[Any, int, dict[str, Any]]:
    """params_t of a call as an argument, its number of batch axes, and its fields."""
    fields = attention_params.params_fields(problem, operands)
    batch_dims = len(fields["batch_shape"])
    packed = attention_params.PARAMS.pack(fields, kBatchDims=batch_dims)
    return with_functions(packed, problem), batch_dims, fields


def fused_steps(row, problem, operands, device, out="out", lse="lse") -> Steps:
    """One kernel over q, k and v."""
    params, batch_dims, _ = pack_params(problem, operands)
    (config,) = row.configs(problem, batch_dims, device)
    arguments = ("q", "k", "v", out, lse, *OPTIONS_AND_OFFSET, params)
    return Steps([(config, arguments)])
