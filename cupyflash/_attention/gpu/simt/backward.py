"""Gradient kernels for any GPU: their tiles, and how they are launched."""

import itertools
from dataclasses import dataclass

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.gradient_config import rows_config
from cupyflash._attention.gpu.simt.forward import Tile, TileLadder, padded_dim
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES, ITEMSIZE
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig

# The widest chunk of columns of a head that a block holds.
_MAX_CHUNK = 128


def rows_in_shared(tile: Tile, chunk: int, itemsize: int, own_tiles: int) -> int:
    """Bytes for the owned tiles, one of the other rows, and one of P or dS."""

    def row(n):
        return (n * itemsize // 16 | 1) * 16

    rows = own_tiles * tile.block_m + tile.block_n
    return rows * row(chunk) + tile.block_m * row(tile.block_n)


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "queries": "attention/simt/backward_dq.cu",
    "keys": "attention/simt/backward_dkdv.cu",
    "bias": "attention/simt/backward_dbias.cu",
    "dscore": "attention/simt/backward_dscore.cu",
    "sinks": "attention/simt/backward_dsinks.cu",
}


@dataclass(frozen=True, kw_only=True)
class VjpKernel(BackwardSpec):
    """Kernels that compute gradients without scores in memory.

    One for delta, then one whose blocks own queries (dq), one whose blocks own keys (dk
    and dv), one for dbias, and one for terms of dsinks that `out` has lost. `tiles`
    maps the size of an accumulator to tiles for chunks of columns up to a bound, from
    large to small.
    """

    tiles: TileLadder

    def unsupported_reason(self, problem, device) -> str | None:
        reason = kernel.refuse_old_device(problem.forward.dtype, device)
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
            for tile in kernel.by_threshold(self.tiles[itemsize], chunk)
            if rows_in_shared(tile, chunk, itemsize, 1 + single) <= device.smem_optin
        )

    def tile(
        self, forward: AttentionProblem, device: Device, heads: int, seqlen: int
    ) -> Tile:
        """The largest tile whose blocks fill the device; `seqlen` rows of each head."""
        tiles = self.fitting(forward, device)
        return attention_config.largest_tile(
            tiles, heads, seqlen, lambda tile: 1.5 * device.num_sms
        )

    def num_chunks(self, forward: AttentionProblem, dim: int) -> int:
        """Chunks of columns of a gradient, each computed by a block of its own."""
        return -(-dim // self.chunk(forward)[0])

    def config(
        self, part, tile, forward, batch_dims, grad, num_blocks, **more
    ) -> LaunchConfig:
        """The launch of a part; `grad` is the dtype that it writes."""
        chunk, single = self.chunk(forward)
        single = single and part != "bias"
        plain = attention_config.is_plain(forward)
        if max(forward.head_dim, forward.head_dim_v) > attention_config.MAX_ONE_SUM:
            more["SUMS_APART"] = 1
        itemsize = ITEMSIZE[forward.compute_dtype]
        return attention_config.launch_config(
            forward,
            batch_dims,
            num_blocks,
            tile.num_threads,
            _SOURCES[part],
            f"attention_vjp_{part}",
            smem=rows_in_shared(tile, chunk, itemsize, 1 + single),
            GRAD_T=CUDA_TYPES[grad],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            CHUNK=chunk,
            SINGLE=int(single),
            # Options take registers: with the limit a kernel would spill.
            MIN_BLOCKS=tile.min_blocks if plain else 1,
            **attention_config.two_level_sum(forward, part),
            **more,
        )

    def configs(self, forward, batch_dims, device, everything):
        grads = {forward.dtype: None, forward.compute_dtype: None}
        sums = [(0, 0), (1, 0), (0, 1)]
        tiles = self.fitting(forward, device)
        if not everything:
            grads, sums, tiles = (forward.dtype,), sums[:2], tiles[:1]
        yield rows_config(forward, batch_dims)
        for tile in tiles:
            for part, grad in itertools.product(("queries", "keys"), grads):
                yield self.config(part, tile, forward, batch_dims, grad, 1)
            if forward.bias is not None:
                for queries, keys in sums:
                    yield self.config(
                        "bias", tile, forward, batch_dims, forward.bias, 1,
                        SUM_QUERIES=queries, SUM_KEYS=keys,
                    )  # fmt: skip
            if forward.sinks is not None and forward.dtype == "float16":
                yield self.config("sinks", tile, forward, batch_dims, forward.dtype, 1)


TILED_VJP = VjpKernel(
    name="tiled",
    tiles={
        4: {
            64: (Tile(64, 64, 256), Tile(32, 64, 128), Tile(32, 32, 128)),
            128: (
                Tile(64, 64, 256),
                Tile(32, 64, 128),
                Tile(32, 32, 128),
                Tile(16, 32, 128),
            ),
        },
        8: {
            64: (Tile(32, 32, 128), Tile(16, 32, 128), Tile(16, 16, 128)),
            # With 128 threads it would spill.
            128: (
                Tile(32, 32, 256),
                Tile(16, 32, 128),
                Tile(16, 16, 128),
                Tile(8, 16, 128),
            ),
        },
    },
)


# Computes gradients again if those of a faster row are not finite.
FALLBACK = TILED_VJP


# --- gradients of the arrays that a score function reads ------------------------------

_FINISH_THREADS = 256


def dscore_config(forward, batch_dims: int, tile: Tile, largest: int) -> LaunchConfig:
    """The launch that finds the largest terms, or the one that adds them up."""
    blocks = attention_config.num_tiles(forward, tile.block_m)
    return FALLBACK.config(
        "dscore", tile, forward, batch_dims, forward.dtype, blocks, LARGEST=largest
    )


def dscore_finish_config(grad: str, size: int) -> LaunchConfig:
    """The launch that makes floats of sums."""
    defines = {"GRAD_T": CUDA_TYPES[grad], "NUM_THREADS": _FINISH_THREADS}
    source = "attention/simt/backward_dscore_finish.cu"
    entry = "attention_vjp_dscore_finish"
    return LaunchConfig.over_threads(source, entry, size, defines)
