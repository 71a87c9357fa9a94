"""Copies of arrays before the launches of a call, for kernels that need them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention.gpu import copy_config
from cupyflash._attention.gpu.config import num_rows
from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core import arrays as _arrays
from cupyflash._core import strides as _strides
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda import launch, tensor_map
from cupyflash._cuda.launch_sequence import Result, Steps

# From this many queries on, a copy for TMA takes less time than it saves; and how many
# bytes such copies may have per byte of out, whose rows are padded as well.
_COPIES_FROM = 256
_MOST_COPIED = 4
# Other kernels read rows between words of 4 bytes number by number. Copies of such
# arrays pay off from so many queries for each head of k on, in attention and its
# gradients, and so many keys; attention of few columns asks for more. Each may have so
# many bytes if four times the result is less.
_WORD = 4
_ODD_FROM, _ODD_GRADIENTS_FROM, _ODD_KEYS_FROM = 5, 6, 64
_NARROW, _NARROW_KEYS_FROM = 16, 2048
_MOST_ODD = 1 << 28
# The Hopper kernel splits the keys, `mma` does not: copies pay off for so few tiles of
# so many queries, from so many keys on.
_FEW_TILES, _OF_TILE, _SPLIT_KEYS_FROM = 64, 64, 2048


class Copy:
    """A copy of an array with this shape and these strides, in elements.

    The shape leaves out broadcast axes; rows of the copy are whole 16-byte vectors.
    """

    def __init__(self, x, shape: tuple[int, ...], strides: tuple[int, ...]):
        *rows, num_columns = shape
        *row_strides, column_stride = strides
        own = (*rows, _strides.whole_vectors(num_columns, x.itemsize))
        self.result = Result(own, x.dtype)
        size, (steps,) = _strides.collapse(rows, [row_strides])
        fields: dict[str, Any] = {
            "num_rows": math.prod(rows),
            "num_columns": num_columns,
            "column_stride": column_stride,
            "by_columns": bool(size) and column_stride != 1 and abs(steps[-1]) == 1,
            "rows": (size or (1,), [steps or (0,)]),
        }
        dims = max(len(size), 1)
        self.params = copy_config.COPY_PARAMS.pack(fields, ROW_DIMS=dims)
        self.config = copy_config.copy_config(
            _arrays.dtype_name(x), dims, num_columns, self.result.nbytes // 16
        )


def names_before(names: Sequence[str], copies: dict[str, Copy]) -> tuple[str, ...]:
    """Names of a call's arrays, with those that are copied replaced by their copies."""
    return tuple(f"given_{name}" if name in copies else name for name in names)


def with_copies(steps: Steps, copies: dict[str, Copy]) -> Steps:
    """The launches, preceded by the copies that they read."""
    first = [
        (copy.config, (f"given_{name}", name, copy.params))
        for name, copy in copies.items()
    ]
    memory = {name: copy.result.nbytes for name, copy in copies.items()}
    return steps._replace(
        launches=[*first, *steps.launches], scratch={**steps.scratch, **memory}
    )


def copies_alone(copies: dict[str, Copy]) -> tuple[dict[str, Result | None], Steps]:
    """Results and launches of a sequence that returns the copies."""
    results = {f"copied_{name}": copy.result for name, copy in copies.items()}
    launches = [
        (copy.config, (name, f"copied_{name}", copy.params))
        for name, copy in copies.items()
    ]
    return {**results}, Steps(launches)


def most_copied(problem: AttentionProblem) -> int:
    """The most bytes that a copy for TMA may have."""
    rows, itemsize = num_rows(problem), ITEMSIZE[problem.dtype]
    columns = _strides.whole_vectors(problem.head_dim_v, itemsize)
    return _MOST_COPIED * rows * columns * itemsize


