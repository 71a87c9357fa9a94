"""The gradient row of attention for sm_90a: tensor cores and TMA."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._attention.gpu import gradient_limits
from cupyflash._attention.gpu.config import compiled_dims, is_plain, launch_config
from cupyflash._attention.gpu.sm90 import forward as sm90_forward
from cupyflash._attention.gpu.tile_lists import TileLists
from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct


@dataclass(frozen=True)
class HopperVjpTile:
    """Queries of a block.

    A section of heads takes `cache_share` of the L2 cache if sums have no order.
    """

    block_m: int
    cache_share: float = gradient_limits.CACHE_SHARE


_Ladder = tuple[tuple[float, HopperVjpTile], ...]

# Keys of a tile, and threads of a block.
BLOCK_N = 128
_THREADS = 256
NUM_WARPS = _THREADS // 32  # each owns a part of a block of dq
_PRODUCER_THREADS = 128  # more of them, for a producer warpgroup
_STATIC_BYTES = 8192  # bytes of shared memory other than tiles
# The fewest blocks of queries of a part of a tile: two parts cost five more than one.
_LEAST_PART = 6

_PRODUCER = "_producer"  # the main kernel with a producer warpgroup

# The most entries whose gradients of k and v one block sums: kMaxSummed.
_MOST_SUMMED = 128

ROWS = Struct(
    "rows_t",
    "attention/sm90/backward.cuh",
    (("int", "head", "batch[2]", "block"),),
    alignment=16,
)
LOCATED = Struct(
    "located_t",
    "attention/sm90/backward.cuh",
    ((ROWS, "q", "dout", "k", "v"), ("index_t", "dk", "dv")),
)
CUT = Struct(
    "cut_t",
    "attention/sm90/backward_postprocess.cu",
    (
        ("const float*", "pieces"),
        ("elem_t*", "dk", "dv"),
        ("int", "num_work_tiles", "num_pieces", "first_work_tile", "num_tiles"),
    ),
)


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "": "attention/sm90/backward.cu",
    "_producer": "attention/sm90/backward_producer.cu",
    "_rows": "attention/sm90/backward_preprocess.cu",
    "_dq": "attention/sm90/backward_postprocess.cu",
}


def _bounds_of(forward):
    """BOUNDS of the kernels; with a mask function, tiles differ as with a bound."""
    varies = forward.mask_function is not None
    return max(sm90_forward.bounds_of(forward), int(varies))


@dataclass(frozen=True)
class HopperVjpKernel:
    """wgmma and TMA, for 16-bit inputs on sm_90a.

    `tiles` maps a head dimension as compiled to two ladders, for queries that see all
    keys and for those that see a part: upper bounds of seqlen_q, and the tile up to
    there.
    """

    name: str
    methods: tuple[str, ...]
    tiles: dict[int, tuple[_Ladder, _Ladder]]
    arch: str = "sm_90a"
    fast: bool = True

    def unsupported_reason(
        self, problem: AttentionVjpProblem, device: Device
    ) -> str | None:
        """Why this kernel does not support `problem` on `device`, or None."""
        forward = problem.forward
        largest = max(self.tiles)
        reason = gradient_limits.unsupported_reason(
            problem,
            device,
            self.arch,
            largest,
            _MOST_SUMMED,
            takes_options=self._has_option_alone(problem),
        )
        if reason is not None:
            return reason
        shared_q = gradient_limits.shared_axes(problem.q_shape, forward)
        if problem.deterministic and any(shared_q):
            return "would add to a shared dq in an order that varies"
        if (smem := self._smem(forward) + _STATIC_BYTES) > device.smem_optin:
            return (
                f"needs {smem} bytes of shared memory, a block may have "
                f"{device.smem_optin}"
            )
        return None

    def _has_option_alone(self, problem: AttentionVjpProblem) -> bool:
        """Whether alibi, or a mask function, is alone, and the kernel applies it."""
        forward = problem.forward
        others = (
            replace(forward, alibi_slopes=None),
            replace(forward, mask_function=None),
        )
        if problem.deterministic or not any(map(is_plain, others)):
            return False
        return max(forward.head_dim, forward.head_dim_v) <= max(self.tiles)

    def dim(self, forward: AttentionProblem) -> int:
        """The head dimension as it is compiled; zeros pad."""
        return max(compiled_dims(forward, self.tiles))

    def tile(self, forward: AttentionProblem) -> HopperVjpTile:
        """The tile measured best for a length."""
        ladder = self.tiles[self.dim(forward)][_bounds_of(forward) > 0]
        return kernel.by_threshold(ladder, forward.seqlen_q)

    def has_producer(self, forward: AttentionProblem, ordered: bool = False) -> bool:
        """Whether the main kernel has a producer warpgroup."""
        return self.dim(forward) == 128 or ordered or not is_plain(forward)

    def tile_lists(self, forward: AttentionProblem) -> TileLists:
        """Lists of the blocks of queries that a mask function shows to each tile.

        Each warpgroup has half of a tile of keys.
        """
        block_m = self.tile(forward).block_m
        return TileLists(BLOCK_N // 2, 2, block_m, transposed=True)

    def num_blocks(self, forward: AttentionProblem) -> int:
        """Blocks of queries per entry."""
        return -(-forward.seqlen_q // self.tile(forward).block_m)

    def num_tiles(self, forward: AttentionProblem) -> int:
        """Tiles of keys per entry."""
        return -(-forward.seqlen_k // BLOCK_N)

    def _smem(self, forward, ordered=False):
        """Bytes of k, v, stages of q and dO, two buffers of dS, statistics, and dq."""
        block_m, row = self.tile(forward).block_m, 2 * self.dim(forward)
        tiles = (2 * BLOCK_N + 5 * block_m) * row
        ds = 2 * block_m * BLOCK_N * 2
        # Staging for TMA: dq of a block.
        sums = 2 * block_m * row if self.has_producer(forward, ordered) else 0
        return tiles + ds + 2 * 2 * block_m * 4 + sums + 1024

    def config(
        self,
        part: str,
        forward: AttentionProblem,
        batch_dims: int,
        num_blocks: int,
        ordered: bool = False,
    ) -> LaunchConfig:
        """The launch of a part."""
        more = {
            "HEAD_DIM": self.dim(forward),
            "BLOCK_M": self.tile(forward).block_m,
        }
        num_threads, smem = _THREADS, 0
        if part == "_rows":
            more |= gradient_limits.rows_defines(forward)
        if not part:
            more["BOUNDS"] = _bounds_of(forward)
            smem = self._smem(forward, ordered)
            if self.has_producer(forward, ordered):
                part = _PRODUCER
                more["ORDERED"] = int(ordered)
                num_threads += _PRODUCER_THREADS
        if part != _PRODUCER:  # the others see no scores, or none with options
            forward = replace(
                forward, alibi_slopes=None, mask_function=None, generated=""
            )
        return launch_config(
            forward,
            batch_dims,
            num_blocks,
            num_threads,
            _SOURCES[part],
            f"attention_vjp_{self.name}{part}",
            arch=self.arch,
            smem=smem,
            GRAD_T=CUDA_TYPES[forward.dtype],
            **more,
        )

    def schedule(
        self,
        forward: AttentionProblem,
        device: Device,
        num_kept: int,
        num_summed: int,
        ordered: bool,
    ) -> dict[str, Any]:
        """How work tiles are divided, and units of exponents: fields of inputs_t."""
        num_tiles = self.num_tiles(forward)
        num_work_tiles, num_blocks = num_tiles * num_kept, self.num_blocks(forward)
        num_split, first_part = self.split(
            forward, device, num_work_tiles, num_blocks * num_summed, ordered
        )
        whole, pieces = self.cut(forward, device, num_work_tiles, ordered)
        # Queries, dO and sums of dq of a section take a share of the L2 cache.
        row = 2 * (forward.head_dim + forward.head_dim_v) + 4 * self.dim(forward)
        row_bytes = forward.seqlen_q * row * num_summed
        share = self.tile(forward).cache_share
        if ordered:
            share = gradient_limits.CACHE_SHARE
        in_cache = gradient_limits.in_cache(device, row_bytes, share)
        if ordered:  # measured: half of that was at least as fast
            in_cache = -(-in_cache // 2)
        to_log2, hidden = gradient_limits.units(forward)
        return {
            "num_work_tiles": whole + (num_work_tiles - whole) * pieces + num_split,
            "num_whole": whole,
            "num_pieces": pieces,
            "num_split": num_split,
            "first_part": first_part,
            "num_tiles": num_tiles,
            "num_blocks": num_blocks,
            "num_kept": num_kept,
            "num_summed": num_summed,
            "section": gradient_limits.section(num_kept, in_cache),
            "to_log2": to_log2,
            "hidden": hidden,
        }

    def split(
        self,
        forward: AttentionProblem,
        device: Device,
        num_work_tiles: int,
        num_blocks: int,
        ordered: bool,
    ) -> tuple[int, int]:
        """How many work tiles are cut in two, and blocks of queries of the first half.

        Of equal work tiles with `num_blocks` each, these are the ones left over when
        every multiprocessor has had the same number.
        """
        if not self.has_producer(forward) or _bounds_of(forward) or ordered:
            return 0, 0
        left = num_work_tiles % device.num_sms
        # Second halves, this many per multiprocessor, take as long as a first half.
        each = -(-left // (device.num_sms - left))
        first = -(-num_blocks * each // (each + 1))
        return (left, first) if num_blocks - first >= _LEAST_PART else (0, 0)

    def cut(
        self,
        forward: AttentionProblem,
        device: Device,
        num_work_tiles: int,
        ordered: bool,
    ) -> tuple[int, int]:
        """How many work tiles stay whole, and into how many pieces others are cut.

        Those left over when every multiprocessor has had the same number would occupy
        few of them; only if work tiles have the same length and no order.
        """
        if ordered or _bounds_of(forward) or self.has_producer(forward):
            return num_work_tiles, 1
        left = num_work_tiles % device.num_sms
        pieces = min(device.num_sms // max(1, left), self.num_blocks(forward))
        return (
            (num_work_tiles - left, pieces)
            if left and pieces > 1
            else (num_work_tiles, 1)
        )

    def configs(
        self, forward: AttentionProblem, batch_dims: int
    ) -> Iterator[LaunchConfig]:
        """Every launch except the fallbacks, for lengths that reach all tiles."""
        ladder = self.tiles[self.dim(forward)][_bounds_of(forward) > 0]
        for bound, _ in ladder:
            longest = replace(forward, seqlen_q=int(min(bound, 1 << 14)))
            for part in ("_rows", "", "_dq"):
                yield self.config(part, longest, batch_dims, 1)
            if forward.mask_function is not None:
                yield self.tile_lists(forward).config(forward, batch_dims)
            if not is_plain(forward):
                continue
            yield self.config("", longest, batch_dims, 1, ordered=True)


HOPPER_VJP = HopperVjpKernel(
    name="hopper",
    methods=("tiled", "auto"),
    tiles={
        64: (
            ((math.inf, HopperVjpTile(128)),),
            (
                (2048, HopperVjpTile(128, cache_share=1 / 3)),
                (math.inf, HopperVjpTile(128)),
            ),
        ),
        128: (
            ((math.inf, HopperVjpTile(64)),),
            ((math.inf, HopperVjpTile(64, cache_share=1 / 3)),),
        ),
    },
)
