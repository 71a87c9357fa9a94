"""The table of gradient kernels of attention, and how each cuts a problem."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash import (
    _attention_hopper,
    _attention_rows,
    _attention_samples,
    _attention_vjp_f64,
    _attention_vjp_limits,
    _attention_vjp_wide,
    _kernels,
    _tensormap,
)
from cupyflash._attention_kernels import Tile, TileLadder, padded_dim
from cupyflash._attention_problem import AttentionProblem
from cupyflash._attention_rows import OPTIONS, Config
from cupyflash._attention_vjp_mma import MMA_VJP, MmaVjpKernel
from cupyflash._attention_vjp_mma_split import MMA_SPLIT_VJP, MmaSplitVjpKernel
from cupyflash._attention_vjp_problem import AttentionVjpProblem
from cupyflash._attention_vjp_wide import HopperWideVjpKernel
from cupyflash._kernels import CUDA_TYPES, ITEMSIZE, Device, Variant

# Widest chunk of columns that a block holds of a head.
_MAX_CHUNK = 128
_ROW_THREADS = 256
_SUM_THREADS = 256


# --- rows ----------------------------------------------------------------------------


def rows_in_shared(tile: Tile, chunk: int, itemsize: int, own_tiles: int) -> int:
    """Bytes for the owned tiles, one of the other rows, and one of P or dS."""

    def row(n):
        return (n * itemsize // 16 | 1) * 16

    rows = own_tiles * tile.block_m + tile.block_n
    return rows * row(chunk) + tile.block_m * row(tile.block_n)


@dataclass(frozen=True)
class VjpKernel:
    """Kernels that make the gradients with no scores in memory.

    One for delta, then one whose blocks own queries (dq), one whose blocks own keys (dk
    and dv), and one for dbias. `tiles` holds for each size of an accumulator the tiles
    for chunks of columns up to a bound, from large to small.
    """

    name: str
    rungs: tuple[str, ...]
    tiles: TileLadder
    fast: bool = False  # must not spill

    def refusal(self, problem: AttentionVjpProblem, device: Device) -> str | None:
        """Why these kernels cannot take `problem` on `device`, or None."""
        reason = _kernels.refuse_old_device(problem.forward.dtype, device)
        if reason is None and not self.fitting(problem.forward, device):
            reason = (
                f"head_dim {problem.forward.head_dim} in "
                f"{problem.forward.compute_dtype} needs more shared memory than the "
                f"{device.smem_optin} bytes that a block may have"
            )
        return reason

    def chunk(self, forward: AttentionProblem) -> tuple[int, bool]:
        """Columns that a block holds at a time, and whether they are all."""
        widest = max(forward.head_dim, forward.head_dim_v)
        return min(padded_dim(widest), _MAX_CHUNK), widest <= _MAX_CHUNK

    def fitting(self, forward: AttentionProblem, device: Device) -> tuple[Tile, ...]:
        """The tiles that fit on `device`."""
        itemsize = ITEMSIZE[forward.compute_dtype]
        chunk, single = self.chunk(forward)
        return tuple(
            tile
            for tile in _kernels.by_threshold(self.tiles[itemsize], chunk)
            if rows_in_shared(tile, chunk, itemsize, 1 + single) <= device.smem_optin
        )

    def tile(
        self, forward: AttentionProblem, device: Device, heads: int, seqlen: int
    ) -> Tile:
        """The largest tile whose blocks fill the device: `seqlen` rows of each head."""
        tiles = self.fitting(forward, device)
        return next(
            (
                tile
                for tile in tiles
                if heads * -(-seqlen // tile.block_m) >= 1.5 * device.num_sms
                and tile.block_m < 2 * seqlen
            ),
            tiles[-1],
        )

    def num_chunks(self, forward: AttentionProblem, dim: int) -> int:
        """Chunks of columns of a gradient, each made by a block of its own."""
        return -(-dim // self.chunk(forward)[0])

    def config(
        self,
        part: str,
        tile: Tile,
        forward: AttentionProblem,
        batch_dims: int,
        grad: str,
        num_blocks: int,
        **more,
    ) -> Config:
        """The launch of ``vjp_<part>.cu``; `grad` is the dtype that it writes."""
        chunk, single = self.chunk(forward)
        single = single and part != "bias"
        plain = _attention_rows.is_plain(forward)
        defines = _attention_rows.defines(
            forward,
            batch_dims,
            tile.num_threads,
            GRAD_T=CUDA_TYPES[grad],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            CHUNK=chunk,
            SINGLE=int(single),
            # Options take registers: under the cap a kernel would spill.
            MIN_BLOCKS=tile.min_blocks if plain else 1,
            **_attention_rows.runs(forward, part),
            **more,
        )
        itemsize = ITEMSIZE[forward.compute_dtype]
        variant = Variant(
            source=f"attention/vjp_{part}.cu",
            entry=f"attention_vjp_{part}",
            defines=defines,
            smem=rows_in_shared(tile, chunk, itemsize, 1 + single),
        )
        return Config(variant, num_blocks, tile.num_threads)


@dataclass(frozen=True)
class HopperVjpTile:
    """Queries of a block, blocks of a cluster, and how sums of dq leave.

    `cluster_alone` is for dk and dv alone, where dq has a kernel of its own. With
    `turns_from` tiles of keys a multiprocessor or more, an order of sums is kept by
    turns, else by that kernel: where all tiles of a head begin at one time, they wait
    for each other. A section of heads takes `cache_share` of the L2 cache, where sums
    have no order; with a `feeder` such sums are those of a kernel with a warpgroup for
    the copy engine.
    """

    block_m: int
    cluster: int = 1
    cluster_alone: int = 1
    turns_from: float = math.inf
    cache_share: float = _attention_vjp_limits.CACHE_SHARE
    feeder: bool = False


_HopperLadder = tuple[tuple[float, HopperVjpTile], ...]

# Keys of a tile, and threads of a block; queries of a tile that makes dq alone.
HOPPER_BLOCK_N = 128
HOPPER_TILE_M = 128
_HOPPER_THREADS = 256
_FEEDER_THREADS = 128  # more of them, where a warpgroup is for the copy engine
_HOPPER_STATIC = 5120  # bytes of shared memory beside tiles
# The fewest blocks of queries of a part of an item: two parts cost five more than one.
_LEAST_PART = 6

# How sums of dq come about: tiles of keys add to them in any order, or one after the
# other; or a kernel of its own makes them.
MIXED, TURNS, APART = "mixed", "turns", "apart"
_FED = "_fed"  # the part that is the main kernel with a feeder

# Entries whose gradients of k and v are summed by one block: kMaxSummed.
_HOPPER_SUMMED = 128

VJP_HOPPER_INPUTS = np.dtype(_attention_vjp_limits.INPUTS)


@dataclass(frozen=True)
class HopperVjpKernel:
    """Tensor cores fed by the copy engine, of 16-bit inputs on sm_90a.

    `tiles` holds for a head dimension as compiled two ladders, for queries that see all
    keys and for those that see a part: upper bounds of seqlen_q, and the tile up to
    there.
    """

    name: str
    rungs: tuple[str, ...]
    tiles: dict[int, tuple[_HopperLadder, _HopperLadder]]
    arch: str = "sm_90a"
    fast: bool = True

    def refusal(self, problem: AttentionVjpProblem, device: Device) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        forward = problem.forward
        largest = max(self.tiles)
        reason = _attention_vjp_limits.refusal(
            problem, device, self.arch, largest, _HOPPER_SUMMED
        )
        if reason is not None:
            return reason
        shared_q = _attention_vjp_limits.shared_axes(problem.q_shape, forward)
        if problem.deterministic and any(shared_q):
            return "adds to a dq that entries share in an order that differs"
        if (smem := self._smem(forward) + _HOPPER_STATIC) > device.smem_optin:
            return (
                f"needs {smem} bytes of shared memory, a block may have "
                f"{device.smem_optin}"
            )
        return None

    def dim(self, forward: AttentionProblem) -> int:
        """The head dimensions as they are compiled; zeros fill the rest."""
        widest = max(forward.head_dim, forward.head_dim_v)
        return min(n for n in self.tiles if n >= widest)

    def tile(self, forward: AttentionProblem, dq: str = MIXED) -> HopperVjpTile:
        """The tile measured best for a length."""
        ladder = self.tiles[self.dim(forward)][_attention_hopper.bounds_of(forward) > 0]
        tile = _kernels.by_threshold(ladder, forward.seqlen_q)
        if dq == TURNS:
            return HopperVjpTile(tile.block_m)
        if dq == APART:
            return HopperVjpTile(tile.block_m, cluster=tile.cluster_alone)
        return tile

    def dq_way(
        self, problem: AttentionVjpProblem, device: Device, num_kept: int
    ) -> str:
        """How sums of dq come about: MIXED, TURNS or APART."""
        if not problem.deterministic:
            return MIXED
        forward = problem.forward
        num_items = self.num_tiles(forward, TURNS) * num_kept
        least = self.tile(forward).turns_from * device.num_sms
        return TURNS if num_items >= least else APART

    @property
    def num_warps(self) -> int:
        """Of a block of the main kernel; each has its own part of a block of dq."""
        return _HOPPER_THREADS // 32

    def num_blocks(self, forward: AttentionProblem) -> int:
        """Blocks of queries of one entry."""
        return -(-forward.seqlen_q // self.tile(forward).block_m)

    def num_tiles(self, forward: AttentionProblem, dq: str) -> int:
        """Tiles of keys of one entry; those of a cluster are one."""
        cluster = self.tile(forward, dq).cluster
        return -(-forward.seqlen_k // (HOPPER_BLOCK_N * cluster))

    def _smem(self, forward, dq=MIXED):
        """Tiles of k and v, stages of q and dO, dS twice, statistics, and dq."""
        tile, row = self.tile(forward, dq), 2 * self.dim(forward)
        tiles = (2 * HOPPER_BLOCK_N + 5 * tile.block_m) * row
        ds = 2 * tile.block_m * HOPPER_BLOCK_N * 2
        # On their way to the copy engine: dq of a block.
        sums = 2 * tile.block_m * row if tile.feeder or dq == TURNS else 0
        return tiles + ds + 2 * 2 * tile.block_m * 4 + sums + 1024

    def config(
        self,
        part: str,
        forward: AttentionProblem,
        batch_dims: int,
        num_blocks: int,
        dq: str = MIXED,
    ) -> Config:
        """The launch of ``vjp_hopper<part>.cu``."""
        tile = self.tile(forward, dq)
        if not part and tile.feeder:
            part = _FED
        more = {"HEAD_DIM": self.dim(forward), "BLOCK_M": tile.block_m}
        num_threads, smem = _HOPPER_THREADS, 0
        if part in ("", _FED, "_queries"):
            more["BOUNDS"] = _attention_hopper.bounds_of(forward)
        if part == "_queries":
            num_threads += _FEEDER_THREADS
            rows = 2 * HOPPER_TILE_M + 2 * 2 * HOPPER_BLOCK_N
            smem = rows * 2 * self.dim(forward) + 1024
        elif part == _FED:
            num_threads += _FEEDER_THREADS
            smem = self._smem(forward, dq)
        elif not part:
            more |= {
                "CLUSTER": tile.cluster,
                "MAKES_DQ": int(dq != APART),
                "ORDERED": int(dq == TURNS),
            }
            smem = self._smem(forward, dq)
        defines = _attention_rows.defines(
            forward,
            batch_dims,
            num_threads,
            GRAD_T=CUDA_TYPES[forward.dtype],
            **more,
        )
        variant = Variant(
            source=f"attention/vjp_{self.name}{part}.cu",
            entry=f"attention_vjp_{self.name}{part}",
            defines=defines,
            arch=self.arch,
            smem=smem,
        )
        return Config(variant, num_blocks, num_threads)

    def schedule(
        self,
        forward: AttentionProblem,
        device: Device,
        num_kept: int,
        num_summed: int,
        dq: str,
    ) -> dict[str, Any]:
        """How the items are cut, and the units of exponents: fields of inputs_t."""
        num_tiles = self.num_tiles(forward, dq)
        num_items, num_blocks = num_tiles * num_kept, self.num_blocks(forward)
        num_split, first_part = self.split(
            forward, device, num_items, num_blocks * num_summed, dq
        )
        whole, pieces = self.cut(forward, device, num_items, dq)
        # Queries, dO and sums of dq of a section take a share of the L2 cache.
        row = 2 * (forward.head_dim + forward.head_dim_v) + 4 * self.dim(forward)
        row_bytes = forward.seqlen_q * row * num_summed
        share = self.tile(forward, dq).cache_share
        in_cache = _attention_vjp_limits.in_cache(device, row_bytes, share)
        if dq == TURNS:  # measured: half of that was as fast or faster in all cells
            in_cache = -(-in_cache // 2)
        to_log2, hidden = _attention_vjp_limits.units(forward)
        return {
            "num_items": whole + (num_items - whole) * pieces + num_split,
            "num_whole": whole,
            "num_pieces": pieces,
            "num_split": num_split,
            "first_part": first_part,
            "num_tiles": num_tiles,
            "num_blocks": num_blocks,
            "num_kept": num_kept,
            "num_summed": num_summed,
            "section": _attention_vjp_limits.section(num_kept, in_cache),
            "to_log2": to_log2,
            "hidden": hidden,
        }

    def split(
        self,
        forward: AttentionProblem,
        device: Device,
        num_items: int,
        num_blocks: int,
        dq: str,
    ) -> tuple[int, int]:
        """How many items are cut in two, and blocks of queries of the first part.

        Of equal items, of `num_blocks`, those that are left over when all
        multiprocessors have had as many.
        """
        if not self.tile(forward, dq).feeder or _attention_hopper.bounds_of(forward):
            return 0, 0
        left = num_items % device.num_sms
        # Second parts, so many for one multiprocessor, take as long as a first part.
        each = -(-left // (device.num_sms - left))
        first = -(-num_blocks * each // (each + 1))
        return (left, first) if num_blocks - first >= _LEAST_PART else (0, 0)

    def cut(
        self, forward: AttentionProblem, device: Device, num_items: int, dq: str
    ) -> tuple[int, int]:
        """How many items stay whole, and into how many pieces each other is cut.

        Those that are left when all multiprocessors have had as many as each other
        would keep few of them busy; where items have one length and no order.
        """
        bounds = _attention_hopper.bounds_of(forward)
        if dq != MIXED or bounds > 0 or self.tile(forward).block_m != 128:
            return num_items, 1
        left = num_items % device.num_sms
        pieces = min(device.num_sms // max(1, left), self.num_blocks(forward))
        return (num_items - left, pieces) if left and pieces > 1 else (num_items, 1)

    def grid(
        self, forward: AttentionProblem, device: Device, num_items: int, dq: str
    ) -> int:
        """Blocks of the main kernel: one a multiprocessor, in whole clusters."""
        cluster = self.tile(forward, dq).cluster
        return min(num_items, device.num_sms // cluster) * cluster


def rows_config(forward: AttentionProblem, batch_dims: int) -> Config:
    """The launch that makes delta, a warp a row."""
    # Of the options, only these two matter to it.
    absent: dict[str, Any] = {
        name: None for name in OPTIONS if name not in ("sinks", "query_lengths")
    }
    few = replace(forward, softcap=0.0, **absent)
    defines = _attention_rows.defines(
        few, batch_dims, _ROW_THREADS, GRAD_T=CUDA_TYPES[forward.dtype]
    )
    variant = Variant("attention/vjp_rows.cu", "attention_vjp_rows", defines)
    num_rows = math.prod(forward.batch) * forward.num_heads * forward.seqlen_q
    return Config(variant, -(-num_rows * 32 // _ROW_THREADS), _ROW_THREADS)


def sum_config(
    accum: str, grad: str, num_axes: int, num_sums: int, num_terms: int
) -> Config:
    """The launch that adds up terms."""
    # A block a sum pays where sums are few; else neighbours share cache lines.
    lanes = _SUM_THREADS if num_terms > num_sums else 1
    defines = {
        "ACCUM_T": CUDA_TYPES[accum],
        "GRAD_T": CUDA_TYPES[grad],
        "AXES": str(num_axes),
        "LANES": str(lanes),
        "NUM_THREADS": str(_SUM_THREADS),
    }
    variant = Variant(
        "attention/vjp_sum.cu", "attention_vjp_sum", tuple(defines.items())
    )
    return Config(variant, -(-num_sums * lanes // _SUM_THREADS), _SUM_THREADS)


ATTENTION_VJP_KERNELS = (  # best first
    HopperVjpKernel(
        name="hopper",
        rungs=("tiled", "auto"),
        tiles={
            64: (
                ((math.inf, HopperVjpTile(128, turns_from=3)),),
                (
                    (2048, HopperVjpTile(128, turns_from=8, cache_share=1 / 3)),
                    (math.inf, HopperVjpTile(128, turns_from=8)),
                ),
            ),
            128: (
                (
                    (
                        math.inf,
                        HopperVjpTile(64, cluster_alone=2, turns_from=3, feeder=True),
                    ),
                ),
                ((math.inf, HopperVjpTile(64, cache_share=1 / 3, feeder=True)),),
            ),
        },
    ),
    _attention_vjp_wide.HOPPER_WIDE_VJP,
    MMA_VJP,
    MMA_SPLIT_VJP,
    _attention_vjp_f64.TILED_F64_VJP,
    VjpKernel(
        name="tiled",
        rungs=("tiled", "auto"),
        fast=True,
        tiles={
            4: (
                (
                    64,
                    (
                        Tile(64, 64, 256),
                        Tile(32, 64, 128),
                        Tile(32, 32, 128),
                    ),
                ),
                (
                    128,
                    (
                        Tile(64, 64, 256),
                        Tile(32, 64, 128),
                        Tile(32, 32, 128),
                        Tile(16, 32, 128),
                    ),
                ),
            ),
            8: (
                (64, (Tile(32, 32, 128), Tile(16, 32, 128), Tile(16, 16, 128))),
                # 128 threads spill 124 bytes.
                (
                    128,
                    (
                        Tile(32, 32, 256),
                        Tile(16, 32, 128),
                        Tile(16, 16, 128),
                        Tile(8, 16, 128),
                    ),
                ),
            ),
        },
    ),
)


# What makes gradients again where those of a faster row are not finite.
REPAIRING = ATTENTION_VJP_KERNELS[-1]


# --- what there is to compile --------------------------------------------------------


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) of what `device` would compile: a selection, or all there is."""
    found: dict[tuple[str, Variant], None] = {}
    problems = (
        _attention_samples.everything()
        if everything
        else _attention_samples.representative()
    )
    for forward, batch_dims in problems:
        for row in ATTENTION_VJP_KERNELS:
            problem = AttentionVjpProblem(_as_tiles(forward), (), (), ())
            if row.refusal(problem, device) is not None:
                continue
            if isinstance(row, HopperVjpKernel):
                for config in _hopper_configs(row, forward, batch_dims, device):
                    found[row.name, config.variant] = None
                continue
            if isinstance(row, HopperWideVjpKernel):
                for config in _wide_configs(row, problem.forward, batch_dims, device):
                    found[row.name, config.variant] = None
                continue
            if isinstance(row, MmaVjpKernel):
                for config in _mma_configs(
                    row, forward, batch_dims, device, everything
                ):
                    found[row.name, config.variant] = None
                continue
            if isinstance(row, MmaSplitVjpKernel):
                for config in _split_configs(
                    row, forward, batch_dims, device, everything
                ):
                    found[row.name, config.variant] = None
                continue
            tiles = row.fitting(forward, device)
            if row is _attention_vjp_f64.TILED_F64_VJP:
                for tile in tiles if everything else tiles[:1]:
                    for config in _f64_configs(row, tile, forward, batch_dims, device):
                        found[row.name, config.variant] = None
                continue
            for tile in tiles if everything else tiles[:1]:
                for config in _configs(row, tile, forward, batch_dims, everything):
                    found[row.name, config.variant] = None
    for accum, grad in itertools.product(("float32", "float64"), ITEMSIZE):
        if _kernels.refuse_old_device(grad, device) is None:
            for num_sums in (1, 1000):
                config = sum_config(accum, grad, 4, num_sums, 100)
                found["sum", config.variant] = None
    return list(found)


