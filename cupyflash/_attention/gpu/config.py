"""Shared by the kernel specs of attention: configurations, defines, counts."""

import math
from dataclasses import replace
from typing import NamedTuple

from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig, Variant


class AttentionCall(NamedTuple):
    """Pointers of the arrays of a call, 0 for absent ones, as launches take them.

    Launches refer to them by these names. attention() has those before `dout`.
    """

    q: int
    k: int
    v: int
    # The optional arrays, in the order of the kernels' parameters.
    bias: int = 0
    mask: int = 0
    sinks: int = 0
    alibi_slopes: int = 0
    query_offsets: int = 0
    query_lengths: int = 0
    key_lengths: int = 0
    offset: int = 0  # the query offset, if it is an int
    functions: bytes = b""  # functions_t: what score and mask function read
    dout: int = 0
    out: int = 0
    lse: int = 0
    dlse: int = 0


_FIELDS = AttentionCall._fields
OPTIONS = _FIELDS[_FIELDS.index("bias") : _FIELDS.index("offset")]
FUNCTIONS = "functions"
# The last parameters of kernels before params_t.
OPTIONS_AND_OFFSET = (*OPTIONS, "offset")
# The arguments of launches of attention().
FORWARD_CALL = _FIELDS[: _FIELDS.index("dout")]


class SplitKV(NamedTuple):
    """How keys are split into ranges whose results are combined."""

    num_splits: int
    keys_per_split: int
    in_kernel: bool = False  # by the kernel itself, not as a new batch axis


# The most keys that a query may see. Tensor cores truncate the low bits of a sum every
# 16 keys, so the relative error of out grows by 2^-25 with each step: to half of the
# guaranteed error of a dtype at this length, if all values are alike.
MOST_KEYS = {"float16": 1 << 18, "bfloat16": 1 << 21}


# Architectures whose float64 tensor cores are at least as fast as their float64 units.
# Others have few of either (sm_86, 89, 103, 120) or none (sm_75).
FAST_FLOAT64 = ("sm_80", "sm_90", "sm_100")


# With more terms, kernels use two-level sums (attention/simt/long_sums.cuh), for types
# whose guarantee a plain sum would break.
LONG_SUM = 1 << 15
RUN_TILES = 64


# With more columns, a score is the sum of several sums, because rounding errors of one
# sum grow like the root of its length.
MAX_ONE_SUM = 256
COLUMNS_APART = 64


def columns_apart(head_dim: int) -> list[slice]:
    """Slices of the columns of a head whose products are summed separately."""
    if head_dim <= MAX_ONE_SUM:
        return [slice(0, head_dim)]
    return [
        slice(first, min(first + COLUMNS_APART, head_dim))
        for first in range(0, head_dim, COLUMNS_APART)
    ]


# Kernels that count in 32 bits support numbers up to this: they add tiles, blocks and
# the like to it, and the sum still fits into an `int`.
MOST_COUNTED = (1 << 30) - (1 << 16)
# For longer axes, kernels without such a limit use 64-bit indices: LONG_AXES of
# attention/score/score.cuh and attention/simt/tile.cuh.
LONG_AXIS = 1 << 30


def too_many(counts: dict[str, tuple[int, int]]) -> str | None:
    """Why a kernel that counts these in 32 bits does not support a problem, or None.

    `counts` maps names to how many there are and how many the kernel can count.
    """
    for name, (number, most) in counts.items():
        if number > most:
            return f"counts {name} in 32 bits, up to {most}, and there are {number}"
    return None


def defines(problem, batch_dims, num_threads, elem=None, **more):
    """The defines of the folder score/ for a problem."""
    switches = {
        "ELEM_T": CUDA_TYPES[elem or problem.dtype],
        "ACCUM_T": CUDA_TYPES[problem.compute_dtype],
        "BATCH_DIMS": batch_dims,
        "NUM_THREADS": num_threads,
        **more,
    }
    for name in OPTIONS:
        dtype = getattr(problem, name)
        if dtype is not None:
            is_mask = name == "mask"
            switches["MASK" if is_mask else f"{name.upper()}_T"] = (
                1 if is_mask else CUDA_TYPES[dtype]
            )
    longest = max(problem.num_heads, problem.head_dim, problem.head_dim_v)
    switches |= if_on(
        LONG_AXES=longest > LONG_AXIS,
        SOFTCAP=problem.softcap != 0,
        SCORE_FUNCTION=problem.score is not None,
        MASK_FUNCTION=problem.mask_function is not None,
        KEY_PARTS=problem.keys_of_part is not None,
    )
    return tuple((name, str(value)) for name, value in switches.items())


def if_on(**switches):
    """The switches that are not 0, as numbers."""
    return {name: int(value) for name, value in switches.items() if value}


def launch_config(
    problem, batch_dims, num_blocks, num_threads, source, entry, *, arch=None, smem=0,
    **more,
):  # fmt: skip
    """The launch of a kernel over blocks, with the defines of a problem and `more`."""
    variant = Variant(
        source,
        entry,
        defines(problem, batch_dims, num_threads, **more),
        arch=arch,
        smem=smem,
        generated=problem.generated,
    )
    return LaunchConfig.over(variant, num_blocks, num_threads)


