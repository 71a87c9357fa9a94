"""The kernel spec of attention on tensor cores of sm_80 and newer."""

import math
from dataclasses import dataclass, replace

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import (
    MOST_KEYS,
    OPTIONS,
    SplitKV,
    compiled_dims,
    defines,
    has_terms,
    holds_blocks,
    if_on,
    is_plain,
    largest_tile,
    launch_config,
    most_seen,
    num_heads,
    num_rows,
    num_splits,
    num_tiles,
    scale_is_plain,
    split_to_fill,
    too_many,
    two_level_sum,
    without_options,
)
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant

# Head dimensions that are compiled; zeros pad.
DIMS = (32, 64, 96, 128, 192, 256)

# Bytes after the tiles: statistics of float32 tiles, and the state of a block.
_TILE_STATS = 128 + 384
# Bytes of statistics after each tile that was split in advance.
_STATS_OF_SPLIT_TILE = 128
# Allowed bytes of such tiles, for all keys, per byte of out.
_MOST_SPLIT = 4
_PREPARE_THREADS = 256
# Persistent blocks: the cost of starting a block, and of each tile of queries, in units
# of the cost of a tile of keys.
_START, _END = 1.5, 1.5
# Up to this many tiles of queries per head; with more, the keys of a head need the
# cache.
_MOST_TILES = 64
# With fewer keys, combining splits takes as long as they save; the number of splits, up
# to 4, scales with this.
_LEAST_SPLIT_KEYS = 4096
# With fewer queries, `tiled` is faster for split keys.
_LEAST_SPLIT_QUERIES = 32
# With fewer queries per group, splitting keys in advance does not pay off; and the most
# bytes that this may take.
_READERS = 256
_MOST_SPLIT_BYTES = 1 << 28
# The same of wide heads: the bytes that k and v have, up to a bound, from so many
# queries per group on.
_WIDE_READERS = 64
_MOST_WIDE_BYTES = 1 << 31
# Few heads: up to so many splits of at least so many keys, with that many keys up to a
# head dimension, if tiles and splits else fill at most a quarter of the device.
_FEW_SPLITS, _FEW_KEYS = 8, 512
_FEW_SPLIT_KEYS: dict[float, int] = {64: 128, 256: 64}
_FEW_FILLED = 4
# Wider float32 is always split in advance: its tiles leave a block no room to do it.
_NARROW = 128
# The longest second axis of a grid in use, and the longest third axis.
_GRID_Y, _GRID_Z = 1 << 15, (1 << 16) - 1
# Positions are sums of two such numbers and a tile.
_MOST_COUNTED = (1 << 29) - 1


@dataclass(frozen=True)
class MmaTile:
    """Queries and keys of a block, its threads, and tiles of k and v loaded ahead."""

    block_m: int
    block_n: int
    num_threads: int
    stages: int = 1
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    only_plain: bool = False  # options would need too many registers
    warps_per_row: int = 1  # warps that share rows (attention/sm80/shared_rows.cuh)
    persistent: bool = (
        False  # a block has several tiles of queries, if scores are plain
    )
    # Compute capabilities between which it does not spill.
    oldest: tuple[int, int] = (0, 0)
    newest: tuple[int, int] = (99, 0)


def split_tile_bytes(block_n: int, dims: tuple[int, int], parts: int) -> int:
    """Bytes of a split tile of k and one of v."""
    return parts * block_n * 2 * sum(dims) + 2 * _STATS_OF_SPLIT_TILE


def keeps_q(tile: MmaTile, dims: tuple[int, int]) -> bool:
    """Whether q stays in registers (kKeepQ of attention/sm80/forward_state.cuh)."""
    row_tiles = tile.block_m * tile.warps_per_row * 2 // tile.num_threads
    return max(dims) <= 64 and row_tiles * dims[0] <= 128


def smem_bytes(
    tile: MmaTile,
    dims: tuple[int, int],
    parts: int,
    staged: bool,
    persistent: bool = False,
) -> int:
    """Shared memory: 16-bit tiles, and staging for float32 ones."""
    stages = tile.stages * split_tile_bytes(tile.block_n, dims, parts)
    staging = 4 * tile.block_n * sum(dims) if staged else 0
    tiles = parts * tile.block_m * 2 * dims[0] + stages + staging
    out = tile.block_m * 2 * dims[1]  # 16-bit results, in place of the tiles
    apart = tile.stages == tile.warps_per_row == 1 and keeps_q(tile, dims)
    if persistent and apart:  # results have a buffer of their own
        tiles, out = tiles + out, 0
    # Weights, and two words per row and warp.
    row = 2 * 2 * tile.block_n + 16
    shared = tile.block_m * row if tile.warps_per_row > 1 else 0
    return max(tiles, out) + _TILE_STATS + shared


