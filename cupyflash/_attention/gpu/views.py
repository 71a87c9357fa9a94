"""pack_gqa: queries that share keys as rows of one tile, by other views of the arrays.

A decode step has one query per head, and the heads of a group read the same keys. As
queries of one head they become rows of one tile, so that every kernel reads keys and
values once for all of them.
"""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention.problem import AttentionProblem


def pack_gqa(problem: AttentionProblem, operands) -> tuple[AttentionProblem, Any]:
    """The same call with (heads, 1) queries as (key heads, group), or unchanged.

    Memory is not moved. Rows of a tile have different positions, so masks by position,
    alibi, functions and query lengths are left as they are.
    """
    group = problem.group_size
    by_position = (problem.left, problem.right, problem.alibi_slopes)
    if (
        problem.seqlen_q != 1
        or group == 1
        or problem.query_lengths is not None
        or problem.has_functions
        or any(x is not None for x in by_position)
        or problem.method not in ("auto", "tiled")
    ):
        return problem, operands

    def fold(x):
        """(.., heads, 1, n) as (.., key heads, group, n)."""
        if x is None:
            return None
        *batch, _, _, n = x.shape
        *steps, head, _, col = x.strides
        shape = (*batch, problem.num_kv_heads, group, n)
        return cupy.ndarray(shape, x.dtype, x.data, (*steps, head * group, head, col))

    sinks = operands.sinks
    if sinks is not None:
        (step,) = sinks.strides
        shape = problem.num_kv_heads, group
        sinks = cupy.ndarray(shape, sinks.dtype, sinks.data, (step * group, step))
    one_head = replace(
        problem,
        num_heads=problem.num_kv_heads,
        seqlen_q=group,
        layout="bhsd",  # the same memory, of one query
    )
    return one_head, operands._replace(
        q=fold(operands.q),
        out=fold(operands.out),
        bias=fold(operands.bias),
        mask=fold(operands.mask),
        sinks=sinks,
    )


_VECTOR_BYTES = 16


def no_vectors(**arrays: Any) -> str | None:
    """Why rows of these arrays do not all start at whole 16-byte vectors, or None."""
    for name, x in arrays.items():
        past = x.data.ptr % _VECTOR_BYTES
        if past:
            return f"{name} starts {past} bytes past a multiple of {_VECTOR_BYTES}"
        for n, step in zip(x.shape[:-1], x.strides[:-1], strict=True):
            if n > 1 and step % _VECTOR_BYTES:
                return (
                    f"{name} has a stride of {step} bytes, not a multiple of "
                    f"{_VECTOR_BYTES}"
                )
    return None
