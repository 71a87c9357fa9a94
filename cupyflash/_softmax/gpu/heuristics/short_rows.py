"""Launches of kernels that hold many short rows at a time."""

import math

from cupyflash._core import arrays
from cupyflash._cuda import kernel
from cupyflash._softmax.gpu.config import (
    BLOCK_THREADS,
    MAX_BLOCKS,
    itemsize_of,
    launch_config,
    widest_of,
)
from cupyflash._softmax.gpu.heuristics import on_chip
from cupyflash._softmax.gpu.heuristics.rows import refuse_scale

# Rows up to this length that are not whole vectors are held many at a time, by bytes of
# the widest element. Longer ones move in vectors, at the cost of two ends per row.
LONGEST_IN_SPAN = {2: 256, 4: 128, 8: 128}
# The same for gradients.
LONGEST_PAIRS_IN_SPAN = {2: 100, 4: 100, 8: 24}
# From this many whole vectors on, rows move as such.
_WHOLE_VECTORS = 4
# Rows of one or three vectors, which two threads cannot divide evenly.
_ODD_VECTORS = (1, 3)
# Up to this many elements, a row of softmax is held by one thread rather than two.
_ALONE = 12
# Bytes of a row in one thread; more would leave too few threads per multiprocessor.
_SPAN_BYTES = 128
# Up to this many bytes per thread, registers suffice for 8 blocks per multiprocessor,
# beyond for the latter number. Spans take all of its shared memory.
_SPAN_FEW_BYTES, _SPAN_BLOCKS = 64, 5
_SPAN_OF_LANES = 32768 + 64
_LIST_BYTES = 2  # for a row that may be put on a list
# A span of the shortest rows takes a block this many turns or more, which is long for a
# few rows on an idle device. If all blocks of spans that are shorter by a factor run at
# once, so many per multiprocessor, spans are that short.
_MANY_TURNS, _FEWER, _FEW_BLOCKS = 16, 4, 16
_BLOCK_RESERVES = 1024  # shared memory that the system reserves for each block


