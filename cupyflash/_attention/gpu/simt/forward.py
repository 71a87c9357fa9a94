"""Kernels of attention for any GPU: their tiles, and how they are launched."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cupyflash._attention.gpu.config import (
    SplitKV,
    is_plain,
    largest_full,
    largest_tile,
    launch_config,
    num_heads,
    num_rows,
    num_tiles,
    split_to_fill,
    too_many,
    two_level_sum,
    without_options,
)
from cupyflash._attention.gpu.spec import ForwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES, ITEMSIZE
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig


@dataclass(frozen=True)
class Tile:
    """Rows of q and of k that a thread block holds at a time, and columns of v."""

    block_m: int
    block_n: int
    num_threads: int
    block_dv: int | None = None  # None: all of them
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    only_plain: bool = False  # options would need too many registers


def padded_dim(head_dim: int) -> int:
    """`head_dim` as the tiled kernel is compiled for it; zeros pad."""
    step = 16 if head_dim <= 16 else 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step


def rows_in_shared(tile: Tile, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes for a tile of q, one of k or v, and one of p, each row padded."""

    def row(n):
        return (n * itemsize // 16 | 1) * 16

    kv = max(row(head_dim), row(head_dim_v))
    tile_q, tile_p = tile.block_m * row(head_dim), tile.block_m * row(tile.block_n)
    return tile_q + tile.block_n * kv + tile_p


def nothing_shared(tile: Tile, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """No shared memory."""
    return 0


# By the size of an accumulator and the largest head dimension: tiles, large to small.
TileLadder = dict[int, dict[float, tuple[Tile, ...]]]


@dataclass(frozen=True, kw_only=True)
class FusedKernel(ForwardSpec):
    """A kernel without scores in memory.

    The name is also the stem of ``cuda_src/attention/simt/<name>.cu`` and, after
    ``attention_``, its entry point. `tiles` maps the size of an accumulator to tiles
    for head dimensions up to a bound, from large to small.
    """

    tiles: TileLadder
    smem: Callable[[Tile, int, int, int], int] = nothing_shared
    dims_compiled: bool = False  # head_dim and head_dim_v are constants of the kernel

    def _dims(self, problem: AttentionProblem) -> tuple[int, int]:
        return padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)

    def _tiles(self, problem, device):
        """The tiles that fit on `device`, all with the block_n of the first."""
        dims = self._dims(problem)
        itemsize = ITEMSIZE[problem.compute_dtype]
        ladder = self.tiles[itemsize]
        if max(dims) > max(ladder):
            return ()
        tiles = [
            tile
            for tile in kernel.by_threshold(ladder, max(dims))
            if self.smem(tile, *dims, itemsize) <= device.smem_optin
            and (not tile.only_plain or is_plain(problem))
        ]
        return tuple(tile for tile in tiles if tile.block_n == tiles[0].block_n)

    def unsupported_reason(self, problem, device) -> str | None:
        reason = kernel.refuse_old_device(problem.dtype, device)
        if reason is None and not self._tiles(problem, device):
            reason = (
                f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} in "
                f"{problem.compute_dtype} need more shared memory than the "
                f"{device.smem_optin} bytes that a block may have"
            )
        return reason

    def tile(self, problem: AttentionProblem, device: Device) -> Tile:
        """The largest tile that still gives every multiprocessor work.

        Tiles with the same block_n sum a row in the same order, so that its bits do not
        depend on the choice. On an H200 (132 multiprocessors), the larger of two tiles
        is faster with 256 blocks, the smaller with 128.
        """
        return largest_tile(
            self._tiles(problem, device),
            num_heads(problem),
            problem.seqlen_q,
            lambda tile: 1.5 * device.num_sms,
        )

    def split_kv(self, problem, device) -> SplitKV:
        # Results of 16-bit splits would be rounded; a method shows only its own idea.
        may_split = problem.dtype in ("float32", "float64")
        if not may_split or problem.method == "online":
            return SplitKV(1, problem.seqlen_k)
        tile = largest_full(self._tiles(problem, device), problem.seqlen_q)
        return split_to_fill(problem, device, tile.block_m)

    def config(self, tile, problem, batch_dims) -> LaunchConfig:
        shape = {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **two_level_sum(problem),
        }
        num_blocks = num_tiles(problem, tile.block_m)
        dims = self._dims(problem)
        if self.dims_compiled:
            # Options take registers: with the limit a kernel would spill.
            shape["MIN_BLOCKS"] = tile.min_blocks if is_plain(problem) else 1
            shape |= {"HEAD_DIM": dims[0], "HEAD_DIM_V": dims[1]}
        if tile.block_dv is not None:
            shape["BLOCK_DV"] = tile.block_dv
            num_blocks *= -(-problem.head_dim_v // tile.block_dv)
        return launch_config(
            problem,
            batch_dims,
            num_blocks,
            tile.num_threads,
            f"attention/simt/{self.name}.cu",
            f"attention_{self.name}",
            smem=self.smem(tile, *dims, ITEMSIZE[problem.compute_dtype]),
            **shape,
        )


@dataclass(frozen=True, kw_only=True)
class UnfusedKernel(ForwardSpec):
    """Scores in memory: matmul, a kernel over their rows, matmul, a kernel for out.

    `in_input_dtype` keeps scores and P in the dtype of the input, otherwise they have
    that of the sums.
    """

    in_input_dtype: bool = False
    num_threads: int = 256
    fast: bool = False

    def unsupported_reason(self, problem, device) -> str | None:
        if problem.keys_of_part is not None:
            return "holds the scores of all keys at once"
        reason = kernel.refuse_old_device(problem.dtype, device)
        return reason or too_many(self.counts(problem, device))

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        most = (1 << 31) - 1  # of cuBLAS, by CuPy
        heads = math.prod(problem.batch) * problem.num_kv_heads
        return {
            "queries of a head of k": (problem.seqlen_q * problem.group_size, most),
            "keys": (problem.seqlen_k, most),
            "columns": (max(problem.head_dim, problem.head_dim_v), most),
            "heads of all batch entries": (heads, most),
        }

    def scores_dtype(self, problem: AttentionProblem) -> str:
        """dtype of S and P."""
        return problem.dtype if self.in_input_dtype else problem.compute_dtype

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        """The kernel after the first matmul and the one after the second."""
        elem = self.scores_dtype(problem)
        rounding = {"ROUND_STEPS": 1} if self.in_input_dtype else {}
        return (
            launch_config(
                problem,
                batch_dims,
                num_rows(problem),
                self.num_threads,
                f"attention/simt/{self.name}.cu",
                f"attention_{self.name}",
                elem=elem,
                **rounding,
            ),
            launch_config(
                without_options(problem),
                batch_dims,
                -(-num_rows(problem) * problem.head_dim_v // self.num_threads),
                self.num_threads,
                "attention/simt/values.cu",
                "attention_values",
                elem=elem,
                VALUE_T=CUDA_TYPES[problem.dtype],
            ),
        )


TILED = FusedKernel(
    name="tiled",
    smem=rows_in_shared,
    dims_compiled=True,
    # Tuned on an H200: docs/design/lab/0024-tiles-and-the-next-best.md.
    tiles={
        4: {
            64: (Tile(64, 64, 128, min_blocks=3), Tile(32, 64, 128), Tile(16, 64, 128)),
            128: (Tile(64, 64, 128), Tile(32, 64, 128), Tile(16, 64, 128)),
            256: (
                # With options it spills on sm_80.
                Tile(64, 64, 256, only_plain=True),
                # With options it spills.
                Tile(32, 64, 128, only_plain=True),
                Tile(32, 32, 128),
                Tile(16, 32, 128),
                Tile(16, 64, 128),
            ),
            512: (Tile(16, 32, 128), Tile(8, 16, 64)),
            768: (Tile(16, 16, 128), Tile(8, 16, 64)),
        },
        8: {
            64: (Tile(32, 32, 128, min_blocks=3), Tile(16, 32, 128)),
            128: (Tile(32, 32, 128), Tile(16, 32, 128), Tile(16, 16, 128)),
            256: (
                Tile(32, 32, 256),
                Tile(16, 32, 128),
                Tile(16, 16, 128),
                Tile(8, 16, 128),
            ),
            512: (Tile(8, 16, 128),),
        },
    },
)

_BY_COLUMNS: dict[float, tuple[Tile, ...]] = {
    32: (Tile(4, 1, 128, block_dv=32),),
    64: (Tile(4, 1, 128, block_dv=64),),
    128: (Tile(4, 1, 128, block_dv=128),),
    math.inf: (Tile(4, 1, 128, block_dv=256),),
}

# Also for problems that no tile can hold.
ONLINE = FusedKernel(
    name="online",
    methods=("online", "tiled", "auto"),
    fast=False,
    tiles={4: _BY_COLUMNS, 8: _BY_COLUMNS},
)

SAFE = UnfusedKernel(name="safe", methods=("safe",))

NAIVE = UnfusedKernel(name="naive", methods=("naive",), in_input_dtype=True)
