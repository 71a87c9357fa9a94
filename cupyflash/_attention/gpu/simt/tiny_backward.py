"""The kernel spec of gradients of the tiniest entries: a thread for each row."""

from dataclasses import dataclass

from cupyflash._attention.gpu.config import launch_config, num_heads
from cupyflash._attention.gpu.gradient_limits import refuse_gradients
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.simt.tiny_forward import (
    NUM_THREADS,
    compiled_keys,
    defines,
    unsupported_reason,
)
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

TINY_GRADS = Struct(
    "tiny_grads_t",
    "attention/simt/tiny_backward.cu",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv"),),
)


@dataclass(frozen=True, kw_only=True)
class TinyVjpKernel(BackwardSpec):
    """All gradients in one launch, with a thread for each query and each key."""

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        if reason := unsupported_reason(forward, device):
            return reason
        if forward.group_size > 1:
            return "takes one query head per head of k"
        return refuse_gradients(problem, "dbias", "dsinks", "dscore")

    def config(self, forward: AttentionProblem, batch_dims: int) -> LaunchConfig:
        """The launch of the kernel that computes all gradients."""
        most = max(forward.seqlen_q, forward.seqlen_k)
        heads_of_block = NUM_THREADS // compiled_keys(most)
        return launch_config(
            forward,
            batch_dims,
            -(-num_heads(forward) // heads_of_block),
            NUM_THREADS,
            "attention/simt/tiny_backward.cu",
            "attention_vjp_tiny",
            GRAD_T=CUDA_TYPES[forward.dtype],
            **defines(forward, most),
        )

    def configs(self, forward, batch_dims, device, everything):
        return (self.config(forward, batch_dims),)


TINY_VJP = TinyVjpKernel(name="tiny")
