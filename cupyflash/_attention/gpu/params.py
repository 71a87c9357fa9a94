"""The parameters of every attention kernel: params_t."""

import math

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


# The axes of an operand after the batch axes.
_AXES = {
    **dict.fromkeys(("q", "k", "v", "out", "bias", "mask"), ("head", "row", "col")),
    "sinks": ("head", "row"),  # the latter where rows are heads (_attention_views)
    "alibi_slopes": ("head",),
    **dict.fromkeys(("query_offsets", "query_lengths", "key_lengths"), ()),
}


def params_fields(problem: AttentionProblem, operands) -> dict:
    """The fields of params_t for a call; batch axes are merged where possible."""
    strides, batch_strides = {}, {}
    for name, axes in _AXES.items():
        x = getattr(operands, name)
        if x is not None:
            steps = _strides.element_strides(x)
            axes = axes[: len(steps)]
        elif name == "out":
            steps = new_out_strides(problem)
        else:
            strides[name] = dict.fromkeys(("head", "row", "col"), 0)
            continue
        num_batch = len(steps) - len(axes)
        # sinks have no batch axes; they are the same for each entry.
        batch_strides[name] = steps[:num_batch] or (0,) * len(problem.batch)
        strides[name] = {
            **dict.fromkeys(("head", "row", "col"), 0),
            **dict(zip(axes, steps[num_batch:], strict=True)),
        }
    batch_strides["part"] = (0,) * len(problem.batch)
    if problem.keys_of_part is not None:
        batch_strides["part"] = (1, *batch_strides["part"][1:])
    shape, merged = _strides.collapse(problem.batch, list(batch_strides.values()))
    # A kernel has at least one batch axis.
    shape = shape or (1,)
    merged = [steps or (0,) for steps in merged]
    batch_strides = dict(zip(batch_strides, merged, strict=True))
    return {
        **scalar_fields(problem),
        "batch_shape": shape,
        **{
            name: (batch_strides.get(name, (0,) * len(shape)), *strides[name].values())
            for name in _AXES
        },
        "part": (
            batch_strides["part"],
            num_heads(problem) // num_splits(problem),
            0,
            0,
        ),
    }


def scalar_fields(problem: AttentionProblem) -> dict:
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


def contiguous_strides(shape) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def launch_offset(problem: AttentionProblem) -> int:
    """The query offset as a launch argument; 0 if only the device knows it."""
    offset = problem.query_offset
    return 0 if isinstance(offset, str) else offset
