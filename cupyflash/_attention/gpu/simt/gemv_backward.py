"""The kernel spec of gradients with few queries per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu.gradient_limits import refuse_gradients
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.simt.gemv_forward import Tuning
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

GEMV_GRADS = Struct(
    "gemv_grads_t",
    "attention/simt/gemv_backward.cu",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv", "dbias"),),
)


@dataclass(frozen=True, kw_only=True)
class GemvVjpKernel(BackwardSpec):
    """All gradients of few queries in one launch, by products with vectors."""

    tuning: Tuning

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        reason = self.tuning.unsupported_reason(forward, device)
        reason = reason or refuse_gradients(problem, "dsinks", "dscore")
        if reason is not None:
            return reason
        if problem.need_dbias:
            scores = (forward.num_heads, forward.seqlen_q, forward.seqlen_k)
            if math.prod(problem.bias_shape) != math.prod((*forward.batch, *scores)):
                return "computes dbias only if each score has a bias of its own"
        return None

    def config(
        self, forward: AttentionProblem, batch_dims: int, device: Device
    ) -> LaunchConfig:
        """The launch of the kernel that computes all gradients."""
        is_tf32 = forward.dtype == "float32" and forward.precision == "tf32"
        more = {"TF32": 1} if is_tf32 else {}
        source, entry = "attention/simt/gemv_backward.cu", "attention_vjp_gemv"
        return self.tuning.config(source, entry, forward, batch_dims, device, **more)

    def configs(self, forward, batch_dims, device, everything):
        return (self.config(forward, batch_dims, device),)


_ANY_BYTES: dict[float, float] = {256: math.inf}

GEMV_VJP = GemvVjpKernel(
    name="gemv",
    tuning=Tuning(
        steps={
            2: {6 << 10: (2, 1), 24 << 10: (4, 4), math.inf: (4, 8)},
            4: {3 << 10: (2, 1), 12 << 10: (2, 4), 28 << 10: (4, 4), math.inf: (4, 8)},
        },
        steps_of_more={2: (2, 2), 4: (2, 4)},
        most_queries={
            2: {32: 2, 63: 3, 96: 4, math.inf: 5},
            4: {24: 2, 64: 3, 80: 4, 112: 6, math.inf: 8},
        },
        most_bytes=dict.fromkeys(("float16", "bfloat16", "float32"), _ANY_BYTES),
        most_bytes_with_bias=dict.fromkeys(
            ("float16", "bfloat16", "float32"), math.inf
        ),
        heads_per_sm={512: 0, math.inf: 0.5},
        registers={4: (96, 128), 8: (128, 168), 16: (128, 168), 32: (255, 255)},
    ),
)
