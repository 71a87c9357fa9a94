"""The kernel spec of gradients with few queries per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu.config import if_on, num_heads
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
    "attention/simt/gemv_backward.cuh",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv", "dbias"),),
)


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "": "attention/simt/gemv_backward.cu",
    "_totals": "attention/simt/gemv_backward_totals.cu",
}


@dataclass(frozen=True, kw_only=True)
class GemvVjpKernel(BackwardSpec):
    """All gradients of few queries in one launch, by products with vectors.

    Blocks share the keys of an entry, in three launches, if there are more than
    `keys_of_block` and multiprocessors finish sooner that way; each block has at least
    `least_steps` steps of them, and all of them take at most `most_waves` waves.
    """

    tuning: Tuning
    keys_of_block: int = 512
    least_steps: int = 2
    most_waves: int = 4

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

    def num_splits(self, forward: AttentionProblem, device: Device) -> int:
        """Blocks that share the keys of an entry."""
        of = self.tuning.layout(forward, device)
        if forward.seqlen_k <= self.keys_of_block or of.entries > 1:
            return 1
        places = device.num_sms * self.tuning.min_blocks(forward, of, device)
        steps = -(-forward.seqlen_k // of.keys_of_step)
        heads = num_heads(forward)
        most = min(self.most_waves * places // heads, steps // self.least_steps)

        def length(splits: int) -> int:
            """Steps of all waves, one after the other."""
            return -(-heads * splits // places) * -(-steps // splits)

        return min(range(1, max(1, most) + 1), key=length)

    def parts(self, forward: AttentionProblem, splits: int) -> tuple[str, ...]:
        """The kernels of a call, in order."""
        sums_first = splits > 1 and forward.dtype == "float32"
        return ("_totals", "") if sums_first else ("",)

    def config(
        self,
        forward: AttentionProblem,
        batch_dims: int,
        device: Device,
        part: str = "",
        splits: int = 1,
    ) -> LaunchConfig:
        """The launch of a part."""
        is_tf32 = forward.dtype == "float32" and forward.precision == "tf32"
        more = if_on(TF32=is_tf32 and not part, KEY_SPLITS=splits > 1)
        source, entry = _SOURCES[part], f"attention_vjp_gemv{part}"
        return self.tuning.config(
            source, entry, forward, batch_dims, device, splits, **more
        )

    def configs(self, forward, batch_dims, device, everything):
        splits = self.num_splits(forward, device)
        return tuple(
            self.config(forward, batch_dims, device, part, splits)
            for part in self.parts(forward, splits)
        )


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
        heads_per_sm={2: {math.inf: 0}, 4: {math.inf: 0}},
        heads_per_sm_of_more={2: {512: 0, math.inf: 0.5}},
        registers={4: (96, 128), 8: (128, 168), 16: (128, 168), 32: (255, 255)},
    ),
)
