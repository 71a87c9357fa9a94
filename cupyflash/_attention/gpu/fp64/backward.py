"""The kernel spec of float64 gradients: tensor cores, and how it is launched."""

from dataclasses import dataclass

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.fp64.forward import WARP_ROWS, unsupported_reason
from cupyflash._attention.gpu.gradient_config import rows_config
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig

# Positions are sums of two such numbers and a tile.
_MOST_COUNTED = (1 << 29) - 1

# The most shared memory other than that of Tile.smem.
_STATIC_SMEM = 3072


@dataclass(frozen=True)
class Tile:
    """Rows that a block owns, and rows at a time of those that it loops over.

    Two warps own 16 rows.
    """

    block_m: int
    block_n: int = 32
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    spills_on: tuple[str, ...] = ()  # architectures
    spills_with_softcap: bool = False

    @property
    def num_threads(self) -> int:
        return 2 * 32 * self.block_m // WARP_ROWS

    def smem(self, dim: int) -> int:
        """Bytes for two tiles of either kind, and what the warps of a pair exchange."""
        rows = 2 * (self.block_m + self.block_n) * dim
        return 8 * (rows + self.block_m * self.block_n)


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "queries": "attention/fp64/backward_dq.cu",
    "keys": "attention/fp64/backward_dkdv.cu",
}


@dataclass(frozen=True, kw_only=True)
class TensorFloat64VjpKernel(BackwardSpec):
    """float64 tensor cores: blocks of one kernel own queries, those of the other keys.

    `tiles` maps head dimensions up to a bound to tiles from large to small.
    """

    tiles: dict[float, tuple[Tile, ...]]

    def unsupported_reason(self, problem, device) -> str | None:
        counts, most = self.counts(problem, device), self.dims[-1]
        return unsupported_reason(problem.forward, device, most, counts, self.fitting)

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        forward = problem.forward
        return {
            "queries": (forward.seqlen_q, _MOST_COUNTED),
            "keys": (forward.seqlen_k, _MOST_COUNTED),
        }

    def fitting(self, forward: AttentionProblem, device: Device) -> tuple[Tile, ...]:
        """The tiles that fit on `device`.

        All loop over the same number of rows at a time, and so compute the same sums.
        """
        dim = self.dim(forward)
        fitting = [
            tile
            for tile in kernel.by_threshold(self.tiles, dim)
            if tile.smem(dim) + _STATIC_SMEM <= device.smem_optin
            and device.arch not in tile.spills_on
            and not (forward.softcap and tile.spills_with_softcap)
        ]
        return tuple(tile for tile in fitting if tile.block_n == fitting[0].block_n)

    def tile(
        self, forward: AttentionProblem, device: Device, heads: int, seqlen: int
    ) -> Tile:
        """The largest tile whose blocks fill the device; `seqlen` rows of each head."""
        tiles = self.fitting(forward, device)
        return attention_config.largest_tile(
            tiles, heads, seqlen, lambda tile: device.num_sms
        )

    def num_chunks(self, forward: AttentionProblem, dim: int) -> int:
        """Chunks of columns of a gradient: a block computes all of them."""
        return 1

    def config(self, part, tile, forward, batch_dims, grad, num_blocks) -> LaunchConfig:
        """The launch of a part; `grad` is the dtype that it writes."""
        dim = self.dim(forward)
        return attention_config.launch_config(
            forward,
            batch_dims,
            num_blocks,
            tile.num_threads,
            _SOURCES[part],
            f"attention_vjp_{self.name}_{part}",
            smem=tile.smem(dim),
            GRAD_T=CUDA_TYPES[grad],
            DIM=dim,
            BLOCK_N=tile.block_n,
            MIN_BLOCKS=tile.min_blocks,
            **attention_config.two_level_sum(forward, part),
        )

    def configs(self, forward, batch_dims, device, everything):
        """See BackwardSpec; dbias belongs to the portable row."""
        yield rows_config(forward, batch_dims)
        for tile in self.fitting(forward, device)[: None if everything else 1]:
            for part in _SOURCES:
                yield self.config(part, tile, forward, batch_dims, "float64", 1)


TILED_F64_VJP = TensorFloat64VjpKernel(
    name="tiled_f64",
    dims=(32, 64, 96, 128),
    tiles={
        64: (
            Tile(64, 64, spills_on=("sm_100",), spills_with_softcap=True),
            Tile(64, 32),
            Tile(32, 64, spills_on=("sm_100",), spills_with_softcap=True),
            Tile(32, 32),
            Tile(16, 64, spills_on=("sm_100",), spills_with_softcap=True),
            Tile(16, 32),
        ),
        128: (Tile(64), Tile(32), Tile(16)),
    },
)
