"""Launches of kernels that reduce rows to one number."""

from cupyflash._core import arrays
from cupyflash._cuda import kernel
from cupyflash._softmax.gpu.config import (
    BLOCK_THREADS,
    MAX_BLOCKS,
    PARTIAL_BYTES,
    PARTS_PER_SM,
    SUM_PARTS_PER_SM,
    WALK_THREADS,
    itemsize_of,
    launch_config,
    num_parts,
    varied,
)
from cupyflash._softmax.gpu.heuristics import on_chip

# Vectors of 16 bytes up to -> (lanes per row, vectors per lane, sets of rows), for rows
# that are held as a whole; by the size of an element. A lane with fewer than eight
# vectors, or four of 16-bit elements, has those of several rows. A single lane computes
# each log only once.
_FEW = {1: (1, 1, 2), 2: (1, 2, 1), 3: (1, 3, 2), 4: (1, 4, 1), 8: (4, 2, 4)}
SUMS = {
    2: {**_FEW, **{4 * n: (n, 4, 2) for n in (4, 8, 16, 32)}},
    4: {**_FEW, 16: (4, 4, 2), **{8 * n: (n, 8, 1) for n in (4, 8, 16, 32)}},
}
SUMS[8] = SUMS[4]
# The same for 5 to 8 whole vectors of 16-bit elements.
_WHOLE_SUM = (2, 4, 2)

# A warp loops over rows of up to this many vectors, a block over longer ones.
WARP_SUM = 4096
# Vectors that a lane loads together, by the size of an element. All blocks are
# resident, and load their next row in advance.
_DEEP = 8
_WALKS = {2: 4, 4: _DEEP, 8: _DEEP}


# Threads per multiprocessor that registers must suffice for, with single lanes.
_ALONE_THREADS = {(1, 2): 896, (2, 1): 1024, (3, 2): 512, (4, 1): 512}


def _sum_threads(lanes, in_registers, sets, device):
    """Threads per multiprocessor that registers suffice for."""
    is_deep = in_registers == _DEEP
    if lanes == 1 and device.cc < (10, 0):
        return _ALONE_THREADS[in_registers, sets]
    if device.cc >= (10, 0):  # ptxas 13.5 spills more there
        return 384 if sets else 256 if is_deep else 512
    return 512 if sets or is_deep else 768


# Share of the L2 cache for results that are written between reads.
_RESULTS_SHARE = 0.25


def _stay(problem, device):
    """Whether all results together may stay in the L2 cache."""
    size = itemsize_of(problem.dtypes["out"]) * problem.num_rows
    return device.cc >= (8, 0) and size <= _RESULTS_SHARE * device.l2_bytes


def sum_rows(problem, device):
    """Threads that read contiguous rows."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "rows are not contiguous"
    if dtypes["b"] or dtypes.get("where"):
        return "there are weights or a mask"
    if dtypes["x"] not in arrays.FLOATS:
        return f"{dtypes['x']} is not one of {', '.join(arrays.FLOATS)}"
    if problem.row_length == 1:
        return "rows have one element"
    size = itemsize_of(dtypes["x"])
    vector = on_chip.VECTOR_BYTES // size
    vectors, parts = -(-problem.row_length // vector), 1
    if vectors <= max(SUMS[size]):
        lanes, in_registers, sets = kernel.by_threshold(SUMS[size], vectors)
        if size == 2 and 4 < vectors <= 8 and problem.row_length % vector == 0:
            lanes, in_registers, sets = _WHOLE_SUM
    else:
        lanes, sets = 32, 0
        in_registers = _WALKS[size]
        few = problem.num_rows < device.num_sms * PARTS_PER_SM
        if vectors > WARP_SUM or few:
            lanes = WALK_THREADS
            parts = num_parts(problem, device, vectors, SUM_PARTS_PER_SM)
            if problem.num_rows * parts <= device.num_sms * SUM_PARTS_PER_SM:
                in_registers = _DEEP
    rows = max(1, BLOCK_THREADS // lanes)
    min_blocks = _sum_threads(lanes, in_registers, sets, device) // (lanes * rows)
    values = {
        "LANES": lanes,
        "ROWS_PER_BLOCK": rows,
        "IN_REGISTERS": in_registers * vector,
        "MIN_BLOCKS": min_blocks,
        "SETS": sets,
        "PARTS": parts,
        "KEEPS": int(sets > 0 and _stay(problem, device)),
    }
    blocks = -(-problem.num_rows // (rows * max(sets, 1)))
    if sets:
        blocks = min(blocks, device.num_sms * 16)
    elif parts == 1:
        blocks = min(blocks, device.num_sms * min_blocks)
    blocks = min(blocks, MAX_BLOCKS)
    scratch = problem.num_rows * parts * PARTIAL_BYTES if parts > 1 else 0
    config = launch_config(blocks * parts, lanes * rows, values, scratch=scratch)
    if parts == 1:
        return (config,)
    return varied(config, entry="parts"), varied(config, (blocks,), entry="merge")
