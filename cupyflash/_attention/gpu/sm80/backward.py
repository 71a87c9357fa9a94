"""The kernel spec of gradients on tensor cores of sm_80 and newer."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._attention.gpu import gradient_limits, spec
from cupyflash._attention.gpu.config import (
    MOST_KEYS,
    OPTIONS,
    has_terms,
    holds_blocks,
    launch_config,
    num_heads,
    scale_is_plain,
    too_many,
    without_options,
)
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

# Head dimensions that are compiled; zeros pad.
DIMS = (64, 128, 256)

# Positions are sums of two such numbers and a tile.
_MOST_COUNTED = (1 << 29) - 1
# Threads per block of the preprocess and postprocess kernels.
_ROW_THREADS = 256
_DQ_THREADS = 256
# Static shared memory of a block; that of dbias has a list of entries.
_STATIC, _STATIC_OF_BIAS = 512, 3072


def counted(forward: AttentionProblem) -> dict[str, tuple[int, int]]:
    """What kernels count in 32 bits: how many there are, and how many may be."""
    return {
        "queries": (forward.seqlen_q, _MOST_COUNTED),
        "keys": (forward.seqlen_k, _MOST_COUNTED),
        "heads of all batch entries": (num_heads(forward), (1 << 32) - 1),
    }


def too_large(forward: AttentionProblem, device: Device) -> str:
    """Why a problem is not supported if none of the tiles fits."""
    return (
        f"head_dim {forward.head_dim} needs more shared memory than the "
        f"{device.smem_optin} bytes that a block may have"
    )


@dataclass(frozen=True)
class MmaVjpTile:
    """Queries and keys of a tile, threads of a block, and how warps divide a tile.

    `warps_m` warps have the same keys, each a part of the queries.
    """

    block_m: int
    block_n: int
    num_threads: int
    warps_m: int = 1
    stages: int = 2
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    oldest: tuple[int, int] = (8, 0)  # it spills on older compute capabilities
    spills_on: tuple[str, ...] = ()  # and on these architectures

    def smem(self, part: str, dim: int) -> int:
        """Bytes of shared memory of a part."""
        m, n = self.block_m, self.block_n
        if part == "_bias":
            return 4 * dim * self.stages * (m + n)
        if part == "_queries":
            return 4 * dim * (m + self.stages * n)
        scores = 2 * m * n * (1 + (self.warps_m > 1))
        return 4 * dim * (n + self.stages * m) + scores + self.stages * 8 * m

    def fits(self, part: str, dim: int, device: Device) -> bool:
        """Whether a multiprocessor holds `min_blocks` blocks, and registers do."""
        smem = self.smem(part, dim)
        smem += _STATIC_OF_BIAS if part == "_bias" else _STATIC
        runs = device.cc >= self.oldest and device.arch not in self.spills_on
        return runs and holds_blocks(device, self.min_blocks, smem)


# Tiles by head dimension as compiled, from best to least: the first that fits is used.
_Tiles = dict[int, tuple[MmaVjpTile, ...]]


SCHEDULE = Struct(
    "schedule_t",
    "attention/sm80/backward.cu",
    (("index_t", "section"), ("index_t", "slot[kBatchDims]")),
)
FOUND = Struct(
    "found_t",
    "attention/sm80/backward.cuh",
    (
        ("int", "nonfinite"),
        ("unsigned", "largest"),
        ("int", "still_nonfinite", "unused"),
    ),
)


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "": "attention/sm80/backward.cu",
    "_queries": "attention/sm80/backward_dq.cu",
    "_bias": "attention/sm80/backward_dbias.cu",
    "_rows": "attention/sm80/backward_preprocess.cu",
    "_dq": "attention/sm80/backward_postprocess.cu",
}


@dataclass(frozen=True, kw_only=True)
class MmaVjpKernel(spec.BackwardSpec):
    """FlashAttention-2 gradients by mma.sync, for 16-bit inputs, with all options.

    `tiles` belong to the kernel whose blocks own keys, without and with score options
    (bias, mask, softcap, alibi), which need registers; `query_tiles` to the kernel that
    computes dq in a fixed order, `bias_tiles` to the one for dbias, without and with
    options other than the bias.
    """

    tiles: dict[bool, _Tiles]
    query_tiles: dict[bool, _Tiles]
    bias_tiles: dict[bool, _Tiles]

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        if reason := spec.refuse_mma(forward, device, spec.HALVES, DIMS[-1]):
            return reason
        if forward.seqlen_k == 0:
            return "there are no keys"
        terms = math.prod(forward.batch) * forward.group_size * forward.seqlen_q
        most = MOST_KEYS[forward.dtype]
        if max(forward.seqlen_k, terms // self._num_kept(problem)) > most:
            return f"sums in {forward.dtype} are exact enough up to {most} terms"
        if reason := too_many(self.counts(problem, device)):
            return reason
        if any(self.tile(part, forward, device) is None for part in ("", "_queries")):
            return too_large(forward, device)
        return None

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        return counted(problem.forward)

    def _num_kept(self, problem):
        """The least number of batch entries with keys or values of their own."""

        def entries(shape):
            return math.prod(shape[: max(0, len(shape) - 3)])

        return max(entries(problem.k_shape), entries(problem.v_shape), 1)

    def tile(
        self, part: str, forward: AttentionProblem, device: Device
    ) -> MmaVjpTile | None:
        """The best tile that fits on `device`."""
        ladder = self.query_tiles if part == "_queries" else self.tiles
        dim = self.dim(forward)
        tiles = ladder[has_terms(forward)]
        if part == "_bias":
            tiles = self.bias_tiles[_has_more(forward)]
        return next((tile for tile in tiles[dim] if tile.fits(part, dim, device)), None)

    def config(
        self, part, tile, forward, batch_dims, grad, num_blocks, **more
    ) -> LaunchConfig:
        """The launch of a part; `grad` is the dtype that it writes.

        `tile` belongs to ``attention/sm80/backward.cu``;
        ``attention/sm80/backward_dq.cu`` and ``attention/sm80/backward_dbias.cu`` have
        their own.
        """
        threads, smem = tile.num_threads, 0
        switches: dict[str, Any] = {}
        if part == "_rows":
            threads = _ROW_THREADS
            forward = without_options(forward, "sinks", "query_lengths")
        elif part == "_dq":
            threads = _DQ_THREADS
            forward = without_options(forward)
            switches["NUM_WARPS"] = tile.num_threads // 32
        else:
            smem = tile.smem(part, self.dim(forward))
            switches["STAGES"] = tile.stages
            if part != "_queries":
                switches["WARPS_M"] = tile.warps_m
            if not part:
                switches["NUM_WARPS"] = tile.num_threads // 32
        if not scale_is_plain(forward.scale):
            switches["SCALE_SCORES"] = 1
        return launch_config(
            forward,
            batch_dims,
            num_blocks,
            threads,
            _SOURCES[part],
            f"attention_vjp_{self.name}{part}",
            smem=smem,
            GRAD_T=CUDA_TYPES[grad],
            HEAD_DIM=self.dim(forward),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            MIN_BLOCKS=tile.min_blocks,
            **switches,
            **more,
        )

    def rows_blocks(self, forward: AttentionProblem, tile: MmaVjpTile) -> int:
        """Blocks of ``attention/sm80/backward_preprocess.cu``."""
        rows = _ROW_THREADS // (self.dim(forward) // 8)
        entries = num_heads(forward)
        return entries * -(-forward.seqlen_q // tile.block_m) * (tile.block_m // rows)

    def section(
        self, forward: AttentionProblem, device: Device, num_kept: int, num_summed: int
    ) -> int:
        """Kept entries whose queries, dO and sums of dq fit into the L2 cache together.

        If all tiles of keys are alike, those of one entry follow each other.
        """
        if forward.left is None and forward.right is None:
            return 1
        row = 2 * (forward.head_dim + forward.head_dim_v) + 4 * self.dim(forward)
        entry_bytes = forward.seqlen_q * row * num_summed
        return gradient_limits.section_in_cache(device, num_kept, entry_bytes)

    def configs(self, forward, batch_dims, device, everything):
        tile, own = (self.tile(part, forward, device) for part in ("", "_queries"))
        if tile is None or own is None:
            return
        grads = {forward.dtype: None, "float32": None} if everything else ()
        yield self.config("_rows", tile, forward, batch_dims, forward.dtype, 1)
        yield self.config("_dq", tile, forward, batch_dims, forward.dtype, 1)
        for grad in grads or (forward.dtype,):
            args = forward, batch_dims, grad, 1
            yield self.config("", tile, *args, MAKES_DQ=1)
            yield self.config("", tile, *args, MAKES_DQ=0)
            yield self.config("", tile, *args, MAKES_DQ=0, CAREFUL=1)
            stats = tile.block_m
            yield self.config("_queries", own, *args, STATS_M=stats)
            yield self.config("_queries", own, *args, STATS_M=stats, CAREFUL=1)
        if forward.bias is None:
            return
        bias = self.tile("_bias", forward, device)
        if bias is None:
            return
        is_alone = everything and not _has_more(forward)
        sums = ((0, 0), (1, 0), (0, 1)) if is_alone else ((0, 0),)
        dtypes = {forward.bias: None, "float32": None}
        for (queries, keys), grad in itertools.product(sums, dtypes):
            yield self.config(
                "_bias", bias, forward, batch_dims, grad, 1,
                SUM_QUERIES=queries, SUM_KEYS=keys,
            )  # fmt: skip


def _has_more(forward):
    """Whether scores have options other than a bias that take registers."""
    return (
        bool(forward.softcap)
        or forward.has_functions
        or any(
            getattr(forward, name) is not None
            for name in OPTIONS
            if name not in ("bias", "sinks")
        )
    )


_BIAS = MmaVjpTile(64, 64, 128, warps_m=2, stages=1)
_WIDE_BIAS = (
    MmaVjpTile(128, 64, 256, warps_m=4, stages=1),
    MmaVjpTile(32, 32, 32, stages=1),
)

MMA_VJP = MmaVjpKernel(
    name="mma",
    dims=DIMS,
    tiles={
        False: {
            64: (
                MmaVjpTile(32, 128, 128, min_blocks=2, spills_on=("sm_100",)),
                MmaVjpTile(64, 128, 256, warps_m=2),
            ),
            128: (MmaVjpTile(64, 128, 256, warps_m=2), MmaVjpTile(32, 64, 128)),
            256: (
                MmaVjpTile(64, 64, 256, warps_m=4),
                MmaVjpTile(64, 64, 256, warps_m=4, stages=1),
                MmaVjpTile(32, 32, 128, warps_m=2, stages=1),
            ),
        },
        True: {
            64: (MmaVjpTile(64, 128, 256, warps_m=2),),
            128: (
                MmaVjpTile(
                    32, 128, 256, warps_m=2, oldest=(9, 0), spills_on=("sm_100",)
                ),
                MmaVjpTile(64, 64, 256, warps_m=2),
                MmaVjpTile(32, 64, 256, warps_m=2),
            ),
            256: (
                MmaVjpTile(32, 64, 256, warps_m=2),
                MmaVjpTile(32, 32, 128, warps_m=2, stages=1),
            ),
        },
    },
    query_tiles={
        False: {
            64: (MmaVjpTile(64, 64, 128, min_blocks=2),),
            128: (MmaVjpTile(64, 64, 128, min_blocks=2), MmaVjpTile(64, 32, 128)),
            256: (MmaVjpTile(64, 32, 128), MmaVjpTile(64, 32, 128, stages=1)),
        },
        True: {
            64: (MmaVjpTile(64, 64, 128, min_blocks=2),),
            128: (
                MmaVjpTile(64, 64, 128, min_blocks=2, spills_on=("sm_100",)),
                MmaVjpTile(64, 32, 128),
            ),
            256: (
                MmaVjpTile(64, 32, 128, oldest=(9, 0), spills_on=("sm_100",)),
                MmaVjpTile(64, 16, 128),
            ),
        },
    },
    bias_tiles={
        False: {
            64: (replace(_BIAS, stages=2, min_blocks=3, spills_on=("sm_100",)), _BIAS),
            128: (replace(_BIAS, min_blocks=3, spills_on=("sm_100",)), _BIAS),
            256: _WIDE_BIAS,
        },
        True: {64: (_BIAS,), 128: (_BIAS,), 256: _WIDE_BIAS},
    },
)
