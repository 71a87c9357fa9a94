"""The kernel spec of float32 gradients on tensor cores of sm_80 and newer."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._attention.gpu import gradient_limits, mask_bits, spec
from cupyflash._attention.gpu.config import (
    has_terms,
    holds_blocks,
    launch_config,
    num_heads,
    num_rows,
    scale_is_plain,
    too_many,
    two_level_sum,
    without_options,
)
from cupyflash._attention.gpu.gradient_config import rows_config
from cupyflash._attention.gpu.sm80.backward import counted, too_large
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig

# Head dimensions that are compiled; zeros pad.
DIMS = (64, 128, 192, 256)

# kGranule, kBytesTileStats and kBytesStats of attention/sm80/fp32_backward.cuh.
_GRANULE, _TILE_STATS, _STATS = 32, 128, 384
_PREPARE_THREADS, _WARP = 128, 32
# Above, two warps share rows and exchange 16 x 32 sums (exchange_t).
_WIDE, _EXCHANGED = 128, 2 * 16 * _GRANULE * 4
_STATIC = 256  # bytes of static shared memory of a block, at most
# Parts are padded, and so are the results that they are compared with: to so many
# columns, and at most to so many times their own.
_LEAST_COLUMNS, _MOST_PADDED = 32, 8
# Blocks that leave multiprocessors idle share loops of so many granules or more, and
# each gets at least so many of them.
_LONG_LOOP, _LEAST_OF_LOOP = 16, 4


@dataclass(frozen=True)
class MmaSplitVjpTile:
    """Rows that a block owns, queries or keys, and its threads."""

    rows: int
    num_threads: int
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    stages: int = 2  # granules of the rows looped over, in shared memory
    apart: bool = False  # dk and dv in separate launches, for lack of registers
    oldest: tuple[int, int] = (8, 0)  # it spills on older compute capabilities
    spills_on: tuple[str, ...] = ()  # and on these architectures

    def smem(self, part: str, dim: int, parts: int) -> int:
        """Bytes of shared memory of a part."""
        num_tiles = 2 * self.rows // _GRANULE + 2 * self.stages
        stats = self.stages * _STATS if part == "_keys" else 0
        exchanged = self.num_threads // _WARP * _EXCHANGED if dim > _WIDE else 0
        return num_tiles * split_tile_bytes(dim, parts) + stats + exchanged

    def fits(self, part: str, dim: int, parts: int, device: Device) -> bool:
        """Whether a multiprocessor holds `min_blocks` blocks, and registers do."""
        smem = self.smem(part, dim, parts) + _STATIC
        runs = device.cc >= self.oldest and device.arch not in self.spills_on
        return runs and holds_blocks(device, self.min_blocks, smem)


def split_tile_bytes(dim: int, parts: int) -> int:
    """kBytesOperand of attention/sm80/fp32_backward.cuh."""
    return parts * _GRANULE * dim * 2 + _TILE_STATS


def _padded(numbers: int, columns: int) -> int:
    """How many numbers there are if rows of `columns` are padded as parts are."""
    least = min(_LEAST_COLUMNS, _MOST_PADDED * columns)
    return numbers // columns * max(columns, least)


def prepare_threads(dim: int) -> int:
    """Threads that split a granule: whole rows of it at a time."""
    return max(dim, _PREPARE_THREADS)


def granules(num_rows: int, dim: int) -> int:
    """granules_of() of attention/sm80/fp32_backward.cuh."""
    largest_tile = 64 if dim > _WIDE else 128
    return -(-num_rows // largest_tile) * (largest_tile // _GRANULE)


# Tiles by head dimension as compiled, from best to least: the first that fits is used.
_Tiles = dict[int, tuple[MmaSplitVjpTile, ...]]


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "_queries": "attention/sm80/fp32_backward_dq.cu",
    "_keys": "attention/sm80/fp32_backward_dkdv.cu",
    "_prepare": "attention/sm80/fp32_backward_split.cu",
    "_finish": "attention/sm80/fp32_backward_dq_finish.cu",
}


@dataclass(frozen=True, kw_only=True)
class MmaSplitVjpKernel(spec.BackwardSpec):
    """FlashAttention-2 gradients by mma.sync, for float32 as float16 parts.

    `tiles` belong to the kernels "_queries" and "_keys", without and with score options
    (bias, mask, softcap, alibi), which need registers, as long sums of wide heads do.
    """

    tiles: dict[tuple[str, bool], _Tiles]
    # Those of "_queries" for one granule of queries: larger ones are mostly padding.
    few_queries: _Tiles
    # The least queries and keys for which splitting float32 pays off, or the least of
    # the longer of the two.
    least: int = 64
    least_of_longer: int = 128
    # Allowed bytes of split k and v per byte of out, or of half of dk and dv if that
    # is more, with padded rows.
    most_split_bytes: float = 4

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        if reason := spec.refuse_mma(forward, device, ("float32",), DIMS[-1]):
            return reason
        shorter, longer = sorted((forward.seqlen_q, forward.seqlen_k))
        if shorter == 0:
            return "there are no queries or no keys"
        if shorter < self.least and longer < self.least_of_longer:
            return (
                f"splits float32 from {self.least} queries and keys on, or "
                f"{self.least_of_longer} of either"
            )
        if reason := too_many(self.counts(problem, device)):
            return reason
        keys = math.prod(forward.batch) * forward.num_kv_heads * forward.seqlen_k
        split_bytes = keys * self.parts(forward) * 2 * 2 * self.dim(forward)
        dim, dim_v = forward.head_dim, forward.head_dim_v
        of_keys = _padded(math.prod(problem.k_shape), dim)
        of_keys += _padded(math.prod(problem.v_shape), dim_v)
        of_queries = _padded(num_rows(forward) * dim_v, dim_v)
        numbers = max(of_queries, of_keys // 2)
        if split_bytes > self.most_split_bytes * 4 * numbers:
            return (
                f"keys in parts would take {split_bytes} bytes, much more than out "
                "or dk and dv"
            )
        if any(self.tile(part, forward, device) is None for part in _PARTS):
            return too_large(forward, device)
        return None

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        return counted(problem.forward)

    def parts(self, forward: AttentionProblem) -> int:
        """float16 numbers per number of the input."""
        return 2 if forward.precision == "float32" else 1

    def tile(
        self, part: str, forward: AttentionProblem, device: Device
    ) -> MmaSplitVjpTile | None:
        """The best tile of a kernel that fits on `device`."""
        dim, parts = self.dim(forward), self.parts(forward)
        tiles = self._tiles(part, forward)
        if part == "_queries" and forward.seqlen_q <= _GRANULE:
            tiles = (*self.few_queries[dim], *tiles)
        return next(
            (tile for tile in tiles if tile.fits(part, dim, parts, device)), None
        )

    def _tiles(self, part, forward):
        dim = self.dim(forward)
        is_long = dim > _WIDE and bool(two_level_sum(forward, part[1:]))
        return self.tiles[part, has_terms(forward) or is_long][dim]

    def num_splits(self, part, forward, device, blocks: int) -> int:
        """Blocks that share the loop of one of `blocks`."""
        tile = self.tile(part, forward, device)
        other = forward.seqlen_k if part == "_queries" else forward.seqlen_q
        loop = -(-other // _GRANULE)
        if tile is None or loop < _LONG_LOOP or 2 * blocks > device.num_sms:
            return 1
        resident = device.num_sms * tile.min_blocks
        return min(resident // blocks, loop // _LEAST_OF_LOOP)

    def blocks_of_finish(self, forward) -> int:
        """Blocks of an entry of the kernel that adds sums of splits: a warp a query."""
        return -(-forward.seqlen_q // _GRANULE) * _GRANULE * _WARP // _PREPARE_THREADS

    def config(
        self, part, tile, forward, batch_dims, grad, num_blocks, splits=1, **more
    ) -> LaunchConfig:
        """The launch of a part; `grad` is the dtype that it writes."""
        dim, parts = self.dim(forward), self.parts(forward)
        threads = prepare_threads(dim) if part == "_prepare" else _PREPARE_THREADS
        smem = 0
        switches: dict[str, Any] = {
            "BLOCK_M": _GRANULE,
            "BLOCK_N": _GRANULE,
            "STAGES": 1 if tile is None else tile.stages,
        }
        if tile is None:
            forward = without_options(forward, *_SEEN_BY[part])
        else:
            threads, smem = tile.num_threads, tile.smem(part, dim, parts)
            switches["BLOCK_M" if part == "_queries" else "BLOCK_N"] = tile.rows
            switches |= two_level_sum(forward, part[1:])
            switches |= mask_bits.switches(forward)
            forward = mask_bits.without_bits(forward)
        if not scale_is_plain(forward.scale):
            switches["SCALE_SCORES"] = 1
        if splits > 1:
            switches["LOOP_SPLITS"] = 1
        return launch_config(
            forward,
            batch_dims,
            num_blocks,
            threads,
            _SOURCES[part],
            f"attention_vjp_{self.name}{part}",
            smem=smem,
            GRAD_T=CUDA_TYPES[grad],
            HEAD_DIM=dim,
            PARTS=parts,
            MIN_BLOCKS=1 if tile is None else tile.min_blocks,
            **switches,
            **more,
        )

    def split_operands(self, forward: AttentionProblem) -> tuple[int, int]:
        """The number of split tiles of all inputs, and their bytes."""
        heads = num_heads(forward)
        heads_kv = math.prod(forward.batch) * forward.num_kv_heads
        dim = self.dim(forward)
        count = 2 * heads * granules(forward.seqlen_q, dim)
        count += 2 * heads_kv * granules(forward.seqlen_k, dim)
        return count, count * split_tile_bytes(dim, self.parts(forward))

    def stats_bytes(self, forward: AttentionProblem) -> int:
        """Bytes of the statistics of queries for the kernel of keys."""
        heads = num_heads(forward)
        return heads * granules(forward.seqlen_q, self.dim(forward)) * _STATS

    def section(self, part, forward, device, num_kept, num_summed) -> int:
        """Kept entries whose split tiles of the other rows fit into the L2 cache.

        If all tiles are alike, those of one entry follow each other.
        """
        if forward.left is None and forward.right is None:
            return 1
        other = forward.seqlen_k if part == "_queries" else forward.seqlen_q
        dim = self.dim(forward)
        tile_bytes = split_tile_bytes(dim, self.parts(forward))
        entry_bytes = 2 * granules(other, dim) * tile_bytes * num_summed
        return gradient_limits.section_in_cache(device, num_kept, entry_bytes)

    def configs(self, forward, batch_dims, device, everything):
        yield rows_config(forward, batch_dims)
        yield from mask_bits.configs(forward, batch_dims)
        for part, splits in (("_prepare", 1), ("_finish", 2)):
            yield self.config(part, None, forward, batch_dims, "float32", 1, splits)
        dim, parts = self.dim(forward), self.parts(forward)
        for part in _PARTS:
            tiles = self._tiles(part, forward)
            fitting = [x for x in tiles if x.fits(part, dim, parts, device)]
            if not everything:
                del fitting[1:]
            if part == "_queries":
                few = self.few_queries[dim]
                fitting += [x for x in few if x.fits(part, dim, parts, device)][:1]
            for tile, splits in itertools.product(fitting, (1, 2)):
                for names in made_by(part, tile):
                    yield self.config(
                        part, tile, forward, batch_dims, "float32", 1, splits,
                        **makes(part, names),
                    )  # fmt: skip


_PARTS = ("_queries", "_keys")
# The options that matter to the other kernels.
_SEEN_BY = {"_prepare": ("query_lengths", "key_lengths"), "_finish": ("sinks",)}


def made_by(part: str, tile: MmaSplitVjpTile) -> tuple[tuple[str, ...], ...]:
    """The gradients of each launch of a kernel."""
    if part == "_queries":
        return (("dq",),)
    return (("dk",), ("dv",)) if tile.apart else (("dk", "dv"),)


def makes(part: str, names: tuple[str, ...]) -> dict[str, int]:
    """The defines of a launch that computes `names`."""
    if part == "_queries":
        return {}
    return {"MAKES_DK": int("dk" in names), "MAKES_DV": int("dv" in names)}


# If a multiprocessor has little shared memory, one block with as many threads as
# registers allow; otherwise several blocks, which hide each other's barriers.
_QUERIES: _Tiles = {
    # Tuned on an H200: docs/design/lab/0024-tiles-and-the-next-best.md.
    64: (MmaSplitVjpTile(128, 128, min_blocks=2), MmaSplitVjpTile(128, 256)),
    128: (
        MmaSplitVjpTile(128, 256),
        MmaSplitVjpTile(64, 128),
        MmaSplitVjpTile(64, 128, stages=1),
    ),
}

# One stage, whose copies are hidden: its two operands come at different times.
_WIDE_FEW = (MmaSplitVjpTile(32, 128, stages=1),)
_WIDE_TILES = (MmaSplitVjpTile(64, 256, stages=1), *_WIDE_FEW)
_WIDE_APART = tuple(replace(tile, apart=True) for tile in _WIDE_TILES)
_QUERIES |= {192: _WIDE_TILES, 256: _WIDE_TILES}

MMA_SPLIT_VJP = MmaSplitVjpKernel(
    name="mma_split",
    dims=DIMS,
    few_queries={
        64: (MmaSplitVjpTile(32, 64, min_blocks=4), MmaSplitVjpTile(32, 64)),
        128: (MmaSplitVjpTile(32, 64, min_blocks=2), MmaSplitVjpTile(32, 64)),
        192: _WIDE_FEW,
        256: _WIDE_FEW,
    },
    tiles={
        ("_queries", False): _QUERIES,
        ("_queries", True): {
            64: (MmaSplitVjpTile(64, 128, min_blocks=2), MmaSplitVjpTile(128, 256)),
            128: _QUERIES[128],
            192: _WIDE_TILES,
            256: _WIDE_TILES,
        },
        ("_keys", False): {
            64: (
                MmaSplitVjpTile(64, 128, min_blocks=3, spills_on=("sm_100",)),
                MmaSplitVjpTile(64, 128, min_blocks=2),
                MmaSplitVjpTile(128, 256),
            ),
            128: (
                MmaSplitVjpTile(128, 256, oldest=(9, 0), spills_on=("sm_100",)),
                MmaSplitVjpTile(128, 256, apart=True),
                MmaSplitVjpTile(64, 128, apart=True),
                MmaSplitVjpTile(64, 128, stages=1, apart=True),
            ),
            192: _WIDE_TILES,
            256: _WIDE_TILES,
        },
        ("_keys", True): {
            64: (MmaSplitVjpTile(64, 128, min_blocks=2), MmaSplitVjpTile(128, 256)),
            128: (
                MmaSplitVjpTile(128, 256, apart=True),
                MmaSplitVjpTile(64, 128, apart=True),
                MmaSplitVjpTile(64, 128, stages=1, apart=True),
            ),
            192: _WIDE_TILES,
            256: _WIDE_APART,
        },
    },
)
