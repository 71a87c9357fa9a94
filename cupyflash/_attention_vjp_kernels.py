"""The table of gradient kernels of attention, and how each cuts a problem."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from cupyflash import _attention_kernels, _kernels
from cupyflash._attention_kernels import OPTIONS, Config, Tile, TileLadder, padded_dim
from cupyflash._attention_problem import AttentionProblem
from cupyflash._attention_vjp_problem import AttentionVjpProblem
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
        plain = _attention_kernels._is_plain(forward)
        defines = _attention_kernels._defines(
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


def rows_config(forward: AttentionProblem, batch_dims: int) -> Config:
    """The launch that makes delta, a warp a row."""
    # Of the options, only these two matter to it.
    absent: dict[str, Any] = {
        name: None for name in OPTIONS if name not in ("sinks", "query_lengths")
    }
    few = replace(forward, softcap=0.0, **absent)
    defines = _attention_kernels._defines(
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


# --- what there is to compile --------------------------------------------------------


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) of what `device` would compile: a selection, or all there is."""
    found: dict[tuple[str, Variant], None] = {}
    problems = (
        _attention_kernels._everything()
        if everything
        else _attention_kernels._representative()
    )
    for forward, batch_dims in problems:
        for row in ATTENTION_VJP_KERNELS:
            problem = AttentionVjpProblem(forward, (), (), ())
            if row.refusal(problem, device) is not None:
                continue
            tiles = row.fitting(forward, device)
            for tile in tiles if everything else tiles[:1]:
                for config in _configs(row, tile, forward, batch_dims, everything):
                    found[row.name, config.variant] = None
    for accum, grad in itertools.product(("float32", "float64"), ITEMSIZE):
        if _kernels.refuse_old_device(grad, device) is None:
            for num_sums in (1, 1000):
                config = sum_config(accum, grad, 4, num_sums, 100)
                found["sum", config.variant] = None
    return list(found)


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
