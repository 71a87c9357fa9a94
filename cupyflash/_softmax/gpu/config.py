"""What a cut of a problem into blocks is, and what the cuts of all kernels share."""

from dataclasses import dataclass

import numpy as np

from cupyflash._core import dtypes

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_vjp", "log_softmax_vjp")

# Threads of a block that holds several short rows.
BLOCK_THREADS = 128

# Blocks of a grid; each takes more rows when there are more.
MAX_BLOCKS = 1 << 20


@dataclass(frozen=True)
class LaunchConfig:
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


def defines_of(values):
    return tuple((name, str(value)) for name, value in values.items())


def widest_of(problem):
    """Bytes of the widest element that is held or moved in a vector, at least 2."""
    names = [problem.dtypes.get(name) for name in ("x", "dy", "out")]
    return max(2, *(itemsize_of(name) for name in names if name))


def itemsize_of(name):
    return dtypes.ITEMSIZE.get(name) or np.dtype(name).itemsize


# Threads of a block that walks over a row, or over a part of one.
WALK_THREADS = 256

# A row is cut into so many parts that each multiprocessor has about this many, if that
# leaves each thread of a part some vectors; powers of two, to compile few kernels.
# Sums: as many as run at once; with 16, of doubles, 0.86 instead of 0.93 at 2^20.
PARTS_PER_SM, SUM_PARTS_PER_SM = 16, 2
_MAX_PARTS = 4096
_PART_VECTORS = 8  # a thread, at least
PARTIAL_BYTES = 24  # what a part leaves behind, at most


def num_parts(problem, device, vectors, parts_per_sm=PARTS_PER_SM):
    """How many parts a row of so many vectors is cut into."""
    most = vectors // (WALK_THREADS * _PART_VECTORS)
    wanted = device.num_sms * parts_per_sm // problem.num_rows
    return 1 << max(1, min(most, wanted, _MAX_PARTS)).bit_length() - 1
