"""Launches of kernels whose rows are shared by many blocks."""

from cupyflash._core import arrays
from cupyflash._softmax.gpu.config import (
    PARTIAL_BYTES,
    WALK_THREADS,
    itemsize_of,
    launch_config,
    num_parts,
    varied,
    widest_of,
)
from cupyflash._softmax.gpu.heuristics import on_chip

_TOLD_BYTES = 16  # what a block publishes for a row


def split_rows(problem, device):
    """Blocks that share a row, which is read twice."""
    if not problem.layout.is_rows:
        return "rows are not contiguous"
    vectors = problem.row_length * widest_of(problem) // on_chip.VECTOR_BYTES
    parts = num_parts(problem, device, vectors)
    blocks = problem.num_rows * parts
    if blocks >= 1 << 31:
        return f"{problem.num_rows} rows are too many"
    values = {"LANES": WALK_THREADS, "ROWS_PER_BLOCK": 1, "PARTS": parts}
    return tuple(
        launch_config(
            blocks,
            WALK_THREADS,
            values,
            entry=entry,
            scratch=blocks * PARTIAL_BYTES,
        )
        for entry in ("sum", "write")
    )


# Long rows in one launch, by bytes of the widest element: vectors per thread, blocks
# per multiprocessor, and the distance in the queue between the last part of a row to be
# summed and the first to be written: this many bytes minus those of the row, in these
# steps, but at least that many.
_MB = 1 << 20
_TRAIL = {
    2: (16, 2, 18 * _MB, 6 * _MB),
    4: (16, 2, 18 * _MB, 6 * _MB),
    8: (12, 2, 0, 12 * _MB),
}
_TRAIL_STEP = 2 * _MB
# Share of the L2 cache for a row.
_TRAIL_SHARE = 0.55


