"""The gradient row of attention for sm_90a: tensor cores and TMA."""

import math
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._attention.gpu import gradient_limits, mask_bits
from cupyflash._attention.gpu.config import is_plain, launch_config
from cupyflash._attention.gpu.sm90 import forward as sm90_forward
from cupyflash._attention.gpu.spec import BackwardSpec, refuse_smem
from cupyflash._attention.gpu.tile_lists import TileLists
from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.tensor_map import MAX_BATCH_AXES

# Keys of a tile, threads of a block, and those of the main kernel, which has a producer
# warpgroup.
BLOCK_N = 128
_THREADS, _MAIN_THREADS = 256, 384
NUM_WARPS = _THREADS // 32  # each owns a part of the gradients of a tile
_STATIC_BYTES = 8192  # bytes of shared memory other than tiles
# Tiles of keys that are left over are cut where that saves this many blocks of queries,
# into at most this many parts, which the last to finish reads one after the other.
_LEAST_SAVED, _MOST_PARTS = 6, 8

# The most entries whose gradients of k and v one block sums: kMaxSummed.
_MOST_SUMMED = 128

# The file of each kernel, below cuda_src/.
_SOURCES = {
    "": "attention/sm90/backward.cu",
    "_rows": "attention/sm90/backward_preprocess.cu",
    "_dq": "attention/sm90/backward_postprocess.cu",
}


# Queries from which blocks that wait for each other take whole sections of heads.
_LONG_ORDERED = 2048


def _bounds_of(forward):
    """BOUNDS of the kernels; with a mask function, tiles differ as with a bound.

    Those that store dq need the registers of whole tiles for the bits of a mask.
    """
    varies = forward.mask_function is not None
    varies |= forward.mask is not None and forward.seqlen_k <= BLOCK_N
    return max(sm90_forward.bounds_of(forward), int(varies))