def span_rows(problem, device):
    """Threads that hold short contiguous rows, many at a time."""
    length, widest = problem.row_length, widest_of(problem)
    size = itemsize_of(problem.dtypes["x"])
    if length > LONGEST_IN_SPAN[widest]:
        return f"a row of {length} is longer than {LONGEST_IN_SPAN[widest]}"
    if problem.dtypes.get("where"):
        return "there is a mask"
    if reason := refuse_scale(problem):
        return reason
    if not _are_back_to_back(problem, ("x", "out")):
        return "the array is not contiguous"
    vectors, rest = divmod(length * size, on_chip.VECTOR_BYTES)
    is_narrow = problem.dtypes["x"] in arrays.FLOATS[:3]
    if not rest and not (vectors in _ODD_VECTORS and is_narrow):
        return "rows are a multiple of 16 bytes"
    thread_map = lanes, _, conflicts = _span_map(length, size, widest)
    if widest == 2 and length > _SPAN_BYTES and conflicts > 1:
        return f"elements of rows of {length} lie in the same banks"  # slower at 191
    lane_bytes = -(-length // lanes) * max(4, widest)
    share = _span_share(lane_bytes, lanes, device)
    return _span_config(problem, device, ("x", "out"), thread_map, share)


def span_pairs(problem, device):
    """The same for gradients, which hold two numbers per element."""
    length, widest = problem.row_length, widest_of(problem)
    size = itemsize_of(problem.dtypes["x"])
    if length > LONGEST_PAIRS_IN_SPAN[widest]:
        return f"a row of {length} is longer than {LONGEST_PAIRS_IN_SPAN[widest]}"
    vectors, rest = divmod(length * size, on_chip.VECTOR_BYTES)
    if not rest and vectors >= _WHOLE_VECTORS:
        return f"rows are {vectors} vectors of 16 bytes"
    if not _are_back_to_back(problem, ("x", "dy", "out")):
        return "the array is not contiguous"
    thread_map = _pair_map(length, size, widest)
    lane_bytes = -(-length // thread_map[0]) * 2 * max(4, widest)
    share = _span_share(lane_bytes, thread_map[0], device)
    return _span_config(problem, device, ("x", "dy", "out"), thread_map, share)


# Up to this many elements, by the size of one, a row is summed by a single thread.
LONGEST_SUM_IN_SPAN = {2: 32, 4: 32, 8: 16}
# Bytes of a row in a thread up to -> blocks per multiprocessor. Doubles, and more
# bytes, would spill.
_SUM_BLOCKS = {40: 16, 96: 10, math.inf: 5}
_SUM_BLOCKS_OF_DOUBLES = {64: 8, math.inf: 5}


def span_sums(problem, device):
    """The same for logsumexp, with a thread per row."""
    dtypes, length = problem.dtypes, problem.row_length
    if dtypes["b"] or dtypes.get("where"):
        return "there are weights or a mask"
    if dtypes["x"] not in arrays.FLOATS:
        return f"{dtypes['x']} is not one of {', '.join(arrays.FLOATS)}"
    size = itemsize_of(dtypes["x"])
    if not 1 < length <= LONGEST_SUM_IN_SPAN[size]:
        return f"a row of {length} is not of 2 to {LONGEST_SUM_IN_SPAN[size]} elements"
    if not _are_back_to_back(problem, ("x",)):
        return "the array is not contiguous"
    thread_map = 1, 1, _bank_conflicts(length, size, 1)
    if not _is_conflict_free(thread_map, size):
        return f"elements of rows of {length} lie in the same banks"
    ladder = _SUM_BLOCKS_OF_DOUBLES if size == 8 else _SUM_BLOCKS
    blocks = kernel.by_threshold(ladder, length * max(4, size))
    if device.cc >= (10, 0):
        blocks = min(blocks, _BLOCKS_ELSEWHERE)
    more = {"MIN_BLOCKS": blocks, "KEEPS": 0}
    share = _share_of_blocks(blocks, device)
    return _span_config(problem, device, ("x",), thread_map, share, _LIST_BYTES, more)


# Threads of a block, and rows of one element that a thread has.
_SINGLE_THREADS, _SINGLE_ROWS = 256, 4


def single_sums(problem, device):
    """Threads that take rows of one element, which is their logsumexp."""
    if problem.row_length != 1:
        return "rows have more than one element"
    if problem.dtypes["b"] or problem.dtypes.get("where"):
        return "there are weights or a mask"
    values = {
        "LANES": 1,
        "ROWS_PER_BLOCK": _SINGLE_THREADS,
        "IN_REGISTERS": _SINGLE_ROWS,
    }
    blocks = -(-problem.num_rows // (_SINGLE_THREADS * _SINGLE_ROWS))
    return (launch_config(min(blocks, MAX_BLOCKS), _SINGLE_THREADS, values),)


def _are_back_to_back(problem, names):
    layout = problem.layout
    length = problem.row_length
    strides = [layout.outer_strides[name] for name in names]
    return layout.is_rows and all(stride == (length,) for stride in strides)


def _span_config(problem, device, names, thread_map, share, beside=0, more=None):
    """The launch for spans of these arrays in `share` bytes of shared memory.

    A row takes a further `beside` bytes of shared memory; `more` are defines.
    """
    lanes, apart, _ = thread_map
    in_registers = -(-problem.row_length // lanes)
    rows_at_once = BLOCK_THREADS // lanes
    # The length of the buffers, and what their alignment may add.
    sizes = sum(itemsize_of(problem.dtypes[name]) for name in names)
    row_bytes = lanes * in_registers * sizes + beside
    phases = 2 * len(names) * on_chip.VECTOR_BYTES
    turns = max(1, (share - phases) // (row_bytes * rows_at_once))
    few = rows_at_once * turns // _FEWER
    if turns >= _MANY_TURNS and problem.num_rows <= few * device.num_sms * _FEW_BLOCKS:
        turns //= _FEWER
    rows = rows_at_once * turns
    return (
        launch_config(
            min(-(-problem.num_rows // rows), MAX_BLOCKS),
            BLOCK_THREADS,
            {
                "LANES": lanes,
                "ROWS_PER_BLOCK": rows_at_once,
                "SPAN_ROWS": rows,
                "IN_REGISTERS": in_registers,
                "APART": apart,
                **(more or {}),
            },
            smem=rows * row_bytes + phases,
        ),
    )


def _span_share(lane_bytes, lanes, device):
    """Bytes of shared memory that the spans of a block may take."""
    is_few = lane_bytes <= _SPAN_FEW_BYTES
    if is_few and lanes > 1:
        return _SPAN_OF_LANES
    return _share_of_blocks(8 if is_few else _SPAN_BLOCKS, device)


def _share_of_blocks(blocks, device):
    """The same for a given number of blocks per multiprocessor."""
    return (device.smem_optin + _BLOCK_RESERVES) // blocks - _BLOCK_RESERVES


def _span_map(length, itemsize, widest):
    """Lanes per row, the distance between the rows of a warp, and bank conflicts.

    Few lanes, and adjacent rows, if their elements then lie in different banks.
    """
    fewest = _fewest_lanes(length * max(4, widest))
    is_whole = length * itemsize % on_chip.VECTOR_BYTES == 0
    alone = _fewest_conflicts(length, itemsize, 1)
    if (
        fewest == 1
        and (length <= _ALONE or is_whole)
        and _is_conflict_free(alone, itemsize)
    ):
        return alone
    maps = [
        _fewest_conflicts(length, itemsize, lanes)
        for lanes in sorted({fewest, min(2 * fewest, on_chip.WARP)})
    ]
    # Idle slots of lanes cost bank conflicts as well.
    return min(
        maps,
        key=lambda thread_map: (
            -(-length // thread_map[0]) * thread_map[0] * thread_map[2]
        ),
    )


def _pair_map(length, itemsize, widest):
    """The same for gradients, whose lanes have less fixed work per row."""
    fewest = _fewest_lanes(2 * length * max(4, widest))
    maps = [
        _fewest_conflicts(length, itemsize, lanes)
        for lanes in (fewest, 2 * fewest, 4 * fewest)
        if lanes <= on_chip.WARP
    ]
    conflict_free = [
        thread_map for thread_map in maps if _is_conflict_free(thread_map, itemsize)
    ]
    return conflict_free[0] if conflict_free else maps[-1]


def _is_conflict_free(thread_map, itemsize):
    """Whether bank conflicts hide behind other work.

    They do if there are at most as many as an element has bytes.
    """
    return thread_map[2] <= itemsize


def _fewest_lanes(row_bytes):
    """Threads, a power of two, that have registers for a row."""
    return 1 << (-(-row_bytes // _SPAN_BYTES) - 1).bit_length()


def _fewest_conflicts(length, itemsize, lanes):
    """The distance between rows with the fewest bank conflicts."""
    maps = [
        (lanes, apart, _bank_conflicts(length * apart, itemsize, lanes))
        for apart in (1, 2, 4)
    ]
    return min(maps, key=lambda thread_map: thread_map[2])


def _bank_conflicts(step, itemsize, lanes):
    """The number of bank conflicts for an element of each lane of a warp.

    There are 32 banks of 4-byte words; rows are `step` elements apart.
    """
    words = max(1, itemsize // 4)  # per element
    found = {
        (lane // lanes * step + lane % lanes) * itemsize // 4 + word
        for lane in range(on_chip.WARP // words)
        for word in range(words)
    }
    banks = [word % 32 for word in found]
    return max(map(banks.count, banks)) * words


# Short rows of whole vectors: a thread has two vectors, of one row or of two, or three.
# Vectors of a thread and its rows -> blocks per multiprocessor that registers must
# suffice for.
_SHORT_BLOCKS = {
    "softmax": {(1, 2): 12, (2, 1): 12, (3, 1): 10},
    "log_softmax": {(1, 2): 8, (2, 1): 12},
}
_SHORT_LANES = {"softmax": (2, 4, 8, 16, 32), "log_softmax": (2, 4, 8)}
_BLOCKS_ELSEWHERE = 8  # at most: ptxas 13.5 spills more from sm_100 on


def short_rows(problem, device):
    """Adjacent threads that hold parts of short rows of whole vectors."""
    dtypes = problem.dtypes
    length, size = problem.row_length, itemsize_of(dtypes["x"])
    if dtypes["x"] not in arrays.FLOATS[:3] or dtypes["out"] != dtypes["x"]:
        return f"{dtypes['x']} as {dtypes['out']} is not one of {arrays.FLOATS[:3]}"
    if dtypes.get("where") or problem.scale != 1:
        return "there is a mask or a scale"
    if not _are_back_to_back(problem, ("x", "out")):
        return "the array is not contiguous"
    if not problem.layout.is_aligned:
        return "an array is not aligned to 16 bytes"
    vectors, rest = divmod(length * size, on_chip.VECTOR_BYTES)
    in_registers, sets = (1, 2) if vectors == 2 else (2 if vectors % 3 else 3, 1)
    lanes, over = divmod(vectors, in_registers)
    min_blocks = _SHORT_BLOCKS[problem.function].get((in_registers, sets))
    if rest or over or lanes not in _SHORT_LANES[problem.function] or not min_blocks:
        return f"a row of {length} is not 2 or 3 vectors in 2 to 32 threads"
    rows_at_once = BLOCK_THREADS // lanes
    if device.cc >= (10, 0):
        min_blocks = min(min_blocks, _BLOCKS_ELSEWHERE)
    values = {
        "LANES": lanes,
        "ROWS_PER_BLOCK": rows_at_once,
        "IN_REGISTERS": in_registers * on_chip.VECTOR_BYTES // size,
        "SETS": sets,
        "MIN_BLOCKS": min_blocks,
    }
    blocks = min(-(-problem.num_rows // (rows_at_once * sets)), MAX_BLOCKS)
    return (launch_config(blocks, BLOCK_THREADS, values),)