def _hopper_configs(row, forward, batch_dims, device):
    """The launches of a problem, in lengths that bring all tiles."""
    if batch_dims > _tensormap.MAX_BATCH_AXES:
        return
    ladder = row.tiles[row.dim(forward)][_attention_hopper.bounds_of(forward) > 0]
    for bound, _ in ladder:
        longest = replace(forward, seqlen_q=min(bound, 1 << 14))
        for part in ("_rows", "", "_dq"):
            yield row.config(part, longest, batch_dims, 1)
        yield row.config("", longest, batch_dims, 1, TURNS)
        for part in ("", "_queries"):
            yield row.config(part, longest, batch_dims, 1, APART)
    yield from _repairs(forward, batch_dims, device)


def _as_tiles(forward):
    """A problem whose arrays the copy engine can read, if keys lie side by side."""
    return replace(forward, terms="tiles") if forward.terms == "unit" else forward


def _wide_configs(row, forward, batch_dims, device):
    """The launches of a problem of wide heads."""
    if batch_dims <= _tensormap.MAX_BATCH_AXES:
        yield from row.configs(forward, batch_dims)
        yield from _repairs(forward, batch_dims, device)


def _mma_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem by mma.sync."""
    yield from row.configs(forward, batch_dims, device, everything)
    yield from _repairs(forward, batch_dims, device)


def _split_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem of float32 by mma.sync."""
    yield from row.configs(forward, batch_dims, device, everything)
    yield rows_config(forward, batch_dims)
    yield from _repairs(forward, batch_dims, device, OWN_LSE=1)


