"""The parameters of every attention kernel: params_t."""

import math
from typing import Any

from cupyflash._attention.gpu.config import OPTIONS, num_heads, num_splits
from cupyflash._attention.problem import FAR, AttentionProblem
from cupyflash._core import strides as _strides
from cupyflash._cuda.structs import Struct

# "No bound" on positions: beyond all keys, for any query.
_NO_BOUND = 2 * FAR


OPERAND = Struct(
    "operand_t",
    "attention/score/params.cuh",
    (("index_t", "batch[kBatchDims]"), ("index_t", "head", "row", "col")),
)
PARAMS = Struct(
    "params_t",
    "attention/score/params.cuh",
    (
        ("index_t", "batch_size", "num_heads", "group_size", "seqlen_q", "seqlen_k"),
        ("index_t", "head_dim", "head_dim_v", "left", "right", "offset_from_lengths"),
        ("index_t", "keys_of_part"),
        ("double", "scale", "softcap"),
        ("index_t", "batch_shape[kBatchDims]"),
        (OPERAND, "q", "k", "v", "out", *OPTIONS, "part"),
    ),
)


FORWARD = ("q", "k", "v", "out", *OPTIONS)


def strides_of(arrays: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Strides in elements by name; None for an array that is absent."""
    return {
        name: None if x is None else _strides.element_strides(x)
        for name, x in arrays.items()
    }


def operands_of(
    batch: tuple[int, ...], strides: dict[str, tuple[int, ...] | None]
) -> tuple[tuple[int, ...], dict[str, tuple[Any, ...]]]:
    """The merged batch axes, and operand_t of arrays; an absent one does not move."""
    # sinks have no batch axes; they are the same for each entry.
    present = {
        name: (0,) * len(batch) + steps if name == "sinks" else steps
        for name, steps in strides.items()
        if steps is not None
    }
    of_batch = [steps[: len(batch)] for steps in present.values()]
    shape, merged = _strides.collapse(batch, of_batch)
    shape = shape or (1,)  # a kernel has at least one batch axis
    operands = dict.fromkeys(strides, ((0,) * len(shape), 0, 0, 0))
    for (name, steps), batch_steps in zip(present.items(), merged, strict=True):
        head, row, col = (*steps[len(batch) :], 0, 0, 0)[:3]
        operands[name] = (batch_steps or (0,), head, row, col)
    return shape, operands


def params_fields(problem: AttentionProblem, operands) -> dict[str, Any]:
    """The fields of params_t for a call; batch axes are merged where possible."""
    strides = strides_of({name: getattr(operands, name) for name in FORWARD})
    strides["out"] = out_strides(problem, operands)
    part = [0] * len(problem.batch)
    if problem.keys_of_part is not None:
        part[0] = 1
    strides["part"] = (*part, num_heads(problem) // num_splits(problem))
    shape, found = operands_of(problem.batch, strides)
    return {**scalar_fields(problem), "batch_shape": shape, **found}


def scalar_fields(problem: AttentionProblem) -> dict[str, Any]:
    """The fields of params_t that do not depend on the memory layout of arrays."""
    return {
        "batch_size": math.prod(problem.batch),
        "num_heads": problem.num_heads,
        "group_size": problem.group_size,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "left": _NO_BOUND if problem.left is None else problem.left,
        "right": _NO_BOUND if problem.right is None else problem.right,
        "offset_from_lengths": problem.query_offset == "lengths",
        "keys_of_part": problem.keys_of_part or 0,
        "scale": problem.scale,
        "softcap": problem.softcap,
    }


def new_out_strides(problem: AttentionProblem) -> tuple[int, ...]:
    """Strides, heads first, of a contiguous result in the layout of the call."""
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    steps = contiguous_strides(shape)
    if problem.layout == "bshd" and problem.heads_axis:
        row = problem.num_heads * problem.head_dim_v
        steps = (*steps[:-3], problem.head_dim_v, row, 1)
    return steps


def out_strides(problem: AttentionProblem, operands) -> tuple[int, ...]:
    """Those of the caller's out, or of a new one."""
    if operands.out is None:
        return new_out_strides(problem)
    return _strides.element_strides(operands.out)


def contiguous_strides(shape) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def launch_offset(problem: AttentionProblem) -> int:
    """The query offset as a launch argument; 0 if only the device knows it."""
    offset = problem.query_offset
    return 0 if isinstance(offset, str) else offset