# Upper bounds of the head dimensions, and tiles from best to least: the first that fits
# min_blocks times into shared memory is used.
_Ladder = dict[float, tuple[MmaTile, ...]]


@dataclass(frozen=True, kw_only=True)
class MmaKernel(spec.ForwardSpec):
    """FlashAttention-2 by mma.sync, for 16-bit inputs or float32 in parts.

    `tiles` maps what is multiplied ("float16", "float32", "tf32"; the latter two with "
    few" if out is small compared with the keys and each block splits them itself), and
    whether scores have options (bias, mask, softcap, alibi), which need registers, to a
    ladder.
    """

    tiles: dict[tuple[str, bool], _Ladder]
    # The least queries, and keys, for which splitting float32 pays off.
    least: int = 64

    def unsupported_reason(self, problem, device) -> str | None:
        dtypes = *spec.HALVES, "float32"
        if reason := spec.refuse_mma(problem, device, dtypes, DIMS[-1]):
            return reason
        shortest = min(problem.seqlen_q, problem.seqlen_k)
        if problem.dtype == "float32" and shortest < self.least:
            if (
                problem.seqlen_q < _LEAST_SPLIT_QUERIES
                or problem.seqlen_k < _LEAST_SPLIT_KEYS
                or self.split_kv(problem, device).num_splits == 1
            ):
                return f"splits float32 from {self.least} queries and keys on"
        most = MOST_KEYS.get(problem.dtype, math.inf)
        if most_seen(problem) > most:
            return f"sums in {problem.dtype} are exact enough up to {most} keys"
        if reason := too_many(self.counts(problem, device)):
            return reason
        if not self.fitting(problem, device) or self._has_too_many(problem):
            return (
                f"has too few registers, or a block too little shared memory, for "
                f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} in "
                f"{problem.dtype} with these options"
            )
        return None

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        return {
            "queries": (problem.seqlen_q, _MOST_COUNTED),
            "keys": (problem.seqlen_k, _MOST_COUNTED),
            "heads of all batch entries": (num_heads(problem), _GRID_Y * _GRID_Z),
        }

    def _has_too_many(self, problem):
        """Whether the options take more registers than wide accumulators leave."""
        arrays = [getattr(problem, name) is not None for name in OPTIONS]
        functions = (problem.score is not None) + (problem.mask_function is not None)
        count = sum(arrays) + (problem.softcap > 0) + functions
        return max(self.dims(problem)) > 192 and count > 4

    def parts(self, problem: AttentionProblem) -> int:
        """float16 numbers per number of the input."""
        both = problem.dtype == "float32" and problem.precision == "float32"
        return 2 if both else 1

    def split_kv(self, problem, device) -> SplitKV:
        """Two blocks of 64 queries per multiprocessor, and more splits of few heads.

        16-bit inputs have none, since results of splits would be rounded.
        """
        split = self._split_of_many(problem, device)
        return self._split_of_few(problem, device, split) or split

    def _split_of_few(self, problem, device, split) -> SplitKV | None:
        """Splits of a few tiles of keys, if `split` leaves most of the device idle.

        They are for keys that are prepared, and not for bands: there most splits of
        a query are empty.
        """
        keys, parts = problem.seqlen_k, self.parts(problem)
        if parts == 1 or not _FEW_KEYS <= keys == most_seen(problem):
            return None
        part = replace(problem, batch=(1, *problem.batch), keys_of_part=_FEW_KEYS)
        if not self.is_prepared(part) or not (fitting := self.fitting(part, device)):
            return None
        blocks_per_sm = 2 if max(self.dims(problem)) <= 64 else 1
        slots = device.num_sms * blocks_per_sm
        tiles = max(1, num_tiles(problem, fitting[-1].block_m))
        if _FEW_FILLED * tiles * split.num_splits > slots:
            return None
        wanted = min(slots // tiles, _FEW_SPLITS)
        least = kernel.by_threshold(_FEW_SPLIT_KEYS, max(self.dims(problem)))
        keys_per_split = -(-max(-(-keys // wanted), least) // 64) * 64
        num_splits = -(-keys // keys_per_split)
        if num_splits <= split.num_splits:
            return None
        return SplitKV(num_splits, keys_per_split)

    def _split_of_many(self, problem, device) -> SplitKV:
        tiles = max(1, num_tiles(problem, _SMALL.block_m))
        wanted = 2 * device.num_sms // tiles
        least_keys = _LEAST_SPLIT_KEYS // max(1, min(wanted, 4))
        if self.is_wide(problem):  # twice as slow, likewise
            least_keys //= 2
        if (
            problem.precision == "tf32"
        ):  # twice as fast, with the same cost of combining
            least_keys *= 2
        if problem.dtype != "float32" or most_seen(problem) < least_keys:
            return SplitKV(1, problem.seqlen_k)
        return split_to_fill(problem, device, _SMALL.block_m, 2)

    def is_prepared(self, problem: AttentionProblem) -> bool:
        """Whether another kernel splits the keys and values into parts in advance.

        The parts need memory, which must not exceed four times that of out or, with
        split keys and for wide heads, a fixed bound.
        """
        if problem.dtype != "float32":
            return False
        keys = self._num_kv_heads(problem) * problem.seqlen_k
        parts = keys * self.parts(problem) * 2 * sum(self.dims(problem))
        if problem.keys_of_part is not None and not self.is_wide(problem):
            readers = problem.seqlen_q * problem.group_size
            return readers >= _READERS and parts <= _MOST_SPLIT_BYTES
        if self.is_wide(problem):
            readers = problem.seqlen_q * problem.group_size
            many = readers >= _WIDE_READERS
            if parts <= (_MOST_WIDE_BYTES if many else _MOST_SPLIT_BYTES):
                return True
        out = num_rows(problem) // num_splits(problem) * problem.head_dim_v * 4
        return parts <= _MOST_SPLIT * out

    def is_wide(self, problem: AttentionProblem) -> bool:
        """Whether it is float32 in two parts of more than 128 columns."""
        return self.parts(problem) == 2 and max(self.dims(problem)) > _NARROW

    def split_operand_bytes(self, problem: AttentionProblem, device: Device) -> int:
        """Bytes of all tiles split in advance."""
        block_n = self.tile(problem, device).block_n
        return self._num_split_tiles(problem, block_n) * split_tile_bytes(
            block_n, self.dims(problem), self.parts(problem)
        )

    def _num_split_tiles(self, problem, block_n):
        return self._num_kv_heads(problem) * -(-problem.seqlen_k // block_n)

    def _num_kv_heads(self, problem):
        """Heads of k over all batch entries; splits of the keys share them."""
        return math.prod(problem.batch) // num_splits(problem) * problem.num_kv_heads

    def smem(self, tile: MmaTile, problem: AttentionProblem) -> int:
        """Bytes of shared memory of a block."""
        staged = problem.dtype == "float32" and not self.is_prepared(problem)
        return smem_bytes(
            tile,
            self.dims(problem),
            self.parts(problem),
            staged,
            self.is_persistent(tile, problem),
        )

    def is_persistent(self, tile: MmaTile, problem: AttentionProblem) -> bool:
        """Whether a block has several tiles of queries.

        That balances blocks of different length; if all are alike, two blocks of a
        multiprocessor hide each other's start and end as well. Results are stored
        through shared memory while the next tiles load: through a buffer of their own,
        that of the weights, that of q, or a stage of k and v, of which the last two
        must be large enough. If warps share rows, an option would take 8 bytes of
        registers too many.
        """
        dim, dim_v = self.dims(problem)
        if tile.stages == 1:
            room = dim >= dim_v or tile.warps_per_row > 1 or keeps_q(tile, (dim, dim_v))
        else:
            stage = tile.block_n * (dim + dim_v)
            room = max(stage, tile.block_m * dim) >= tile.block_m * dim_v
        if tile.warps_per_row == 1:
            pays = problem.left is not None or problem.right is not None
        else:
            pays = is_plain(problem)
        return tile.persistent and pays and room

    def rounds(self, tile: MmaTile, problem: AttentionProblem, num_sms: int) -> int:
        """Tiles of queries per block, for the least total time."""
        if not self.is_persistent(tile, problem):
            return 1
        heads = num_heads(problem)
        tiles = -(-problem.seqlen_q // tile.block_m)
        if tile.warps_per_row > 1 and tiles > _MOST_TILES:
            return 1
        slots = num_sms * tile.min_blocks
        seen = most_seen(problem)
        if seen == problem.seqlen_k and (problem.left, problem.right) != (None, None):
            seen /= 2
        length = seen / tile.block_n + _END

        def time(rounds):
            waves = -(-tiles // rounds) * heads / slots
            # Short blocks fill the gaps that others leave in the last wave.
            waves = max(waves + 0.5, 1) if rounds == 1 else math.ceil(waves)
            return waves * (min(rounds, tiles) * length + _START)

        return min((1, 2), key=time)

    def is_aligned(self, problem: AttentionProblem) -> bool:
        """Whether rows of 16-bit inputs are known to be whole 16-byte chunks."""
        in_chunks = (problem.head_dim | problem.head_dim_v) % 8 == 0
        lengths = min(
            problem.seqlen_q, problem.seqlen_k
        )  # a single row may have any stride
        is_known = problem.dtype != "float32" and problem.no_tensor_map is None
        return in_chunks and lengths > 1 and is_known

    def dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """head_dim and head_dim_v as they are compiled."""
        return compiled_dims(problem, DIMS)

    def fitting(self, problem: AttentionProblem, device: Device) -> tuple[MmaTile, ...]:
        """The tiles that fit on `device`, with equal block_n and warps_per_row."""
        ladder = self.tiles[self._kind(problem), has_terms(problem)]
        tiles = [
            tile
            for tile in kernel.by_threshold(ladder, max(self.dims(problem)))
            if holds_blocks(device, tile.min_blocks, self.smem(tile, problem))
            and (not tile.only_plain or is_plain(problem))
            and tile.oldest <= device.cc <= tile.newest
            and self.dims(problem)[1] % (32 * tile.warps_per_row) == 0
        ]
        return tuple(
            tile
            for tile in tiles
            if (tile.block_n, tile.warps_per_row)
            == (tiles[0].block_n, tiles[0].warps_per_row)
        )

    def tile(self, problem: AttentionProblem, device: Device) -> MmaTile:
        """The best tile that still gives every multiprocessor work.

        Tiles with the same block_n and warps_per_row sum a row in the same order, so
        that its bits do not depend on the choice.
        """
        # A multiprocessor holds one block of a wide tile, whatever its size.
        fewest = device.num_sms // 2 + 1 if self.is_wide(problem) else device.num_sms
        return largest_tile(
            self.fitting(problem, device),
            num_heads(problem),
            problem.seqlen_q,
            lambda tile: fewest,
        )

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        """The launch, preceded by the one that splits keys in advance, if any."""
        tile = self.tile(problem, device)
        rounds = self.rounds(tile, problem, device.num_sms)
        config = self.config(tile, problem, batch_dims, rounds)
        if not self.is_prepared(problem):
            return (config,)
        return config, self.prepare_config(tile, problem, batch_dims)

    def _switches(self, tile, problem):
        dims = self.dims(problem)
        return {
            "HEAD_DIM": dims[0],
            "HEAD_DIM_V": dims[1],
            "BLOCK_N": tile.block_n,
            "PARTS": self.parts(problem),
        }

    def config(self, tile, problem, batch_dims, rounds=1) -> LaunchConfig:
        """The launch with a given tile, and tiles of queries per block."""
        switches = {
            **self._switches(tile, problem),
            "BLOCK_M": tile.block_m,
            "MIN_BLOCKS": tile.min_blocks,
            "STAGES": tile.stages,
        }
        switches |= if_on(
            WARPS_PER_ROW=tile.warps_per_row if tile.warps_per_row > 1 else 0,
            PERSISTENT=self.is_persistent(tile, problem),
            ALIGNED=self.is_aligned(problem),
            PREPARED=self.is_prepared(problem),
            SCALE_SCORES=not scale_is_plain(problem.scale),
        )
        switches |= two_level_sum(problem)
        variant = Variant(
            source="attention/sm80/forward.cu",
            entry=f"attention_{self.name}",
            defines=defines(problem, batch_dims, tile.num_threads, **switches),
            smem=self.smem(tile, problem),
            generated=problem.generated,
        )
        heads = num_heads(problem)
        num_blocks = -(-problem.seqlen_q // (tile.block_m * rounds))
        # Many heads are spread over the third axis as well.
        grid = num_blocks, min(heads, _GRID_Y), -(-heads // _GRID_Y)
        return LaunchConfig(variant, grid, (tile.num_threads,))

    def prepare_config(self, tile, problem, batch_dims) -> LaunchConfig:
        """The launch that splits keys and values; only lengths matter to it."""
        threads = _PREPARE_THREADS
        switches = {
            **self._switches(tile, problem),
            "BLOCK_M": threads // 2,  # for products, which it does not use
            "MIN_BLOCKS": 1,
        }
        return launch_config(
            replace(without_options(problem, "key_lengths"), keys_of_part=None),
            batch_dims,
            self._num_split_tiles(problem, tile.block_n),
            threads,
            "attention/sm80/split_fp32_kv.cu",
            f"attention_{self.name}_prepare",
            **switches,
        )

    def _kind(self, problem: AttentionProblem) -> str:
        """What is multiplied: the key of `tiles`."""
        if problem.dtype != "float32":
            return "float16"
        few = "" if self.is_prepared(problem) else " few"
        return problem.precision + few


_SMALL = MmaTile(64, 64, 128)

# float32 in two parts above 128 columns, split in advance: a block has no room for
# numbers that it would split itself. Not for sm_86, sm_89 and sm_120, where the last
# would fit at 192 columns: their CUDA cores are as fast as a third of tensor cores.
_WIDE = (
    MmaTile(128, 32, 256, newest=(8, 0)),
    MmaTile(96, 32, 192, newest=(8, 0)),
    MmaTile(64, 32, 128, newest=(8, 0)),
    MmaTile(128, 32, 256, oldest=(9, 0), newest=(11, 0)),
    MmaTile(64, 32, 128, oldest=(9, 0), newest=(11, 0)),
)

# float32 in two parts, by head dimension.
_TWO_PARTS: _Ladder = {
    64: (MmaTile(64, 64, 128, min_blocks=2), _SMALL),
    96: (MmaTile(128, 64, 256),),
    128: (
        MmaTile(128, 64, 256, newest=(9, 0)),
        MmaTile(128, 32, 256),
        MmaTile(64, 32, 128),
    ),
    256: _WIDE,
}
# The same with options, or if each block splits: both take registers.
_TWO_PARTS_AND_MORE: _Ladder = {
    64: (MmaTile(64, 64, 128, min_blocks=2), _SMALL),
    128: (MmaTile(64, 32, 128),),
    256: (),
}
_TWO_PARTS_AND_OPTIONS: _Ladder = {**_TWO_PARTS_AND_MORE, 256: _WIDE}
_ONE_PART: _Ladder = {
    64: (MmaTile(128, 64, 256), _SMALL),
    128: (MmaTile(128, 64, 256), _SMALL),
    256: (MmaTile(64, 32, 128),),
}

# 16 bits without options.
_HALVES: _Ladder = {
    64: (
        MmaTile(128, 64, 128, 1, 2, newest=(10, 9), persistent=True),
        MmaTile(128, 64, 128, 1, 2, only_plain=True),
        _SMALL,
    ),
    96: (MmaTile(128, 32, 128, 1, 2), MmaTile(64, 32, 128)),
    128: (
        MmaTile(128, 64, 128, 2, 2, only_plain=True, newest=(9, 0), persistent=True),
        MmaTile(128, 64, 128, 2, 2, only_plain=True),
        # It spills on sm_90 and sm_100.
        MmaTile(128, 64, 128, 1, 2, only_plain=True, newest=(8, 0), persistent=True),
        MmaTile(128, 64, 256),
        _SMALL,
    ),
    256: (
        MmaTile(128, 64, 256, 1, warps_per_row=2, newest=(9, 0), persistent=True),
        MmaTile(64, 64, 256, 1, warps_per_row=2, newest=(9, 0)),
        MmaTile(128, 64, 256),
        MmaTile(64, 64, 128, oldest=(9, 0)),
        MmaTile(64, 64, 128, only_plain=True),
        MmaTile(64, 32, 128),
    ),
}

MMA = MmaKernel(
    name="mma",
    # Tuned on an H200: docs/design/lab/0024-tiles-and-the-next-best.md.
    tiles={
        ("float16", False): _HALVES,
        ("float16", True): {
            64: (MmaTile(128, 64, 256, 2), _SMALL),
            128: (MmaTile(128, 64, 256), _SMALL),
            256: (MmaTile(64, 32, 128),),
        },
        ("float32", False): _TWO_PARTS,
        ("float32", True): _TWO_PARTS_AND_OPTIONS,
        ("float32 few", False): _TWO_PARTS_AND_MORE,
        ("float32 few", True): _TWO_PARTS_AND_MORE,
        ("tf32", False): {
            64: (MmaTile(128, 64, 128, 2, 2), _SMALL),
            # With one stage it would spill.
            128: (MmaTile(128, 64, 128, 2, 2), MmaTile(128, 64, 256), _SMALL),
            256: (MmaTile(64, 32, 128),),
        },
        **dict.fromkeys(
            (("tf32", True), ("tf32 few", False), ("tf32 few", True)), _ONE_PART
        ),
    },
)