def is_plain(problem):
    """Whether scores are q.k times a scale, without options that take registers."""
    if problem.softcap or problem.has_functions:
        return False
    return all(getattr(problem, n) is None for n in OPTIONS)


def without_options(problem, *kept):
    """The problem with only these options, for kernels other than the main one."""
    absent = {name: None for name in OPTIONS if name not in kept}
    absent |= {
        "score": None,
        "mask_function": None,
        "generated": "",
        "mask_varies_by": "",
    }
    return replace(problem, softcap=0.0, scale=1.0, **absent)


def largest_tile(tiles, num_heads, seqlen, fewest):
    """The largest tile that gives at least `fewest` blocks and is not half empty.

    Blocks own tiles of `seqlen` rows of each head. `tiles` are sorted from large to
    small; if none qualifies, the last one is used.
    """
    return next(
        (
            tile
            for tile in tiles
            if num_heads * -(-seqlen // tile.block_m) >= fewest(tile)
            and tile.block_m < 2 * seqlen
        ),
        tiles[-1],
    )


def largest_full(tiles, seqlen):
    """The largest tile that is not half empty, whatever the number of blocks."""
    return largest_tile(tiles, 1, seqlen, lambda tile: 0)


# Shared memory that the system reserves for each block.
_RESERVED = 1024


def holds_blocks(device, num_blocks, smem):
    """Whether a multiprocessor holds so many blocks with `smem` bytes each."""
    return num_blocks * (smem + _RESERVED) <= device.smem_optin + _RESERVED


def compiled_dims(problem, dims):
    """head_dim and head_dim_v as they are compiled, each the next of `dims`."""
    dim, dim_v = (
        next(n for n in dims if n >= wanted)
        for wanted in (problem.head_dim, problem.head_dim_v)
    )
    return dim, dim_v


def num_heads(problem):
    """Query heads over all batch entries."""
    return math.prod(problem.batch) * problem.num_heads


def num_rows(problem):
    return num_heads(problem) * problem.seqlen_q


def num_tiles(problem, block_m):
    return num_heads(problem) * -(-problem.seqlen_q // block_m)


def most_seen(problem):
    """The most keys that one query may see, within a split."""
    keys = problem.keys_of_part or problem.seqlen_k
    if problem.left is not None and problem.right is not None:
        keys = min(keys, problem.left + problem.right + 1)
    return min(keys, problem.seqlen_k)


# A split has at least this many keys, and a multiple of what all key tiles divide.
_LEAST_KEYS = 256
_STEP_OF_KEYS = 64
_LEAST_TILE = 32  # of keys, up to 128 columns


def split_to_fill(
    problem, device, block_m, blocks_per_sm=4, least=_LEAST_KEYS,
    shortest=2 * _LEAST_KEYS,
):  # fmt: skip
    """Split the keys if tiles of `block_m` queries do not fill the device.

    With the split, each multiprocessor has `blocks_per_sm` blocks; splits have `least`
    keys or more. Fewer than `shortest` keys are not split.
    """
    wanted = device.num_sms * blocks_per_sm // max(1, num_tiles(problem, block_m))
    if most_seen(problem) < shortest or wanted < max(blocks_per_sm, 2):
        return SplitKV(1, problem.seqlen_k)
    keys = min(max(-(-problem.seqlen_k // wanted), least), LONG_SUM)
    # Splits of long sums are their first-level sums, combined without loss.
    if problem.seqlen_k > LONG_SUM and _is_exact(problem):
        keys = min(keys, RUN_TILES * _LEAST_TILE)
    keys = -(-keys // _STEP_OF_KEYS) * _STEP_OF_KEYS
    return SplitKV(-(-problem.seqlen_k // keys), keys)


def num_splits(problem):
    """The number of splits of the keys, which are the first batch axis."""
    return 1 if problem.keys_of_part is None else problem.batch[0]


def scale_is_plain(scale):
    """Whether the softmax can work on unscaled products."""
    return 1e-20 <= scale <= 1e20


def has_terms(problem):
    """Whether scores are finished one by one before the softmax."""
    arrays = (problem.bias, problem.mask, problem.alibi_slopes)
    has_arrays = any(x is not None for x in arrays)
    if has_arrays or problem.softcap > 0 or problem.has_functions:
        return True
    return not scale_is_plain(problem.scale)


def two_level_sum(problem, part="queries"):
    """The define of a kernel with long sums.

    Sums over keys belong to "queries" (out, dq), those over queries to "keys" (dk and
    dv); for "bias" it may be either.
    """
    over_queries = problem.seqlen_q * problem.group_size
    terms = {
        "queries": most_seen(problem),
        "keys": over_queries,
        "bias": max(problem.seqlen_k, problem.seqlen_q),
        "dscore": 0,  # of integers
        "sinks": 0,  # of float16 alone
    }[part]
    is_long = _is_exact(problem) and terms > LONG_SUM
    return {"RUN_TILES": RUN_TILES} if is_long else {}


def _is_exact(problem):
    """Whether the guarantee is stricter than the error of a long one-level sum."""
    return problem.dtype in ("float32", "float64") and problem.precision != "tf32"
