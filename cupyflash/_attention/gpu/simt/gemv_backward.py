"""The kernel spec of gradients with few queries per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu.gradient_limits import shared_axes
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.simt import gemv_forward
from cupyflash._attention.gpu.simt.gemv_forward import MOST_QUERIES, layout
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.kernel import LaunchConfig, by_threshold
from cupyflash._cuda.structs import Struct

GEMV_GRADS = Struct(
    "gemv_grads_t",
    "attention/simt/gemv_backward.cu",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv", "dbias"),),
)


@dataclass(frozen=True, kw_only=True)
class GemvVjpKernel(BackwardSpec):
    """All gradients of few queries in one launch, by products with vectors.

    The fields are those of GemvKernel.
    """

    most_keys: dict[int, dict[float, int]]
    heads_per_sm: float
    registers: dict[float, int]

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        keys = self.most_keys.get(ITEMSIZE[forward.dtype], {})
        reason = gemv_forward.unsupported_reason(
            forward, device, keys, self.heads_per_sm
        )
        if reason is not None:
            return reason
        for name in ("dsinks", "dscore"):
            if getattr(problem, f"need_{name}"):
                return f"does not compute {name}"
        for name in "qkv":
            if any(shared_axes(getattr(problem, f"{name}_shape"), forward)):
                return f"{name} is shared by entries of the batch"
        scores = forward.num_heads, forward.seqlen_q, forward.seqlen_k
        if problem.need_dbias and math.prod(problem.bias_shape) != math.prod(
            (*forward.batch, *scores)
        ):
            return "computes dbias only if each score has a bias of its own"
        return None

    def config(self, forward: AttentionProblem, batch_dims: int) -> LaunchConfig:
        """The launch of the kernel that computes all gradients."""
        registers = by_threshold(self.registers, layout(forward).columns)
        is_tf32 = forward.dtype == "float32" and forward.precision == "tf32"
        more = {"TF32": 1} if is_tf32 else {}
        return gemv_forward.config(
            "attention/simt/gemv_backward.cu", "attention_vjp_gemv", forward,
            batch_dims, registers, **more,
        )  # fmt: skip

    def configs(self, forward, batch_dims, device, everything):
        return (self.config(forward, batch_dims),)


GEMV_VJP = GemvVjpKernel(
    name="gemv",
    most_keys={2: {MOST_QUERIES: 4096}, 4: {MOST_QUERIES: 4096}},
    heads_per_sm=2,
    registers={8: 128, 16: 168, 32: 255},
)
