"""The kernel spec of attention with few queries and keys per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import compiled_dims, is_plain, launch_config
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

# Head dimensions that are compiled; zeros pad.
DIMS = (16, 32, 64, 96, 128)
# kRows of attention/sm80/short.cuh: queries, or keys, per warp.
ROWS = 16
# Registers per multiprocessor, and the most per thread.
_REGISTERS, MOST_REGISTERS = 1 << 16, 255
# The most queries of an entry.
MOST_QUERIES = 64
_NARROW = 64
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
    problem: AttentionProblem, device: Device, most_keys: int
) -> str | None:
    """Why no kernel for short entries supports `problem`, or None."""
    dtypes = *spec.HALVES, "float32"
    if reason := spec.refuse_mma(problem, device, dtypes, math.inf):
        return reason
    if problem.has_functions:
        return "takes no score or mask function"
    if problem.keys_of_part is not None:
        return "holds all keys of a head at once"
    for name, most in (("seqlen_q", MOST_QUERIES), ("seqlen_k", most_keys)):
        if not 1 <= (n := getattr(problem, name)) <= most:
            return f"takes entries with 1 to {most} {_ROWS_OF[name]}, not {n}"
    if reason := spec.refuse_width(problem, DIMS[-1]):
        return reason
    if (heads := num_kv_heads(problem)) < device.num_sms:
        return f"takes a head of k for each of {device.num_sms} blocks, not {heads}"
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


def config(
    source: str,
    entry: str,
    problem: AttentionProblem,
    batch_dims: int,
    warps: int,
    head_bytes: int,
    registers: int,
    **more,
) -> LaunchConfig:
    """A launch with one block of `warps` warps per head of k, which share `head_bytes`.

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
        "MIN_BLOCKS": max(1, _REGISTERS // (num_threads * registers)),
        **more,
    }
    num_blocks = num_kv_heads(problem)
    return launch_config(
        problem, batch_dims, num_blocks, num_threads, source, entry, smem=head_bytes,
        **shape,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MmaShortKernel(spec.ForwardSpec):
    """Attention by mma.sync with all keys of a head on chip.

    `most_keys` maps the size of an element to how many keys pay off up to a number of
    queries; `registers` belong to most_registers(), by the keys.
    """

    registers: dict[int, dict[float, int]]
    most_keys: dict[int, dict[float, int]]

    def unsupported_reason(self, problem, device) -> str | None:
        ladder = self.most_keys.get(ITEMSIZE[problem.dtype], {MOST_QUERIES: 0})
        queries = min(problem.seqlen_q, MOST_QUERIES)
        reason = unsupported_reason(problem, device, by_threshold(ladder, queries))
        if reason is None and self.head_bytes(problem) > device.smem_optin:
            reason = (
                f"{problem.seqlen_k} keys of {problem.head_dim} columns need more "
                f"shared memory than the {device.smem_optin} bytes that a block may "
                "have"
            )
        return reason

    def warps(self, problem: AttentionProblem) -> int:
        """Warps that share a head of k and v: one per 16 queries, up to 4."""
        tiles = problem.group_size * in_tiles(problem.seqlen_q) // ROWS
        return min(tiles, _MOST_WARPS)

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
        return (
            config(
                "attention/sm80/short_forward.cu",
                "attention_mma_short",
                problem,
                batch_dims,
                self.warps(problem),
                self.head_bytes(problem),
                most_registers(self.registers, keys, problem, device),
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
)
