"""The kernel spec of gradients with few queries and keys per entry."""

import math
from dataclasses import dataclass
from typing import ClassVar

from cupyflash._attention.gpu.config import LONG_SUM, MOST_COUNTED, if_on, is_plain
from cupyflash._attention.gpu.gradient_limits import refuse_gradients
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.sm80 import short_forward
from cupyflash._attention.gpu.sm80.short_forward import (
    MOST_REGISTERS,
    ROWS,
    dims,
    in_tiles,
    keys_in_tiles,
    matrix_bytes,
    most_blocks,
    most_registers,
    num_kv_heads,
)
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES, ITEMSIZE
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold
from cupyflash._cuda.structs import Struct

# Shared memory that each block has for the system.
_SYSTEM_BYTES = 1 << 10
# kMostNumbers of the kernel, and that of wide heads.
_MOST_NUMBERS, _MOST_OF_WIDE = 72, 168
# Wide heads have more columns.
_WIDE = 128
# Tiles of queries that blocks may share, and the fewest of a block.
_LONG_LOOP, _LEAST_OF_LOOP = 8, 2
# What a block does beside its loop, and the sums of terms, in tiles of queries.
_OF_START, _OF_SUMS = 1, 4
# Waves of blocks that share loops.
_MOST_WAVES = 4

SHORT_GRADS = Struct(
    "short_grads_t",
    "attention/sm80/short_backward.cu",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv"),),
)


