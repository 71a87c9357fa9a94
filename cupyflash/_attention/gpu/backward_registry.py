"""The table of gradient kernels of attention, and how each cuts a problem."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cupyflash import _attention_rows, _attention_samples, _kernels, _tensormap
from cupyflash._attention_kernels import Tile, TileLadder, padded_dim
from cupyflash._attention_problem import AttentionProblem
from cupyflash._attention_rows import Config
from cupyflash._attention_vjp_f64 import TILED_F64_VJP, TensorFloat64VjpKernel
from cupyflash._attention_vjp_hopper import HOPPER_VJP, HopperVjpKernel
from cupyflash._attention_vjp_mma import MMA_VJP, MmaVjpKernel
from cupyflash._attention_vjp_mma_split import MMA_SPLIT_VJP, MmaSplitVjpKernel
from cupyflash._attention_vjp_problem import AttentionVjpProblem
from cupyflash._attention_vjp_wide import HOPPER_WIDE_VJP, HopperWideVjpKernel
from cupyflash._kernels import CUDA_TYPES, ITEMSIZE, Device, Variant

# Widest chunk of columns that a block holds of a head.
_MAX_CHUNK = 128
_ROW_THREADS = 256
_SUM_THREADS = 256
_NARROW_THREADS = 256
_WORDS = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


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
        return _attention_rows.largest_tile(
            tiles, heads, seqlen, lambda tile: 1.5 * device.num_sms
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
        if max(forward.head_dim, forward.head_dim_v) > _attention_rows.MAX_ONE_SUM:
            more["SUMS_APART"] = 1
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


def rows_config(forward: AttentionProblem, batch_dims: int) -> Config:
    """The launch that makes delta, a warp a row."""
    # Of the options, only these two matter to it.
    few = _attention_rows.without_options(forward, "sinks", "query_lengths")
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


def blocks_of_narrow(num_bytes: int) -> int:
    """Blocks that take one result from rows of whole vectors."""
    return -(-num_bytes // (16 * _NARROW_THREADS))


def narrow_config(word: int, num_blocks: int) -> Config:
    """The launch that takes results from such rows, by words of so many bytes."""
    defines = {"WORD_T": _WORDS[word], "NUM_THREADS": str(_NARROW_THREADS)}
    variant = Variant("attention/narrow.cu", "attention_narrow", tuple(defines.items()))
    return Config(variant, num_blocks, _NARROW_THREADS)


ATTENTION_VJP_KERNELS = (  # best first
    HOPPER_VJP,
    HOPPER_WIDE_VJP,
    MMA_VJP,
    MMA_SPLIT_VJP,
    TILED_F64_VJP,
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
            if row.refusal(problem, device) is None:
                of_row = _CONFIGS[type(row)]
                asked = problem.forward, batch_dims, device, everything
                for config in of_row(row, *asked):
                    found[row.name, config.variant] = None
    for accum, grad in itertools.product(("float32", "float64"), ITEMSIZE):
        if _kernels.refuse_old_device(grad, device) is None:
            for num_sums in (1, 1000):
                config = sum_config(accum, grad, 4, num_sums, 100)
                found["sum", config.variant] = None
    if f"{device.arch}a" == HOPPER_VJP.arch:
        for word in _WORDS:
            found["narrow", narrow_config(word, 1).variant] = None
    return list(found)


def _as_tiles(forward):
    """A problem whose arrays the copy engine can read, if keys lie side by side."""
    return replace(forward, terms="tiles") if forward.terms == "unit" else forward


def _mapped_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem by a row of sm_90a."""
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


def _f64_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem of float64; dbias is the portable row's."""
    for tile in _some(row.fitting(forward, device), everything):
        yield rows_config(forward, batch_dims)
        for part in ("queries", "keys"):
            yield row.config(part, tile, forward, batch_dims, "float64", 1)
        yield from _repairs(forward, batch_dims, device)


def _portable_configs(row, forward, batch_dims, device, everything):
    """The launches of a problem by the portable row."""
    grads = {forward.dtype: None, forward.compute_dtype: None} if everything else ()
    for tile in _some(row.fitting(forward, device), everything):
        yield rows_config(forward, batch_dims)
        for part in ("queries", "keys"):
            for grad in grads or (forward.dtype,):
                yield row.config(part, tile, forward, batch_dims, grad, 1)
        if forward.bias is not None:
            for sums in ((0, 0), (1, 0), (0, 1)) if everything else ((0, 0), (1, 0)):
                names = dict(zip(("SUM_QUERIES", "SUM_KEYS"), sums, strict=True))
                yield row.config(
                    "bias", tile, forward, batch_dims, forward.bias, 1, **names
                )


def _some(tiles, everything):
    """All tiles, or the first."""
    return tiles if everything else tiles[:1]


_CONFIGS: dict[type, Callable[..., Iterator[Config]]] = {
    HopperVjpKernel: _mapped_configs,
    HopperWideVjpKernel: _mapped_configs,
    MmaVjpKernel: _mma_configs,
    MmaSplitVjpKernel: _split_configs,
    TensorFloat64VjpKernel: _f64_configs,
    VjpKernel: _portable_configs,
}
