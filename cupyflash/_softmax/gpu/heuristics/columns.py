"""Launches of kernels of columns."""

import math

from cupyflash._core import arrays as _arrays
from cupyflash._softmax.gpu import config as softmax_config
from cupyflash._softmax.gpu.heuristics import on_chip

# Registers per thread for elements, and threads per multiprocessor, for short columns.
# A vjp holds two arrays.
_REGISTERS = {"softmax": (32, 768), "vjp": (64, 512)}
_WALKING_THREADS = 512
# Bytes of adjacent columns in a tile of a short column, or one that is looped over.
_WIDTH = 128
# A slab with fewer vectors is one tile, since it is contiguous.
_NARROW = 16
_COLUMN_THREADS, _MOST_BLOCKS_A_COLUMN = 128, 8

# Longer columns: blocks have 256 threads, three per multiprocessor, or 512, two.
# Registers per thread for elements, and bytes per thread in shared memory.
_LONG_RESIDENT = {256: 768, 512: 1024}
_LONG_REGISTERS = {"softmax": 24, "vjp": 32}
_LONG_IN_SMEM = 160
# Threads, bytes of adjacent columns (best first), and blocks that may then share a
# column. Wide tiles need more blocks per column, which exchange more; doubles gain by
# them if rows of a slab are far apart.
_LONG_TILES = {
    "16 bits": ((256, 256, 1), (256, 128, 8), (512, 128, 8), (256, 128, 16)),
    "floats": ((256, 256, 16), (256, 128, 16)),
    "wide doubles": ((256, 256, 16), (256, 128, 16)),
    "others": ((256, 256, 1), (256, 128, 16)),
}
_NARROWEST = (256, 64, 16)
_WIDE_SLAB = 64 << 10  # bytes per row
_COLUMN_EXCHANGE_BYTES = 32768  # static shared memory of a block, at most


