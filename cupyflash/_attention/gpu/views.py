"""The arrays of a call as kernels read them best: other views of them, or copies.

A decode step has one query a head, and the heads of a group read the same keys. As
queries of one head they stand in the rows of one tile, so that every kernel reads keys
and values once for all of them, whatever their number. And where tiles of queries are
fewer than multiprocessors, parts of the keys are one more axis of the batch.

All kernels want the last axis of q, k and v contiguous; the copy engine of Hopper wants
rows that begin at multiples of 16 bytes.
"""

import math
from dataclasses import replace
from typing import Any

import cupy

from cupyflash import _arrays, _attention_kernels, _gpu, _layout, _tensormap
from cupyflash._attention_problem import AttentionProblem

# Queries from which a copy for the copy engine takes less time than it saves, and bytes
# of each such copy that are allowed a byte of out.
_COPIES_FROM = 256
_MOST_COPIED = 4


def folded(problem: AttentionProblem, operands) -> tuple[AttentionProblem, Any]:
    """The same call with (heads, 1) queries as (key heads, group), or as it was.

    Memory stays where it is. Rows of a tile have positions of their own, so that a mask
    by position, alibi and lengths of queries stay with heads.
    """
    group = problem.group_size
    by_position = (problem.left, problem.right, problem.alibi_slopes)
    if (
        problem.seqlen_q != 1
        or group == 1
        or problem.query_lengths is not None
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


def in_parts(
    problem: AttentionProblem, operands, num_parts: int, keys_of_part: int
) -> tuple[AttentionProblem, Any]:
    """The call over parts of the keys, a new first axis of the batch, without out."""

    def spread(x):
        if x is None:
            return None
        return cupy.ndarray((num_parts, *x.shape), x.dtype, x.data, (0, *x.strides))

    parts = replace(
        problem,
        batch=(num_parts, *problem.batch),
        keys_of_part=keys_of_part,
        layout="bhsd",
        heads_axis=True,
        return_lse=True,
    )
    names = set(operands._fields) - {"out", "given_out", "sinks"}
    views = {name: spread(getattr(operands, name)) for name in names}
    return parts, operands._replace(out=None, given_out=None, **views)


class Copy:
    """Copies of an array that has this shape and these strides, in elements.

    The shape is that without axes that are broadcast; rows of the copy are whole
    vectors of 16 bytes.
    """

    def __init__(self, x, shape: tuple[int, ...], strides: tuple[int, ...]):
        *rows, num_columns = shape
        *row_strides, column_stride = strides
        self.shape = (*rows, _layout.whole_vectors(num_columns, x.itemsize))
        self.dtype = x.dtype
        size, (steps,) = _layout.collapse(rows, [row_strides])
        fields: dict[str, Any] = {
            "num_rows": math.prod(rows),
            "num_columns": num_columns,
            "column_stride": column_stride,
            "by_columns": bool(size) and column_stride != 1 and abs(steps[-1]) == 1,
            "size": size or (1,),
            "stride": [steps or (0,)],
        }
        dims = len(fields["size"])
        dtype = _attention_kernels.copy_params_dtype(dims)
        self.params = _gpu.pack_bytes(fields, dtype)
        config = _attention_kernels.copy_config(
            _arrays.dtype_name(x),
            dims,
            num_columns,
            math.prod(self.shape) * x.itemsize // 16,
        )
        device_id = x.data.device_id
        self.launch = _gpu.Launch(config.variant, config.grid, config.block, device_id)

    def __call__(self, x):
        """A copy of an array, which has the pointer of that one."""
        copy = cupy.ndarray(self.shape, self.dtype)
        self.launch.enqueue(x.data.ptr, copy.data.ptr, self.params)
        return copy


def may_copy(problem: AttentionProblem) -> bool:
    """Whether copies for the copy engine of Hopper may pay."""
    in_16_bits = problem.dtype in ("float16", "bfloat16")
    by_method = problem.method in ("auto", "tiled")
    return in_16_bits and by_method and problem.seqlen_q >= _COPIES_FROM


def made_to_fit(
    arrays: dict[str, Any], for_copy_engine: tuple[str, ...], most_bytes: float
) -> tuple[dict[str, Any], dict[str, Copy]]:
    """Arrays with a contiguous last axis, as if copied where they must be; the copies.

    Those named in `for_copy_engine` become readable to it, as far as that takes copies
    of at most so many bytes each. No place in memory is known yet: pointers are 0.
    """
    copies, views = {}, {}
    for name, x in arrays.items():
        itemsize = x.itemsize
        own = [
            1 if step == 0 else n for n, step in zip(x.shape, x.strides, strict=True)
        ]
        own[-1] = x.shape[-1]
        columns = _layout.whole_vectors(own[-1], itemsize)
        size = math.prod(own[:-1]) * columns * itemsize
        fits = x.size == 0 or x.shape[-1] == 1 or x.strides[-1] == itemsize
        if fits and name in for_copy_engine and size <= most_bytes:
            refusal = _tensormap.refusal(x.data.ptr, x.shape, x.strides, itemsize)
            fits = refusal is None
        if fits:
            continue
        taken = tuple(
            0 if n == 1 else s // itemsize for n, s in zip(own, x.strides, strict=True)
        )
        copies[name] = Copy(x, tuple(own), taken)
        steps = [math.prod((*own[axis + 1 : -1], columns)) for axis in range(x.ndim)]
        steps[-1] = 1
        strides = tuple(
            0 if n == 1 else step * itemsize for n, step in zip(own, steps, strict=True)
        )
        views[name] = cupy.ndarray(x.shape, x.dtype, _gpu.NULL, strides)
    return views, copies


def most_copied(problem: AttentionProblem) -> int:
    """Bytes that a copy for the copy engine may have."""
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    return _MOST_COPIED * rows * problem.head_dim_v * 2
