"""How kernels cut a problem whose rows a block walks over, or some blocks hold."""

from cupyflash._core import arrays
from cupyflash._cuda import kernel
from cupyflash._softmax.gpu.config import (
    BLOCK_THREADS,
    MAX_BLOCKS,
    LaunchConfig,
    defines_of,
    itemsize_of,
    widest_of,
)
from cupyflash._softmax.gpu.heuristics import on_chip

# Static shared memory of a block of 1024 threads at most: what its warps exchange.
_EXCHANGE_BYTES = 8192

# Row length up to -> threads a row, for kernels that walk over a row.
LANES = (
    (8, 4),
    (64, 8),
    (1024, 32),
    (4096, 128),
    (16384, 256),
    (float("inf"), 512),
)

# Of others, factors of keys or units of exponents might be 0 or infinite in float32,
# and what lies beyond a row is infinite.
_SCALES = 2.0**-100, 2.0**100

# Long rows that are fewer than this get all threads that a block may have.
_FEW_ROWS = 128


def walk_rows(problem, device):
    """Threads that walk over a row of any length and any strides."""
    lanes = kernel.by_threshold(LANES, problem.row_length)
    if lanes == LANES[-1][1] and problem.num_rows < _FEW_ROWS:
        lanes = 1024
    rows_per_block = max(1, BLOCK_THREADS // lanes)
    return (
        LaunchConfig(
            min(-(-problem.num_rows // rows_per_block), MAX_BLOCKS),
            lanes * rows_per_block,
            defines_of({"LANES": lanes, "ROWS_PER_BLOCK": rows_per_block}),
        ),
    )


def refuse_scale(problem):
    """Why exponents of two cannot be counted in units of the scale, or None."""
    least, most = _SCALES
    if least <= abs(problem.scale) <= most:
        return None
    return f"a scale of {problem.scale} is not of 2^-100 to 2^100 in size"


def hold_rows(problem, device):
    """Threads that hold a row on chip; any strides."""
    if reason := refuse_scale(problem):
        return reason
    return _held_by(problem, device, _forward_tiers(problem, device), ("x",))


def hold_pairs(problem, device):
    """Threads that hold a row of y and one of dy on chip; any strides."""
    return _held_by(problem, device, _backward_tiers(problem, device), ("x", "dy"))


def _is_contiguous(problem):
    """Whether rows lie in one piece, or in pieces of whole vectors that are aligned."""
    if problem.layout.is_rows:
        return True
    vector = on_chip.VECTOR_BYTES // widest_of(problem)
    return not _is_heavy(problem) and problem.layout.is_in_vectors(vector)


def _is_heavy(problem):
    """Whether there is a mask, a scale or an input of integers, which take registers.

    Of gradients the scale takes none.
    """
    dtypes = problem.dtypes
    if not {dtypes["x"], dtypes.get("dy") or dtypes["x"]} <= {*arrays.FLOATS}:
        return True
    if dtypes.get("dy"):
        return False
    return bool(dtypes.get("where")) or (
        problem.scale != 1 and not _has_room_for_scale(problem)
    )


def _has_room_for_scale(problem):
    """Whether rows are held with a scale as without: exponentials stay in their place.

    Of 16 bits they are computed twice: 80 bytes would spill. log_softmax takes exact
    differences twice: 272 bytes of doubles, 8 of floats.
    """
    return (
        problem.function == "softmax"
        and problem.layout.is_rows
        and problem.dtypes["x"] == problem.dtypes["out"] == problem.compute_dtype
    )


def _is_only_scaled(problem):
    """Whether it is a scale alone that takes registers; of doubles, they are many."""
    floats, dtypes = arrays.FLOATS[:3], problem.dtypes
    return not dtypes.get("where") and {dtypes["x"], dtypes["out"]} <= {*floats}


def _forward_tiers(problem, device):
    if not _is_contiguous(problem):
        return on_chip.STRIDED
    if _is_heavy(problem):
        short, clusters = on_chip.FORWARD_HEAVY, on_chip.FORWARD_HEAVY_CLUSTERS
        if _is_only_scaled(problem):
            short, clusters = on_chip.FORWARD_SCALED, on_chip.FORWARD_SCALED_CLUSTERS
    else:
        short, clusters = on_chip.FORWARD, on_chip.FORWARD_CLUSTERS
        widest, is_log = widest_of(problem), problem.function == "log_softmax"
        if widest == 8:
            short, clusters = on_chip.FORWARD_F64, on_chip.FORWARD_F64_CLUSTERS
            if is_log:
                clusters = on_chip.LOG_F64_CLUSTERS
        elif not problem.layout.is_rows:
            short = on_chip.FORWARD_OF_PIECES
            clusters = on_chip.FORWARD_OF_PIECES_CLUSTERS
        elif widest == 2 and is_log:
            short = on_chip.LOG_16_BITS
    return on_chip.ladder(short, clusters, 1, device)


def _backward_tiers(problem, device):
    if not _is_contiguous(problem):
        return on_chip.STRIDED
    if _is_heavy(problem):
        return on_chip.ladder(on_chip.FORWARD_HEAVY, (), 2, device)
    widest = widest_of(problem)
    if not problem.layout.is_rows:
        short, clusters = on_chip.BACKWARD_OF_PIECES, on_chip.BACKWARD_16_BITS_CLUSTERS
    elif widest == 2:
        short, clusters = on_chip.BACKWARD_16_BITS, on_chip.BACKWARD_16_BITS_CLUSTERS
    elif widest == 8 and problem.function == "log_softmax_vjp":
        short, clusters = on_chip.BACKWARD, on_chip.BACKWARD_LOG_F64_CLUSTERS
    else:
        short, clusters = on_chip.BACKWARD, on_chip.BACKWARD_CLUSTERS
    return on_chip.ladder(short, clusters, 2, device)


def _held_by(problem, device, tiers, names):
    """The launch that holds rows of these operands, or why there is none."""
    widest, contiguous = widest_of(problem), _is_contiguous(problem)
    vector = on_chip.VECTOR_BYTES // widest
    # What does not fill a vector at either end of a contiguous row has a place besides.
    vectors = problem.row_length // vector
    if not contiguous:
        vectors = -(-problem.row_length // vector)
    is_whole = not contiguous or problem.row_length % vector == 0
    hold = on_chip.hold(tiers, vectors, 0 if is_whole else 2 * vector - 2)
    if hold is None:
        longest = tiers[-1].vectors * vector
        return (
            f"a row of {problem.row_length} does not fit on chip (at most about "
            f"{longest} elements for these options and strides)"
        )
    sizes = [itemsize_of(problem.dtypes[name]) for name in names]
    shifts = (
        problem.layout.is_rows
        and widest == 2
        and hold.cluster == 1
        and not hold.parked
        and problem.dtypes["x"] in arrays.FLOATS
        and not (problem.dtypes.get("where") or problem.scale != 1)
    )
    if shifts:
        windows = hold.held * (hold.lanes + 1) * hold.rows_per_block
        smem = windows * on_chip.VECTOR_BYTES * sizes.count(2)
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
        LaunchConfig(
            blocks * hold.cluster,
            hold.num_threads,
            defines_of(values),
            smem=smem,
            cluster=hold.cluster,
        ),
    )
