"""The table of softmax kernels: which takes a problem, and how it cuts it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _arrays, _kernels, _softmax_layout
from cupyflash import _softmax_tiers as _tiers
from cupyflash._kernels import CUDA_TYPES, Device, Step, Variant
from cupyflash._softmax_layout import Layout

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_vjp", "log_softmax_vjp")

# Threads of a block that holds several short rows.
_BLOCK_THREADS = 128

# Static shared memory of a block of 1024 threads at most: what its warps exchange.
_EXCHANGE_BYTES = 8192

# Blocks of a grid; each takes more rows when there are more.
MAX_BLOCKS = 1 << 20

# Row length up to -> threads a row, for kernels that walk over a row.
_LANES = (
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
_LONGEST_IN_SPAN = {2: 256, 4: 128, 8: 128}
# Bytes of a row in one thread; more would leave too few threads on a multiprocessor.
_SPAN_BYTES = 128
# Bytes of x that a block takes at a time: 6 blocks of twice this fit a multiprocessor.
_SPAN_BUFFER = 16384


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
    rows_per_block = max(1, _BLOCK_THREADS // lanes)
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


def _walk(problem, device):
    """Threads that walk over a row of any length and any strides."""
    lanes = _kernels.by_threshold(_LANES, problem.row_length)
    if lanes == _LANES[-1][1] and problem.num_rows < _FEW_ROWS:
        lanes = 1024
    return _cut(problem, lanes)


def _hold(problem, device):
    """Threads that hold a row on chip; any strides."""
    return _held_by(problem, device, _forward_tiers(problem, device), ("x",))


def _hold_pair(problem, device):
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
        widest, is_log = _widest(problem), problem.function == "log_softmax"
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
    if _widest(problem) == 2:
        short, clusters = _tiers.BACKWARD_16_BITS, _tiers.BACKWARD_16_BITS_CLUSTERS
    else:
        short, clusters = _tiers.BACKWARD, _tiers.BACKWARD_CLUSTERS
    return _tiers.ladder(short, clusters, 2, device)


def _held_by(problem, device, tiers, names):
    """The launch that holds rows of these operands, or why there is none."""
    widest, contiguous = _widest(problem), problem.layout.is_rows
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
    sizes = [_itemsize(problem.dtypes[name]) for name in names]
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


def _span(problem, device):
    """Threads that hold short rows which lie back to back, many at a time."""
    layout, dtypes = problem.layout, problem.dtypes
    length, widest = problem.row_length, _widest(problem)
    if length > _LONGEST_IN_SPAN[widest]:
        return f"a row of {length} is longer than {_LONGEST_IN_SPAN[widest]}"
    if dtypes.get("where"):
        return "there is a mask"
    strides = [layout.outer_strides[name] for name in ("x", "out")]
    if not layout.is_rows or any(stride != (length,) for stride in strides):
        return "rows do not lie back to back"
    if length * _itemsize(dtypes["x"]) % _tiers.VECTOR_BYTES == 0:
        return "rows are whole vectors of 16 bytes"
    lanes, apart, turns = _span_deal(length, _itemsize(dtypes["x"]), widest)
    if widest == 2 and length > _SPAN_BYTES and turns > 1:
        return f"elements of rows of {length} lie in the same banks"  # 0.79 at 191
    held = -(-length // lanes)
    rows_at_once = _BLOCK_THREADS // lanes
    # The length of the buffers, and what their phases in memory may add.
    sizes = _itemsize(dtypes["x"]) + _itemsize(dtypes["out"])
    times = max(1, _SPAN_BUFFER // (rows_at_once * lanes * held * widest))
    rows = rows_at_once * times
    return (
        Cut(
            min(-(-problem.num_rows // rows), MAX_BLOCKS),
            _BLOCK_THREADS,
            (
                ("LANES", str(lanes)),
                ("ROWS_PER_BLOCK", str(rows_at_once)),
                ("SPAN_ROWS", str(rows)),
                ("HELD", str(held)),
                ("APART", str(apart)),
            ),
            smem=rows * lanes * held * sizes + 4 * _tiers.VECTOR_BYTES,
        ),
    )


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


def _widest(problem):
    """Bytes of the widest element that is held or moved in a vector, at least 2."""
    names = [problem.dtypes.get(name) for name in ("x", "dy", "out")]
    return max(2, *(_itemsize(name) for name in names if name))


def _itemsize(name):
    return _kernels.ITEMSIZE.get(name) or np.dtype(name).itemsize


# --- columns -------------------------------------------------------------------------

# Registers of a thread that hold elements, and threads that a multiprocessor is to
# hold, for short columns. A vjp holds two arrays.
_HELD_REGISTERS = {"softmax": (32, 768), "vjp": (64, 512)}
_WALKING_THREADS = 512
# Bytes of neighbouring columns in a tile of a short or a walked column.
_WIDTH = 128
# Slabs of fewer vectors are one tile: they lie in one piece.
_NARROW = 16
_COLUMN_THREADS, _MOST_BLOCKS_A_COLUMN = 128, 8

# Longer columns: blocks of 256 threads, three on a multiprocessor. A thread has so many
# registers of elements, and bytes of more in shared memory.
_LONG_THREADS, _LONG_RESIDENT = 256, 768
_LONG_REGISTERS = {"softmax": 24, "vjp": 32}
_LONG_PARKED = 160
# Bytes of neighbouring columns, best first, and blocks that may share a column then. A
# mere copy through tiles of 1024 floats reaches 0.93 of a plain one at 256 bytes, 0.87
# at 128 and 0.67 at 64; but wide tiles need more blocks a column, and those exchange
# more. Columns of 1024: floats 0.91 at 256 bytes, 0.87 at 128; 16 bits 0.86 and 0.88;
# gradients 0.87 and 0.97.
_LONG_WIDTHS = {
    "floats": ((256, 4), (128, 16), (64, 16)),
    "others": ((256, 1), (128, 16), (64, 16)),
}
_COLUMN_EXCHANGE_BYTES = 32768  # static shared memory of a block, at most


def _columns(problem, device):
    """Threads that hold tiles of neighbouring columns."""
    layout = problem.layout
    if not layout.is_columns:
        return "rows do not lie side by side in memory"
    names = [name for name in ("x", "dy", "out") if problem.dtypes.get(name)]
    widest = max(_itemsize(problem.dtypes[name]) for name in names)
    vector = _vector(layout, 16 // widest)
    kind = "vjp" if problem.dtypes.get("dy") else "softmax"
    registers, resident = _HELD_REGISTERS[kind]
    held = max(1, registers // _registers(problem, vector))
    num_vectors = -(-layout.inner // vector)
    tile = _tile(problem.row_length, held, num_vectors, vector * widest)
    if tile is None:
        held = _LONG_REGISTERS[kind] // _registers(problem, vector)
        tile = _long_tile(problem, held, vector, vector * widest, device)
        resident = _LONG_RESIDENT
    if tile is None:
        return f"a column of {problem.row_length} does not fit into a block or cluster"
    return _column_cut(problem, vector, *tile, resident)


# Sums of columns in equal shares: threads of a multiprocessor (768: 0.73 to 0.74 where
# 512 reach 0.81 to 0.83, floats), bytes of neighbouring columns in a tile, and the most
# parts of such a tile; a warp merges up to so many, a block more. Shared memory of a
# block that has room for batches of twice the rows, batches of a lane that are worth a
# launch more, and rows of a lane that are worth a tile of its own.
_SHARE_RESIDENT, _FEW_PARTS = 512, 8
_SHARE_WIDTHS = ((256, _FEW_PARTS), (128, math.inf))
_SHARE_ROOM, _SHARE_BATCHES, _SHARE_ROWS = 160 << 10, 4, 64


def _sum_shares(problem, device):
    """Warps that have equal shares of the rows of all columns."""
    layout, x = problem.layout, problem.dtypes["x"]
    if not layout.is_columns:
        return "rows do not lie side by side in memory"
    if problem.dtypes["b"]:
        return "there are weights"
    if x not in _arrays.FLOATS:
        return f"{x} is not one of {', '.join(_arrays.FLOATS)}"
    size = _itemsize(x)
    vector = _tiers.VECTOR_BYTES // size
    if _vector(layout, vector) != vector:
        return "columns are no whole vectors of 16 bytes"
    held = 8 if device.smem_optin >= _SHARE_ROOM else 4
    warps = device.num_sms * _SHARE_RESIDENT // 32
    worth = warps * 32 * held * vector * _SHARE_BATCHES
    if problem.num_rows * problem.row_length < worth:
        return f"fewer than {worth} elements are not worth a launch more"
    for width, most in _SHARE_WIDTHS:
        side = _side(layout.inner // vector, width // _tiers.VECTOR_BYTES)
        # Whole warps, though some lanes of a narrow slab be idle.
        side = 1 << (side - 1).bit_length()
        tiles = problem.num_rows // layout.inner * -(-layout.inner // (side * vector))
        share = -(-tiles * problem.row_length // warps)
        parts = (problem.row_length - 1) // share + 2
        if parts <= most:
            break
    if problem.row_length < _SHARE_ROWS * 32 // side:
        return f"columns of {problem.row_length} are too short for a warp each"

    def cut(entry, threads):
        """The launch of groups of so many threads."""
        (cut,) = _column_cut(
            problem, vector, side, threads // side, held, 0, 1, _SHARE_RESIDENT
        )
        return dataclasses.replace(
            cut,
            entry=entry,
            defines=(*cut.defines, ("SHARES", str(warps))),
            smem=2 * held * _tiers.VECTOR_BYTES * cut.num_threads,
            scratch=tiles * parts * side * vector * _PARTIAL_BYTES,
        )

    main = dataclasses.replace(
        cut("sum", 32), num_blocks=-(-warps * 32 // _BLOCK_THREADS)
    )
    return main, cut("merge", 32 if parts <= _FEW_PARTS else 256)


def _sum_columns(problem, device):
    """Threads that walk down neighbouring columns, each with a sum a column."""
    layout = problem.layout
    if not layout.is_columns:
        return "rows do not lie side by side in memory"
    if problem.dtypes["b"]:
        return "there are weights"
    size = _itemsize(problem.dtypes["x"])
    vector = _vector(layout, min(4, 16 // size))
    num_vectors = -(-layout.inner // vector)
    held = 8 if vector > 1 else 16
    side = _side(num_vectors, _WIDTH // (vector * size))
    length = problem.row_length
    # Enough threads for a batch or two each.
    most = 256 if length > 64 * held else 32 if length <= 16 * held else 128
    deep = max(1, most // side)
    cluster = _cluster_of(problem, side * vector, 4 * deep * held, device)
    return _column_cut(problem, vector, side, deep, held, 0, cluster, _WALKING_THREADS)


# Batches of a thread that are worth a block of their own, and the most blocks, all and
# those of a column, that share long columns.
_BATCHES, _PIECES_PER_SM, _MOST_PIECES = 4, 2, 1024


def _walk_columns(problem, device, may_cluster=True):
    """Threads that walk down neighbouring columns twice; columns of any length."""
    layout = problem.layout
    if not layout.is_columns:
        return "rows do not lie side by side in memory"
    widest = max(_itemsize(problem.dtypes[name]) for name in ("x", "out"))
    vector = _vector(layout, 16 // widest)
    held = 4 if vector > 1 else 8
    side = _side(-(-layout.inner // vector), _WIDTH // (vector * widest))
    # Also where a column is short (online is asked for), its threads fill a warp.
    deep = max(256 // side, 64 // side + 1)
    cluster = 1
    if may_cluster:
        cluster = _cluster_of(problem, side * vector, 4 * deep * held, device)
    return _column_cut(problem, vector, side, deep, held, 0, cluster, 512)


def _split_columns(problem, device):
    """Blocks that share columns, which are read twice; columns of any length."""
    cuts = _walk_columns(problem, device, may_cluster=False)
    if isinstance(cuts, str):
        return cuts
    (cut,) = cuts
    values = dict(cut.defines)
    vector, side = int(values["VECTOR"]), int(values["SIDE"])
    rows = int(values["DEEP"]) * int(values["HELD"]) * _BATCHES
    pieces = min(
        -(-problem.row_length // rows),
        device.num_sms * _PIECES_PER_SM // cut.num_blocks,
        _MOST_PIECES,
    )
    if pieces < 2:
        return "there are enough columns for all multiprocessors, or they are short"
    split = dataclasses.replace(
        cut,
        defines=(*cut.defines, ("SPLITS", "1")),
        num_groups=pieces,
        scratch=cut.num_blocks * pieces * vector * side * _PARTIAL_BYTES,
    )
    return tuple(dataclasses.replace(split, entry=entry) for entry in ("sum", "write"))


def _cluster_of(problem, columns, rows, device):
    """Blocks that share a column of more than `rows` rows where there are few tiles."""
    inner = problem.layout.inner
    tiles = problem.num_rows // inner * -(-inner // columns)
    cluster = 1
    while (
        device.cc >= (9, 0)
        and cluster < _MOST_BLOCKS_A_COLUMN
        and tiles * cluster < 2 * device.num_sms
        and problem.row_length > rows * cluster
    ):
        cluster *= 2
    return cluster


def _column_cut(problem, vector, side, deep, held, parked, cluster, resident):
    """The launch for tiles of `side` vectors, with `deep` threads down each column.

    Each has `held` rows in registers and `parked` in shared memory.
    """
    layout = problem.layout
    group = side * deep
    in_warp = group <= 32 and _is_power_of_two(group)
    cluster = 1 if in_warp else cluster  # only whole blocks make a cluster
    threads = _COLUMN_THREADS if in_warp else -(-group // 32) * 32
    groups = threads // group if in_warp else 1
    tiles = layout.num_rows // layout.inner * -(-layout.inner // (side * vector))
    values = {
        "VECTOR": vector,
        "SIDE": side,
        "DEEP": deep,
        "HELD": held,
        "PARKED": parked,
        "CLUSTER": cluster,
        "RESIDENT": max(1, round(resident / threads)),
    }
    return (
        Cut(
            min(-(-tiles // groups), MAX_BLOCKS // cluster) * cluster,
            threads,
            _defines(values),
            smem=parked * threads * vector * _held_bytes(problem),
            cluster=cluster,
        ),
    )


def _vector(layout, most):
    """Columns that can be moved as one: all strides are multiples of that."""
    steps = [layout.inner]
    for name in layout.full:
        steps += (*layout.outer_strides[name][:-1], *layout.reduced_strides[name])
    return math.gcd(most, *steps)


def _registers(problem, vector):
    """Registers that one vector of each operand takes, masks and scales included."""
    total = 0
    for name in ("x", "dy"):
        if dtype := problem.dtypes.get(name):
            size = _itemsize(dtype) if dtype in _arrays.FLOATS else 8  # as computed
            pairs = size == 2 and vector % 2 == 0
            total += vector // 2 if pairs else vector * max(1, size // 4)
    if problem.dtypes.get("where") or problem.scale != 1:
        total *= 2
    return total


def _held_bytes(problem):
    """Bytes of an element of each input."""
    names = [problem.dtypes.get(name) for name in ("x", "dy")]
    return sum(_itemsize(name) for name in names if name)


def _side(num_vectors, wide):
    """Threads side by side for tiles of `wide` vectors, or of a whole narrow slab."""
    wide = max(1, wide)
    return num_vectors if num_vectors < max(wide, _NARROW) else wide


def _tile(length, held, num_vectors, vector_bytes):
    """Short columns: threads side by side and along a column, rows of each."""
    if length <= held:
        return 1, 1, length, 0, 1
    need = -(-length // held)
    side = _side(num_vectors, _WIDTH // vector_bytes)
    deep = _deep(side, need)
    if side * deep > _COLUMN_THREADS:
        return None
    while side * deep > 32 and side * deep < _COLUMN_THREADS <= num_vectors * deep:
        side *= 2
    return side, deep, held, 0, 1


def _long_tile(problem, held, vector, vector_bytes, device):
    """The same for longer ones: also rows that are parked, and blocks a cluster."""
    num_vectors = -(-problem.layout.inner // vector)
    arrays = 2 if problem.dtypes.get("dy") else 1
    held = max(2, min(held, 16 // arrays) // 2 * 2)
    row_bytes = vector * _held_bytes(problem)
    most = held + _LONG_PARKED // row_bytes // 2 * 2
    if problem.dtypes.get("where"):
        most = min(most, 64 // vector)  # a bit an element
    is_floats = vector_bytes == 4 * vector and arrays == 1
    widths = _LONG_WIDTHS["floats" if is_floats else "others"]
    if device.cc < (9, 0):
        # No clusters, but all of the shared memory for one block.
        widths = (*((width, 1) for width, _ in widths), (64, 0), (32, 0))
    for width, blocks in widths:
        side = _side(num_vectors, width // vector_bytes)
        if side > _LONG_THREADS:
            continue
        deep, rows = _LONG_THREADS // side, most
        if not blocks and not problem.dtypes.get("where"):
            spare = device.smem_optin - _COLUMN_EXCHANGE_BYTES
            rows = held + spare // (_LONG_THREADS * row_bytes) // 2 * 2
        need = -(-problem.row_length // deep)
        cluster = -(-need // rows)
        if cluster <= max(1, blocks):
            slots = -(-need // cluster)
            slots += slots % 2
            return side, deep, min(held, slots), max(0, slots - held), cluster
    return None


def _deep(side, need):
    """At least `need` threads along a column, with whole warps if a warp holds some."""
    if side >= 32 or not _is_power_of_two(side):
        return need
    step = 32 // side
    return -(-need // step) * step if need > step else 1 << (need - 1).bit_length()


def _is_power_of_two(n):
    return n & (n - 1) == 0


# Vectors of 16 bytes up to -> (lanes a row, vectors in a lane, sets of rows), for sums
# of rows that are held as a whole; by the size of an element. A lane that has fewer
# than eight vectors, or four of 16-bit elements, has those of several rows.
_SUMS = {
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
_SUMS[8] = _SUMS[4]

# A warp walks over rows of up to so many vectors, a block over longer ones.
_WARP_SUM = 4096
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
_PARTIAL_BYTES = 24  # what a part leaves behind, at most
_TOLD_BYTES = 16  # what a block tells the others of a row


def _num_parts(problem, device, vectors, parts_per_sm=_PARTS_PER_SM):
    """How many parts a row of so many vectors is cut into."""
    most = vectors // (_WALK_THREADS * _PART_VECTORS)
    wanted = device.num_sms * parts_per_sm // problem.num_rows
    return 1 << max(1, min(most, wanted, _MAX_PARTS)).bit_length() - 1


def _defines(values):
    return tuple((name, str(value)) for name, value in values.items())


def _split(problem, device):
    """Blocks that share a row, which is read twice."""
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    vectors = problem.row_length * _widest(problem) // _tiers.VECTOR_BYTES
    parts = _num_parts(problem, device, vectors)
    blocks = problem.num_rows * parts
    if blocks >= 1 << 31:
        return f"{problem.num_rows} rows are too many"
    values = {"LANES": _WALK_THREADS, "ROWS_PER_BLOCK": 1, "PARTS": parts}
    return tuple(
        Cut(
            blocks,
            _WALK_THREADS,
            _defines(values),
            entry=entry,
            scratch=blocks * _PARTIAL_BYTES,
        )
        for entry in ("sum", "write")
    )


def _stream_pair(problem, device):
    """Rows of y and dy that pass through the shared memory of many multiprocessors."""
    if not problem.layout.is_rows:
        return "neighbours along a row are not neighbours in memory"
    if device.cc < (8, 0):
        return f"{device.name} copies nothing to shared memory by itself"
    names = [problem.dtypes[name] for name in ("x", "dy")]
    if not {*names} <= {*_arrays.FLOATS}:
        return f"{', '.join(names)}: not all of {', '.join(_arrays.FLOATS)}"
    vector = _tiers.VECTOR_BYTES // _widest(problem)
    place = vector * sum(map(_itemsize, names))  # bytes of a vector of each
    vectors = -(-problem.row_length // vector)
    stream = _tiers.stream(vectors, problem.num_rows, place, device)
    if stream is None:
        return f"a row of {problem.row_length} is more than the card can hold"
    main = Cut(
        stream.blocks,
        stream.threads,
        _defines({
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


def _sum_rows(problem, device):
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
    size = _itemsize(dtypes["x"])
    vector = _tiers.VECTOR_BYTES // size
    vectors, parts = -(-problem.row_length // vector), 1
    if vectors <= _SUMS[size][-1][0]:
        lanes, held, sets = _kernels.by_threshold(_SUMS[size], vectors)
    else:
        lanes, sets = 32, 0
        held = _WALKS[size]
        few = problem.num_rows < device.num_sms * _PARTS_PER_SM
        if vectors > _WARP_SUM or few:
            lanes = _WALK_THREADS
            parts = _num_parts(problem, device, vectors, _SUM_PARTS_PER_SM)
            if problem.num_rows * parts <= device.num_sms * _SUM_PARTS_PER_SM:
                held = _DEEP
    rows = max(1, _BLOCK_THREADS // lanes)
    min_blocks = _sum_threads(held, sets, device) // (lanes * rows)
    values = {
        "LANES": lanes,
        "ROWS_PER_BLOCK": rows,
        "HELD": held * vector,
        "MIN_BLOCKS": min_blocks,
        "SETS": sets,
        "PARTS": parts,
    }
    blocks = -(-problem.num_rows // (rows * max(sets, 1)))
    if sets:
        blocks = min(blocks, device.num_sms * 16)
    elif parts == 1:
        blocks = min(blocks, device.num_sms * min_blocks)
    blocks = min(blocks, MAX_BLOCKS)
    scratch = problem.num_rows * parts * _PARTIAL_BYTES if parts > 1 else 0
    cut = Cut(blocks * parts, lanes * rows, _defines(values), scratch=scratch)
    if parts == 1:
        return (cut,)
    return (
        dataclasses.replace(cut, entry="parts"),
        dataclasses.replace(cut, entry="merge", num_blocks=blocks),
    )


@dataclass(frozen=True)
class SoftmaxKernel:
    """One kernel: what it accepts and how it cuts the problem.

    The name is also the stem of ``cuda_src/softmax/<name>.cu`` and, after ``softmax_``,
    its entry point.
    """

    name: str
    functions: tuple[str, ...]
    rungs: tuple[str, ...]
    # The launches for a problem on a device, or why the kernel cannot take it.
    cuts: Callable[[Any, Device], tuple[Cut, ...] | str]
    # Made-up layouts that reach every step of its ladder, for these dtypes.
    samples: Callable[..., Iterable[Layout]]
    fast: bool = False  # must not spill registers

    @property
    def source(self) -> str:
        return f"softmax/{self.name}.cu"

    def refusal(self, problem: Any, device: Device) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        if problem.function not in self.functions:
            return f"{problem.function} is not one of {', '.join(self.functions)}"
        if problem.is_complex:
            return "complex numbers have no kernel; CuPy's array operations take them"
        for name in problem.dtypes.values():
            if name and (reason := _kernels.refuse_old_device(name, device)):
                return reason
        cuts = self.cuts(problem, device)
        return cuts if isinstance(cuts, str) else None

    def steps(self, problem: Any, device: Device) -> tuple[Step, ...]:
        """What is launched, one after the other, all with the same parameters."""
        cuts = self.cuts(problem, device)
        assert not isinstance(cuts, str), "the row has refused this problem"
        defines = (
            *_switches(problem),
            ("OUTER_AXES", str(len(problem.layout.outer_size))),
            ("REDUCED_AXES", str(len(problem.layout.reduced_size))),
        )
        return tuple(
            Step(
                Variant(
                    self.source,
                    "_".join(filter(None, ("softmax", self.name, cut.entry))),
                    (*defines, *cut.defines),
                    smem=cut.smem,
                    cluster=cut.cluster,
                    cooperative=cut.cooperative,
                ),
                (cut.num_blocks, cut.num_groups, 1),
                (cut.num_threads, 1, 1),
                cut.scratch,
            )
            for cut in cuts
        )


def _switches(problem):
    """Types and options as -D, by the parameter list that the function belongs to."""
    dtypes = problem.dtypes
    types = {"OUT_T": dtypes["out"], "ACC_T": problem.compute_dtype}
    flags = {}
    if problem.function in FORWARD:
        types |= {"X_T": dtypes["x"]}
        flags["HAS_WHERE"] = bool(dtypes["where"])
        flags["SCALED"] = problem.scale != 1
    elif problem.function in BACKWARD:
        types |= {"Y_T": dtypes["x"], "DY_T": dtypes["dy"]}
    else:
        types |= {"A_T": dtypes["x"], "B_T": dtypes["b"] or dtypes["x"]}
        flags["HAS_WHERE"] = bool(dtypes["where"])
        flags["HAS_B"] = dtypes["b"] is not None
    if problem.function != "logsumexp":
        flags["LOG"] = problem.function.startswith("log_")
    return (
        *((name, CUDA_TYPES[dtype]) for name, dtype in sorted(types.items())),
        *((name, str(int(flag))) for name, flag in sorted(flags.items())),
    )


# --- made-up layouts -----------------------------------------------------------------

_MANY = 1 << 20  # rows that fill any card
_FEW = 1 << 20  # the row length that stands for a long row that is alone


def _rows_of(lengths):
    """Rows back to back of these lengths; a long one stands alone."""

    def samples(*dtypes):
        names = ("x", "dy", "b", "where", "out", "sign")
        for length in lengths(*dtypes):
            yield _softmax_layout.rows(1 if length == _FEW else _MANY, length, names)

    return samples


def _walked(*dtypes):
    return [*(int(min(length, _FEW - 1)) for length, _ in _LANES), _FEW]


def _held(*dtypes):
    """A length for each tier, a short one, and one with elements beside its vectors."""
    vector = _tiers.VECTOR_BYTES // max(2, *(_itemsize(name) for name in dtypes))
    tiers = (*_tiers.FORWARD, *_tiers.FORWARD_CLUSTERS)
    return [vector, 25 * vector + 1, *(tier.vectors * vector for tier in tiers)]


def _held_pairs(*dtypes):
    widest = max(2, *(_itemsize(name) for name in dtypes))
    vector = _tiers.VECTOR_BYTES // widest
    tiers = (*_tiers.BACKWARD, *_tiers.BACKWARD_CLUSTERS)
    if widest == 2:
        tiers = (*_tiers.BACKWARD_16_BITS, *_tiers.BACKWARD_16_BITS_CLUSTERS)
    return [vector, 25 * vector + 1, *(tier.vectors * vector for tier in tiers)]


def _spanned(*dtypes):
    longest = _LONGEST_IN_SPAN[max(2, *(_itemsize(name) for name in dtypes))]
    return [n for n in (3, 7, 15, 31, 33, 63, 127, 245) if n < longest]


def _summed(*dtypes):
    """A length for each step of the ladder, and long rows that are few or many."""
    size = _itemsize(dtypes[0])
    vector = _tiers.VECTOR_BYTES // size
    steps = _SUMS.get(size, ())
    return [*(v * vector for v, _ in steps), _WARP_SUM * vector, 1 << 17, _FEW]


def _long(*dtypes):
    return [1 << 21, _FEW]


def _streamed(*dtypes):
    return [1 << 20, _FEW]


def _columns_of(*dtypes):
    """Columns of every kind: narrow and wide, short and long."""
    names = ("x", "dy", "b", "where", "out", "sign")
    for inner in (8, 7, 1024):
        for length in (4, 64, 256, 1000, 4096):
            yield _softmax_layout.columns(1 << 10, length, inner, names)


def _shared_columns(*dtypes):
    """Columns that fill a card: wide or narrow, of few or many parts."""
    names = ("x", "dy", "b", "where", "out", "sign")
    for slabs, length, inner in (
        (1, 1024, 1 << 17),
        (1 << 13, 1024, 8),
        (1, 1 << 20, 96),
    ):
        yield _softmax_layout.columns(slabs, length, inner, names)


def _long_columns(*dtypes):
    """Few columns of many elements."""
    names = ("x", "dy", "b", "where", "out", "sign")
    for inner in (7, 128):
        yield _softmax_layout.columns(1, 1 << 17, inner, names)


# --- the table -----------------------------------------------------------------------

_ANY, _TILED = ("auto", "tiled", "online"), ("auto", "tiled")

KERNELS = (  # best first
    SoftmaxKernel("columns", FORWARD, _TILED, _columns, _columns_of),
    SoftmaxKernel("split_columns", FORWARD, _TILED, _split_columns, _long_columns),
    SoftmaxKernel("long_columns", FORWARD, _TILED, _walk_columns, _columns_of),
    SoftmaxKernel("vjp_columns", BACKWARD, ("auto",), _columns, _columns_of),
    SoftmaxKernel(
        "logsumexp_shares", ("logsumexp",), ("auto",), _sum_shares, _shared_columns
    ),
    SoftmaxKernel(
        "logsumexp_columns", ("logsumexp",), ("auto",), _sum_columns, _columns_of
    ),
    SoftmaxKernel("span", FORWARD, _TILED, _span, _rows_of(_spanned), fast=True),
    SoftmaxKernel("tiled", FORWARD, _TILED, _hold, _rows_of(_held), fast=True),
    SoftmaxKernel(
        "vjp_tiled", BACKWARD, ("auto",), _hold_pair, _rows_of(_held_pairs), fast=True
    ),
    SoftmaxKernel(
        "vjp_stream", BACKWARD, ("auto",), _stream_pair, _rows_of(_streamed), fast=True
    ),
    # Rows that do not fit on chip are read twice.
    SoftmaxKernel("split", FORWARD, _TILED, _split, _rows_of(_long)),
    SoftmaxKernel("vjp_split", BACKWARD, ("auto",), _split, _rows_of(_long)),
    SoftmaxKernel("online", FORWARD, _ANY, _walk, _rows_of(_walked)),
    SoftmaxKernel("safe", FORWARD, ("safe",), _walk, _rows_of(_walked)),
    SoftmaxKernel("naive", FORWARD, ("naive",), _walk, _rows_of(_walked)),
    SoftmaxKernel(
        "logsumexp_rows", ("logsumexp",), ("auto",), _sum_rows, _rows_of(_summed)
    ),
    SoftmaxKernel("logsumexp", ("logsumexp",), ("auto",), _walk, _rows_of(_walked)),
    SoftmaxKernel("vjp", BACKWARD, ("auto",), _walk, _rows_of(_walked)),
)


def select(
    problem: Any, device: Device, *, name: str | None = None, unfit: Iterable[str] = ()
):
    """The row for a problem, and why rows before it refused.

    Rows named in `unfit` are passed over: the card could not hold their launch.
    """
    rows = [
        row
        for row in KERNELS
        if problem.function in row.functions and row.name not in unfit
    ]
    return _kernels.select(rows, problem, device, name=name)


# --- all that may be compiled --------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """A problem as far as a choice of kernel and its switches depend on it."""

    function: str
    layout: Layout
    dtypes: dict[str, str | None]
    scale: float = 1.0
    method: str = "auto"
    is_complex: bool = False

    @property
    def row_length(self) -> int:
        return self.layout.row_length

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    @property
    def compute_dtype(self) -> str:
        used = [d for name, d in self.dtypes.items() if d and name != "where"]
        return "float32" if all(d in _arrays.FLOATS[:3] for d in used) else "float64"


def _natural(*names):
    """The result type of NumPy's promotion, with bool and integers as float64."""
    names = {name if name in _arrays.FLOATS else "float64" for name in names}
    if len(names) == 1:
        return names.pop()
    return np.result_type(*(names - {"bfloat16"}), np.float32).name


