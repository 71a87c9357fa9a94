"""Queries that share keys as rows of one tile: other views of a call's arrays.

A decode step has one query a head, and the heads of a group read the same keys. As
queries of one head they stand in the rows of one tile, so that every kernel reads keys
and values once for all of them, whatever their number."""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention.problem import AttentionProblem


def pack_gqa(problem: AttentionProblem, operands) -> tuple[AttentionProblem, Any]:
    """The same call with (heads, 1) queries as (key heads, group), or as it was.

    Memory stays where it is. Rows of a tile have positions of their own, so that a mask
    by position, alibi, functions and lengths of queries stay with heads.
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
