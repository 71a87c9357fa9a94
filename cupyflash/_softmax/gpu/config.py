"""Launch descriptions, and what all kernels share."""

from dataclasses import replace

from cupyflash._core import dtypes
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import AXES, Struct

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_vjp", "log_softmax_vjp")

# Threads of a block with several short rows.
BLOCK_THREADS = 128

# The most blocks of a grid; each takes more rows if there are more.
MAX_BLOCKS = 1 << 20


_OVER_AXES = (
    ((AXES, "OUTER_AXES", "kNumArrays"), "outer"),
    ((AXES, "REDUCED_AXES", "kNumArrays"), "reduced"),
)
_ROWS = ("long long", "num_rows", "row_length")
# The layout as kernels take it, by the functions that it belongs to.
_FORWARD_LAYOUT = Struct(
    "layout_t",
    "softmax/detail/params.cuh",
    (
        _ROWS,
        ("double", "scale", "key_factor", "factor", "unit", "unit_rest"),
        *_OVER_AXES,
    ),
)
_BACKWARD_LAYOUT = Struct(
    "layout_t",
    "softmax/detail/backward_params.cuh",
    (_ROWS, ("double", "scale"), *_OVER_AXES),
)
LAYOUTS = {
    **dict.fromkeys(FORWARD, _FORWARD_LAYOUT),
    **dict.fromkeys(BACKWARD, _BACKWARD_LAYOUT),
    "logsumexp": Struct(
        "layout_t",
        "softmax/detail/log_params.cuh",
        (_ROWS, ("long long", "returns_sign"), *_OVER_AXES),
    ),
}


def launch_config(
    num_blocks, num_threads, values, *, num_groups=1, scratch=0, entry="", **more
):
    """A launch; the kernel spec adds its source and its types."""
    variant = Variant("", entry, defines_of(values), **more)
    grid, block = (num_blocks, num_groups, 1), (num_threads, 1, 1)
    return LaunchConfig(variant, grid, block, scratch=scratch)


def varied(config, grid=(), scratch=None, values=(), **more):
    """The same launch with another grid, scratch memory, more defines and so on."""
    defines = (*config.variant.defines, *defines_of(dict(values)))
    return replace(
        config,
        variant=replace(config.variant, defines=defines, **more),
        grid=(*grid, *config.grid[len(grid) :]),
        scratch=config.scratch if scratch is None else scratch,
    )


def defines_of(values):
    return tuple((name, str(value)) for name, value in values.items())


def widest_of(problem):
    """Bytes of the widest element that is held or moved in a vector, at least 2."""
    names = [problem.dtypes.get(name) for name in ("x", "dy", "out")]
    return max(2, *(itemsize_of(name) for name in names if name))


itemsize_of = dtypes.ITEMSIZE.__getitem__


# Threads of a block that loops over a row, or over a part of one.
WALK_THREADS = 256

# A row is split into so many parts that each multiprocessor has about this many, if
# each thread of a part still has some vectors; powers of two, to compile few kernels.
# For sums as many as run at once.
PARTS_PER_SM, SUM_PARTS_PER_SM = 16, 2
_MAX_PARTS = 4096
_PART_VECTORS = 8  # per thread, at least
PARTIAL_BYTES = 24  # what a part stores, at most


def num_parts(problem, device, vectors, parts_per_sm=PARTS_PER_SM):
    """How many parts a row with this many vectors is split into."""
    most = vectors // (WALK_THREADS * _PART_VECTORS)
    wanted = device.num_sms * parts_per_sm // problem.num_rows
    return 1 << max(1, min(most, wanted, _MAX_PARTS)).bit_length() - 1