def _samples(row, layout, x, out, where, scaled, function):
    """One choice of types and switches; `out` is the type of a second input if any."""
    dtypes = {"x": x, "where": where and "bool"}
    if "logsumexp" in row.functions:
        for b in (None, out):
            result = _natural(x) if b is None else _natural(x, b)
            yield _Sample(function, layout, dtypes | {"b": b, "out": result})
    elif row.functions == BACKWARD:
        dtypes |= {"dy": out, "out": _natural(x, out), "where": None}
        yield _Sample(function, layout, dtypes)
    else:
        scale, method = 2.0 if scaled else 1.0, row.rungs[-1] if row.rungs else "auto"
        yield _Sample(function, layout, dtypes | {"out": out}, scale, method)


def _everything(row) -> Iterable[_Sample]:
    """All types and switches, on up to two axes of each kind."""
    seconds = _arrays.FLOATS if row.functions == FORWARD else tuple(CUDA_TYPES)
    scales = (False, True) if row.functions == FORWARD else (False,)
    masks = (False,) if row.functions == BACKWARD else (False, True)
    for x, second, where, scaled, function in itertools.product(
        CUDA_TYPES, seconds, masks, scales, row.functions
    ):
        for layout in row.samples(x, second):
            for axes in ((1, 1), (2, 1), (1, 2), (2, 2)):
                placed = layout.spread(*axes)
                yield from _samples(row, placed, x, second, where, scaled, function)


