"""Launches of kernels whose rows a block loops over, or some blocks hold."""

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

# The most static shared memory of a block of 1024 threads: what its warps exchange.
_EXCHANGE_BYTES = 8192

# Row length up to -> threads per row, for kernels that loop over a row.
LANES = {8: 4, 64: 8, 1024: 32, 4096: 128, 16384: 256, math.inf: 512}

# With other scales, factors of keys or units of exponents might be 0 or infinite in
# float32, and slots beyond a row are infinite.
_SCALES = 2.0**-100, 2.0**100

# If there are fewer long rows than this, each gets as many threads as a block may have.
_FEW_ROWS = 128


def walk_rows(problem, device):
    """Threads that loop over a row of any length and any strides."""
    lanes = kernel.by_threshold(LANES, problem.row_length)
    if lanes == LANES[math.inf] and problem.num_rows < _FEW_ROWS:
        lanes = 1024
    rows_per_block = max(1, BLOCK_THREADS // lanes)
    return (
        launch_config(
            min(-(-problem.num_rows // rows_per_block), MAX_BLOCKS),
            lanes * rows_per_block,
            {"LANES": lanes, "ROWS_PER_BLOCK": rows_per_block},
        ),
    )


def refuse_scale(problem):
    """Why exponents of two cannot be in units of the scale, or None."""
    least, most = _SCALES
    if least <= abs(problem.scale) <= most:
        return None
    return f"a scale of {problem.scale} is not between 2^-100 and 2^100 in magnitude"


def hold_rows(problem, device):
    """Threads that hold a row on chip; any strides."""
    if reason := refuse_scale(problem):
        return reason
    return _on_chip_rows(problem, device, _forward_configs(problem, device), ("x",))


def hold_pairs(problem, device):
    """Threads that hold a row of y and one of dy on chip; any strides."""
    return _on_chip_rows(
        problem, device, _backward_configs(problem, device), ("x", "dy")
    )


def _is_contiguous(problem):
    """Whether rows are contiguous, or consist of pieces of whole, aligned vectors."""
    if problem.layout.is_rows:
        return True
    vector = on_chip.VECTOR_BYTES // widest_of(problem)
    return not _is_heavy(problem) and problem.layout.is_in_vectors(vector)


def _is_heavy(problem):
    """Whether a mask, a scale or an integer input takes registers.

    For gradients a scale does not.
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
    """Whether rows can be held with a scale as without: exponentials replace elements.

    16-bit exponentials are computed twice, and would spill; so would log_softmax, which
    computes exact differences twice.
    """
    return (
        problem.function == "softmax"
        and problem.layout.is_rows
        and problem.dtypes["x"] == problem.dtypes["out"] == problem.compute_dtype
    )


def _is_only_scaled(problem):
    """Whether only a scale takes registers; for doubles it takes many."""
    floats, dtypes = arrays.FLOATS[:3], problem.dtypes
    return not dtypes.get("where") and {dtypes["x"], dtypes["out"]} <= {*floats}


def _forward_configs(problem, device):
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


def _backward_configs(problem, device):
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


def _on_chip_rows(problem, device, configs, names):
    """The launch that holds rows of these operands, or why there is none."""
    widest, contiguous = widest_of(problem), _is_contiguous(problem)
    vector = on_chip.VECTOR_BYTES // widest
    # Elements outside whole vectors, at the ends of a contiguous row, have slots of
    # their own.
    vectors = problem.row_length // vector
    if not contiguous:
        vectors = -(-problem.row_length // vector)
    is_whole = not contiguous or problem.row_length % vector == 0
    hold = on_chip.hold(configs, vectors, 0 if is_whole else 2 * vector - 2)
    if hold is None:
        longest = configs[-1].vectors * vector
        return (
            f"a row of {problem.row_length} does not fit on chip (at most about "
            f"{longest} elements for these options and strides)"
        )
    sizes = [itemsize_of(problem.dtypes[name]) for name in names]
    shifts = (
        problem.layout.is_rows
        and widest == 2
        and hold.cluster == 1
        and not hold.in_smem
        and problem.dtypes["x"] in arrays.FLOATS
        and not (problem.dtypes.get("where") or problem.scale != 1)
    )
    if shifts:
        windows = hold.in_registers * (hold.lanes + 1) * hold.rows_per_block
        smem = windows * on_chip.VECTOR_BYTES * sizes.count(2)
    else:
        smem = hold.in_smem * vector * sum(sizes) * hold.num_threads
    if smem > device.smem_optin - _EXCHANGE_BYTES:
        return f"a row of {problem.row_length} needs more shared memory than there is"
    values = {
        "LANES": hold.lanes,
        "ROWS_PER_BLOCK": hold.rows_per_block,
        "IN_REGISTERS": hold.in_registers * vector,
        "IN_SMEM": hold.in_smem * vector,
        "CLUSTER": hold.cluster,
        "CONTIGUOUS": int(contiguous),
        "SHIFTS": int(shifts),
        "MIN_BLOCKS": hold.min_blocks,
    }
    blocks = min(-(-problem.num_rows // hold.rows_per_block), MAX_BLOCKS)
    return (
        launch_config(
            blocks * hold.cluster,
            hold.num_threads,
            values,
            smem=smem,
            cluster=hold.cluster,
        ),
    )