def hold_columns(problem, device):
    """Threads that hold tiles of adjacent columns."""
    layout = problem.layout
    if not layout.is_columns:
        return "neighbouring rows are not adjacent in memory"
    names = [name for name in ("x", "dy", "out") if problem.dtypes.get(name)]
    widest = max(softmax_config.itemsize_of(problem.dtypes[name]) for name in names)
    vector = _vector(layout, 16 // widest)
    kind = "vjp" if problem.dtypes.get("dy") else "softmax"
    registers, resident = _REGISTERS[kind]
    in_registers = max(1, registers // _registers(problem, vector))
    num_vectors = -(-layout.inner // vector)
    tile = _tile(problem.row_length, in_registers, num_vectors, vector * widest)
    if tile is None:
        in_registers = _LONG_REGISTERS[kind] // _registers(problem, vector)
        resident, tile = _long_tile(
            problem, in_registers, vector, vector * widest, device
        )
    if tile is None:
        return _share_tiles(problem, in_registers, vector, vector * widest, device)
    return _column_config(problem, vector, *tile, resident)


# Columns that no cluster holds: a tile is shared by a team of blocks anywhere on the
# card. Threads of a block, blocks per multiprocessor, rows per thread that are worth a
# block, static shared memory beside the numbers of columns, and bytes of adjacent
# columns in a tile (best first).
_TEAM_THREADS, _TEAM_RESIDENT, _TEAM_LEAST_ROWS = 256, 3, 4
_TEAM_OTHER_BYTES = 2 << 10
# Teams that may take any number of tiles, and tiles that each may take otherwise.
_TEAM_MANY, _TEAM_TURNS = 4, 2
_TEAM_WIDTHS = (128, 64, 32, 16)
_PUBLISHED_BYTES = 16  # what a block publishes for a column
_LINE_BYTES = 128


def _share_tiles(problem, in_registers, vector, vector_bytes, device):
    """Teams of blocks, all of which run at once; each team holds a tile."""
    layout, length = problem.layout, problem.row_length
    if device.cc < (9, 0):
        return f"a column of {length} does not fit into a block"
    num_vectors = -(-layout.inner // vector)
    blocks = device.num_sms * _TEAM_RESIDENT
    arrays = 2 if problem.dtypes.get("dy") else 1
    in_registers = max(2, min(in_registers, 16 // arrays) // 2 * 2)
    for width in _TEAM_WIDTHS:
        side = min(num_vectors, max(1, width // vector_bytes))
        deep = _TEAM_THREADS // side
        parts = _TEAM_THREADS // on_chip.WARP if _is_power_of_two(side) else deep
        static = side * vector * (8 * parts + 48) + _TEAM_OTHER_BYTES
        room = device.smem_optin // _TEAM_RESIDENT - 1024 - static
        slots = room // (_TEAM_THREADS * vector * _row_bytes(problem)) // 2 * 2
        slots = in_registers + max(0, slots)
        if problem.dtypes.get("where"):
            slots = min(slots, 64 // vector)  # one bit per element
        team = -(-length // (deep * slots))
        if team <= blocks:
            break
    else:
        return f"a column of {length} does not fit into all multiprocessors"
    tiles = layout.num_rows // layout.inner * -(-num_vectors // side)
    teams = blocks // team
    if arrays == 1 and tiles > teams and not _may_take_turns(problem, tiles, teams):
        return f"of {tiles} tiles {teams} fit at once; reading twice is as fast"
    # All blocks, with fewer rows each, unless these are very few.
    teams = min(tiles, teams)
    most = min(blocks // teams, -(-length // (deep * _TEAM_LEAST_ROWS)))
    slots = -(-length // (most * deep))
    slots += slots % 2
    in_registers = min(in_registers, slots)
    (main,) = _column_config(
        problem, vector, side, deep, in_registers, slots - in_registers, 1,
        _TEAM_THREADS * _TEAM_RESIDENT,
    )  # fmt: skip
    team = -(-length // (slots * deep))
    main = softmax_config.varied(
        main,
        (team, teams),
        scratch=tiles * (team + 1) * side * vector * _PUBLISHED_BYTES,
        values={"TEAMS": 1},
        cooperative=True,
    )
    return softmax_config.varied(main, entry="clear", cooperative=False, smem=0), main


def _may_take_turns(problem, tiles, teams):
    """Whether teams that take several tiles are faster than to read twice."""
    itemsize = softmax_config.widest_of(problem)
    line = _LINE_BYTES // itemsize
    if itemsize > 4 or problem.dtypes.get("where") or problem.scale != 1:
        return False
    if _vector(problem.layout, line) < line:  # tiles are not whole lines
        return False
    # A team waits for its slowest block, so there should be others meanwhile.
    return teams >= _TEAM_MANY or (itemsize == 2 and tiles <= _TEAM_TURNS * teams)


# Sums of columns in equal shares: threads per multiprocessor, bytes of adjacent columns
# in a tile, and the most parts of a tile that a warp merges; a block merges more.
# Shared memory that a block needs for batches of twice the rows, batches per lane that
# are worth another launch, and rows per lane that are worth a tile of its own.
_SHARE_RESIDENT, _FEW_PARTS = 512, 8
_SHARE_WIDTHS = ((256, _FEW_PARTS), (128, math.inf))
_SHARE_ROOM, _SHARE_BATCHES, _SHARE_ROWS = 160 << 10, 4, 64
# One block merges all parts of a tile: if so few tiles have up to so many bytes, this
# many parts each are enough.
_FEW_TILES, _FEW_BYTES, _MOST_PARTS = 2, 64 << 20, 512
# If whole tiles keep this part of the warps busy, each warp has whole ones, and nothing
# is left to merge.
_SHARE_BUSY = 0.96
# Rows that a lane processes at a time, by the size of an element.
_SHARE_IN_REGISTERS = {2: 4, 4: 8, 8: 4}


def share_columns(problem, device):
    """Warps with equal shares of the rows of all columns."""
    layout, x = problem.layout, problem.dtypes["x"]
    if not layout.is_columns:
        return "neighbouring rows are not adjacent in memory"
    if problem.dtypes["b"]:
        return "there are weights"
    if x not in _arrays.FLOATS:
        return f"{x} is not one of {', '.join(_arrays.FLOATS)}"
    size = softmax_config.itemsize_of(x)
    vector = on_chip.VECTOR_BYTES // size
    if _vector(layout, vector) != vector:
        return "columns are not a multiple of 16 bytes"
    in_registers = _SHARE_IN_REGISTERS[size] if device.smem_optin >= _SHARE_ROOM else 4
    array_bytes = problem.num_rows * problem.row_length * size
    for width, most in _SHARE_WIDTHS:
        side = _side(layout.inner // vector, width // on_chip.VECTOR_BYTES)
        # Whole warps, although some lanes of a narrow slab are idle.
        side = 1 << (side - 1).bit_length()
        tiles = layout.num_rows // layout.inner * -(-layout.inner // (side * vector))
        warps = device.num_sms * _SHARE_RESIDENT // on_chip.WARP
        if tiles <= _FEW_TILES and array_bytes <= _FEW_BYTES:
            warps = min(warps, tiles * _MOST_PARTS)
        share = -(-tiles * problem.row_length // warps)
        tiles_each = -(-tiles // warps)
        whole = size < 8 and tiles >= _SHARE_BUSY * tiles_each * warps
        parts = 1 if whole else (problem.row_length - 1) // share + 2
        if parts <= most:
            break
    worth = warps * 32 * in_registers * vector * _SHARE_BATCHES
    if problem.num_rows * problem.row_length < worth:
        return f"fewer than {worth} elements are not worth another launch"
    if problem.row_length < _SHARE_ROWS * 32 // side:
        return f"columns of {problem.row_length} are too short for a warp each"

    values = {"SHARES": warps, "WHOLE": int(whole)}

    def config(entry, threads, grid=()):
        """The launch with groups of this many threads."""
        (config,) = _column_config(
            problem, vector, side, threads // side, in_registers, 0, 1, _SHARE_RESIDENT
        )
        return softmax_config.varied(
            config,
            grid,
            scratch=tiles * parts * side * vector * softmax_config.PARTIAL_BYTES,
            values=values,
            entry=entry,
            smem=2 * in_registers * on_chip.VECTOR_BYTES * config.num_threads,
        )

    main = config("sum", 32, (-(-warps * 32 // softmax_config.BLOCK_THREADS),))
    if whole:
        return (main,)
    return main, config("merge", 32 if parts <= _FEW_PARTS else 256)


def sum_columns(problem, device):
    """Threads that loop down adjacent columns, with a sum for each column."""
    layout = problem.layout
    if not layout.is_columns:
        return "neighbouring rows are not adjacent in memory"
    if problem.dtypes["b"]:
        return "there are weights"
    size = softmax_config.itemsize_of(problem.dtypes["x"])
    vector = _vector(layout, min(4, 16 // size))
    num_vectors = -(-layout.inner // vector)
    in_registers = 8 if vector > 1 else 16
    side = _side(num_vectors, _WIDTH // (vector * size))
    length = problem.row_length
    # Enough threads for a batch or two each.
    most = (
        256
        if length > 64 * in_registers
        else 32
        if length <= 16 * in_registers
        else 128
    )
    deep = max(1, most // side)
    cluster = _cluster_of(problem, side * vector, 4 * deep * in_registers, device)
    return _column_config(
        problem, vector, side, deep, in_registers, 0, cluster, _WALKING_THREADS
    )


# Batches per thread that are worth a block of their own; and the most blocks per
# multiprocessor, and per column, that share long columns.
_BATCHES, _PIECES_PER_SM, _MOST_PIECES = 4, 2, 1024
# Bytes of adjacent columns in a tile, and rows per thread at a time.
_SPLIT_WIDTH, _SPLIT_ROWS = 256, 8
_SPLIT_ROWS_OF_SCALED_DOUBLES = 4  # with more they spill


def split_columns(problem, device):
    """Blocks that share columns, which are read twice; columns of any length."""
    layout = problem.layout
    if not layout.is_columns:
        return "neighbouring rows are not adjacent in memory"
    widest = max(
        softmax_config.itemsize_of(problem.dtypes[name]) for name in ("x", "out")
    )
    vector = _vector(layout, 16 // widest)
    is_scaled_double = problem.scale != 1 and problem.compute_dtype == "float64"
    in_registers = _SPLIT_ROWS_OF_SCALED_DOUBLES if is_scaled_double else _SPLIT_ROWS
    if vector == 1:
        in_registers = _SPLIT_ROWS
    side = _side(-(-layout.inner // vector), _SPLIT_WIDTH // (vector * widest))
    # Even if a column is short (method="online"), its threads fill a warp.
    deep = max(256 // side, 64 // side + 1)
    (config,) = _column_config(
        problem, vector, side, deep, in_registers, 0, 1, _WALKING_THREADS
    )
    tiles = layout.num_rows // layout.inner * -(-layout.inner // (side * vector))
    pieces = min(
        -(-problem.row_length // (deep * in_registers * _BATCHES)),
        max(1, device.num_sms * _PIECES_PER_SM // tiles),
        _MOST_PIECES,
    )
    partials = tiles * pieces * vector * side
    return tuple(
        softmax_config.varied(
            config,
            (config.grid[0], pieces),
            scratch=partials * softmax_config.PARTIAL_BYTES,
            values={"SPLITS": 1},
            entry=entry,
        )
        for entry in ("sum", "write")
    )


def _cluster_of(problem, columns, rows, device):
    """Blocks that share a column of more than `rows` rows if there are few tiles."""
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


def _column_config(
    problem, vector, side, deep, in_registers, in_smem, cluster, resident
):
    """The launch for tiles of `side` vectors, with `deep` threads along each column.

    Each thread has `in_registers` rows in registers and `in_smem` in shared memory.
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
        "IN_REGISTERS": in_registers,
        "IN_SMEM": in_smem,
        "CLUSTER": cluster,
        "RESIDENT": max(1, round(resident / threads)),
    }
    return (
        softmax_config.launch_config(
            min(-(-tiles // groups), softmax_config.MAX_BLOCKS // cluster) * cluster,
            threads,
            values,
            smem=in_smem * threads * vector * _row_bytes(problem),
            cluster=cluster,
        ),
    )


def _vector(layout, most):
    """Columns that can be moved together: all strides are multiples of that."""
    steps = [layout.inner]
    for name in layout.full:
        steps += (*layout.outer_strides[name][:-1], *layout.reduced_strides[name])
    return math.gcd(most, *steps)


def _registers(problem, vector):
    """Registers per vector of each operand, including masks and scales."""
    total = 0
    for name in ("x", "dy"):
        if dtype := problem.dtypes.get(name):
            size = (
                softmax_config.itemsize_of(dtype) if dtype in _arrays.FLOATS else 8
            )  # as computed
            pairs = size == 2 and vector % 2 == 0
            total += vector // 2 if pairs else vector * max(1, size // 4)
    if problem.dtypes.get("where") or problem.scale != 1:
        total *= 2
    return total


def _row_bytes(problem):
    """Bytes of an element of each input."""
    names = [problem.dtypes.get(name) for name in ("x", "dy")]
    return sum(softmax_config.itemsize_of(name) for name in names if name)


def _side(num_vectors, wide):
    """Threads side by side for tiles of `wide` vectors, or of a whole narrow slab."""
    wide = max(1, wide)
    return num_vectors if num_vectors < max(wide, _NARROW) else wide


def _tile(length, in_registers, num_vectors, vector_bytes):
    """Short columns: threads side by side and along a column, and rows per thread."""
    if length <= in_registers:
        return 1, 1, length, 0, 1
    need = -(-length // in_registers)
    side = _side(num_vectors, _WIDTH // vector_bytes)
    deep = _deep(side, need)
    if side * deep > _COLUMN_THREADS:
        return None
    while side * deep > 32 and side * deep < _COLUMN_THREADS <= num_vectors * deep:
        side *= 2
    return side, deep, in_registers, 0, 1


def _long_tile(problem, in_registers, vector, vector_bytes, device):
    """The same for longer ones: also rows in shared memory, and blocks per cluster.

    The first number is that of threads per multiprocessor.
    """
    num_vectors = -(-problem.layout.inner // vector)
    arrays = 2 if problem.dtypes.get("dy") else 1
    in_registers = max(2, min(in_registers, 16 // arrays) // 2 * 2)
    row_bytes = vector * _row_bytes(problem)
    most = in_registers + _LONG_IN_SMEM // row_bytes // 2 * 2
    if problem.dtypes.get("where"):
        most = min(most, 64 // vector)  # one bit per element
    tiles = (*_LONG_TILES[_kind(problem, vector_bytes // vector)], _NARROWEST)
    if device.cc < (9, 0):
        # No clusters, but a single block with all of the shared memory.
        tiles = (
            *((256, width, 1) for _, width, _ in tiles),
            (256, 64, 0),
            (256, 32, 0),
        )
    # Large blocks need more than a small shared memory, and with masks more registers
    # than their threads have.
    may_be_large = device.smem_optin >= _SHARE_ROOM and not problem.dtypes.get("where")
    for threads, width, blocks in tiles:
        side = _side(num_vectors, width // vector_bytes)
        if side > threads or (threads > 256 and not may_be_large):
            continue
        deep, rows = threads // side, most
        if not blocks and not problem.dtypes.get("where"):
            spare = device.smem_optin - _COLUMN_EXCHANGE_BYTES
            rows = in_registers + spare // (threads * row_bytes) // 2 * 2
        need = -(-problem.row_length // deep)
        cluster = -(-need // rows)
        if cluster <= max(1, blocks):
            slots = -(-need // cluster)
            slots += slots % 2
            in_registers, in_smem = (
                min(in_registers, slots),
                max(0, slots - in_registers),
            )
            return _LONG_RESIDENT[threads], (side, deep, in_registers, in_smem, cluster)
    return 0, None


def _kind(problem, widest):
    """The key of _LONG_TILES; `widest` are the bytes of the widest element."""
    dtypes = problem.dtypes
    if dtypes.get("dy"):
        return "others"
    if widest == 4:
        return "floats"
    if widest == 2:
        return "16 bits"
    is_wide = problem.layout.inner * widest >= _WIDE_SLAB
    return "wide doubles" if is_wide and dtypes["x"] == "float64" else "others"


def _deep(side, need):
    """At least `need` threads along a column, in whole warps if a warp has several."""
    if side >= 32 or not _is_power_of_two(side):
        return need
    step = 32 // side
    return -(-need // step) * step if need > step else 1 << (need - 1).bit_length()


def _is_power_of_two(n):
    return n & (n - 1) == 0
