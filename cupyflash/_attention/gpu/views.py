"""pack_gqa: queries that share keys as rows of one tile, by other views of the arrays.

A decode step has one query per head, and the heads of a group read the same keys. As
queries of one head they become rows of one tile, so that every kernel reads keys and
values once for all of them.
"""

import math
from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem

# The most queries of a head that become rows beside those of other heads: they are one
# axis with the heads only in memory without gaps.
_MOST_PACKED = 32
# The most rows of several queries in float32, forward: more are faster by heads.
_MOST_FLOAT32_ROWS = 16


def pack_gqa(problem: AttentionProblem, operands) -> tuple[AttentionProblem, Any]:
    """The same call with (heads, queries) as (key heads, rows), or unchanged.

    Memory is not moved. Rows of a tile have different positions, so masks by position,
    alibi, functions and query lengths are left as they are.
    """
    arrays = {name: getattr(operands, name) for name in _OF_QUERIES}
    if not _can_pack(problem, arrays.values(), operands.sinks):
        return problem, operands
    if problem.seqlen_q > 1:
        if problem.layout != "bhsd":
            return problem, operands  # of `out`, which is new
        rows = problem.group_size * problem.seqlen_q
        is_float32 = problem.dtype == "float32"
        is_tf32 = is_float32 and problem.precision == "tf32"
        if is_tf32 or (is_float32 and rows > _MOST_FLOAT32_ROWS):
            return problem, operands
    packed = {name: _packed(x, problem) for name, x in arrays.items()}
    if operands.sinks is not None:
        packed["sinks"] = _packed_sinks(operands.sinks, problem)
    return _of_rows(problem, "bhsd"), operands._replace(**packed)


def pack_gqa_of_gradients(
    problem: AttentionVjpProblem, operands
) -> tuple[AttentionVjpProblem, Any]:
    """The same for gradients, of which those of q and of the bias are packed, too."""
    forward, given = problem.forward, operands.forward
    of_forward = {name: getattr(given, name) for name in _OF_QUERIES}
    # Axes without columns get one.
    others = {"dout": operands.dout}
    for name in ("lse", "dlse"):
        x = getattr(operands, name)
        others[name] = None if x is None else x[..., None]
    arrays = (*of_forward.values(), *others.values())
    heads, queries, _ = (1, 1, 1, *problem.bias_shape)[-3:]
    can_pack_dbias = heads == queries == 1 or (
        heads == forward.num_heads and queries == forward.seqlen_q
    )
    if (
        not _can_pack(forward, arrays, given.sinks)
        or problem.need_dsinks
        or not can_pack_dbias
        or (forward.seqlen_q > 1 and forward.layout != "bhsd")  # of dq, which is new
    ):
        return problem, operands
    packed = {name: _packed(x, forward) for name, x in of_forward.items()}
    others = {name: _packed(x, forward) for name, x in others.items()}
    for name in ("lse", "dlse"):
        if others[name] is not None:
            others[name] = others[name][..., 0]
    if given.sinks is not None:
        packed["sinks"] = _packed_sinks(given.sinks, forward)
    own = replace(problem, forward=_of_rows(forward, forward.layout), is_packed=True)
    rows = own.forward.num_heads, own.forward.seqlen_q
    columns = problem.q_shape[-1]
    own = replace(own, q_shape=(*problem.q_shape[:-3], *rows, columns))
    if heads * queries > 1:
        *batch, _, _, keys = problem.bias_shape
        own = replace(own, bias_shape=(*batch, *rows, keys))
    return own, operands._replace(forward=given._replace(**packed), **others)


# Arrays of the forward call with rows for queries of a head.
_OF_QUERIES = ("q", "out", "bias", "mask")


def _can_pack(problem, arrays, sinks):
    """Whether heads of a group and queries can be one axis of all these arrays."""
    by_position = (problem.left, problem.right, problem.alibi_slopes)
    return not (
        problem.group_size == 1
        or not 1 <= problem.seqlen_q <= _MOST_PACKED
        or problem.query_lengths is not None
        or problem.has_functions
        or any(x is not None for x in by_position)
        or problem.method not in ("auto", "tiled")
        or (problem.seqlen_q > 1 and sinks is not None)
        or any(
            x.strides[-3] != problem.seqlen_q * x.strides[-2]
            for x in arrays
            if x is not None and problem.seqlen_q > 1
        )
    )


def _of_rows(problem, layout):
    """The problem with all queries of a group as those of one head."""
    rows = problem.group_size * problem.seqlen_q
    heads = problem.num_kv_heads
    return replace(problem, num_heads=heads, seqlen_q=rows, layout=layout)


def _packed(x, problem):
    """(.., heads, queries, n) as (.., key heads, rows, n)."""
    if x is None:
        return None
    *batch, _, queries, n = x.shape
    *steps, head, row, col = x.strides
    group = problem.group_size
    if queries == 1:
        row = head
    shape = (*batch, problem.num_kv_heads, group * queries, n)
    return cupy.ndarray(shape, x.dtype, x.data, (*steps, head * group, row, col))


def _packed_sinks(sinks, problem):
    """(heads) as (key heads, group): a number for each row, of one query."""
    (step,), group = sinks.strides, problem.group_size
    shape = problem.num_kv_heads, group
    return cupy.ndarray(shape, sinks.dtype, sinks.data, (step * group, step))


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


def row_alignment(**arrays: Any) -> int:
    """Bytes, a power of two up to 16, of which starts of all rows are multiples."""
    shared = _VECTOR_BYTES
    for x in arrays.values():
        steps = zip(x.shape[:-1], x.strides[:-1], strict=True)
        shared = math.gcd(shared, x.data.ptr, *(step for n, step in steps if n > 1))
    return shared