def _representative(row) -> Iterable[_Sample]:
    """Each type, switch, axis count and step of the ladder once, not all together."""
    function, other = row.functions[0], row.functions[-1]
    for x in CUDA_TYPES:
        # All rows convert in the same way: one of them shows every type.
        if row.fast or x in (*_arrays.FLOATS, "int8"):
            layout = _closest(row.samples(x, _natural(x)), 1000)
            yield from _samples(row, layout, x, _natural(x), False, False, other)
    for layout in list(row.samples("float32", "float32"))[:: 1 if row.fast else 2]:
        yield from _samples(row, layout, "float32", "float32", False, False, function)
    # All switches at once, in the types that take the most registers of each kind.
    where, scaled = row.functions != BACKWARD, row.functions == FORWARD
    for x, out in (("float32",) * 2, ("float64",) * 2, ("float16", "float32")):
        layout = _closest(row.samples(x, out), 4096).spread(2, 2)
        yield from _samples(row, layout, x, out, where, scaled, other)


def _closest(layouts, length):
    """The layout with rows nearest to `length`, seen from above."""
    layouts = list(layouts)
    longer = [layout for layout in layouts if layout.row_length >= length]
    if longer:
        return min(longer, key=lambda layout: layout.row_length)
    return max(layouts, key=lambda layout: layout.row_length)


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """Names of rows and what they compile for `device`: all of it, or a sample."""
    found: dict[tuple[str, Variant], None] = {}
    samples_of = _everything if everything else _representative
    for row in KERNELS:
        for problem in samples_of(row):
            if row.refusal(problem, device) is None:
                for step in row.steps(problem, device):
                    found[row.name, step.variant] = None
    return list(found)
