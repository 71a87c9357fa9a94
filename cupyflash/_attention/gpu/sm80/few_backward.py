"""The kernel spec of gradients of few queries over many keys."""

import math
from dataclasses import dataclass
from typing import ClassVar

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import (
    LONG_SUM,
    compiled_dims,
    if_on,
    is_plain,
    launch_config,
    num_heads,
)
from cupyflash._attention.gpu.gradient_limits import refuse_gradients
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_VJP
from cupyflash._attention.gpu.sm80.short_forward import (
    DIMS,
    MOST_REGISTERS,
    ROWS,
    in_tiles,
    matrix_bytes,
    most_blocks,
)
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold
from cupyflash._cuda.structs import Struct

FEW_GRADS = Struct(
    "few_grads_t",
    "attention/sm80/few_backward.cu",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv"),),
)

_ITEMSIZE = 2
# Shared memory that each block has for the system.
_SYSTEM_BYTES = 1 << 10
# Tiles of keys that take as long as what a block does beside its loop, and as the sums.
_OF_START, _OF_SUMS = 2, 2
# Waves of blocks that share the keys of heads.
_MOST_WAVES = 4
# Fewer heads for each multiprocessor are few.
_MANY_HEADS = 2
# Wide heads have more columns.
_WIDE = 128


@dataclass(frozen=True, kw_only=True)
class MmaFewVjpKernel(BackwardSpec):
    """All gradients of a head in one launch by mma.sync, with all its queries on chip.

    Of few heads and of many: `most_queries` up to a head dimension, and `warps`, each
    of which has 16 keys at a time. `of_vectors` are the queries up to which products
    with vectors are as fast. `least_keys` pay off, up to a head dimension; of many wide
    heads of over 16 queries `least_keys_of_many`. `registers` are those of a thread
    without options, up to a head dimension and so many queries in tiles.
    """

    grads: ClassVar[Struct] = FEW_GRADS
    of_splits: ClassVar[tuple[str, ...]] = ("dq",)  # of which they have terms

    most_queries: dict[float, tuple[int, int]]
    of_vectors: int
    least_keys: dict[float, int]
    least_keys_of_many: int
    warps: tuple[int, int]
    registers: dict[float, dict[float, int]]

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        if reason := spec.refuse_mma(
            forward, device, spec.HALVES, DIMS[-1]
        ) or refuse_gradients(problem, "dbias", "dsinks", "dscore"):
            return reason
        if forward.has_functions:
            return "takes no score or mask function"
        if forward.keys_of_part is not None:
            return "takes all keys of a head"
        if forward.group_size > 1:
            return f"takes one query head per head of k, not {forward.group_size}"
        if not num_heads(forward):
            return "there are no heads"
        if reason := self._refuse_slower(problem, device):
            return reason
        if reason := spec.refuse_smem(self.smem(forward, device), device):
            return reason
        tiles = self._num_tiles(forward, device)
        tiles = -(-tiles // self.num_splits(forward, device))
        keys = tiles * self._block_n(forward, device)
        if keys > LONG_SUM:
            return f"sums up to {LONG_SUM} keys of a block, not {keys}"
        return None

    def _refuse_slower(self, problem, device: Device) -> str | None:
        """Why rows that stand below are as fast or faster, or None."""
        forward = problem.forward
        queries, keys = forward.seqlen_q, forward.seqlen_k
        widest = max(forward.head_dim, forward.head_dim_v)
        are_many = _has_many_heads(forward, device)
        most = by_threshold(self.most_queries, widest)[are_many]
        if most == 0:
            return f"is no faster for heads of {widest} columns"
        if not 2 <= queries <= most:
            return f"takes entries with 2 to {most} queries, not {queries}"
        least = by_threshold(self.least_keys, widest)
        if widest > _WIDE and queries > ROWS and are_many:
            least = self.least_keys_of_many
        if keys < least:
            return f"takes entries with {least} keys or more, not {keys}"
        if not _has_whole_vectors(forward):
            return "takes rows of whole vectors"
        if queries <= self.of_vectors:
            if GEMV_VJP.unsupported_reason(problem, device) is None:
                return f"vectors are as fast for {queries} queries"
        return None

    def _warps(self, forward, device):
        return self.warps[_has_many_heads(forward, device)]

    def _block_n(self, forward, device):
        """Keys of a tile."""
        return ROWS * self._warps(forward, device)

    def _num_tiles(self, forward, device):
        return -(-forward.seqlen_k // self._block_n(forward, device))

    def block_m(self, forward: AttentionProblem) -> int:
        """Queries as they are compiled."""
        return in_tiles(forward.seqlen_q)

    def smem(self, forward: AttentionProblem, device: Device) -> int:
        """The size of smem_t of attention/sm80/few_backward.cu."""
        queries = self.block_m(forward)
        keys = self._block_n(forward, device)
        dims = compiled_dims(forward, DIMS)
        rows = sum(matrix_bytes(queries + keys, n, _ITEMSIZE) for n in dims)
        ds = matrix_bytes(keys, queries, _ITEMSIZE)
        return rows + ds + 2 * 4 * queries + 4 * ROWS

    def num_blocks(self, forward: AttentionProblem, device: Device) -> int:
        """Blocks that a multiprocessor holds."""
        registers = MOST_REGISTERS
        if device.cc[0] == 9 and is_plain(forward):
            widest = max(compiled_dims(forward, DIMS))
            by_queries = by_threshold(self.registers, widest)
            registers = by_threshold(by_queries, self.block_m(forward))
        smem = self.smem(forward, device) + _SYSTEM_BYTES
        fitting = (device.smem_optin + _SYSTEM_BYTES) // smem
        return min(most_blocks(self._warps(forward, device), registers), fitting)

    def num_splits(self, forward: AttentionProblem, device: Device) -> int:
        """Blocks that share the keys of a head: they end soonest so."""
        tiles, heads = self._num_tiles(forward, device), num_heads(forward)
        places = device.num_sms * self.num_blocks(forward, device)
        most = min(_MOST_WAVES * places // heads, tiles)

        def time(splits: int) -> int:
            """Tiles of all waves, one after the other."""
            waves, of_sums = -(-heads * splits // places), _OF_SUMS * (splits > 1)
            return waves * (-(-tiles // splits) + _OF_START) + of_sums

        return min(range(1, max(1, most) + 1), key=time)

    def config(
        self,
        forward: AttentionProblem,
        batch_dims: int,
        device: Device,
        splits: int = 1,
    ) -> LaunchConfig:
        """The launch of the kernel; `splits` blocks share the keys of a head."""
        dim, dim_v = compiled_dims(forward, DIMS)
        warps = self._warps(forward, device)
        return launch_config(
            forward,
            batch_dims,
            num_heads(forward) * splits,
            32 * warps,
            "attention/sm80/few_backward.cu",
            f"attention_vjp_{self.name}",
            smem=self.smem(forward, device),
            HEAD_DIM=dim,
            HEAD_DIM_V=dim_v,
            BLOCK_M=self.block_m(forward),
            BLOCK_N=self._block_n(forward, device),
            WARPS=warps,
            MIN_BLOCKS=self.num_blocks(forward, device),
            **if_on(LOOP_SPLITS=splits > 1),
        )

    def configs(self, forward, batch_dims, device, everything):
        splits = self.num_splits(forward, device)
        return (self.config(forward, batch_dims, device, splits),)


def _has_whole_vectors(forward):
    """Whether all rows are copied in 16 bytes at a time."""
    widths = forward.head_dim, forward.head_dim_v
    return math.gcd(forward.row_alignment, *(_ITEMSIZE * n for n in widths)) == 16


def _has_many_heads(forward, device):
    return num_heads(forward) >= _MANY_HEADS * device.num_sms


MMA_FEW_VJP = MmaFewVjpKernel(
    name="mma_few",
    # Tuned on an H200: docs/design/lab/results/few_queries_vjp_h200.json. `hopper` is
    # as fast or faster for the others.
    most_queries={
        32: (32, 32), 64: (16, 32), 96: (0, 16), 128: (0, 0), 256: (32, 32),
    },
    of_vectors=5,
    least_keys={128: 65, 256: 33},
    least_keys_of_many=256,
    warps=(8, 4),
    registers={
        32: {32: 128}, 64: {16: 128, 32: 168}, 96: {16: 128, 32: 168}, 256: {32: 255},
    },
)  # fmt: skip