def trail_rows(problem, device):
    """Blocks that share rows, which are read again from the L2 cache."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "rows are not contiguous"
    if device.cc < (9, 0):
        return f"{device.name} has not been tested"
    if dtypes.get("where") or problem.scale != 1:
        return "there is a mask or a scale"
    if dtypes["x"] not in arrays.FLOATS:
        return f"{dtypes['x']} is not one of {', '.join(arrays.FLOATS)}"
    if problem.row_length * itemsize_of(dtypes["x"]) > _TRAIL_SHARE * device.l2_bytes:
        return f"a row of {problem.row_length} is more than the L2 cache can hold"
    widest = widest_of(problem)
    in_registers, blocks_per_sm, in_cache, least = _TRAIL[widest]
    left = (in_cache - problem.row_length * widest) // _TRAIL_STEP * _TRAIL_STEP
    return _along_line(problem, device, in_registers, blocks_per_sm, max(left, least))


def _along_line(problem, device, in_registers, blocks_per_sm, between):
    """The launches of blocks that take parts of rows from one queue."""
    part_bytes = WALK_THREADS * in_registers * on_chip.VECTOR_BYTES
    part = part_bytes // widest_of(problem)
    parts = problem.num_rows * -(-problem.row_length // part)
    if parts >= 1 << 30:
        return f"{problem.num_rows} rows are too many"
    values = {
        "LANES": WALK_THREADS,
        "ROWS_PER_BLOCK": 1,
        "IN_REGISTERS": in_registers,
        "MARGIN": between // part_bytes,
        "MIN_BLOCKS": blocks_per_sm,
    }
    words = 1 + problem.num_rows + parts  # of _TOLD_BYTES
    main = launch_config(
        min(2 * parts, device.num_sms * blocks_per_sm),
        WALK_THREADS,
        values,
        scratch=words * _TOLD_BYTES,
    )
    blocks = min(-(-words // WALK_THREADS), device.num_sms)
    return varied(main, (blocks,), entry="clear"), main


# Long rows through a ring in the shared memory of all multiprocessors: warps that sum,
# follow and write, by bytes of an element; and the least bytes of a row per block.
# Groups of blocks take rows side by side if each block still has that much.
_RELAY_WARPS = {2: (8, 3, 8), 4: (6, 3, 6), 8: (8, 3, 4)}
_RELAY_SLICE = 62 << 10
_RELAY_CHUNK = 4096  # bytes: on_chip.WARP * kHeld vectors
_RELAY_CHUNKS = on_chip.WARP  # of a row in a block
_RELAY_ROWS = 16  # kRowsUnderWay
_RELAY_OTHER_BYTES = 8 << 10  # of shared memory
_LINE_BYTES = 128
# Bytes of the shortest row, by bytes of an element, and of the longest that was
# measured. Nothing overlaps with a single row: two reads are then as fast
# (docs/design/lab/0008).
_RELAY_LEAST, _RELAY_MOST = {2: 2 * _MB, 4: 4 * _MB, 8: 4 * _MB}, 12 * _MB
# Rows that are enough, if clusters hold up to so many bytes of one and otherwise.
_RELAY_HELD_ROWS, _RELAY_HELD = 8, 2 * _MB
_RELAY_LEAST_ROWS = 2


def relay_rows(problem, device):
    """Blocks that share rows, several of which are under way in shared memory."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "rows are not contiguous"
    if device.cc < (9, 0):
        return f"{device.name} has no bulk copies"
    if dtypes.get("where") or problem.scale != 1:
        return "there is a mask or a scale"
    if dtypes["x"] not in arrays.FLOATS or dtypes["out"] != dtypes["x"]:
        return f"{dtypes['x']} to {dtypes['out']} is not one floating-point type"
    size = itemsize_of(dtypes["x"])
    row_bytes = problem.row_length * size
    if not _RELAY_LEAST[size] <= row_bytes <= _RELAY_MOST:
        return f"a row has {row_bytes} bytes, not {_RELAY_LEAST[size]} to {_RELAY_MOST}"
    least = _RELAY_HELD_ROWS if row_bytes <= _RELAY_HELD else _RELAY_LEAST_ROWS
    if problem.num_rows < least:
        return f"fewer than {least} rows do not overlap"
    blocks = min(device.num_sms, row_bytes // _RELAY_SLICE)
    groups = min(device.num_sms // blocks, problem.num_rows)
    blocks = device.num_sms // groups
    # Chunks of the largest slice, and of the smallest, which has a line less.
    lines = -(-row_bytes // _LINE_BYTES)
    most, least = -(-lines // blocks), max(1, lines // blocks - 1)
    chunks, least = (-(-n * _LINE_BYTES // _RELAY_CHUNK) for n in (most, least))
    ring = (device.smem_optin - _RELAY_OTHER_BYTES) // _RELAY_CHUNK
    ring = min(ring, (_RELAY_ROWS - 2) * least)
    if chunks > min(_RELAY_CHUNKS, ring // 2):  # one row loads while another waits
        return f"a block holds {ring} chunks of rows, fewer than two rows of {chunks}"
    summers, followers, writers = _RELAY_WARPS[size]
    threads = on_chip.WARP * (1 + summers + followers + writers)
    main = launch_config(
        blocks,
        threads,
        {
            "LANES": threads,
            "ROWS_PER_BLOCK": 1,
            "BLOCKS": blocks,
            "CHUNKS": ring,
            "SUMMERS": summers,
            "FOLLOWERS": followers,
            "WRITERS": writers,
        },
        smem=ring * _RELAY_CHUNK,
        cooperative=True,
        scratch=problem.num_rows * (1 + blocks) * _TOLD_BYTES,
        num_groups=groups,
    )
    clear = min(-(-problem.num_rows * (1 + blocks) // threads), device.num_sms)
    return varied(main, (clear, 1), entry="clear", smem=0, cooperative=False), main


# The same for gradients, for all dtypes: vectors per thread, of y and of dy, and blocks
# per multiprocessor; the bytes up to which a row is short, distances for short rows and
# for longer ones, and the longest row that was measured. log_softmax_vjp reads only dy
# twice.
_PAIRS_IN_REGISTERS, _PAIRS_BLOCKS = 8, 2
_PAIRS_SHORT, _PAIRS_BETWEEN, _PAIRS_LONGEST = 4 * _MB, (8 * _MB, 4 * _MB), 16 * _MB
# Up to this many bytes of all rows, rings are faster (docs/design/lab/0024).
_PAIRS_FEW = 8 * _MB


def trail_pairs(problem, device):
    """Blocks that share rows of y and dy, which are read again from the L2 cache."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "rows are not contiguous"
    if device.cc[0] != 9:  # for sm_120 16 bits spill 96 bytes
        return f"{device.name} has not been tested"
    names = [dtypes[name] for name in ("x", "dy")]
    if not {*names} <= {*arrays.FLOATS}:
        return f"{', '.join(names)}: not all of {', '.join(arrays.FLOATS)}"
    widest = widest_of(problem)
    row_bytes = problem.row_length * widest
    is_short = row_bytes <= _PAIRS_SHORT
    if problem.function != "log_softmax_vjp" and widest > 2:
        return "y is read twice as well; rings in shared memory are faster"
    if row_bytes > min(_PAIRS_LONGEST, _TRAIL_SHARE * device.l2_bytes):
        return f"a row of {problem.row_length} is more than the L2 cache can hold"
    between = _PAIRS_BETWEEN[0 if is_short else 1]
    return _along_line(problem, device, _PAIRS_IN_REGISTERS, _PAIRS_BLOCKS, between)


def stream_pairs(problem, device):
    """Rows of y and dy that stream through shared memory of many multiprocessors."""
    if not problem.layout.is_rows:
        return "rows are not contiguous"
    if device.cc < (8, 0):
        return f"{device.name} has no asynchronous copies"
    names = [problem.dtypes[name] for name in ("x", "dy")]
    if not {*names} <= {*arrays.FLOATS}:
        return f"{', '.join(names)}: not all of {', '.join(arrays.FLOATS)}"
    vector = on_chip.VECTOR_BYTES // widest_of(problem)
    place = vector * sum(map(itemsize_of, names))  # bytes of a vector of each
    vectors = -(-problem.row_length // vector)
    is_few = problem.row_length * widest_of(problem) * problem.num_rows <= _PAIRS_FEW
    if not is_few and not isinstance(trail_pairs(problem, device), str):
        return f"{problem.num_rows} rows are faster as a stream through L2"
    stream = on_chip.stream(vectors, problem.num_rows, place, device)
    if stream is None:
        return f"a row of {problem.row_length} is more than the card can hold"
    main = launch_config(
        stream.blocks,
        stream.threads,
        {
            "LANES": stream.threads,
            "ROWS_PER_BLOCK": 1,
            "RING": stream.ring,
            "AHEAD": stream.ahead,
        },
        smem=stream.ring * stream.threads * place,
        cooperative=True,
        scratch=problem.num_rows * stream.blocks * _TOLD_BYTES,
        num_groups=stream.groups,
    )
    blocks = min(-(-problem.num_rows // main.num_threads), 64)
    grid = (main.grid[0], blocks)
    return varied(main, grid, entry="clear", smem=0, cooperative=False), main
