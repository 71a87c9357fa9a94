"""About how long a call of the kernel for sm_90a takes, to choose tile and splits.

Tiles of queries go over the multiprocessors in waves, from the longest to the shortest.
A tile of queries takes what it needs to start and to end, and then as long for each
tile of keys. Measured on an H100: docs/design/lab/0007-hopper-forward.md.
"""

import numpy as np

from cupyflash._attention.gpu.config import num_heads
from cupyflash._core.dtypes import ITEMSIZE

# All times are in microseconds. The start and end of a call, and of a tile of queries:
# for itself, and for each number of its result.
_CALL, _TILE, _TILE_NUMBER = 1.0, 1.5, 1.4e-4
# A score, from the width of heads, where it is not measured for the tile.
_SCORE, _SCORE_COLUMN = 2.7e-5, 4.7e-7
# Terms of scores take as long as the rest.
_TERMS = 2
# The launch that combines splits, counting what it costs the host; each number that it
# reads, and each that it writes.
_COMBINE, _COMBINE_READ, _COMBINE_WRITE = 6.0, 2e-6, 6e-6
# A row that is combined by a warp of the block that finishes last.
_COMBINE_ROW = 0.7
# Bytes of keys and values that come from memory.
_BANDWIDTH = 2.7e6


def microseconds(problem, tile, num_splits, device, dims, has_terms, in_kernel):
    """About how long a call takes; `in_kernel` says that the kernel combines splits."""
    dim = max(dims)
    score = 1e-6 * tile.score_ps or _SCORE + _SCORE_COLUMN * dim
    step = tile.block_m * tile.block_n * score * (_TERMS if has_terms else 1)
    keys = keys_of_tiles(problem, tile.block_m)
    steps = -(-keys // tile.block_n)
    steps = -(-steps // num_splits)
    each = _TILE + _TILE_NUMBER * tile.block_m * dim + step * steps
    heads = num_heads(problem)
    # Of the tiles that take at least as long as the n-th of a head, some multiprocessor
    # has at least their share.
    tiles = heads * num_splits * np.arange(1, each.size + 1)
    slowest = (each * -(-tiles // device.num_sms)).max()
    busy = each.sum() * heads * num_splits / device.num_sms
    bytes_of_keys = heads // problem.group_size * problem.seqlen_k
    bytes_of_keys *= 2 * dim * ITEMSIZE[problem.dtype]
    time = _CALL + max(slowest, busy, bytes_of_keys / _BANDWIDTH)
    if num_splits == 1:
        return time
    if in_kernel:
        rows = min(tile.block_m, problem.seqlen_q)
        return time + _COMBINE_ROW * -(-rows // (4 * tile.num_groups))
    numbers = heads * problem.seqlen_q * dim
    return time + _COMBINE + numbers * (_COMBINE_READ * num_splits + _COMBINE_WRITE)


def keys_of_tiles(problem, block_m):
    """The keys that each tile of a head sees, the last tile first."""
    last = np.arange(problem.seqlen_q, 0, -block_m)  # one past the last query
    keys = np.full(last.size, problem.seqlen_k)
    if not isinstance(problem.query_offset, int):
        return keys  # only the device knows
    if problem.right is not None:
        end = last + problem.query_offset + problem.right
        keys = np.minimum(keys, end)
    if problem.left is not None:
        first = np.maximum(last - block_m, 0) + problem.query_offset - problem.left
        keys = keys - np.maximum(first, 0)
    return np.maximum(keys, 1)
