"""The kernel spec of float64 attention: tensor cores, and how it is launched."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu import mask_bits
from cupyflash._attention.gpu.spec import ForwardSpec, refuse_dtype
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig

# The most shared memory other than that of Tile.smem.
_STATIC_SMEM = 1024

# Keys of a split, and queries of a block, where the keys of few heads are split.
_LEAST_OF_SPLIT, _SMALLER_ROWS = 64, 64

# More options of scores than these take the registers of a tile with part of q in them.
_OPTIONS_BESIDE_Q = 3

# Queries of a warp: rows of a fragment.
WARP_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """Rows of q and of k that a block holds at a time, and how."""

    block_m: int
    block_n: int
    slots: int  # buffers for tiles of k and v
    sharers: int = 1  # warps that own WARP_ROWS rows together
    in_registers: int = 0  # steps of 16 columns of q that each warp keeps in registers
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    only_plain: bool = False  # score options would need too many registers
    if_others_spill: bool = False  # instead of those with 3 buffers
    if_held: bool = False  # where shared memory suffices for min_blocks

    @property
    def drifts(self) -> bool:
        """Whether warps need not be at the same tile of keys: with 3 buffers."""
        return self.slots > 2

    @property
    def num_threads(self) -> int:
        return 32 * self.sharers * self.block_m // WARP_ROWS

    def smem(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes for q, the buffers for tiles of k and v, and scores of two warps."""
        of_kv = self.slots * self.block_n * max(head_dim, head_dim_v)
        of_scores = 2 * self.block_m * self.block_n if self.sharers == 2 else 0
        dim_of_q = head_dim - 16 * self.sharers * self.in_registers
        return 8 * (self.block_m * dim_of_q + of_kv + of_scores)


def unsupported_reason(
    problem: AttentionProblem,
    device: Device,
    most: int,
    counts: dict[str, tuple[int, int]],
    tiles: Callable[[AttentionProblem, Device], tuple],
) -> str | None:
    """Why kernels for heads of up to `most` columns do not support `problem`, or None.

    `tiles` are those that fit on the device.
    """
    if reason := refuse_dtype(problem, "float64"):
        return reason
    if device.arch not in attention_config.FAST_FLOAT64:
        return f"{device.arch} has no fast tensor cores for float64"
    heads = f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v}"
    if max(problem.head_dim, problem.head_dim_v) > most:
        return f"{heads} are not both up to {most}"
    if reason := attention_config.too_many(counts):
        return reason
    if not tiles(problem, device):
        return (
            f"{heads} need more shared memory than the {device.smem_optin} bytes that "
            "a block may have"
        )
    return None


def _spills_drifting(problem: AttentionProblem, device: Device) -> bool:
    """Whether kernels with 3 buffers have too few registers."""
    if device.cc < (9, 0):
        return True
    is_crowded = problem.softcap > 0 and problem.alibi_slopes is not None
    return device.arch == "sm_100" and is_crowded


def _num_options(problem: AttentionProblem) -> int:
    """How many options of scores a kernel holds in registers, functions as one."""
    arrays = (getattr(problem, name) for name in attention_config.OPTIONS)
    others = problem.softcap > 0, problem.has_functions
    return sum(x is not None for x in arrays) + sum(others)


def _is_held(tile: Tile, dims: tuple[int, int], device: Device) -> bool:
    """Whether a multiprocessor holds `min_blocks` of them."""
    smem = tile.smem(*dims) + _STATIC_SMEM
    return attention_config.holds_blocks(device, tile.min_blocks, smem)


