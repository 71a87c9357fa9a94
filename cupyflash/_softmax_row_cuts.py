"""How kernels of rows cut a problem into launches."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from cupyflash import _arrays, _kernels
from cupyflash import _softmax_tiers as _tiers

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_vjp", "log_softmax_vjp")

# Threads of a block that holds several short rows.
BLOCK_THREADS = 128

# Static shared memory of a block of 1024 threads at most: what its warps exchange.
_EXCHANGE_BYTES = 8192

# Blocks of a grid; each takes more rows when there are more.
MAX_BLOCKS = 1 << 20

# Row length up to -> threads a row, for kernels that walk over a row.
LANES = (
    (8, 4),
    (64, 8),
    (1024, 32),
    (4096, 128),
    (16384, 256),
    (float("inf"), 512),
)

# Long rows that are fewer than this get all threads that a block may have.
_FEW_ROWS = 128

# Rows that are no whole vectors up to this length are held many at a time, by bytes of
# the widest element. The others move in vectors, at the price of the two ends of each
# row: of 16 bits 0.65 to 0.87 at 98 to 210, where a span reaches 0.85 to 0.98.
LONGEST_IN_SPAN = {2: 256, 4: 128, 8: 128}
# Bytes of a row in one thread; more would leave too few threads on a multiprocessor.
_SPAN_BYTES = 128
# Bytes that a thread holds up to which a multiprocessor has registers for 8 blocks, and
# how many it has them for beyond. Spans in all of its shared memory: rows of 86 and 170
# elements of 16 bits 0.99, 0.97; of 11 KB a block, which leave half of it empty, 0.87,
# 0.84. Rows of 7 0.95; of 32 KB, for 7 blocks, 0.90. But 101 doubles, in 16 threads,
# 0.92 with 8 blocks, 0.98 with these 32 KB.
_SPAN_FEW_BYTES, _SPAN_BLOCKS = 64, 5
_SPAN_OF_LANES = 32768 + 64
_BLOCK_RESERVES = 1024  # bytes of shared memory that each block has besides


@dataclass(frozen=True)
class Cut:
    """How one launch of a kernel deals a problem to blocks and threads."""

    num_blocks: int
    num_threads: int
    defines: tuple[tuple[str, str], ...] = ()
    smem: int = 0  # bytes of dynamic shared memory
    cluster: int = 1  # blocks that work on one row together
    cooperative: bool = False  # all blocks run at once
    entry: str = ""  # of the source, where that has more than one
    scratch: int = 0  # bytes of memory that the launches share, as the last pointer
    num_groups: int = 1  # of num_blocks each


def _cut(problem, lanes, held=0):
    """`lanes` threads a row, each with `held` elements in registers if not 0."""
    rows_per_block = max(1, BLOCK_THREADS // lanes)
    values = {"LANES": lanes, "ROWS_PER_BLOCK": rows_per_block}
    if held:
        values["HELD"] = held
    return (
        Cut(
            min(-(-problem.num_rows // rows_per_block), MAX_BLOCKS),
            lanes * rows_per_block,
            tuple((name, str(value)) for name, value in values.items()),
        ),
    )


def walk_rows(problem, device):
    """Threads that walk over a row of any length and any strides."""
    lanes = _kernels.by_threshold(LANES, problem.row_length)
    if lanes == LANES[-1][1] and problem.num_rows < _FEW_ROWS:
        lanes = 1024
    return _cut(problem, lanes)


def hold_rows(problem, device):
    """Threads that hold a row on chip; any strides."""
    return _held_by(problem, device, _forward_tiers(problem, device), ("x",))


def hold_pairs(problem, device):
    """Threads that hold a row of y and one of dy on chip; any strides."""
    return _held_by(problem, device, _backward_tiers(problem, device), ("x", "dy"))


def _forward_tiers(problem, device):
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return _tiers.STRIDED
    if dtypes.get("where") or problem.scale != 1 or dtypes["x"] not in _arrays.FLOATS:
        short, clusters = _tiers.FORWARD_HEAVY, _tiers.FORWARD_HEAVY_CLUSTERS
    else:
        short, clusters = _tiers.FORWARD, _tiers.FORWARD_CLUSTERS
        widest, is_log = widest_of(problem), problem.function == "log_softmax"
        if widest == 8:
            short, clusters = _tiers.FORWARD_F64, _tiers.FORWARD_F64_CLUSTERS
            if is_log:
                clusters = _tiers.LOG_F64_CLUSTERS
        elif widest == 2 and is_log:
            short = _tiers.LOG_16_BITS
    return _tiers.ladder(short, clusters, 1, device)


def _backward_tiers(problem, device):
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return _tiers.STRIDED
    if not {dtypes["x"], dtypes["dy"]} <= {*_arrays.FLOATS}:
        return _tiers.ladder(_tiers.FORWARD_HEAVY, (), 2, device)
    widest = widest_of(problem)
    if widest == 2:
        short, clusters = _tiers.BACKWARD_16_BITS, _tiers.BACKWARD_16_BITS_CLUSTERS
    elif widest == 8 and problem.function == "log_softmax_vjp":
        short, clusters = _tiers.BACKWARD, _tiers.BACKWARD_LOG_F64_CLUSTERS
    else:
        short, clusters = _tiers.BACKWARD, _tiers.BACKWARD_CLUSTERS
    return _tiers.ladder(short, clusters, 2, device)


def _held_by(problem, device, tiers, names):
    """The launch that holds rows of these operands, or why there is none."""
    widest, contiguous = widest_of(problem), problem.layout.is_rows
    vector = _tiers.VECTOR_BYTES // widest
    # What does not fill a vector at either end of a contiguous row has a place besides.
    vectors = problem.row_length // vector
    if not contiguous:
        vectors = -(-problem.row_length // vector)
    is_whole = not contiguous or problem.row_length % vector == 0
    hold = _tiers.hold(tiers, vectors, 0 if is_whole else 2 * vector - 2)
    if hold is None:
        longest = tiers[-1].vectors * vector
        return (
            f"a row of {problem.row_length} does not fit on chip (at most about "
            f"{longest} elements for these options and strides)"
        )
    sizes = [itemsize_of(problem.dtypes[name]) for name in names]
    shifts = contiguous and widest == 2 and hold.cluster == 1 and not hold.parked
    shifts = (
        shifts
        and problem.dtypes["x"] in _arrays.FLOATS
        and not (problem.dtypes.get("where") or problem.scale != 1)
    )
    if shifts:
        windows = hold.held * (hold.lanes + 1) * hold.rows_per_block
        smem = windows * _tiers.VECTOR_BYTES * sizes.count(2)
    else:
        smem = hold.parked * vector * sum(sizes) * hold.num_threads
    if smem > device.smem_optin - _EXCHANGE_BYTES:
        return f"a row of {problem.row_length} needs more shared memory than there is"
    values = {
        "LANES": hold.lanes,
        "ROWS_PER_BLOCK": hold.rows_per_block,
        "HELD": hold.held * vector,
        "PARKED": hold.parked * vector,
        "CLUSTER": hold.cluster,
        "CONTIGUOUS": int(contiguous),
        "SHIFTS": int(shifts),
        "MIN_BLOCKS": hold.min_blocks,
    }
    blocks = min(-(-problem.num_rows // hold.rows_per_block), MAX_BLOCKS)
    return (
        Cut(
            blocks * hold.cluster,
            hold.num_threads,
            tuple((name, str(value)) for name, value in values.items()),
            smem=smem,
            cluster=hold.cluster,
        ),
    )


def span_rows(problem, device):
    """Threads that hold short rows which lie back to back, many at a time."""
    layout, dtypes = problem.layout, problem.dtypes
    length, widest = problem.row_length, widest_of(problem)
    if length > LONGEST_IN_SPAN[widest]:
        return f"a row of {length} is longer than {LONGEST_IN_SPAN[widest]}"
    if dtypes.get("where"):
        return "there is a mask"
    strides = [layout.outer_strides[name] for name in ("x", "out")]
    if not layout.is_rows or any(stride != (length,) for stride in strides):
        return "rows do not lie back to back"
    if length * itemsize_of(dtypes["x"]) % _tiers.VECTOR_BYTES == 0:
        return "rows are whole vectors of 16 bytes"
    lanes, apart, turns = _span_deal(length, itemsize_of(dtypes["x"]), widest)
    if widest == 2 and length > _SPAN_BYTES and turns > 1:
        return f"elements of rows of {length} lie in the same banks"  # 0.79 at 191
    held = -(-length // lanes)
    rows_at_once = BLOCK_THREADS // lanes
    # The length of the buffers, and what their phases in memory may add.
    sizes = itemsize_of(dtypes["x"]) + itemsize_of(dtypes["out"])
    row_bytes, phases = lanes * held * sizes, 4 * _tiers.VECTOR_BYTES
    share = _span_share(held * max(4, widest), lanes, device)
    rows = rows_at_once * max(1, (share - phases) // (row_bytes * rows_at_once))
    return (
        Cut(
            min(-(-problem.num_rows // rows), MAX_BLOCKS),
            BLOCK_THREADS,
            (
                ("LANES", str(lanes)),
                ("ROWS_PER_BLOCK", str(rows_at_once)),
                ("SPAN_ROWS", str(rows)),
                ("HELD", str(held)),
                ("APART", str(apart)),
            ),
            smem=rows * row_bytes + phases,
        ),
    )


def _span_share(held_bytes, lanes, device):
    """Bytes of shared memory that the spans of a block may take."""
    is_few = held_bytes <= _SPAN_FEW_BYTES
    if is_few and lanes > 1:
        return _SPAN_OF_LANES
    blocks = 8 if is_few else _SPAN_BLOCKS
    return (device.smem_optin + _BLOCK_RESERVES) // blocks - _BLOCK_RESERVES


def _span_deal(length, itemsize, widest):
    """Lanes of a row, how many rows apart a warp has its own, and turns of its memory.

    Few lanes, and rows side by side, if their elements then lie in different banks.
    """
    fewest = 1 << (-(-length * max(4, widest) // _SPAN_BYTES) - 1).bit_length()
    deals = [
        (lanes, apart, _bank_turns(length * apart, itemsize, lanes))
        for lanes in sorted({fewest, min(2 * fewest, _tiers.WARP)})
        for apart in (1, 2, 4)
    ]
    # Slots of lanes that hold nothing take their turns, too.
    return min(deals, key=lambda deal: -(-length // deal[0]) * deal[0] * deal[2])


def _bank_turns(step, itemsize, lanes):
    """How often shared memory takes turns for an element of each lane of a warp.

    It has 32 banks of words of 4 bytes; from row to row there are `step` elements.
    """
    words = max(1, itemsize // 4)  # of an element
    found = {
        (lane // lanes * step + lane % lanes) * itemsize // 4 + word
        for lane in range(_tiers.WARP // words)
        for word in range(words)
    }
    banks = [word % 32 for word in found]
    return max(map(banks.count, banks)) * words


# Short rows of whole vectors: a thread has two vectors, of one row or of two, or three.
# 16-bit rows of 16, 32, 64 and 256: 1.01; with one vector 0.95, 0.92, 0.93, 0.91, with
# four in more sets 0.98, 0.98, 1.00, 0.99, in a tier of rows that are held 0.91, 0.90,
# 0.98, 0.98. Doubles are 0.9 here, 0.98 there. Vectors of a thread and its rows ->
# blocks that a multiprocessor is to have registers for.
_SHORT_BLOCKS = {
    "softmax": {(1, 2): 12, (2, 1): 12, (3, 1): 10},
    "log_softmax": {(1, 2): 8, (2, 1): 12},
}
# log_softmax of 256 floats 0.99, in a tier of rows that are held 1.00.
_SHORT_LANES = {"softmax": (2, 4, 8, 16, 32), "log_softmax": (2, 4, 8)}
_SHORT_BLOCKS_ELSEWHERE = 8  # at most: ptxas 13.5 spills more from sm_100 on


def short_rows(problem, device):
    """Threads that are neighbours and hold parts of short rows of whole vectors."""
    layout, dtypes = problem.layout, problem.dtypes
    length, size = problem.row_length, itemsize_of(dtypes["x"])
    if dtypes["x"] not in _arrays.FLOATS[:3] or dtypes["out"] != dtypes["x"]:
        return f"{dtypes['x']} as {dtypes['out']} is none of {_arrays.FLOATS[:3]}"
    if dtypes.get("where") or problem.scale != 1:
        return "there is a mask or a scale"
    strides = [layout.outer_strides[name] for name in ("x", "out")]
    if not layout.is_rows or any(stride != (length,) for stride in strides):
        return "rows do not lie back to back"
    if not layout.is_aligned:
        return "an array does not begin at a whole vector of 16 bytes"
    vectors, rest = divmod(length * size, _tiers.VECTOR_BYTES)
    held, sets = (1, 2) if vectors == 2 else (2 if vectors % 3 else 3, 1)
    lanes, over = divmod(vectors, held)
    min_blocks = _SHORT_BLOCKS[problem.function].get((held, sets))
    if rest or over or lanes not in _SHORT_LANES[problem.function] or not min_blocks:
        return f"a row of {length} is not 2 or 3 vectors in 2 to 32 threads"
    rows_at_once = BLOCK_THREADS // lanes
    if device.cc >= (10, 0):
        min_blocks = min(min_blocks, _SHORT_BLOCKS_ELSEWHERE)
    values = {
        "LANES": lanes,
        "ROWS_PER_BLOCK": rows_at_once,
        "HELD": held * _tiers.VECTOR_BYTES // size,
        "SETS": sets,
        "MIN_BLOCKS": min_blocks,
    }
    blocks = min(-(-problem.num_rows // (rows_at_once * sets)), MAX_BLOCKS)
    return (Cut(blocks, BLOCK_THREADS, defines_of(values)),)


def widest_of(problem):
    """Bytes of the widest element that is held or moved in a vector, at least 2."""
    names = [problem.dtypes.get(name) for name in ("x", "dy", "out")]
    return max(2, *(itemsize_of(name) for name in names if name))


def itemsize_of(name):
    return _kernels.ITEMSIZE.get(name) or np.dtype(name).itemsize


# Vectors of 16 bytes up to -> (lanes a row, vectors in a lane, sets of rows), for sums
# of rows that are held as a whole; by the size of an element. A lane that has fewer
# than eight vectors, or four of 16-bit elements, has those of several rows.
SUMS = {
    2: (
        (2, (2, 1, 8)),
        (4, (4, 1, 8)),
        (8, (4, 2, 4)),
        *((4 * n, (n, 4, 2)) for n in (4, 8, 16, 32)),
    ),
    4: (
        (2, (2, 1, 8)),
        (4, (4, 1, 8)),
        (8, (4, 2, 4)),
        (16, (4, 4, 2)),
        *((8 * n, (n, 8, 1)) for n in (4, 8, 16, 32)),
    ),
}
SUMS[8] = SUMS[4]
# The same for 5 to 8 whole vectors of 16-bit elements: 0.96 at 64, with 4 lanes 0.92.
_WHOLE_SUM = (2, 4, 2)

# A warp walks over rows of up to so many vectors, a block over longer ones.
WARP_SUM = 4096
_WALK_THREADS = 256
# Vectors that a lane asks for together, by the size of an element. All blocks run at
# once, and go on to their next row with its loads under way: 8192 floats 0.97, where
# 4 vectors and a block a row reach 0.91. Of 16 bits 4 are 0.94, 8 as well or 0.91.
_DEEP = 8
_WALKS = {2: 4, 4: _DEEP, 8: _DEEP}

# A row is cut into so many parts that each multiprocessor has about this many, if that
# leaves each thread of a part some vectors; powers of two, to compile few kernels.
# Sums: as many as run at once; with 16, of doubles, 0.86 instead of 0.93 at 2^20.
_PARTS_PER_SM, _SUM_PARTS_PER_SM = 16, 2
_MAX_PARTS = 4096
_PART_VECTORS = 8  # a thread, at least
PARTIAL_BYTES = 24  # what a part leaves behind, at most
_TOLD_BYTES = 16  # what a block tells the others of a row


def num_parts(problem, device, vectors, parts_per_sm=_PARTS_PER_SM):
    """How many parts a row of so many vectors is cut into."""
    most = vectors // (_WALK_THREADS * _PART_VECTORS)
    wanted = device.num_sms * parts_per_sm // problem.num_rows
    return 1 << max(1, min(most, wanted, _MAX_PARTS)).bit_length() - 1


def defines_of(values):
    return tuple((name, str(value)) for name, value in values.items())


def split_rows(problem, device):
    """Blocks that share a row, which is read twice."""
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    vectors = problem.row_length * widest_of(problem) // _tiers.VECTOR_BYTES
    parts = num_parts(problem, device, vectors)
    blocks = problem.num_rows * parts
    if blocks >= 1 << 31:
        return f"{problem.num_rows} rows are too many"
    values = {"LANES": _WALK_THREADS, "ROWS_PER_BLOCK": 1, "PARTS": parts}
    return tuple(
        Cut(
            blocks,
            _WALK_THREADS,
            defines_of(values),
            entry=entry,
            scratch=blocks * PARTIAL_BYTES,
        )
        for entry in ("sum", "write")
    )


# Long rows in one launch, by bytes of the widest element: vectors of a thread, blocks a
# multiprocessor (2^20 floats: 0.79, with 8 vectors in 3 blocks 0.77; more of doubles
# spill), and what lies between the last part that is summed of a row and the first
# that is written: so many bytes less those of the row, in such steps, but at least so
# many. Rows of 4 MB: 10 MB between 0.76, 12 MB 0.78, 14 MB 0.79; of 8 MB: 10 MB 0.77,
# 14 MB 0.74; of 16 MB: 6 MB 0.72, 10 MB 0.70. Doubles of 8 MB: 9 MB 0.57, 12 MB 0.62.
_MB = 1 << 20
_TRAIL = {
    2: (16, 2, 18 * _MB, 6 * _MB),
    4: (16, 2, 18 * _MB, 6 * _MB),
    8: (12, 2, 0, 12 * _MB),
}
_TRAIL_STEP = 2 * _MB
# Of the L2 cache, for a row: 0.67 at 2^23 floats, more than half of it; two launches
# reach 0.61.
_TRAIL_SHARE = 0.55


def trail_rows(problem, device):
    """Blocks that share rows, which are read again while they are in the L2 cache."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    if device.cc < (9, 0):
        return f"{device.name} has not been tried"
    if dtypes.get("where") or problem.scale != 1:
        return "there is a mask or a scale"
    if dtypes["x"] not in _arrays.FLOATS:
        return f"{dtypes['x']} is not one of {', '.join(_arrays.FLOATS)}"
    if problem.row_length * itemsize_of(dtypes["x"]) > _TRAIL_SHARE * device.l2_bytes:
        return f"a row of {problem.row_length} is more than the L2 cache can hold"
    widest = widest_of(problem)
    held, blocks_per_sm, in_cache, least = _TRAIL[widest]
    left = (in_cache - problem.row_length * widest) // _TRAIL_STEP * _TRAIL_STEP
    return _along_line(problem, device, held, blocks_per_sm, max(left, least))


