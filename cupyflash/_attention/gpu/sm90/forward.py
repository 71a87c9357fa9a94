"""The kernel spec of attention for sm_90a: wgmma and TMA."""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupyflash._attention.functions import SHORT_INTEGERS
from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.combine_config import parts_config
from cupyflash._attention.gpu.config import (
    MOST_COUNTED,
    MOST_KEYS,
    SplitKV,
    compiled_dims,
    if_on,
    is_plain,
    launch_config,
    most_seen,
    num_heads,
    scale_is_plain,
    too_many,
)
from cupyflash._attention.gpu.sm90.forward_model import microseconds
from cupyflash._attention.gpu.sm90.forward_tiles import (
    BIASED,
    FEW,
    HOPPER_GROUP_ROWS,
    LISTED,
    NARROW,
    NARROW_KEYS,
    OTHERS,
    SHORT_KEYS,
    TILES,
    BiasTiles,
    Few,
    HopperTile,
    Ladder,
    Others,
)
from cupyflash._attention.gpu.tile_lists import TileLists
from cupyflash._attention.problem import AttentionProblem, MergeProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

# Queries, keys and columns of short sequences, and the heads per multiprocessor of
# many.
_SHORT, _MANY = 64, 16

# The least keys of a split, and the numbers of splits to choose from.
_KEYS_OF_SPLIT = 256
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Another tile than the first must promise this much.
_SURELY = 1.02
# With more rows or bytes of results, splits are combined by another kernel, with warps
# for each row, rather than by the block that finishes last, whose warps combine one row
# after another. Only that block knows the sinks, so it may have more of them.
_COMBINED_ROWS, _COMBINED_BYTES = 16, 1 << 16
_COMBINED_WITH_SINKS = 1 << 17
# Of few queries, the least numbers of keys and values of a head that are worth a split:
# of each 16 rows that a block combines, or by another launch. One block takes about
# 8 us for the first and 15 for the second.
_SPLIT_BY_BLOCK, _SPLIT_BY_LAUNCH = 1 << 17, 1 << 18

# Above, tiles of queries are so many that the ladder's is best.
_LONG = 1 << 16

# The most splits that keep sums exact enough, and bytes of their results. Beyond, the
# next row takes a problem.
_MOST_EXACT_SPLITS, _MOST_SPLIT_BYTES = 8, 8 << 30

# Leaves room for up to 10 KB of key terms and barriers.
_MOST_STAGED = 217 << 10

# Bytes of keys and values that stay in the L2 cache.
_CACHED = 50 << 20

CAP = Struct(
    "cap_t",
    "attention/score/softcap.cuh",
    (("float", "inverse", "limit", "softcap"), ("float", "coefficients[4]")),
)
SCHEDULE = Struct(
    "schedule_t",
    "attention/sm90/tile_scheduler.cuh",
    (
        ("int", "num_work_tiles", "num_blocks", "num_heads", "section", "num_splits"),
        ("int", "absent"),
    ),
)
HOPPER_INPUTS = Struct(
    "inputs_t",
    "attention/sm90/forward.cu",
    (
        ("ptx::tensor_map_t", "q_map", "k_map", "v_map"),
        (SCHEDULE, "schedule"),
        ("const elem_t*", "q", "k", "v"),
        ("double", "from_log2"),
        ("float", "to_log2", "margin"),
        (CAP, "cap"),
        ("float", "scale"),
    ),
    alignment=64,
)

HOPPER_BIAS_INPUTS = Struct(
    "with_bias_t",
    "attention/sm90/forward.cu",
    (("ptx::tensor_map_t", "bias_map"),),
    alignment=64,
    base=HOPPER_INPUTS,
)

# Values of problem.terms with which a warp reads the bias once for all queries.
_OF_KEYS = ("keys", "bias of keys")

# How far a score may exceed its reference, as an exponent of 2.
_LAZY_LOG2 = np.float32(8)

# tanh(y) / y as a polynomial in y^2; with the first n coefficients, the relative error
# is at most 1e-7 for |y| up to limit n.
_TANH_LIMITS = (0.0, 5e-4, 0.029, 0.11, 0.4)
_TINY = float(np.finfo(np.float32).tiny)
_TANH_COEFFICIENTS = (
    0.999999901901,
    -0.3333136246,
    0.132709767739,
    -0.0475536041585,
)