@dataclass(frozen=True, kw_only=True)
class HopperVjpKernel(BackwardSpec):
    """wgmma and TMA, for 16-bit inputs on sm_90a.

    If sums of dq have no order, a section of
    heads takes `cache_share` of the L2 cache where queries see a part of the keys, up
    to a number of queries for each head dimension.
    """

    cache_share: float
    cache_share_up_to: dict[int, float]
    arch: str = "sm_90a"

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        largest = max(self.dims)
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
        return refuse_smem(self._smem(forward) + _STATIC_BYTES, device)

    def _has_option_alone(self, problem: AttentionVjpProblem) -> bool:
        """Whether alibi or a mask is alone, and the kernel applies it."""
        forward = problem.forward
        others = (
            replace(forward, alibi_slopes=None),
            replace(forward, mask=None),
            replace(forward, mask_function=None),
        )
        if problem.deterministic or not any(map(is_plain, others)):
            return False
        return max(forward.head_dim, forward.head_dim_v) <= max(self.dims)

    def block_m(self, forward: AttentionProblem) -> int:
        """Queries of a block: twice as many if sums have half the columns."""
        return 64 * 128 // self.dim(forward)

    def tile_lists(self, forward: AttentionProblem) -> TileLists:
        """Lists of the blocks of queries that a mask function shows to each tile.

        Each warpgroup has half of a tile of keys.
        """
        return TileLists(BLOCK_N // 2, 2, self.block_m(forward), transposed=True)

    def num_blocks(self, forward: AttentionProblem) -> int:
        """Blocks of queries per entry."""
        return -(-forward.seqlen_q // self.block_m(forward))

    def num_tiles(self, forward: AttentionProblem) -> int:
        """Tiles of keys per entry."""
        return -(-forward.seqlen_k // BLOCK_N)

    def _smem(self, forward):
        """Bytes of k, v, q, dO, two buffers of dS, statistics, dq, bits of a mask."""
        block_m, row = self.block_m(forward), 2 * self.dim(forward)
        tiles = (2 * BLOCK_N + 5 * block_m) * row
        ds = 2 * block_m * BLOCK_N * 2
        words = 0 if forward.mask is None else 2 * block_m // 64 * 1024
        return tiles + ds + 2 * 2 * block_m * 4 + 2 * block_m * row + words + 1024

    def visits_all(self, forward: AttentionProblem) -> bool:
        """Whether each block of queries meets keys, where these fit one tile."""
        if self.num_blocks(forward) == 1 or not _bounds_of(forward):
            return True
        first = forward.query_offset
        if forward.mask_function is not None or not isinstance(first, int):
            return False
        last = first + forward.seqlen_q - 1
        left = math.inf if forward.left is None else forward.left
        right = math.inf if forward.right is None else forward.right
        return first + right >= 0 and last - left < forward.seqlen_k

    def config(
        self, part, forward, batch_dims, num_blocks, ordered=False, stores_dq=False
    ) -> LaunchConfig:
        """The launch of a part; with `stores_dq`, the main one needs no sums."""
        more = {"HEAD_DIM": self.dim(forward), "BLOCK_M": self.block_m(forward)}
        num_threads, smem = _THREADS, 0
        if part == "_rows":
            more |= gradient_limits.rows_defines(forward)
        if not part:
            bounds = max(_bounds_of(forward), stores_dq and forward.mask is not None)
            more |= {"BOUNDS": int(bounds), "ORDERED": int(ordered)}
            more |= {"STORES_DQ": 1} if stores_dq else {}
            more |= {"MASK_WORDS": 1} if forward.mask is not None else {}
            num_threads, smem = _MAIN_THREADS, self._smem(forward)
        else:  # these see no scores, or none with options
            forward = replace(
                forward, alibi_slopes=None, mask_function=None, generated=""
            )
        forward = replace(forward, mask=None)  # it comes as bits
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
        self, forward, device, num_kept, num_summed, ordered
    ) -> dict[str, Any]:
        """How work tiles are divided, and units of exponents: fields of inputs_t."""
        num_tiles = self.num_tiles(forward)
        num_work_tiles, num_blocks = num_tiles * num_kept, self.num_blocks(forward)
        num_split, part_blocks, num_parts = self.split(
            forward, device, num_work_tiles, num_blocks * num_summed, ordered
        )
        # Queries, dO and sums of dq of a section take a share of the L2 cache.
        row = 2 * (forward.head_dim + forward.head_dim_v) + 4 * self.dim(forward)
        row_bytes = forward.seqlen_q * row * num_summed
        up_to = self.cache_share_up_to[self.dim(forward)]
        share = gradient_limits.CACHE_SHARE
        if not ordered and _bounds_of(forward) and forward.seqlen_q <= up_to:
            share = self.cache_share
        in_cache = gradient_limits.in_cache(device, row_bytes, share)
        if not ordered and num_blocks == 1:
            # Bounds make no tile longer than others: all of an entry follow each other,
            # as without bounds, and add to sums that are still in the cache.
            in_cache = 1
        # Blocks that wait for each other: half of that is faster, but for long heads
        # with bounds, where more heads leave less to wait for.
        is_long = _bounds_of(forward) and forward.seqlen_q >= _LONG_ORDERED
        if ordered and in_cache < num_kept and not is_long:
            in_cache = -(-in_cache // 2)
        to_log2, hidden = gradient_limits.units(forward)
        return {
            "num_work_tiles": num_work_tiles + num_split * (num_parts - 1),
            "num_split": num_split,
            "part_blocks": part_blocks,
            "num_parts": num_parts,
            "num_tiles": num_tiles,
            "num_blocks": num_blocks,
            "num_kept": num_kept,
            "num_summed": num_summed,
            "section": gradient_limits.section(num_kept, in_cache),
            "to_log2": to_log2,
            "hidden": hidden,
        }

    def split(
        self, forward, device, num_work_tiles, num_blocks, ordered
    ) -> tuple[int, int, int]:
        """Work tiles that are cut, blocks of queries of a part, and parts of each.

        Of equal work tiles with `num_blocks` each, these are the ones left over when
        every multiprocessor has had the same number.
        """
        left = num_work_tiles % device.num_sms
        if left == 0 or ordered or _bounds_of(forward):
            return 0, 0, 1
        # A part for each multiprocessor; or a second part that is shorter, so that
        # several of them take as long as a first one.
        parts = min(device.num_sms // left, num_blocks // 2, _MOST_PARTS)
        if parts > 1:
            part_blocks = -(-num_blocks // parts)
        else:
            seconds = -(-left // (device.num_sms - left))  # per multiprocessor left
            part_blocks = -(-num_blocks * seconds // (seconds + 1))
        if num_blocks - part_blocks < _LEAST_SAVED:
            return 0, 0, 1
        return left, part_blocks, -(-num_blocks // part_blocks)

    def configs(self, forward, batch_dims, device, everything):
        if batch_dims > MAX_BATCH_AXES:
            return
        for part in ("_rows", "", "_dq"):
            yield self.config(part, forward, batch_dims, 1)
        yield self.config("", forward, batch_dims, 1, stores_dq=True)
        if forward.mask is not None:
            yield mask_bits.words_config(batch_dims)
        if forward.mask_function is not None:
            yield self.tile_lists(forward).config(forward, batch_dims)
        if is_plain(forward):
            yield self.config("", forward, batch_dims, 1, ordered=True)


HOPPER_VJP = HopperVjpKernel(
    name="hopper",
    dims=(64, 128),
    cache_share=1 / 3,
    cache_share_up_to={64: 2048, 128: math.inf},
)