def copied_for_tma(problem: AttentionProblem, arrays: dict[str, Any]) -> dict[str, int]:
    """Arrays of which copies for TMA may pay off, and the most bytes of each copy."""
    widest = max(x.shape[-1] for x in arrays.values())
    keys_from = _NARROW_KEYS_FROM if widest <= _NARROW else _ODD_KEYS_FROM
    is_odd = _are_odd(problem, arrays, _ODD_FROM, keys_from)
    if not _may_pay(problem) or not (is_odd or problem.seqlen_q >= _COPIES_FROM):
        return {}
    most = most_copied(problem)
    return dict.fromkeys(arrays, max(most, _MOST_ODD) if is_odd else most)


def copied_to_split(
    problem: AttentionProblem, arrays: dict[str, Any]
) -> dict[str, int]:
    """The same of calls that `mma` takes, whose keys the Hopper kernel would split."""
    is_long = problem.seqlen_k >= _SPLIT_KEYS_FROM
    if not _may_pay(problem) or not is_long or _num_tiles(problem) > _FEW_TILES:
        return {}
    return dict.fromkeys(arrays, max(most_copied(problem), _MOST_ODD))


def copied_for_gradients(
    problem: AttentionVjpProblem, arrays: dict[str, Any]
) -> dict[str, int]:
    """The same for gradients.

    Those of k and v are as large as k and v, so that odd rows of these may be copied
    for any number of queries.
    """
    forward = problem.forward
    is_odd = _are_odd(forward, arrays, _ODD_GRADIENTS_FROM, _ODD_KEYS_FROM)
    if not _may_pay(forward) or not (is_odd or forward.seqlen_q >= _COPIES_FROM):
        return {}
    most = most_copied(forward)
    if is_odd:
        written = replace(problem, whole_vectors=True)
        numbers = sum(math.prod(written.written_shape(name)) for name in "qkv")
        most = max(most, numbers * ITEMSIZE[forward.dtype])
    return dict.fromkeys(arrays, most)


def _num_tiles(problem):
    """Tiles of queries, over all heads of k and batch entries."""
    heads = math.prod(problem.batch) * problem.num_kv_heads
    return heads * -(-problem.seqlen_q * problem.group_size // _OF_TILE)


def _may_pay(problem):
    in_16_bits = problem.dtype in ("float16", "bfloat16")
    return in_16_bits and problem.method in ("auto", "tiled")


def _are_odd(problem, arrays, least, least_keys):
    """Whether other kernels would take long to read some of these, for long enough."""
    is_long = problem.seqlen_q * problem.group_size >= least
    is_long &= problem.seqlen_k >= least_keys
    return is_long and any(map(_lies_between_words, arrays.values()))


def _lies_between_words(x) -> bool:
    """Whether rows that kernels can read as they lie do not start at words."""
    *rows, _ = x.shape
    *steps, step = x.strides
    if step != x.itemsize:
        return False
    steps = [s for n, s in zip(rows, steps, strict=True) if n > 1]
    return math.gcd(x.data.ptr, *steps) % _WORD != 0


def made_to_fit(
    arrays: dict[str, Any], for_tma: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, Copy]]:
    """Arrays with a contiguous last axis, as if copied where necessary; and the copies.

    Those named in `for_tma` become readable by TMA, if copies of at most so many bytes
    suffice. No address is known yet: pointers are 0.
    """
    copies, views = {}, {}
    for name, x in arrays.items():
        itemsize = x.itemsize
        own = [
            1 if step == 0 else n for n, step in zip(x.shape, x.strides, strict=True)
        ]
        own[-1] = x.shape[-1]
        columns = _strides.whole_vectors(own[-1], itemsize)
        size = math.prod(own[:-1]) * columns * itemsize
        fits = x.size == 0 or x.shape[-1] == 1 or x.strides[-1] == itemsize
        if fits and size <= for_tma.get(name, -1):
            unsupported_reason = tensor_map.unsupported_reason(
                x.data.ptr, x.shape, x.strides, itemsize
            )
            fits = unsupported_reason is None
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
        views[name] = cupy.ndarray(x.shape, x.dtype, launch.NULL, strides)
    return views, copies
