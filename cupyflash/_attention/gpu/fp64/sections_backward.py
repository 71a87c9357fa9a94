"""The kernel spec of float64 gradients whose weights are kept in memory for a while."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.fp64.forward import unsupported_reason
from cupyflash._attention.gpu.gradient_config import rows_config
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

SECTION = Struct(
    "section_t",
    "attention/fp64/sections.cuh",
    (
        ("index_t", "first_kept", "num_kept", "first_summed", "num_summed"),
        ("index_t", "first_row", "num_rows", "rows", "cols"),
        ("index_t", "num_parts", "part_size", "num_splits", "adds"),
    ),
)

SQUARE = 128
_MOST_COUNTED = (1 << 29) - 1
# The most shared memory other than that of Tile.smem.
_STATIC_SMEM = 3072

# P and dS of a section together: half of the bytes of q, k, v and dout, within these
# bounds, unless there would be more sections than this. Fewer sections are faster where
# keys are many, since each adds to all of dk and dv.
LEAST_BYTES, MOST_BYTES, MOST_SECTIONS = 64 << 20, 256 << 20, 1024
_PAIR = 16

# Threads of the kernels that only add.
_ROWS_THREADS, _ROWS_OF_BLOCK, _SUM_THREADS = 256, 32, 256

# Slots of sums in a step, and steps at the start of a block, beside those of its loop.
STEP, _OF_START = 16, 3
# Blocks that share a loop get so many steps of it at least.
_LEAST_STEPS = 8
# What a number of a split takes to write and to read, in products of a multiprocessor,
# and what the launch takes that adds them.
_OF_SUM, _OF_LAUNCH = 0.8, 4e5
# The speed of a multiprocessor with one warp for each scheduler, beside that with two.
_ALONE = 0.6


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a product that a block and its warps compute."""

    block_m: int
    block_n: int
    warp_m: int
    warp_n: int
    stages: int
    min_blocks: int  # blocks per multiprocessor; limits the registers of a thread
    speed: float = 1.0  # of a multiprocessor full of them

    @property
    def num_threads(self) -> int:
        return 32 * (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def smem(self) -> int:
        return 8 * self.stages * ((self.block_m + self.block_n) * (STEP + 4) + STEP)

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor of `device` holds."""
        of_smem = device.smem_optin // (self.smem + _STATIC_SMEM)
        return max(1, min(of_smem, self.min_blocks))

    def blocks(self, rows: int, cols: int) -> int:
        """Blocks that compute a product."""
        return -(-rows // self.block_m) * -(-cols // self.block_n)

    def time(self, num_blocks: int, steps: float, device: Device) -> float:
        """Of blocks with loops of so many steps, in products of a multiprocessor."""
        on_each = -(-num_blocks // device.num_sms)
        threads = min(on_each, self.resident(device)) * self.num_threads
        speed = self.speed * min(1.0, _ALONE * max(threads, 64) / 128)
        size = self.block_m * self.block_n * STEP
        return on_each * size * (steps + _OF_START) / speed


@dataclass(frozen=True)
class Section:
    """Entries of dk and dv, entries that each sums, and queries of these."""

    first_kept: int
    num_kept: int
    first_summed: int
    num_summed: int
    first_row: int
    num_rows: int

    @property
    def adds(self) -> bool:
        """Whether earlier sections have the same entries of dk and dv."""
        return self.first_summed > 0 or self.first_row > 0

    @property
    def num_entries(self) -> int:
        """Entries whose queries it has."""
        return self.num_kept * self.num_summed


@dataclass(frozen=True)
class Narrow:
    """Calls without options of narrow heads that the row takes."""

    least_pairs: int  # of queries and keys, in all
    most_pairs_of_head: float


_SOURCES = {
    "scores": "attention/fp64/sections_scores.cu",
    "rows": "attention/fp64/sections_rows.cu",
    "queries": "attention/fp64/sections_queries.cu",
    "sum": "attention/fp64/sections_sum.cu",
    "keys": "attention/fp64/sections_keys.cu",
}
# Parts that compute products, and the options that the others and they depend on.
PRODUCTS = ("scores", "queries", "keys")
_BOUNDS = ("query_offsets", "query_lengths", "key_lengths")
_NOT_OF_NARROW = (*_BOUNDS, "left", "right", "sinks")


@dataclass(frozen=True, kw_only=True)
class SectionsFloat64VjpKernel(BackwardSpec):
    """float64 tensor cores: products of matrices, with P and dS in memory between them.

    A call is divided into sections, so that these stay small.
    """

    tiles: tuple[Tile, ...]
    tiles_with_terms: tuple[Tile, ...]  # of scores with options
    # Heads of `wide` columns (of the larger head dimension) and more are taken; others
    # only where the next row would take longer, and never with few queries or keys.
    wide: int
    narrow: dict[int, Narrow]  # by columns, padded to whole steps
    least_queries: int
    least_keys: int
    most_bytes: int  # of weights of narrow heads; the next row needs none

    def unsupported_reason(self, problem, device) -> str | None:
        forward, counts = problem.forward, self.counts(problem, device)
        reason = unsupported_reason(
            forward, device, self.dims[-1], counts, lambda *_: self.fitting(device)
        )
        if reason is not None:
            return reason
        if max(forward.head_dim, forward.head_dim_v) < self.wide:
            if reason := self._refuses_narrow(forward):
                return reason
        if forward.keys_of_part is not None:
            return "takes no parts of keys"
        if 0 in (forward.seqlen_q, forward.seqlen_k):
            return "there are no keys"
        return None

    def _refuses_narrow(self, forward: AttentionProblem) -> str | None:
        """Why heads that the next row takes, too, are not taken, or None."""
        columns = max(forward.head_dim, forward.head_dim_v)
        bounds = self.narrow.get(-(-columns // STEP) * STEP)
        if bounds is None:
            return f"does not take {columns} columns: the next row pads them less"
        if any(getattr(forward, name) is not None for name in _NOT_OF_NARROW):
            return f"takes bounds and options of {self.wide} columns or more"
        if attention_config.has_terms(forward):
            return f"takes score options of {self.wide} columns or more"
        queries, keys = forward.seqlen_q, forward.seqlen_k
        pairs = attention_config.num_rows(forward) * keys
        if (
            pairs < bounds.least_pairs
            or queries < self.least_queries
            or keys < self.least_keys
        ):
            return "of few scores, seven products take less time than more launches"
        least_bytes = _PAIR * max(SQUARE * keys, pairs // MOST_SECTIONS)
        if least_bytes > self.most_bytes:
            return f"would take {least_bytes} bytes for weights of {columns} columns"
        if queries * keys > bounds.most_pairs_of_head:
            return (
                f"takes at most {bounds.most_pairs_of_head} scores of a head of "
                f"{columns} columns: with more, sections add to each other too often"
            )
        return None

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        forward = problem.forward
        return {
            "queries": (forward.seqlen_q, _MOST_COUNTED),
            "keys": (forward.seqlen_k, _MOST_COUNTED),
        }

    def fitting(
        self, device: Device, part: str = "", forward: AttentionProblem | None = None
    ) -> tuple[Tile, ...]:
        """The tiles of a part that fit on `device`."""
        tiles = self.tiles
        if part == "scores" and attention_config.has_terms(forward):
            tiles = self.tiles_with_terms
        return tuple(t for t in tiles if t.smem + _STATIC_SMEM <= device.smem_optin)

    def sections(
        self, problem: AttentionVjpProblem, num_kept: int, num_summed: int
    ) -> Iterator[Section]:
        """Those of a call, in order."""
        forward = problem.forward
        queries = forward.seqlen_q
        keys = -(-forward.seqlen_k // STEP) * STEP
        most = section_bytes(problem) // _PAIR // keys  # queries
        most = max(most, num_kept * num_summed * queries // MOST_SECTIONS, SQUARE)
        squares = -(-queries // SQUARE)
        of_kept = max(1, most // (num_summed * queries))
        of_summed = max(1, min(num_summed, most // queries))
        of_rows = min(squares, max(1, most // SQUARE))
        for kept, summed, rows in itertools.product(
            _even(num_kept, of_kept),
            _even(num_summed, of_summed),
            _even(squares, of_rows) if most < queries else ((0, squares),),
        ):
            first, last = (min(n * SQUARE, queries) for n in rows)
            yield Section(
                kept[0], kept[1] - kept[0], summed[0], summed[1] - summed[0],
                first, last - first,
            )  # fmt: skip

    def tile(
        self, part: str, forward: AttentionProblem, device: Device, count: int,
        rows: int, cols: int, length: int, splits: bool = False,
    ) -> tuple[Tile, int]:  # fmt: skip
        """The tile of `count` products of a part, and how many blocks share a loop."""
        best: tuple[float, Tile, int] | None = None
        steps = -(-length // STEP)
        for tile in self.fitting(device, part, forward):
            blocks = count * tile.blocks(rows, cols)
            most = max(1, min(64, steps // _LEAST_STEPS)) if splits else 1
            for n in range(1, most + 1):
                if n > 1 and blocks * n > 4 * device.num_sms:
                    break
                time = tile.time(blocks * n, -(-steps // n), device)
                if n > 1:
                    numbers = (n + 1) * count * rows * cols
                    time += _OF_SUM * numbers + _OF_LAUNCH
                if best is None or time < best[0]:
                    best = time, tile, n
        assert best is not None
        return best[1:]

    def config(
        self, part, tile, forward, batch_dims, grad, num_blocks, splits=1
    ) -> LaunchConfig:
        """The launch of a part; `grad` is the dtype that it writes."""
        threads = _ROWS_THREADS if part == "rows" else _SUM_THREADS
        smem, switches = 0, {}
        if part == "rows":
            sinks = ("sinks",) if forward.sinks else ()
            forward = attention_config.without_options(forward, *_BOUNDS, *sinks)
        elif part != "scores":
            forward = attention_config.without_options(forward, *_BOUNDS)
        if tile is not None:
            threads, smem = tile.num_threads, tile.smem
            switches = {
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "WARP_M": tile.warp_m,
                "WARP_N": tile.warp_n,
                "STAGES": tile.stages,
                "MIN_BLOCKS": tile.min_blocks,
                **({"LOOP_SPLITS": 1} if splits > 1 else {}),
            }
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

    def blocks_of_rows(self, entries: int, rows: int) -> int:
        """Blocks of the kernel that computes factors."""
        return entries * -(-rows // _ROWS_OF_BLOCK)

    def blocks_of_sum(self, numbers: int) -> int:
        """Blocks of the kernel that adds what splits leave."""
        return -(-numbers // _SUM_THREADS)

    def configs(self, forward, batch_dims, device, everything):
        """See BackwardSpec; dbias belongs to the portable row."""
        asked = forward, batch_dims, "float64", 1
        yield rows_config(forward, batch_dims)
        yield self.config("rows", None, *asked)
        yield self.config("sum", None, *asked)
        for part in PRODUCTS:
            tiles = self.fitting(device, part, forward)
            for tile in tiles if everything else tiles[:1]:
                yield self.config(part, tile, *asked)
                if part != "scores":
                    yield self.config(part, tile, *asked, splits=2)


def section_bytes(problem: AttentionVjpProblem) -> int:
    """The most bytes that P and dS of a section should take."""
    of_rows = math.prod(problem.rows_shape) * problem.forward.head_dim_v  # dout
    shapes = problem.q_shape, problem.k_shape, problem.v_shape
    inputs = 8 * (of_rows + sum(math.prod(shape) for shape in shapes))
    return max(LEAST_BYTES, min(MOST_BYTES, inputs // 2))


def _even(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of up to `most`, nearly of one length, that are range(n) together."""
    number = -(-n // most)
    return itertools.pairwise(n * i // number for i in range(number + 1))


# Tiles of scores with options, too, which take more registers.
_SMALL = (
    Tile(64, 64, 32, 32, 4, 2, 0.87),
    Tile(32, 64, 16, 32, 4, 3, 0.65),
    Tile(64, 32, 32, 16, 4, 3, 0.65),
    Tile(128, 16, 32, 16, 3, 3, 0.5),
    Tile(16, 128, 16, 32, 3, 3, 0.5),
)

SECTIONS_F64_VJP = SectionsFloat64VjpKernel(
    name="sections_f64",
    dims=(256,),
    wide=129,
    # As timed on an H200.
    narrow={
        64: Narrow(1 << 20, 1 << 18),
        96: Narrow(1 << 20, 1 << 18),
        128: Narrow(1 << 18, math.inf),
    },
    least_queries=32,
    least_keys=64,
    most_bytes=MOST_BYTES,
    tiles=(
        Tile(64, 128, 64, 32, 3, 2),
        Tile(128, 64, 64, 32, 3, 2),
        Tile(128, 64, 32, 32, 4, 1, 0.87),  # with less shared memory
        *_SMALL,
    ),
    tiles_with_terms=_SMALL,
)
