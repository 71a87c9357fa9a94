"""The kernel spec of attention with few queries and keys per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import (
    MOST_COUNTED,
    compiled_dims,
    if_on,
    is_plain,
    launch_config,
    too_many,
)
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

# Head dimensions that are compiled; zeros pad.
DIMS = (16, 32, 64, 96, 128, 192, 256)
# kRows of attention/sm80/short.cuh: queries, or keys, per warp.
ROWS = 16
# Registers per multiprocessor, and the most per thread.
_REGISTERS, MOST_REGISTERS = 1 << 16, 255
# The most queries of a head that one block takes; of more, blocks have a part each.
MOST_QUERIES = 64
_NARROW, _MANY_COLUMNS = 64, 128
# The most warps that share a head.
_MOST_WARPS = 4


def in_tiles(rows: int, tile: int = ROWS) -> int:
    """Rows as they are compiled: whole tiles."""
    return -(-rows // tile) * tile


def keys_in_tiles(problem: AttentionProblem) -> int:
    """Keys as they are compiled: as many to a tile as a step of a product has."""
    return in_tiles(problem.seqlen_k, 32 // ITEMSIZE[problem.dtype])


def dims(problem: AttentionProblem) -> tuple[int, int]:
    """head_dim and head_dim_v as they are compiled."""
    return compiled_dims(problem, DIMS)


def matrix_bytes(rows: int, columns: int, itemsize: int) -> int:
    """matrix_t of attention/sm80/short.cuh."""
    return rows * (columns * itemsize + 16)


def num_kv_heads(problem: AttentionProblem) -> int:
    """Heads of k and v over all batch entries."""
    return math.prod(problem.batch) * problem.num_kv_heads


def unsupported_reason(
    problem: AttentionProblem,
    device: Device,
    most_queries: float,
    most_keys: int,
    widest: int,
) -> str | None:
    """Why no kernel for short entries supports `problem`, or None."""
    dtypes = *spec.HALVES, "float32"
    if reason := spec.refuse_mma(problem, device, dtypes, math.inf):
        return reason
    if problem.has_functions:
        return "takes no score or mask function"
    if problem.keys_of_part is not None:
        return "holds all keys of a head at once"
    if reason := spec.refuse_width(problem, widest):
        return reason
    if most_keys == 0:
        columns = max(problem.head_dim, problem.head_dim_v)
        return f"is no faster for {problem.seqlen_q} queries of {columns} columns"
    for name, most in (("seqlen_q", most_queries), ("seqlen_k", most_keys)):
        if not 1 <= (n := getattr(problem, name)) <= most:
            return f"takes entries with 1 to {most} {_ROWS_OF[name]}, not {n}"
    return None


def refuse_few_blocks(num_blocks: int, device: Device) -> str | None:
    """Why so few blocks would leave multiprocessors idle, or None."""
    if num_blocks < device.num_sms:
        return f"needs work for {device.num_sms} blocks, and has it for {num_blocks}"
    return None


_ROWS_OF = {"seqlen_q": "queries", "seqlen_k": "keys"}


def most_registers(
    ladders: dict[int, dict[float, int]],
    largest: int,
    problem: AttentionProblem,
    device: Device,
) -> int:
    """Registers per thread, few if that lets more blocks run at once.

    `ladders` map the size of an element to what suffices on sm_90 without options, by
    the longest side of the matrices; tf32 takes a few more.
    """
    is_tf32 = problem.dtype == "float32" and problem.precision == "tf32"
    if device.cc[0] != 9 or not is_plain(problem) or is_tf32:
        return MOST_REGISTERS
    return by_threshold(ladders[ITEMSIZE[problem.dtype]], largest)


def most_blocks(warps: int, registers: int) -> int:
    """How many blocks have so many registers per thread at once, or 1."""
    return max(1, _REGISTERS // (32 * warps * registers))


def config(
    source: str,
    entry: str,
    problem: AttentionProblem,
    batch_dims: int,
    num_blocks: int,
    warps: int,
    head_bytes: int,
    registers: int,
    **more,
) -> LaunchConfig:
    """A launch with blocks of `warps` warps, which share `head_bytes`.

    `registers` are those of a thread without options.
    """
    num_threads = 32 * warps
    dim, dim_v = dims(problem)
    if problem.dtype == "float32":
        more["PARTS"] = 2 if problem.precision == "float32" else 1
    shape = {
        "HEAD_DIM": dim,
        "HEAD_DIM_V": dim_v,
        "BLOCK_N": keys_in_tiles(problem),
        "WARPS": warps,
        "MIN_BLOCKS": most_blocks(warps, registers),
        **more,
    }
    return launch_config(
        problem, batch_dims, num_blocks, num_threads, source, entry, smem=head_bytes,
        **shape,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MmaShortKernel(spec.ForwardSpec):
    """Attention by mma.sync with all keys of a head on chip.

    How many keys pay off, by the size of an element: `most_keys` up to a number of
    queries, `wide_keys` the same of wide heads; `few_keys` up to a head dimension with
    more queries, `biased_keys` the same with a bias of each score. `registers` belong
    to most_registers(), by the keys.
    """

    registers: dict[int, dict[float, int]]
    most_keys: dict[int, dict[float, int]]
    few_keys: dict[int, dict[float, int]]
    biased_keys: dict[int, dict[float, int]]
    wide_keys: dict[int, dict[float, int]]
    tiles_of_block: int  # of 16 queries, where blocks have a part of a head each

    def unsupported_reason(self, problem, device) -> str | None:
        most_keys = self._most_keys(problem)
        return (
            unsupported_reason(problem, device, MOST_COUNTED, most_keys, DIMS[-1])
            or too_many(self.counts(problem, device))
            or self._refuse_few_blocks(problem, device)
            or spec.refuse_smem(self.head_bytes(problem), device)
        )

    def _refuse_few_blocks(self, problem, device):
        """Parts of the queries in float32 are as many blocks as other rows have."""
        if problem.dtype == "float32" and self.splits_queries(problem):
            return None
        return refuse_few_blocks(self._num_blocks(problem, device), device)

    def _most_keys(self, problem):
        """The most keys that pay off."""
        size, columns = (
            ITEMSIZE[problem.dtype],
            max(problem.head_dim, problem.head_dim_v),
        )
        if size not in self.most_keys or columns > DIMS[-1]:
            return 0
        if not self.splits_queries(problem):
            is_wide = columns > _MANY_COLUMNS
            ladders = self.wide_keys if is_wide else self.most_keys
            return by_threshold(ladders[size], problem.seqlen_q)
        has_bias = problem.bias is not None and problem.terms != "keys"
        ladders = self.biased_keys if has_bias else self.few_keys
        return by_threshold(ladders[size], columns)

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        queries = problem.group_size * problem.seqlen_q
        return {"queries of a head of k": (queries, MOST_COUNTED)}

    def splits_queries(self, problem: AttentionProblem) -> bool:
        """Whether several blocks share a head of k and v."""
        return problem.seqlen_q > MOST_QUERIES

    def _num_tiles(self, problem):
        """Tiles of queries of a head of k and v."""
        return problem.group_size * in_tiles(problem.seqlen_q) // ROWS

    def _tiles_of_block(self, problem, device):
        """As many as pay off, or one for each warp if blocks would be too few."""
        blocks = -(-self._num_tiles(problem) // self.tiles_of_block)
        fills = num_kv_heads(problem) * blocks >= device.num_sms
        return self.tiles_of_block if fills else _MOST_WARPS

    def _num_blocks(self, problem, device):
        heads = num_kv_heads(problem)
        if not self.splits_queries(problem):
            return heads
        tiles = self._tiles_of_block(problem, device)
        return heads * -(-self._num_tiles(problem) // tiles)

    def warps(self, problem: AttentionProblem) -> int:
        """Warps of a block: one per 16 queries, up to 4."""
        return min(self._num_tiles(problem), _MOST_WARPS)

    def head_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a head of k and v, and of the queries of its warps."""
        itemsize = ITEMSIZE[problem.dtype]
        dim, dim_v = dims(problem)
        keys, queries = keys_in_tiles(problem), ROWS * self.warps(problem)
        return matrix_bytes(keys + queries, dim, itemsize) + matrix_bytes(
            keys, dim_v, itemsize
        )

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        keys = keys_in_tiles(problem)
        if max(dims(problem)) > _NARROW:  # wide heads take the registers of many keys
            keys = max(keys, _NARROW)
        splits, tiles = self.splits_queries(problem), self._num_tiles(problem)
        if splits:
            tiles = self._tiles_of_block(problem, device)
        return (
            config(
                "attention/sm80/short_forward.cu",
                "attention_mma_short",
                problem,
                batch_dims,
                self._num_blocks(problem, device),
                self.warps(problem),
                self.head_bytes(problem),
                most_registers(self.registers, keys, problem, device),
                **if_on(
                    TILES_OF_BLOCK=splits and tiles,
                    LOADS_AHEAD=tiles > _MOST_WARPS,
                ),
            ),
        )


MMA_SHORT = MmaShortKernel(
    name="mma_short",
    registers={
        2: {48: 104, 64: 128, math.inf: 224},
        4: {40: 112, math.inf: 128},
    },
    # Tuned on an H200: docs/design/lab/results/short_h200.json. For 64 x 64 keys in 16
    # bits `hopper` is as fast, for more it is faster; for one query and 100 keys in
    # float32 `tiled` is.
    most_keys={
        2: {16: 112, 48: 64, 64: 48},
        4: {16: 32, 64: 64},
    },
    # Tuned on an H100: docs/design/lab/results/few_keys_h100.json. Else `hopper` is
    # as fast in 16 bits, or faster; it loads a bias by TMA from 8 keys on.
    wide_keys={
        2: {32: 16, 64: 0},
        4: {64: 32},
    },
    few_keys={
        2: {32: 16, 256: 0},
        4: {128: 64, 256: 32},
    },
    biased_keys={
        2: {128: 7, 256: 0},
        4: {128: 64, 256: 32},
    },
    tiles_of_block=16,
)