@dataclass(frozen=True, kw_only=True)
class MmaShortVjpKernel(BackwardSpec):
    """All gradients of a head in one launch by mma.sync, with all its keys on chip.

    `registers` belong to most_registers(), by the largest of head dimensions, queries
    and keys; `few_keys` maps the size of an element to how many keys pay off for more
    queries than a block holds at a time. Where heads do not fill the device, blocks
    share those queries, up to so many keys by the queries: `keys_of_few_heads`. Of wide
    heads `wide_keys` pay off, of any queries and heads; blocks have `wide_warps` for
    each 16 keys, so that registers hold dk and dv of several tiles, and `wide_queries`
    at a time. `queries_of_few_wide_heads` are the fewest of heads that do not fill a
    device of sm_90.
    """

    grads: ClassVar[Struct] = SHORT_GRADS
    of_splits: ClassVar[tuple[str, ...]] = ("dk", "dv")  # of which they have terms

    registers: dict[int, dict[float, int]]
    few_keys: dict[int, int]
    keys_of_few_heads: dict[int, dict[float, int]]
    wide_keys: dict[int, int]
    wide_warps: dict[int, int]
    wide_queries: dict[int, int]
    queries_of_few_wide_heads: dict[int, int]
    most_keys: int = 112  # more spill
    # Keys in tiles that spill in float32, of wide heads the fewest that do, and the
    # devices from which on.
    spilling_keys: int = 104
    spilling_wide_keys: int = 24
    spills_from: tuple[int, int] = (10, 0)
    widest: int = short_forward.DIMS[-1]
    # The same, and the head dimension of float32, if scores have options.
    most_keys_with_options: int = 64
    most_columns_with_options: int = 64

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        most_keys = self.most_keys
        if _is_wide(forward):
            most_keys = self.wide_keys.get(ITEMSIZE[forward.dtype], 0)
        elif forward.seqlen_q > short_forward.MOST_QUERIES:
            most_keys = self.few_keys.get(ITEMSIZE[forward.dtype], 0)
        reason = short_forward.unsupported_reason(
            forward, device, MOST_COUNTED, most_keys, self.widest
        ) or refuse_gradients(problem, "dbias", "dsinks", "dscore")
        if reason is not None:
            return reason
        if not is_plain(forward) and (
            forward.seqlen_k > self.most_keys_with_options
            or (
                forward.dtype == "float32"
                and max(dims(forward)) > self.most_columns_with_options
            )
        ):
            return "has too few registers for these options with such keys"
        keys = keys_in_tiles(forward)
        spills = keys == self.spilling_keys
        if _is_wide(forward) and self.sums_tiles(forward):
            spills = keys >= self.spilling_wide_keys
        if spills and forward.dtype == "float32" and device.cc >= self.spills_from:
            return f"has too few registers for {forward.seqlen_k} keys"
        if self.head_bytes(forward) > device.smem_optin:
            return (
                f"{forward.seqlen_q} queries and {forward.seqlen_k} keys of "
                f"{forward.head_dim} columns need more shared memory than the "
                f"{device.smem_optin} bytes that a block may have"
            )
        splits = self.num_splits(forward, device)
        queries = -(-self._num_tiles(forward) // splits) * self.block_m(forward)
        if self.sums_tiles(forward) and queries > LONG_SUM:
            return f"sums up to {LONG_SUM} queries of a block, not {queries}"
        heads = num_kv_heads(forward)
        if heads >= device.num_sms or splits == 1:
            return short_forward.refuse_few_blocks(heads, device)
        if _is_wide(forward):
            return self._refuse_short_loops(forward, device)
        ladder = self.keys_of_few_heads[ITEMSIZE[forward.dtype]]
        most_keys = by_threshold(ladder, forward.seqlen_q)
        if forward.seqlen_k > most_keys:
            return (
                f"takes up to {most_keys} keys of as few as {heads} heads of k, "
                f"not {forward.seqlen_k}"
            )
        return None

    def _refuse_short_loops(self, forward, device):
        """Why few wide heads of so few queries are left to `hopper_wide`, or None."""
        least = self.queries_of_few_wide_heads.get(ITEMSIZE[forward.dtype], 0)
        if device.cc[0] != 9 or forward.group_size > 1 or forward.seqlen_q >= least:
            return None
        heads = num_kv_heads(forward)
        return f"asks for {least} queries of {heads} heads, not {forward.seqlen_q}"

    def warps(self, forward: AttentionProblem) -> int:
        """Warps that share a head of k and v: one per 16 queries, or keys."""
        warps = in_tiles(max(self.block_m(forward), forward.seqlen_k)) // ROWS
        if not _is_wide(forward):
            return warps
        tiles = in_tiles(forward.seqlen_k) // ROWS if self.sums_tiles(forward) else 1
        return max(warps, self.wide_warps[ITEMSIZE[forward.dtype]] * tiles)

    def block_m(self, forward: AttentionProblem) -> int:
        """Queries that are on chip at a time."""
        return min(in_tiles(forward.seqlen_q), self._most_queries(forward))

    def _most_queries(self, forward):
        if _is_wide(forward):
            return self.wide_queries[ITEMSIZE[forward.dtype]]
        return short_forward.MOST_QUERIES

    def sums_tiles(self, forward: AttentionProblem) -> bool:
        """Whether dk and dv are sums over several tiles of queries."""
        return forward.group_size > 1 or forward.seqlen_q > self._most_queries(forward)

    def num_splits(self, forward: AttentionProblem, device: Device) -> int:
        """Blocks that share the queries of a head of k and v.

        They end soonest so: each wave takes as long as its tiles of queries.
        """
        tiles, heads = self._num_tiles(forward), num_kv_heads(forward)
        if tiles < _LONG_LOOP or not heads:
            return 1
        places = device.num_sms * self._resident(forward, device)
        most = min(_MOST_WAVES * places // heads, tiles // _LEAST_OF_LOOP)

        def time(splits: int) -> int:
            waves, of_sums = -(-heads * splits // places), _OF_SUMS * (splits > 1)
            return waves * (-(-tiles // splits) + _OF_START) + of_sums

        return min(range(1, max(1, most) + 1), key=time)

    def _num_tiles(self, forward):
        """Tiles of queries of a head of k and v."""
        return forward.group_size * -(-forward.seqlen_q // self.block_m(forward))

    def _kept(self, forward, dim):
        """kKept of the kernel: dk or dv as accumulators, four a thread."""
        columns = dim // -(-dim // 64)  # kChunk
        tiles, warps = in_tiles(keys_in_tiles(forward)) // ROWS, self.warps(forward)
        while tiles * (dim // columns) < warps and columns % 32 == 0:
            columns //= 2  # columns_of_job()
        return -(-tiles * (dim // columns) // warps) * (columns // 8)

    def _keeps_in_registers(self, forward):
        """kInRegisters of the kernel."""
        kept = 4 * sum(self._kept(forward, n) for n in dims(forward))
        is_kept = self.sums_tiles(forward)
        most = _MOST_OF_WIDE if _is_wide(forward) else _MOST_NUMBERS
        return is_kept and keys_in_tiles(forward) + kept <= most

    def head_bytes(self, forward: AttentionProblem, stages: int = 1) -> int:
        """The size of smem_t of attention/sm80/short_backward.cu."""
        itemsize = ITEMSIZE[forward.dtype]
        queries, keys = self.block_m(forward), keys_in_tiles(forward)
        rows = sum(
            matrix_bytes(stages * queries + keys, n, itemsize) for n in dims(forward)
        )
        weights = matrix_bytes(queries, in_tiles(keys), itemsize)
        grouped = self.sums_tiles(forward)
        reused = min(matrix_bytes(keys, n, itemsize) for n in dims(forward))
        if itemsize == 4 and not grouped and weights <= reused:
            weights = 0  # where k and v were
        warps = self.warps(forward)
        # dk and dv of the tiles of queries before.
        kept = sum(self._kept(forward, n) for n in dims(forward)) if grouped else 0
        if self._keeps_in_registers(forward):
            kept = 0
        exchanged = keys // 8 if self._sharing(forward) > 1 else 0
        return rows + 2 * weights + 16 * warps + 16 * 32 * warps * (exchanged + kept)

    def _sharing(self, forward):
        """kSharing of the kernel: warps that share 16 queries."""
        if not _is_wide(forward):
            return 1
        most = self.warps(forward) // (self.block_m(forward) // ROWS)
        fits = (
            n
            for n in range(most, 1, -1)
            if not any(x % (16 * n) for x in dims(forward))
        )
        return next(fits, 1)

    def _registers(self, forward, device):
        """Registers of a thread."""
        if forward.group_size > 1 and forward.seqlen_q <= short_forward.MOST_QUERIES:
            return MOST_REGISTERS
        sides = *dims(forward), self.block_m(forward), keys_in_tiles(forward)
        return most_registers(self.registers, max(sides), forward, device)

    def stages(self, forward: AttentionProblem, device: Device) -> int:
        """Tiles of queries on chip: two, the next one too, if that costs no block."""
        if not self._keeps_in_registers(forward):
            return 1
        one, two = (self._blocks(forward, device, stages) for stages in (1, 2))
        return 2 if two >= max(1, one) else 1

    def _blocks(self, forward, device, stages):
        """Blocks that a multiprocessor holds."""
        registers = self._registers(forward, device)
        size = self.head_bytes(forward, stages) + _SYSTEM_BYTES
        return min(
            most_blocks(self.warps(forward), registers),
            (device.smem_optin + _SYSTEM_BYTES) // size,
        )

    def _resident(self, forward, device):
        return max(1, self._blocks(forward, device, self.stages(forward, device)))

    def config(
        self,
        forward: AttentionProblem,
        batch_dims: int,
        device: Device,
        splits: int = 1,
    ) -> LaunchConfig:
        """The launch of the kernel that computes all gradients, or terms of dk and dv.

        `splits` blocks share the queries of a head of k and v.
        """
        stages = self.stages(forward, device)
        return short_forward.config(
            "attention/sm80/short_backward.cu",
            "attention_vjp_mma_short",
            forward,
            batch_dims,
            num_kv_heads(forward) * splits,
            self.warps(forward),
            self.head_bytes(forward, stages),
            self._registers(forward, device),
            BLOCK_M=self.block_m(forward),
            GROUPED=int(self.sums_tiles(forward)),
            **if_on(STAGES=stages > 1 and stages, LOOP_SPLITS=splits > 1),
            GRAD_T=CUDA_TYPES[forward.dtype],
        )

    def configs(self, forward, batch_dims, device, everything):
        splits = self.num_splits(forward, device)
        return (self.config(forward, batch_dims, device, splits),)


def _is_wide(forward):
    return max(forward.head_dim, forward.head_dim_v) > _WIDE


MMA_SHORT_VJP = MmaShortVjpKernel(
    name="mma_short",
    registers={
        2: {32: 96, 64: 136, math.inf: 255},
        4: {64: 168, math.inf: 255},
    },
    # Tuned on an H100: docs/design/lab/results/few_keys_h100.json.
    few_keys={2: 32, 4: 64},
    # Tuned on an H200: docs/design/lab/results/few_keys_of_few_heads_h200.json. With
    # more keys in 16 bits `hopper` is faster, unless its loops are long.
    keys_of_few_heads={2: {8192: 16, math.inf: 32}, 4: {math.inf: 64}},
    wide_keys={2: 32, 4: 32},
    wide_warps={2: 4, 4: 4},
    wide_queries={2: 64, 4: 32},
    queries_of_few_wide_heads={2: 513},
)