@dataclass(frozen=True, kw_only=True)
class TensorFloat64Kernel(ForwardSpec):
    """float64 tensor cores.

    `tiles` maps head dimensions up to a bound to tiles from large to small.
    """

    tiles: dict[float, tuple[Tile, ...]]
    dims: tuple[int, ...]  # head dimensions that are compiled; zeros pad
    most_alone: int  # the most columns of v for whose sums a warp has registers

    def unsupported_reason(self, problem, device) -> str | None:
        counts = self.counts(problem, device)
        return unsupported_reason(problem, device, self.dims[-1], counts, self._tiles)

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        return {"keys": (problem.seqlen_k, attention_config.MOST_COUNTED)}

    def _dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """head_dim and head_dim_v as they are compiled."""
        asked = problem.head_dim, problem.head_dim_v
        # Two warps that share rows halve the columns, in steps of 16.
        step = 32 if max(asked) > self.most_alone else 16
        dims = [n for n in self.dims if n % step == 0]
        dim, dim_v = (next(n for n in dims if n >= x) for x in asked)
        return dim, dim_v

    def _has_partial_rows(self, problem):
        """Whether rows end inside of a tile, or begin between vectors."""
        asked = problem.head_dim, problem.head_dim_v
        return self._dims(problem) != asked or problem.row_alignment % 16 != 0

    def _tiles(self, problem, device):
        """The tiles that fit on `device`, all with the block_n of the first."""
        dims, drifts = self._dims(problem), not _spills_drifting(problem, device)
        has_terms = attention_config.has_terms(mask_bits.without_bits(problem))
        is_crowded = _num_options(problem) > _OPTIONS_BESIDE_Q
        tiles = [
            tile
            for tile in kernel.by_threshold(self.tiles, max(dims))
            if tile.smem(*dims) + _STATIC_SMEM <= device.smem_optin
            and (drifts or not tile.drifts)
            and not (drifts and tile.if_others_spill)
            and not (tile.only_plain and has_terms)
            and not (tile.in_registers and is_crowded)
            and not (tile.if_held and not _is_held(tile, dims, device))
        ]
        return tuple(tile for tile in tiles if tile.block_n == tiles[0].block_n)

    def tile(self, problem: AttentionProblem, device: Device) -> Tile:
        """The largest tile that still gives every multiprocessor work.

        With split keys, it suffices that more than half of them have some, since there
        should not be more blocks than run at once.
        """
        share = 1 if problem.keys_of_part is None else 0.5
        return attention_config.largest_tile(
            self._tiles(problem, device),
            attention_config.num_heads(problem),
            problem.seqlen_q,
            lambda tile: share * device.num_sms * tile.min_blocks,
        )

    def split_kv(self, problem, device) -> attention_config.SplitKV:
        tiles = self._tiles(problem, device)
        tile = attention_config.largest_full(tiles, problem.seqlen_q)
        # A single warp has more.
        blocks = tile.min_blocks if tile.block_m > WARP_ROWS else 4
        split = attention_config.split_to_fill(problem, device, tile.block_m, blocks)
        # Smaller tiles of queries cost less than smaller splits, if they are enough.
        block_m = min(tile.block_m, _SMALLER_ROWS)
        num_blocks = split.num_splits * attention_config.num_tiles(problem, block_m)
        if split.num_splits == 1 or 2 * num_blocks > device.num_sms:
            return split
        return attention_config.split_to_fill(
            problem, device, tile.block_m, blocks, least=_LEAST_OF_SPLIT
        )

    def config(self, tile, problem, batch_dims) -> LaunchConfig:
        dims = self._dims(problem)
        switches: dict[str, Any] = {
            "HEAD_DIM": dims[0],
            "HEAD_DIM_V": dims[1],
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "SLOTS": tile.slots,
            "SHARERS": tile.sharers,
            "IN_REGISTERS": tile.in_registers,
            "MIN_BLOCKS": tile.min_blocks,
        }
        if not attention_config.scale_is_plain(problem.scale):
            switches["SCALE_SCORES"] = 1
        switches |= attention_config.if_on(PARTIAL_ROWS=self._has_partial_rows(problem))
        switches |= attention_config.two_level_sum(problem)
        switches |= mask_bits.switches(problem)
        return attention_config.launch_config(
            mask_bits.without_bits(problem),
            batch_dims,
            attention_config.num_tiles(problem, tile.block_m),
            tile.num_threads,
            "attention/fp64/forward.cu",
            f"attention_{self.name}",
            smem=tile.smem(*dims),
            **switches,
        )


TILED_F64 = TensorFloat64Kernel(
    name="tiled_f64",
    dims=(16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    most_alone=128,
    # Tuned on an H200: docs/design/lab/0024-tiles-and-the-next-best.md.
    tiles={
        64: (
            Tile(128, 64, 3, only_plain=True),
            Tile(64, 64, 2, min_blocks=2, only_plain=True),
            Tile(32, 64, 2, min_blocks=2, only_plain=True),
            Tile(16, 64, 2, only_plain=True),
            Tile(64, 32, 2, min_blocks=2),
            Tile(32, 32, 2, min_blocks=2),
            Tile(16, 32, 2),
        ),
        128: (
            Tile(128, 32, 3),
            Tile(64, 32, 3),
            Tile(64, 32, 2, if_others_spill=True),
            Tile(32, 32, 2, min_blocks=2, if_held=True),
            Tile(32, 32, 3),
            Tile(32, 32, 2, if_others_spill=True),
            Tile(16, 32, 2, min_blocks=2, if_held=True),
            Tile(16, 32, 3),
            Tile(16, 32, 2, if_others_spill=True),
        ),
        192: (
            Tile(64, 16, 3, sharers=2),
            Tile(32, 16, 3, sharers=2),
            Tile(16, 16, 3, sharers=2),
            Tile(64, 32, 2, sharers=2, if_others_spill=True),
            Tile(32, 32, 2, sharers=2, if_others_spill=True),
            Tile(16, 32, 2, sharers=2, if_others_spill=True),
        ),
        256: (
            Tile(64, 16, 3, sharers=2, in_registers=1),
            Tile(32, 16, 3, sharers=2),
            Tile(16, 16, 3, sharers=2),
            Tile(32, 16, 2, sharers=2, if_others_spill=True),
            Tile(16, 16, 2, sharers=2, if_others_spill=True),
        ),
    },
)


def representative(make: Any) -> Iterator[tuple[AttentionProblem, int]]:
    """Problems whose kernels differ; make(dtype, head_dim, **options) makes one."""
    few = {"batch": (128,)}
    for head_dim in (64, 96, 128, 192, 256):
        for options in (
            {},
            {"key_lengths": "int32", "sinks": "float64"},
            {"bias": "float64", "mask": "bool"},
            {"mask": "bool", "key_lengths": "int32"},  # as bits
            {"softcap": 30.0, "alibi_slopes": "float64"},
        ):
            asked = make("float64", head_dim, **options)
            yield asked, 1
            yield replace(asked, row_alignment=8), 1
            for queries in (16, 32) if 64 < head_dim <= 128 else ():
                yield replace(asked, seqlen_q=queries, **few), 1
    for head_dim in (48, 80, 112, 160, 224):
        yield make("float64", head_dim), 1