def _along_line(problem, device, held, blocks_per_sm, between):
    """The launches of blocks that take parts of rows in one line (softmax/line.cuh)."""
    part_bytes = _WALK_THREADS * held * _tiers.VECTOR_BYTES
    part = part_bytes // widest_of(problem)
    parts = problem.num_rows * -(-problem.row_length // part)
    if parts >= 1 << 30:
        return f"{problem.num_rows} rows are too many"
    values = {
        "LANES": _WALK_THREADS,
        "ROWS_PER_BLOCK": 1,
        "HELD": held,
        "MARGIN": between // part_bytes,
        "MIN_BLOCKS": blocks_per_sm,
    }
    words = 1 + problem.num_rows + parts  # of _TOLD_BYTES
    main = Cut(
        min(2 * parts, device.num_sms * blocks_per_sm),
        _WALK_THREADS,
        defines_of(values),
        scratch=words * _TOLD_BYTES,
    )
    blocks = min(-(-words // _WALK_THREADS), device.num_sms)
    return dataclasses.replace(main, entry="clear", num_blocks=blocks), main


# The same for gradients, whatever the dtype: vectors of a thread, of y and of dy, and
# blocks a multiprocessor; the bytes of a row up to which it is short, those between for
# short rows and for longer ones, and the longest that has been tried. log_softmax_vjp
# reads only dy twice: 2^20 floats 0.88 (3 MB between 0.86, 12 MB 0.87), through rings
# 0.81; rows of 16 MB 0.84 (8 MB between 0.80); doubles, rows of 8 MB 0.86, by rings
# 0.73. softmax_vjp of 2^20 floats 0.81, through rings 0.86; of 16 bits 0.82, through
# rings 0.78, rows of 6, 8 and 16 MB 0.78, 0.79, 0.63, by others 0.73, 0.79, 0.58.
_PAIRS_HELD, _PAIRS_BLOCKS = 8, 2
_PAIRS_SHORT, _PAIRS_BETWEEN, _PAIRS_LONGEST = 4 * _MB, (8 * _MB, 4 * _MB), 16 * _MB
# Bytes of all rows up to which rings are faster: 4 rows of 2 MB 12.5 us, in a line
# 13.5 us; 4 of 4 MB 21 us, 19 us.
_PAIRS_FEW = 8 * _MB


def trail_pairs(problem, device):
    """Blocks that share rows of y and dy, of which L2 has what is read again."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    if device.cc[0] != 9:  # for sm_120 16 bits spill 96 bytes
        return f"{device.name} has not been tried"
    names = [dtypes[name] for name in ("x", "dy")]
    if not {*names} <= {*_arrays.FLOATS}:
        return f"{', '.join(names)}: not all of {', '.join(_arrays.FLOATS)}"
    widest = widest_of(problem)
    row_bytes = problem.row_length * widest
    is_short = row_bytes <= _PAIRS_SHORT
    if problem.function != "log_softmax_vjp" and widest > 2:
        return "y is read twice, too, and rings in shared memory are faster"
    if row_bytes > min(_PAIRS_LONGEST, _TRAIL_SHARE * device.l2_bytes):
        return f"a row of {problem.row_length} is more than the L2 cache can hold"
    between = _PAIRS_BETWEEN[0 if is_short else 1]
    return _along_line(problem, device, _PAIRS_HELD, _PAIRS_BLOCKS, between)


def stream_pairs(problem, device):
    """Rows of y and dy that pass through the shared memory of many multiprocessors."""
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    if device.cc < (8, 0):
        return f"{device.name} copies nothing to shared memory by itself"
    names = [problem.dtypes[name] for name in ("x", "dy")]
    if not {*names} <= {*_arrays.FLOATS}:
        return f"{', '.join(names)}: not all of {', '.join(_arrays.FLOATS)}"
    vector = _tiers.VECTOR_BYTES // widest_of(problem)
    place = vector * sum(map(itemsize_of, names))  # bytes of a vector of each
    vectors = -(-problem.row_length // vector)
    is_few = problem.row_length * widest_of(problem) * problem.num_rows <= _PAIRS_FEW
    if not is_few and not isinstance(trail_pairs(problem, device), str):
        return f"{problem.num_rows} rows are faster along a line through L2"
    stream = _tiers.stream(vectors, problem.num_rows, place, device)
    if stream is None:
        return f"a row of {problem.row_length} is more than the card can hold"
    main = Cut(
        stream.blocks,
        stream.threads,
        defines_of({
            "LANES": stream.threads,
            "ROWS_PER_BLOCK": 1,
            "RING": stream.ring,
            "AHEAD": stream.ahead,
        }),
        smem=stream.ring * stream.threads * place,
        cooperative=True,
        scratch=problem.num_rows * stream.blocks * _TOLD_BYTES,
        num_groups=stream.groups,
    )  # fmt: skip
    blocks = min(-(-problem.num_rows // main.num_threads), 64)
    clear = dataclasses.replace(
        main, entry="clear", smem=0, cooperative=False, num_groups=blocks
    )
    return clear, main


def _sum_threads(held, sets, device):
    """Threads that a multiprocessor has registers for."""
    is_deep = held == _DEEP
    if device.cc >= (10, 0):  # ptxas 13.5 spills more there
        return 384 if sets else 256 if is_deep else 512
    return 512 if sets or is_deep else 768


# Of the L2 cache, for results that are written among reads: 64 floats a row 0.95, where
# they give way to what is read 0.89.
_RESULTS_SHARE = 0.25


def _stay(problem, device):
    """Whether all results together may stay in the L2 cache."""
    size = itemsize_of(problem.dtypes["out"]) * problem.num_rows
    return device.cc >= (8, 0) and size <= _RESULTS_SHARE * device.l2_bytes


def sum_rows(problem, device):
    """Threads that read rows whose elements lie side by side."""
    dtypes = problem.dtypes
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    if dtypes["b"] or dtypes.get("where"):
        return "there are weights or a mask"
    if dtypes["x"] not in _arrays.FLOATS:
        return f"{dtypes['x']} is not one of {', '.join(_arrays.FLOATS)}"
    if problem.row_length == 1:
        return "rows have one element"
    size = itemsize_of(dtypes["x"])
    vector = _tiers.VECTOR_BYTES // size
    vectors, parts = -(-problem.row_length // vector), 1
    if vectors <= SUMS[size][-1][0]:
        lanes, held, sets = _kernels.by_threshold(SUMS[size], vectors)
        if size == 2 and 4 < vectors <= 8 and problem.row_length % vector == 0:
            lanes, held, sets = _WHOLE_SUM
    else:
        lanes, sets = 32, 0
        held = _WALKS[size]
        few = problem.num_rows < device.num_sms * _PARTS_PER_SM
        if vectors > WARP_SUM or few:
            lanes = _WALK_THREADS
            parts = num_parts(problem, device, vectors, _SUM_PARTS_PER_SM)
            if problem.num_rows * parts <= device.num_sms * _SUM_PARTS_PER_SM:
                held = _DEEP
    rows = max(1, BLOCK_THREADS // lanes)
    min_blocks = _sum_threads(held, sets, device) // (lanes * rows)
    values = {
        "LANES": lanes,
        "ROWS_PER_BLOCK": rows,
        "HELD": held * vector,
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
    cut = Cut(blocks * parts, lanes * rows, defines_of(values), scratch=scratch)
    if parts == 1:
        return (cut,)
    return (
        dataclasses.replace(cut, entry="parts"),
        dataclasses.replace(cut, entry="merge", num_blocks=blocks),
    )