@dataclass(frozen=True, kw_only=True)
class HopperKernel(spec.ForwardSpec):
    """wgmma and TMA, for 16-bit inputs on sm_90a.

    See TILES, OTHERS, FEW, NARROW, LISTED and BIASED for `tiles`, `others` and so on.
    """

    tiles: dict[tuple[int, int], tuple[Ladder, ...]] = field(hash=False)
    others: dict[tuple[int, int], Others] = field(hash=False)
    dims: tuple[int, ...]  # head dimensions that are compiled; zeros pad
    few: Few = field(hash=False)
    narrow: dict[tuple[int, int], HopperTile] = field(hash=False)
    listed: dict[tuple[int, int], Ladder] = field(hash=False)
    biased: dict[tuple[int, int], BiasTiles] = field(hash=False)
    arch: str = "sm_90a"

    def unsupported_reason(self, problem, device) -> str | None:
        widest = self.dims[-1]
        reason = spec.refuse_mma(problem, device, spec.HALVES, widest, self.arch)
        if reason is not None:
            return reason
        if problem.seqlen_k == 0:
            return "there are no keys"
        if self._are_short(problem, device):
            return (
                "many short sequences of narrow heads hide each other in smaller blocks"
            )
        if problem.no_tensor_map is not None:
            return problem.no_tensor_map
        if not self._ladder(problem):
            return (
                "has too few registers for these options together at head_dim "
                f"{problem.head_dim} and head_dim_v {problem.head_dim_v}"
            )
        return (
            self._has_long_sums(problem, device)
            or spec.refuse_smem(self._smem(problem, self.tile(problem, device)), device)
            or too_many(self.counts(problem, device))
        )

    def _has_long_sums(self, problem, device):
        """Why splits do not keep the sums over keys exact enough, or None."""
        most, splits = MOST_KEYS[problem.dtype], self.num_splits(problem, device)
        if most_seen(problem) <= splits * most:
            return None
        reason = f"sums in {problem.dtype} are exact enough up to {most} keys"
        wanted = _exact_splits(problem)
        if wanted > _MOST_EXACT_SPLITS:
            return f"{reason}, or up to {_MOST_EXACT_SPLITS} times as many in splits"
        size = wanted * _bytes_of_results(problem)
        if size > _MOST_SPLIT_BYTES:
            return f"{reason}, and results of {wanted} splits would take {size} bytes"
        return f"{reason}, and the sinks of these queries are not joined with splits"

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        tile = self.tile(problem, device)
        num_work_tiles = self._num_tiles(problem, tile) * self.num_splits(
            problem, device
        )
        tiles_of_keys = -(-problem.seqlen_k // tile.block_n)
        # Per block, with up to twice its share of work tiles.
        of_block = 2 * -(-num_work_tiles // device.num_sms) * tiles_of_keys
        return {
            "queries": (problem.seqlen_q, MOST_COUNTED),
            "keys": (problem.seqlen_k, MOST_COUNTED),
            "heads of all batch entries": (num_heads(problem), MOST_COUNTED),
            # Below the flag kCareful, also for the first number that is past the end.
            "tiles of queries": (num_work_tiles, MOST_COUNTED),
            "tiles of keys of a block": (of_block, (1 << 32) - 1),
        }

    def _are_short(self, problem, device):
        """Whether `mma_short` is faster: a block here has one tile at a time.

        Tuned on an H200: docs/design/lab/0024-tiles-and-the-next-best.md.
        """
        longest = max(problem.seqlen_q, problem.seqlen_k)
        heads = num_heads(problem)
        return (
            longest <= _SHORT
            and max(problem.head_dim, problem.head_dim_v) <= _SHORT
            and heads >= _MANY * device.num_sms
            and problem.group_size == 1
            and is_plain(problem)
            and bounds_of(problem) == 0
        )

    def dims_of(self, problem: AttentionProblem) -> tuple[int, int]:
        """head_dim and head_dim_v as they are compiled."""
        return compiled_dims(problem, self.dims)

    def tile(self, problem: AttentionProblem, device: Device) -> HopperTile:
        """The tile for a problem: see _choice."""
        return _choice(self, problem, device)[0]

    def num_splits(self, problem: AttentionProblem, device: Device) -> int:
        """Splits of the keys: to fill the device, or to keep sums exact enough."""
        return _choice(self, problem, device)[1]

    def tiles_of(self, problem: AttentionProblem) -> tuple[HopperTile, ...]:
        """The tiles for a problem: first that measured best for a length and mask."""
        if (biased := self._bias_tile(problem)) is not None:
            return (biased,)
        has_terms = _adds_terms(problem) or problem.has_functions
        if self._has_few_rows(problem):
            tiles = kernel.by_threshold(self.few, max(self.dims_of(problem)))
            if has_terms:
                return (tiles[3 if _weight_of_terms(problem) == 3 else 2],)
            return (tiles[_bytes_of_keys(problem) > _CACHED],)
        tile = kernel.by_threshold(self._ladder(problem), problem.seqlen_q)
        bounds, others = bounds_of(problem), self.others.get(self.dims_of(problem))
        has_arrays = problem.bias is not None or problem.mask is not None
        has_more = has_terms or has_arrays or has_lengths(problem)
        is_measured = bounds < 2 and not has_more
        if others is None or not is_measured or problem.seqlen_q > _LONG:
            return (tile,)
        return tile, *(x for x in others[bounds] if x != tile)

    def _has_few_rows(self, problem):
        """Whether one warpgroup has room for all queries of a head."""
        return problem.seqlen_q * self.pack(problem) <= HOPPER_GROUP_ROWS

    def has_bias_tiles(self, problem: AttentionProblem) -> bool:
        """Whether TMA loads the bias: kBiasTiles of the kernel."""
        return self._bias_tile(problem) is not None

    def _bias_tile(self, problem):
        """The tile for a bias that TMA loads, or None."""
        tiles = self.biased.get(self.dims_of(problem))
        if tiles is None or problem.bias not in spec.HALVES or problem.terms != "tiles":
            return None
        others = _num_beside_bias(problem)
        if problem.seqlen_q <= HOPPER_GROUP_ROWS:
            return tiles.few_beside if others else tiles.few
        if others:
            return tiles.beside if others == 1 else tiles.several
        # Window bounds beside a mask take registers, too.
        has_room = problem.mask is None or problem.left is None
        is_short = most_seen(problem) <= SHORT_KEYS and has_room
        return tiles.short if is_short else tiles.alone

    def pack(self, problem: AttentionProblem) -> int:
        """Query heads of a group that are packed into the rows of a tile.

        As many as divide the group and whose queries all fit into the rows of one
        warpgroup: keys and values are then read once for all of them.
        """
        group = problem.group_size
        of_heads = ("bias", "mask", "sinks", "alibi_slopes")
        if (
            not problem.heads_can_be_packed
            or problem.has_functions
            or any(getattr(problem, name) is not None for name in of_heads)
        ):
            return 1
        most = min(group, HOPPER_GROUP_ROWS // max(1, problem.seqlen_q))
        return max((n for n in range(1, most + 1) if group % n == 0), default=1)

    def split_kv(self, problem, device) -> SplitKV:
        """By whole tiles, done by the kernel itself."""
        splits = self.num_splits(problem, device)
        return SplitKV(splits, -(-problem.seqlen_k // splits), in_kernel=True)

    def splits_of(
        self, problem: AttentionProblem, tile: HopperTile, device: Device
    ) -> tuple[int, ...]:
        """The numbers of splits of the keys that may be best with a tile."""
        num_tiles = max(1, self._num_tiles(problem, tile))
        to_fill = device.num_sms // num_tiles
        most = most_seen(problem) // _KEYS_OF_SPLIT
        if problem.sinks is not None:  # added by a block that combines splits
            of_split = max(1, self._bytes_of_split(problem, tile))
            most = min(most, _COMBINED_WITH_SINKS // of_split)
        most = max(1, min(to_fill, most))
        if self._has_few_rows(problem):
            rows = problem.seqlen_q * self.pack(problem)
            least = _SPLIT_BY_BLOCK * -(-rows // _COMBINED_ROWS)
            if problem.sinks is None:
                least = min(least, _SPLIT_BY_LAUNCH)
            numbers = most_seen(problem) * sum(self.dims_of(problem))
            return (most if numbers >= least else 1,)
        return tuple(sorted({min(n, most) for n in _SPLITS}))

    def exact_splits(
        self, problem: AttentionProblem, tile: HopperTile, device: Device
    ) -> int:
        """The least splits of the keys that keep sums exact enough, or 1."""
        exact = _exact_splits(problem)
        size = exact * _bytes_of_results(problem)
        if exact > _MOST_EXACT_SPLITS or size > _MOST_SPLIT_BYTES:
            return 1
        if problem.sinks is not None:
            return min(exact, max(self.splits_of(problem, tile, device)))
        return exact

    def _bytes_of_split(self, problem, tile):
        """Bytes of the results of a tile for one split of the keys."""
        rows = min(tile.block_m, problem.seqlen_q * self.pack(problem))
        return 4 * rows * split_columns(problem)

    def combines(self, problem: AttentionProblem, device: Device) -> bool:
        """Whether the kernel itself combines the splits of the keys."""
        tile, num_splits = _choice(self, problem, device)
        # There is a counter for each tile, if splits are to fill the device.
        if num_splits == 1 or 2 * self._num_tiles(problem, tile) > device.num_sms:
            return False
        size = num_splits * self._bytes_of_split(problem, tile)
        if problem.sinks is not None:
            return size <= _COMBINED_WITH_SINKS
        rows = problem.seqlen_q * self.pack(problem)
        return rows <= _COMBINED_ROWS and size <= _COMBINED_BYTES

    def split_bytes(self, problem: AttentionProblem, device: Device) -> dict[str, int]:
        """Bytes of lse (float64) and out (float32) of all splits."""
        rows = self.num_splits(problem, device) * math.prod(problem.lse_shape)
        return {"split_lse": 8 * rows, "split_out": 4 * split_columns(problem) * rows}

    def is_dynamic(self, problem: AttentionProblem) -> bool:
        """Whether blocks take work tiles from a counter: kDynamic of the kernel."""
        names = ("bias", "mask", "query_lengths", "key_lengths")
        if bounds_of(problem) > 0 or problem.has_functions:
            return True
        return any(getattr(problem, name) is not None for name in names)

    def _num_tiles(self, problem, tile):
        """Tiles of queries, over all heads and batch entries."""
        pack = self.pack(problem)
        heads = num_heads(problem) // pack
        return heads * -(-problem.seqlen_q * pack // tile.block_m)

    def _ladder(self, problem):
        """Tiles for the head dimensions and kind of a problem; may be empty."""
        dims = self.dims_of(problem)
        ladders = self.tiles.get(dims) or self.tiles[(max(dims),) * 2]
        if dims in self.listed and _has_mask_alone(problem):
            return self.listed[dims]
        beside_bits = has_mask_bits(problem) and problem.bias is not None
        if _adds_terms(problem) or problem.has_functions or beside_bits:
            return ladders[3 + _weight_of_terms(problem)]
        if has_lengths(problem):
            return ladders[2]
        if problem.left is not None and most_seen(problem) <= NARROW_KEYS:
            if dims in self.narrow:
                return {math.inf: self.narrow[dims]}
        return ladders[int(bounds_of(problem) > 0)]

    def _smem(self, problem, tile):
        """Bytes of the tiles of q, the stages of k and v, and staging for out."""
        columns = self._staged_columns(problem, tile)
        return self._smem_of_tiles(problem, tile) + _staged_bytes(tile, columns)

    def _smem_of_tiles(self, problem, tile):
        """Bytes of the tiles of q and stages of k and v, with room for alignment."""
        row_qk, row_v = (-(-n // 64) * 128 for n in self.dims_of(problem))
        kv = tile.num_stages * tile.block_n * (row_qk + row_v)
        biases = 0
        if self.has_bias_tiles(problem):
            biases = tile.num_stages * tile.block_m * tile.block_n * 2
        return tile.block_m * row_qk + kv + biases + 1024

    def _staged_columns(self, problem, tile):
        """Columns of out that are staged in shared memory at a time, or 0."""
        if tile.num_groups == 1 or not tile.stage_out:
            return 0  # with few rows, keys take all shared memory
        if problem.has_functions:
            return 0
        has_room = self.has_bias_tiles(problem) or _is_cap_only(problem)
        if _adds_terms(problem) and not has_room:
            return 0  # options leave no registers for it
        head_dim_v = self.dims_of(problem)[1]
        columns = 64 if head_dim_v % 64 == 0 else 32
        size = self._smem_of_tiles(problem, tile) + _staged_bytes(tile, columns)
        return columns if size <= _MOST_STAGED else 0

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        """The launch, followed by another that combines splits, if there is one."""
        tile = self.tile(problem, device)
        config = self.config(tile, problem, batch_dims, device)
        num_splits = self.num_splits(problem, device)
        if num_splits == 1 or self.combines(problem, device):
            return (config,)
        states = split_states(problem, num_splits)
        return config, parts_config(states, 1, problem.dtype, "float32")

    def config(self, tile, problem, batch_dims, device) -> LaunchConfig:
        """The launch with a given tile."""
        dims = self.dims_of(problem)
        switches = {
            "HEAD_DIM": dims[0],
            "HEAD_DIM_V": dims[1],
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "BOUNDS": bounds_of(problem),
            "PINGPONG": int(tile.pingpong),
        }
        pack, num_splits = self.pack(problem), self.num_splits(problem, device)
        has_bits = has_mask_bits(problem)
        terms = None if problem.bias is problem.mask is None else problem.terms
        switches |= if_on(
            BOX_N=tile.box_n,
            SCALE_SCORES=not scale_is_plain(problem.scale),
            PACK=pack if pack > 1 else 0,
            READ_ONCE=tile.evict_first and pack == problem.group_size,
            SPLIT=num_splits > 1,
            STAGED_COLUMNS=0 if num_splits > 1 else self._staged_columns(problem, tile),
            COMBINE=self.combines(problem, device),
            MASK_BITS=has_bits,
            TERMS_OF_KEYS=terms in _OF_KEYS,
            KEY_BIAS=_is_key_bias(problem),
            UNIT_COLUMNS=terms in ("unit", "tiles")
            and (problem.bias is not None or not has_bits),
            BIAS_TILES=self.has_bias_tiles(problem),
        )
        num_work_tiles = self._num_tiles(problem, tile) * num_splits
        return launch_config(
            problem,
            batch_dims,
            min(num_work_tiles, device.num_sms),
            tile.num_threads,
            "attention/sm90/forward.cu",
            f"attention_{self.name}",
            arch=self.arch,
            smem=self._smem(problem, tile),
            **switches,
        )

    def tile_lists(self, problem: AttentionProblem, device: Device) -> TileLists:
        """Lists of the tiles that a mask function shows to tiles of queries."""
        tile = self.tile(problem, device)
        first = 0
        if (
            bounds_of(problem) > 0 and tile.num_groups > 1
        ):  # tiles are aligned to the last query
            first = -self._absent(problem, tile)
        return TileLists(
            HOPPER_GROUP_ROWS,
            tile.num_groups,
            tile.block_n,
            own_first=first,
            whole_first=True,
        )

    def _absent(self, problem, tile):
        """Rows by which a head's partial tile is short, in whole warpgroups."""
        spare = -problem.seqlen_q * self.pack(problem) % tile.block_m
        return spare // HOPPER_GROUP_ROWS * HOPPER_GROUP_ROWS

    def schedule(self, problem: AttentionProblem, device: Device) -> dict[str, Any]:
        """How work tiles are divided, and units of exponents: fields of inputs_t."""
        tile = self.tile(problem, device)
        pack, num_splits = self.pack(problem), self.num_splits(problem, device)
        heads = num_heads(problem) // pack
        num_blocks = -(-problem.seqlen_q * pack // tile.block_m)
        bytes_of_head = _bytes_of_keys(problem) // _num_kv_heads(problem)
        # Keys and values of a section stay in the L2 cache; sections have equal size,
        # since a small one at the end would not fill the device.
        cache_bytes = int(device.l2_bytes * tile.cache_share)
        in_cache = cache_bytes // bytes_of_head * problem.group_size
        in_cache //= pack
        bounds = bounds_of(problem)
        if bounds == 0 and not has_lengths(problem) and not problem.mask_function:
            in_cache = 1  # blocks walk through a head side by side
        num_sections = -(-heads // max(1, in_cache))
        with np.errstate(over="ignore"):  # as a conversion on the device
            scale = np.float32(problem.scale)
        return {
            "num_work_tiles": self._num_tiles(problem, tile) * num_splits,
            "num_blocks": num_blocks,
            "absent": self._absent(problem, tile),  # rows that do not exist
            "num_heads": heads,
            "num_splits": num_splits,
            "section": -(-heads // num_sections),
            **_exponents(problem),
            "cap": cap_of(problem),
            "scale": scale,
        }


@functools.lru_cache(maxsize=256)
def _choice(row, problem, device):
    """The tile and the number of splits of the keys that promise the least time."""
    tiles = row.tiles_of(problem)
    splits = row.splits_of
    choices = [(tile, n) for tile in tiles for n in splits(problem, tile, device)]
    has_terms = _adds_terms(problem) or problem.has_functions
    in_kernel = problem.sinks is not None

    def time(choice):
        took = microseconds(
            problem, *choice, device, row.dims_of(problem), has_terms, in_kernel
        )
        return took if choice[0] is tiles[0] else _SURELY * took

    exists = math.prod(problem.lse_shape) > 0
    choice = min(choices, key=time) if exists and len(choices) > 1 else choices[0]
    tile, num_splits = choice
    return tile, max(num_splits, row.exact_splits(problem, tile, device))


def _staged_bytes(tile, columns):
    """kStagedBytes of cuda_src/attention/sm90/epilogue.cuh, for all warps."""
    return tile.block_m * (2 * columns + 16) if columns else 0


def _exact_splits(problem):
    """The splits of the keys in which sums are exact enough."""
    return -(-most_seen(problem) // MOST_KEYS[problem.dtype])


def _bytes_of_results(problem):
    """Bytes of lse (float64) and out (float32) of a split."""
    return (8 + 4 * split_columns(problem)) * math.prod(problem.lse_shape)


def split_columns(problem: AttentionProblem) -> int:
    """Columns from row to row of the results of a split: part_pitch() of the kernel."""
    return -(-problem.head_dim_v // 4) * 4


def split_states(problem, num_splits):
    """The results over splits of the keys, as another kernel combines them."""
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q)
    return MergeProblem(
        problem.backend, num_splits, shape, problem.head_dim_v, "float32", "float64"
    )


def _num_kv_heads(problem):
    """Heads of k over all batch entries."""
    return math.prod(problem.batch) * problem.num_kv_heads


def _bytes_of_keys(problem):
    """Bytes of all keys and values."""
    row = (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return _num_kv_heads(problem) * problem.seqlen_k * row


def _weight_of_terms(problem):
    """0 for one term of the scores or of keys, 1 to 2 for a softcap, 3 for several.

    Alibi alone, or a table of diagonals, takes the tile of a softcap, unless the bounds
    of a window take registers, too. 4 for a mask as bits beside one of the others.
    """
    if has_mask_bits(problem):
        weight = _weight_of_terms(replace(problem, mask=None))
        # Alibi over all keys has registers for the bits.
        alibi_alone = weight == 1 and not problem.softcap and bounds_of(problem) == 0
        return weight if weight == 3 or alibi_alone else 4
    arrays = problem.bias, problem.mask
    lie_apart = 0
    if problem.terms not in _OF_KEYS:
        lie_apart = sum(x is not None for x in arrays)
        if lie_apart and problem.terms == "any":
            return 3
    has_alibi = problem.alibi_slopes is not None
    if problem.has_functions and (lie_apart or has_alibi or problem.softcap):
        return 3
    if problem.softcap:
        if lie_apart or has_alibi or has_lengths(problem):
            return 3
        return 1 if _is_cap_only(problem) else 2
    if lie_apart + has_alibi > 1 or (lie_apart and has_lengths(problem)):
        return 3
    if all(x is None for x in arrays) and problem.mask_function is None:
        if problem.table is not None:
            return 1 if problem.left is None else 2
        if has_alibi and problem.left is None:
            return 1
    # Window bounds and mask rows together need too many registers.
    return 3 if lie_apart and problem.mask and problem.left is not None else 0


def _num_beside_bias(problem):
    """Score options that take registers beside a bias; functions count as two."""
    mask = None if has_mask_bits(problem) else problem.mask
    some = mask, problem.alibi_slopes, problem.softcap or None
    beside = sum(x is not None for x in some) + has_lengths(problem)
    return beside + 2 * problem.has_functions


def _is_cap_only(problem):
    """kCapOnly of cuda_src/attention/sm90/score_mod.cuh."""
    arrays = (problem.bias, problem.mask, problem.alibi_slopes)
    alone = all(x is None for x in arrays) and scale_is_plain(problem.scale)
    return problem.softcap > 0 and alone and not problem.has_functions


def _is_key_bias(problem):
    """Whether a bias of keys is added to the products: kKeyBias of the kernel."""
    mask = None if has_mask_bits(problem) else problem.mask
    others = (mask, problem.alibi_slopes, problem.score, problem.mask_function)
    has_others = any(x is not None for x in others)
    # The scale must keep a bias in units of the products within float32.
    is_plain = not problem.softcap and 1e-2 <= problem.scale <= 1e2
    alone = problem.terms in _OF_KEYS and not has_others and is_plain
    return problem.bias is not None and alone


def has_mask_bits(problem: AttentionProblem) -> bool:
    """Whether a kernel before makes bits of the mask: kMaskBits of the kernel.

    Not beside functions, which hide keys by the same registers, nor for few queries,
    where a launch counts.
    """
    return (
        problem.mask is not None
        and problem.terms != "keys"
        and problem.seqlen_q > HOPPER_GROUP_ROWS
        and not problem.has_functions
    )


def _adds_terms(problem):
    """Whether scores are finished before the softmax: kHasTerms of the kernel."""
    mask = None if has_mask_bits(problem) else problem.mask
    arrays = (problem.bias, mask, problem.alibi_slopes, problem.score)
    has_terms = any(x is not None for x in arrays) or problem.softcap > 0
    is_plain = scale_is_plain(problem.scale) and not has_terms
    return not is_plain and not _is_key_bias(problem)


def _has_mask_alone(problem):
    """Whether a mask function meets no option that takes registers.

    One with 64-bit integers takes them, too: divisions of these are called.
    """
    if problem.mask_function is None or not problem.generated.startswith(
        SHORT_INTEGERS
    ):
        return False
    return not _adds_terms(problem) and not has_lengths(problem)


def _exponents(problem):
    """The factor from scores to exponents of 2, as a float32, and that back to lse."""
    if _is_cap_only(problem):  # the softcap makes them exponents
        return {"to_log2": 1.0, "from_log2": math.log(2), "margin": _LAZY_LOG2}
    scale = 1.0 if _adds_terms(problem) else problem.scale
    to_log2 = np.float32(scale * math.log2(math.e))
    return {
        "to_log2": to_log2,
        "from_log2": scale / float(to_log2),
        "margin": _LAZY_LOG2 / to_log2,
    }


def cap_of(problem, in_log2=None):
    """cap_t of cuda_src/attention/score/softcap.cuh: the softcap as a polynomial.

    Scores are exponents of 2 with `in_log2`; None: as in the forward kernel.
    """
    if not problem.softcap:
        return {}
    # If float32 overflows, every product but 0 is at the cap, as it is with the largest
    # number.
    largest = float(np.finfo(np.float32).max)
    inverse = np.float32(max(-largest, min(problem.scale / problem.softcap, largest)))
    if in_log2 is None:
        in_log2 = _is_cap_only(problem)
    unit = problem.softcap * (math.log2(math.e) if in_log2 else 1.0)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        powers = np.float64(inverse) ** np.arange(1, 8, 2)
        coefficients = (unit * powers * _TANH_COEFFICIENTS).astype(np.float32)
        # Coefficients out of the range of float32 are left out, if that changes
        # nothing.
        held = np.isfinite(coefficients) & (np.abs(coefficients) >= _TINY)
        limit = _TANH_LIMITS[int(np.cumprod(held).sum())] if inverse else np.inf
        return {
            "inverse": inverse,
            "limit": np.float32(limit) / np.abs(inverse),
            "softcap": np.float32(unit),
            "coefficients": np.where(held, coefficients, 0),
        }


def bounds_of(problem):
    """kBounds of cuda_src/attention/sm90/tile_scheduler.cuh."""
    if problem.left is not None:
        return 2
    return 0 if problem.right is None else 1


def has_lengths(problem):
    """Whether only the device knows which keys queries see: kBoundsPerTile."""
    arrays = (problem.query_offsets, problem.query_lengths, problem.key_lengths)
    return any(x is not None for x in arrays)


HOPPER = HopperKernel(
    name="hopper",
    dims=(64, 96, 128, 192, 256),
    few=FEW,
    narrow=NARROW,
    listed=LISTED,
    biased=BIASED,
    tiles=TILES,
    others=OTHERS,
)