def _repairs(forward, batch_dims, device, **of_queries):
    """The kernels that make gradients again where they are not finite."""
    tile = REPAIRING.tile(forward, device, 1000, 1000)
    for part in ("queries", "keys"):
        grad, more = forward.dtype, of_queries if part == "queries" else {}
        yield REPAIRING.config(
            part, tile, forward, batch_dims, grad, 1, REPAIRS=1, **more
        )


def _f64_configs(row, tile, forward, batch_dims, device):
    """The launches of a problem with a given tile; dbias is the portable row's."""
    portable = REPAIRING.tile(forward, device, 1000, 1000)
    yield rows_config(forward, batch_dims)
    for part in ("queries", "keys"):
        yield row.config(part, tile, forward, batch_dims, "float64", 1)
        yield REPAIRING.config(
            part, portable, forward, batch_dims, "float64", 1, REPAIRS=1
        )


def _configs(row, tile, forward, batch_dims, everything):
    """The launches of a problem with a given tile."""
    yield rows_config(forward, batch_dims)
    grads = {forward.dtype: None, forward.compute_dtype: None} if everything else ()
    for part in ("queries", "keys"):
        for grad in grads or (forward.dtype,):
            yield row.config(part, tile, forward, batch_dims, grad, 1)
    if forward.bias is not None:
        for sums in ((0, 0), (1, 0), (0, 1)) if everything else ((0, 0), (1, 0)):
            names = dict(zip(("SUM_QUERIES", "SUM_KEYS"), sums, strict=True))
            yield row.config(
                "bias", tile, forward, batch_dims, forward.bias, 1, **names
            )
