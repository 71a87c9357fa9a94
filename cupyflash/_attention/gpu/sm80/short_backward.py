"""The kernel spec of gradients with few queries and keys per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu.config import is_plain
from cupyflash._attention.gpu.gradient_limits import shared_axes
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.sm80 import short_forward
from cupyflash._attention.gpu.sm80.short_forward import (
    MOST_REGISTERS,
    ROWS,
    dims,
    in_tiles,
    keys_in_tiles,
    matrix_bytes,
    most_registers,
)
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES, ITEMSIZE
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

SHORT_GRADS = Struct(
    "short_grads_t",
    "attention/sm80/short_backward.cu",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv"),),
)


@dataclass(frozen=True, kw_only=True)
class MmaShortVjpKernel(BackwardSpec):
    """All gradients of a head in one launch by mma.sync, with all its keys on chip.

    `registers` belong to most_registers(), by the largest of head dimensions, queries
    and keys.
    """

    registers: dict[int, dict[float, int]]
    most_keys: int = 112  # more spill
    # The same, and the head dimension of float32, if scores have options.
    most_keys_with_options: int = 64
    most_columns_with_options: int = 64

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        reason = short_forward.unsupported_reason(forward, device, self.most_keys)
        if reason is not None:
            return reason
        for name in ("dbias", "dsinks", "dscore"):
            if getattr(problem, f"need_{name}"):
                return f"does not compute {name}"
        for name in "qkv":
            if any(shared_axes(getattr(problem, f"{name}_shape"), forward)):
                return f"{name} is shared by entries of the batch"
        if not is_plain(forward) and (
            forward.seqlen_k > self.most_keys_with_options
            or (
                forward.dtype == "float32"
                and max(dims(forward)) > self.most_columns_with_options
            )
        ):
            return "has too few registers for these options with such keys"
        if self.head_bytes(forward) > device.smem_optin:
            return (
                f"{forward.seqlen_q} queries and {forward.seqlen_k} keys of "
                f"{forward.head_dim} columns need more shared memory than the "
                f"{device.smem_optin} bytes that a block may have"
            )
        return None

    def warps(self, forward: AttentionProblem) -> int:
        """Warps that share a head of k and v: one per 16 queries, or keys."""
        return in_tiles(max(forward.seqlen_q, forward.seqlen_k)) // ROWS

    def head_bytes(self, forward: AttentionProblem) -> int:
        """The size of smem_t of attention/sm80/short_backward.cu."""
        itemsize = ITEMSIZE[forward.dtype]
        queries, keys = in_tiles(forward.seqlen_q), keys_in_tiles(forward)
        rows = sum(matrix_bytes(queries + keys, n, itemsize) for n in dims(forward))
        weights = matrix_bytes(queries, in_tiles(keys), itemsize)
        reused = min(matrix_bytes(keys, n, itemsize) for n in dims(forward))
        if itemsize == 4 and forward.group_size == 1 and weights <= reused:
            weights = 0  # where k and v were
        warps = self.warps(forward)
        # dk and dv of the previous query heads, in float32.
        kept = sum(dims(forward)) * 64 * warps if forward.group_size > 1 else 0
        return rows + 2 * weights + 16 * warps + kept

    def config(
        self, forward: AttentionProblem, batch_dims: int, device: Device
    ) -> LaunchConfig:
        """The launch of the kernel that computes all gradients."""
        queries, keys = in_tiles(forward.seqlen_q), keys_in_tiles(forward)
        largest = max(*dims(forward), queries, keys)
        registers = MOST_REGISTERS
        if forward.group_size == 1:
            registers = most_registers(self.registers, largest, forward, device)
        return short_forward.config(
            "attention/sm80/short_backward.cu",
            "attention_vjp_mma_short",
            forward,
            batch_dims,
            self.warps(forward),
            self.head_bytes(forward),
            registers,
            BLOCK_M=queries,
            GROUPED=int(forward.group_size > 1),
            GRAD_T=CUDA_TYPES[forward.dtype],
        )

    def configs(self, forward, batch_dims, device, everything):
        return (self.config(forward, batch_dims, device),)


MMA_SHORT_VJP = MmaShortVjpKernel(
    name="mma_short",
    registers={
        2: {32: 96, 64: 136, math.inf: 255},
        4: {64: 168, math.inf: 255},
    },
)
