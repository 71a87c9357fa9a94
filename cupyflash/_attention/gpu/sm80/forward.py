"""The kernel spec of attention on tensor cores of sm_80 and newer."""

import math
from dataclasses import dataclass, replace

from cupyflash._attention.gpu.config import (
    MOST_KEYS,
    OPTIONS,
    SplitKV,
    defines,
    has_terms,
    is_plain,
    largest_tile,
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

# Head dimensions that are compiled; zeros fill the rest.
DIMS = (32, 64, 96, 128, 192, 256)

# Bytes behind the tiles: what tiles of float32 say of their numbers, and what a block
# keeps for its end.
_TILE_STATS = 128 + 384
# The same behind each tile that has been split beforehand.
_STATS_OF_SPLIT_TILE = 128
# Bytes of such tiles, of all keys, that are allowed a byte of out.
_MOST_SPLIT = 4
_PREPARE_THREADS = 256
# Shared memory of a multiprocessor that the system keeps for each block.
_RESERVED = 1024
# Tiles of queries that a block may take one after the other, and what they cost it
# beside those of keys that they see, in tiles of keys: the start of a block, and what
# each tile of queries adds.
_START, _END = 1.5, 1.5
# Up to so many tiles of queries a head: above, a head's keys want the cache for
# themselves at 256 columns (causal, 16384 keys: 349.5 with two tiles a block, 358.4
# with one).
_MOST_TILES = 64
# Keys from which splits pay, by as many splits, up to 4: below, to combine takes what
# they save (8 heads of 64 columns: 1024 x 1024 in 2 splits 53 us, whole 45).
_LEAST_SPLIT_KEYS = 4096
# Queries from which the row splits as many keys: 48 x 65536 of 128 columns
# 85 us, by "tiled" 138; of 32 83 and 94, of 16 80 and 80; 48 x 1024 51 and 42.
_LEAST_SPLIT_QUERIES = 32
# Queries of a group from which keys are made float16 beforehand, and bytes that may
# take: of 128 queries it takes as long, of 512 x 65536 232 us where each block splits
# them in 388.
_READERS = 256
_MOST_SPLIT_BYTES = 1 << 28
# Longest second axis of a grid that is used, and third one that there is.
_GRID_Y, _GRID_Z = 1 << 15, (1 << 16) - 1
# Positions are the sum of two such numbers and a tile.
_MOST_COUNTED = (1 << 29) - 1


@dataclass(frozen=True)
class MmaTile:
    """Queries and keys that a block holds, its threads, and tiles of k and v ahead."""

    block_m: int
    block_n: int
    num_threads: int
    stages: int = 1
    min_blocks: int = 1  # of a multiprocessor at once; caps the registers of a thread
    only_plain: bool = False  # options would need more registers than there are
    warps_per_row: int = 1  # warps that share rows (attention/sm80/shared_rows.cuh)
    persistent: bool = (
        False  # a block has several tiles of queries, if scores are plain
    )
    # Compute capabilities between which it does not spill.
    oldest: tuple[int, int] = (0, 0)
    newest: tuple[int, int] = (99, 0)


def split_tile_bytes(block_n: int, dims: tuple[int, int], parts: int) -> int:
    """Bytes of a tile of k and one of v that have been split."""
    return parts * block_n * 2 * sum(dims) + 2 * _STATS_OF_SPLIT_TILE


def keeps_q(tile: MmaTile, dims: tuple[int, int]) -> bool:
    """Whether queries lie in registers (kKeepQ of attention/sm80/forward_state.cuh)."""
    row_tiles = tile.block_m * tile.warps_per_row * 2 // tile.num_threads
    return max(dims) <= 64 and row_tiles * dims[0] <= 128


def smem_bytes(
    tile: MmaTile,
    dims: tuple[int, int],
    parts: int,
    staged: bool,
    persistent: bool = False,
) -> int:
    """Shared memory: 16-bit tiles, and float32 ones as they came."""
    stages = tile.stages * split_tile_bytes(tile.block_n, dims, parts)
    staging = 4 * tile.block_n * sum(dims) if staged else 0
    tiles = parts * tile.block_m * 2 * dims[0] + stages + staging
    out = tile.block_m * 2 * dims[1]  # of 16-bit results, in place of the tiles
    apart = tile.stages == tile.warps_per_row == 1 and keeps_q(tile, dims)
    if persistent and apart:  # they come meanwhile
        tiles, out = tiles + out, 0
    # Weights, and two words a row and side.
    row = 2 * 2 * tile.block_n + 16
    shared = tile.block_m * row if tile.warps_per_row > 1 else 0
    return max(tiles, out) + _TILE_STATS + shared


# Upper bound of the head dimensions, and tiles from best to least: the first that an
# architecture's shared memory holds min_blocks times is taken.
_Ladder = tuple[tuple[float, tuple[MmaTile, ...]], ...]


@dataclass(frozen=True)
class MmaKernel:
    """FlashAttention-2 by mma.sync, of 16-bit inputs or of float32 in parts.

    `tiles` holds a ladder by what is multiplied ("float16", "float32", "tf32"; "few"
    after the last two, where out is small beside the keys and each block splits them
    itself) and for scores with terms of their own (bias, mask, softcap, alibi), which
    need registers.
    """

    name: str
    methods: tuple[str, ...]
    tiles: dict[tuple[str, bool], _Ladder]
    # Queries, and keys, from which float32 pays for being split.
    least: int = 64
    fast: bool = True

    def unsupported_reason(
        self, problem: AttentionProblem, device: Device
    ) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        if device.cc < (8, 0):
            return f"needs sm_80 or newer, {device.name} is {device.arch}"
        if problem.dtype == "float64":
            return "takes float16, bfloat16 and float32, not float64"
        for name in ("head_dim", "head_dim_v"):
            if (n := getattr(problem, name)) > DIMS[-1]:
                return f"{name} {n} is above {DIMS[-1]}"
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

    def counts(
        self, problem: AttentionProblem, device: Device
    ) -> dict[str, tuple[int, int]]:
        """What is counted in 32 bits: how many there are, and how many there may be."""
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
        """float16 numbers that stand for one of the input."""
        both = problem.dtype == "float32" and problem.precision == "float32"
        return 2 if both else 1

    def split_kv(self, problem: AttentionProblem, device: Device) -> SplitKV:
        """The split of the keys: two blocks of 64 queries for each SM.

        16 bits have none: results of splits would be rounded.
        """
        tiles = max(1, num_tiles(problem, _SMALL.block_m))
        wanted = 2 * device.num_sms // tiles
        least_keys = _LEAST_SPLIT_KEYS // max(1, min(wanted, 4))
        if problem.precision == "tf32":  # twice as fast, with the same merge
            least_keys *= 2
        if problem.dtype != "float32" or most_seen(problem) < least_keys:
            return SplitKV(1, problem.seqlen_k)
        return split_to_fill(problem, device, _SMALL.block_m, 2)

    def is_prepared(self, problem: AttentionProblem) -> bool:
        """Whether another kernel splits the keys and values beforehand.

        Their parts are extra memory, which must not be more than out is, or, where keys
        are split, than a bound.
        """
        if problem.dtype != "float32":
            return False
        keys = self._num_kv_heads(problem) * problem.seqlen_k
        parts = keys * self.parts(problem) * 2 * sum(self.dims(problem))
        if problem.keys_of_part is not None:
            readers = problem.seqlen_q * problem.group_size
            return readers >= _READERS and parts <= _MOST_SPLIT_BYTES
        out = num_rows(problem) * problem.head_dim_v * 4
        return parts <= _MOST_SPLIT * out

    def split_operand_bytes(self, problem: AttentionProblem, device: Device) -> int:
        """Bytes of all split tiles."""
        block_n = self.tile(problem, device).block_n
        return self._num_split_tiles(problem, block_n) * split_tile_bytes(
            block_n, self.dims(problem), self.parts(problem)
        )

    def _num_split_tiles(self, problem, block_n):
        return self._num_kv_heads(problem) * -(-problem.seqlen_k // block_n)

    def _num_kv_heads(self, problem):
        """Over all batch entries; splits of the keys share them."""
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

        That levels blocks of unlike length; alike, two blocks of a multiprocessor hide
        each other's start and end as well. Results leave through shared memory while
        the next tiles come: through a place of their own, that of weights, that of q,
        or a stage of k and v, of which the last two have to be large enough. Where
        warps share rows, an option would take 8 bytes of registers too many.
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
        """Tiles of queries that a block takes, for the least time of all."""
        if not self.is_persistent(tile, problem):
            return 1
        heads = math.prod(problem.batch) * problem.num_heads
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
            # Short blocks fill what others leave of the last wave.
            waves = max(waves + 0.5, 1) if rounds == 1 else math.ceil(waves)
            return waves * (min(rounds, tiles) * length + _START)

        return min((1, 2), key=time)

    def is_aligned(self, problem: AttentionProblem) -> bool:
        """Whether rows of 16-bit inputs are known to be whole chunks of 16 bytes."""
        in_chunks = (problem.head_dim | problem.head_dim_v) % 8 == 0
        lengths = min(problem.seqlen_q, problem.seqlen_k)  # of one row, any stride
        is_known = problem.dtype != "float32" and problem.no_tensor_map is None
        return in_chunks and lengths > 1 and is_known

    def dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """head_dim and head_dim_v as they are compiled."""
        dim, dim_v = (
            next(n for n in DIMS if n >= wanted)
            for wanted in (problem.head_dim, problem.head_dim_v)
        )
        return dim, dim_v

    def fitting(self, problem: AttentionProblem, device: Device) -> tuple[MmaTile, ...]:
        """The tiles that `device` holds, alike in block_n and warps_per_row."""
        ladder = self.tiles[self._kind(problem), has_terms(problem)]
        whole = device.smem_optin + _RESERVED
        tiles = [
            tile
            for tile in kernel.by_threshold(ladder, max(self.dims(problem)))
            if tile.min_blocks * (self.smem(tile, problem) + _RESERVED) <= whole
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

        Tiles alike in these sum a row in the same order, so that its bits do
        not depend on the choice.
        """
        return largest_tile(
            self.fitting(problem, device),
            num_heads(problem),
            problem.seqlen_q,
            lambda tile: device.num_sms,
        )

    def configs(
        self, problem: AttentionProblem, batch_dims: int, device: Device
    ) -> tuple[LaunchConfig, ...]:
        """The launch, and where keys are split beforehand the one before it."""
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

    def config(
        self,
        tile: MmaTile,
        problem: AttentionProblem,
        batch_dims: int,
        rounds: int = 1,
    ) -> LaunchConfig:
        """The launch with a given tile, and tiles of queries a block."""
        switches = {
            **self._switches(tile, problem),
            "BLOCK_M": tile.block_m,
            "MIN_BLOCKS": tile.min_blocks,
            "STAGES": tile.stages,
        }
        if tile.warps_per_row > 1:
            switches["WARPS_PER_ROW"] = tile.warps_per_row
        if self.is_persistent(tile, problem):
            switches["PERSISTENT"] = 1
        if self.is_aligned(problem):
            switches["ALIGNED"] = 1
        if self.is_prepared(problem):
            switches["PREPARED"] = 1
        if not scale_is_plain(problem.scale):
            switches["SCALE_SCORES"] = 1
        switches |= two_level_sum(problem)
        variant = Variant(
            source="attention/sm80/forward.cu",
            entry=f"attention_{self.name}",
            defines=defines(problem, batch_dims, tile.num_threads, **switches),
            smem=self.smem(tile, problem),
            generated=problem.generated,
        )
        heads = math.prod(problem.batch) * problem.num_heads
        num_blocks = -(-problem.seqlen_q // (tile.block_m * rounds))
        # Heads once more along the third axis where they are many.
        grid = num_blocks, min(heads, _GRID_Y), -(-heads // _GRID_Y)
        return LaunchConfig(variant, grid, (tile.num_threads,))

    def prepare_config(
        self, tile: MmaTile, problem: AttentionProblem, batch_dims: int
    ) -> LaunchConfig:
        """The launch that splits keys and values; lengths alone matter to it."""
        threads = _PREPARE_THREADS
        switches = {
            **self._switches(tile, problem),
            "BLOCK_M": threads // 2,  # of the products, which are not here
            "MIN_BLOCKS": 1,
        }
        variant = Variant(
            source="attention/sm80/split_fp32_kv.cu",
            entry=f"attention_{self.name}_prepare",
            defines=defines(
                replace(without_options(problem, "key_lengths"), keys_of_part=None),
                batch_dims,
                threads,
                **switches,
            ),
        )
        return LaunchConfig.over(
            variant, self._num_split_tiles(problem, tile.block_n), threads
        )

    def _kind(self, problem: AttentionProblem) -> str:
        """What is multiplied."""
        if problem.dtype != "float32":
            return "float16"
        few = "" if self.is_prepared(problem) else " few"
        return problem.precision + few


_SMALL = MmaTile(64, 64, 128)

# float32 in two parts, by head dimension; above 128 a thread has too few registers.
_TWO_PARTS: _Ladder = (
    (64, (MmaTile(64, 64, 128, min_blocks=2), _SMALL)),
    (96, (MmaTile(128, 64, 256),)),
    (
        128,
        (
            MmaTile(128, 64, 256, newest=(9, 0)),
            MmaTile(128, 32, 256),
            MmaTile(64, 32, 128),
        ),
    ),
    (256, ()),
)
# The same with terms, or where each block splits: both take registers, too.
_TWO_PARTS_AND_MORE: _Ladder = (
    (64, (MmaTile(64, 64, 128, min_blocks=2), _SMALL)),
    (128, (MmaTile(64, 32, 128),)),
    (256, ()),
)
_ONE_PART: _Ladder = (
    (64, (MmaTile(128, 64, 256), _SMALL)),
    (128, (MmaTile(128, 64, 256), _SMALL)),
    (256, (MmaTile(64, 32, 128),)),
)

MMA = MmaKernel(
    name="mma",
    methods=("tiled", "auto"),
    # TFLOP/s on an H200 at 4 x 2048 / head_dim heads x 4096 beside the next best, full
    # attention (docs/design/lab/results/mma_h200.json; above 128 columns
    # attention_mma_lengths_h200.json).
    tiles={
        ("float16", False): (
            # 366.0; 3 blocks of 64 queries 296.4, one of 256 310.3
            (
                64,
                (
                    MmaTile(128, 64, 128, 1, 2, newest=(10, 9), persistent=True),
                    MmaTile(128, 64, 128, 1, 2, only_plain=True),
                    _SMALL,
                ),
            ),
            (96, (MmaTile(128, 32, 128, 1, 2), MmaTile(64, 32, 128))),
            (
                128,
                (
                    # 393.8; 32 keys 313.5
                    MmaTile(
                        128,
                        64,
                        128,
                        2,
                        2,
                        only_plain=True,
                        newest=(9, 0),
                        persistent=True,
                    ),
                    MmaTile(128, 64, 128, 2, 2, only_plain=True),
                    # 400.3, but spills on sm_90 and 100; one block of 256 queries 371.0
                    MmaTile(
                        128,
                        64,
                        128,
                        1,
                        2,
                        only_plain=True,
                        newest=(8, 0),
                        persistent=True,
                    ),
                    MmaTile(128, 64, 256),  # 264.3
                    _SMALL,
                ),
            ),
            (
                256,
                (
                    # 358.2
                    MmaTile(
                        128, 64, 256, 1, warps_per_row=2, newest=(9, 0), persistent=True
                    ),
                    MmaTile(64, 64, 256, 1, warps_per_row=2, newest=(9, 0)),
                    MmaTile(128, 64, 256),  # 314.5; 32 keys 252.8
                    MmaTile(64, 64, 128, oldest=(9, 0)),  # 226.1
                    MmaTile(64, 64, 128, only_plain=True),
                    MmaTile(64, 32, 128),
                ),
            ),
        ),
        ("float16", True): (
            (64, (MmaTile(128, 64, 256, 2), _SMALL)),
            (128, (MmaTile(128, 64, 256), _SMALL)),
            (256, (MmaTile(64, 32, 128),)),
        ),
        ("float32", False): _TWO_PARTS,
        **dict.fromkeys(
            (("float32", True), ("float32 few", False), ("float32 few", True)),
            _TWO_PARTS_AND_MORE,
        ),
        ("tf32", False): (
            (64, (MmaTile(128, 64, 128, 2, 2), _SMALL)),  # 228.0; one stage 220.7
            # One stage 260.3, but spills 8 bytes; 32 keys 236.2, 256 threads 213.9
            (128, (MmaTile(128, 64, 128, 2, 2), MmaTile(128, 64, 256), _SMALL)),
            (256, (MmaTile(64, 32, 128),)),
        ),
        **dict.fromkeys(
            (("tf32", True), ("tf32 few", False), ("tf32 few", True)), _ONE_PART
        ),
    },
)
