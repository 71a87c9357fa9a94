"""The kernel spec of float64 gradients: tensor cores, and how it is launched."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu import mask_bits
from cupyflash._attention.gpu.fp64.forward import (
    WARP_ROWS,
    unsupported_reason,
)
from cupyflash._attention.gpu.gradient_config import rows_config
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig

# Positions are sums of two such numbers and a tile.
_MOST_COUNTED = (1 << 29) - 1

# The most shared memory other than that of Tile.smem, and what the system reserves.
_STATIC_SMEM, _RESERVED_SMEM = 3072, 1024
_MOST_MASK_SMEM = 16 * 64  # of bits of a mask beside that, for 64 queries

# Blocks that leave multiprocessors idle share loops over so many rows or more, and each
# gets at least so many of them.
_LONG_LOOP, _LEAST_OF_LOOP = 512, 64

# What a block does beside its loop, in tiles; and the time of a tile with few warps on
# a multiprocessor, beside that with as many as its registers hold.
_OF_START, _ALONE = 0.5, 0.5
_MOST_THREADS = 256  # whose registers a multiprocessor holds

# The time of a tile of a long loop by the rows that a block owns, beside that with 32:
# with one block on a multiprocessor, with two and so on. More take as long as in turns.
_OF_TILE = {64: (1.45,), 32: (1.0,), 16: (0.87, 1.06)}
# Elements of splits that are written, or read and added, in the time of a tile; and
# what an element of the result takes, in those of splits.
_ADDED, _OF_SUM = 1 << 18, 3

_FINISH_THREADS, _WARP = 128, 32


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

    def resident(self, dim: int, device: Device) -> int:
        """Blocks that a multiprocessor of `device` holds."""
        smem = self.smem(dim) + _STATIC_SMEM + _RESERVED_SMEM
        of_smem = (device.smem_optin + _RESERVED_SMEM) // smem
        return max(1, min(of_smem, _MOST_THREADS // self.num_threads))

    def time(self, num_blocks: int, dim: int, device: Device) -> float:
        """That of a tile of the loops of all blocks, as measured on an H200."""
        times = _OF_TILE[self.block_m][: self.resident(dim, device)]
        waves, rest = divmod(-(-num_blocks // device.num_sms), len(times))
        return waves * times[-1] + (times[rest - 1] if rest else 0)


# Where a block's loop has fewer rows than a tile, the tile has as many of these as hold
# them all. Nothing then hides its copies but other blocks: it owns few rows.
_SHORT_LOOPS, _MOST_OWNED = {"queries": (32,), "keys": (16, 32)}, 32

# The file of each kernel, below cuda_src/.
_SOURCES = {
    "queries": "attention/fp64/backward_dq.cu",
    "keys": "attention/fp64/backward_dkdv.cu",
    "finish": "attention/fp64/backward_dq_finish.cu",
}
_PARTS = ("queries", "keys")


def _short(tiles: Iterable[Tile], rows: int) -> list[Tile]:
    """Those for loops of up to `rows` rows."""
    return [replace(t, block_n=rows) for t in tiles if t.block_m <= _MOST_OWNED]


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

    def sides(self, part: str, forward: AttentionProblem) -> tuple[int, int]:
        """Rows that the blocks of a part own, and rows that each loops over."""
        sides = forward.seqlen_q, forward.seqlen_k
        return sides if part == "queries" else sides[::-1]

    def fitting(
        self, forward: AttentionProblem, device: Device, part: str = ""
    ) -> tuple[Tile, ...]:
        """The tiles that fit on `device`; those of a part suit the length of its loop.

        All loop over the same number of rows at a time, and so compute the same sums.
        """
        dim = self.dim(forward)
        static = _STATIC_SMEM
        if mask_bits.has_bits(forward):
            static += _MOST_MASK_SMEM
        fitting = [
            tile
            for tile in kernel.by_threshold(self.tiles, dim)
            if tile.smem(dim) + static <= device.smem_optin
            and device.arch not in tile.spills_on
            and not (forward.softcap and tile.spills_with_softcap)
        ]
        fitting = [tile for tile in fitting if tile.block_n == fitting[0].block_n]
        if part and fitting:
            _, other = self.sides(part, forward)
            usual = fitting[0].block_n
            rows = next((n for n in _SHORT_LOOPS[part] if other <= n), usual)
            if rows < usual:
                fitting = _short(fitting, rows)
        return tuple(fitting)

    def tile(
        self, part: str, forward: AttentionProblem, device: Device, entries: int
    ) -> Tile:
        """The tile of a part: of long loops that whose waves of blocks take least time.

        Of other loops it is the largest tile whose blocks fill the device, and so it is
        under bounds, where a few loops are long: the longest of large tiles would take
        all the time.
        """
        own, other = self.sides(part, forward)
        tiles = self.fitting(forward, device, part)
        bounded = forward.left is not None or forward.right is not None
        if other < _LONG_LOOP or bounded:
            return attention_config.largest_tile(
                tiles, entries, own, lambda _: device.num_sms
            )
        largest, dim = attention_config.largest_full(tiles, own), self.dim(forward)

        def time(tile):
            return tile.time(entries * -(-own // tile.block_m), dim, device)

        return min(tiles[tiles.index(largest) :], key=time)

    def sharing(
        self, part: str, forward: AttentionProblem, device: Device, entries: int
    ) -> tuple[Tile | None, int]:
        """The tile of a part whose blocks share loops, and how many share one, or 1.

        Each of the `entries` has tiles of its own. Loops are shared where those fill at
        most half of the device: with the tile and by as many blocks that take the least
        time, and where blocks with loops of their own take longer than that and the
        sums of splits.
        """
        own, other = self.sides(part, forward)
        if other < _LONG_LOOP or not own * entries:
            return None, 1
        tiles = self.fitting(forward, device)
        largest = attention_config.largest_full(tiles, own)
        dim, best = self.dim(forward), (math.inf, largest, 1)
        for tile in tiles[tiles.index(largest) :]:
            blocks = entries * -(-own // tile.block_m)
            resident = tile.resident(dim, device)
            room = device.num_sms * resident
            if tile is largest and 2 * blocks > room:
                return None, 1
            splits = max(1, min(room // blocks, other // _LEAST_OF_LOOP))
            waves = -(-blocks * splits // room)
            at_once = min(resident, -(-blocks * splits // device.num_sms))
            busy = at_once * tile.num_threads / _MOST_THREADS
            loop = -(-other // tile.block_n)
            time = waves * (-(-loop // splits) + _OF_START)
            time *= _ALONE + (1 - _ALONE) * busy
            if time < best[0]:
                best = time, tile, splits
        _, tile, splits = best
        alone = self.tile(part, forward, device, entries)
        blocks, of_alone = (entries * -(-own // t.block_m) for t in (tile, alone))
        time = tile.time(blocks * splits, dim, device) * (
            -(-loop // splits) + _OF_START
        )
        time += entries * own * dim * (splits + _OF_SUM) / _ADDED
        if alone.time(of_alone, dim, device) * (loop + _OF_START) <= time:
            return None, 1
        return tile, splits

    def blocks_of_finish(self, forward: AttentionProblem) -> int:
        """Blocks of an entry of the kernel that adds sums of splits."""
        warps = forward.seqlen_q * -(-forward.head_dim // _WARP)
        return -(-warps * _WARP // _FINISH_THREADS)

    def num_chunks(self, forward: AttentionProblem, dim: int) -> int:
        """Chunks of columns of a gradient: a block computes all of them."""
        return 1

    def config(
        self, part, tile, forward, batch_dims, grad, num_blocks, splits=1
    ) -> LaunchConfig:
        """The launch of a part; `grad` is the dtype that it writes."""
        threads, smem, switches = _FINISH_THREADS, 0, {}
        if part == "finish":
            # Without a sink, no option matters to it.
            seen = ("query_lengths", "sinks") if forward.sinks else ()
            forward = attention_config.without_options(forward, *seen)
        else:
            dim = self.dim(forward)
            threads, smem = tile.num_threads, tile.smem(dim)
            switches = {
                "DIM": dim,
                "BLOCK_N": tile.block_n,
                "MIN_BLOCKS": tile.min_blocks,
                **({"LOOP_SPLITS": 1} if splits > 1 else {}),
                **attention_config.two_level_sum(forward, part),
            }
            switches |= mask_bits.switches(forward)
            forward = mask_bits.without_bits(forward)
        return attention_config.launch_config(
            forward,
            batch_dims,
            num_blocks,
            threads,
            _SOURCES[part],
            f"attention_vjp_{self.name}_{part}",
            smem=smem,
            GRAD_T=CUDA_TYPES[grad],
            **switches,
        )

    def configs(self, forward, batch_dims, device, everything):
        """See BackwardSpec; dbias belongs to the portable row."""
        yield rows_config(forward, batch_dims)
        yield from mask_bits.configs(forward, batch_dims)
        yield self.config("finish", None, forward, batch_dims, "float64", 1)
        tiles = self.fitting(forward, device)[: None if everything else 1]
        for tile, part, splits in itertools.product(tiles, _PARTS, (1, 2)):
            yield self.config(part, tile, forward, batch_dims, "float64", 1, splits)
        for part, lengths in _SHORT_LOOPS.items():
            for rows in lengths:
                if rows >= tiles[0].block_n:
                    continue
                for tile in _short(self.fitting(forward, device), rows)[: len(tiles)]:
                    yield self.config(part, tile, forward, batch_dims, "float64", 1)


TILED_F64_VJP = TensorFloat64VjpKernel(
    name="tiled_f64",
    dims=(32, 48, 64, 80, 96, 112, 128),
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
