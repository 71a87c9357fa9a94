"""The kernel spec of gradients with few queries per entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu.config import holds_blocks, if_on, num_heads
from cupyflash._attention.gpu.gradient_limits import refuse_gradients
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.simt.gemv_forward import (
    Tuning,
    has_narrow_vectors,
    power_of_two,
)
from cupyflash._attention.gpu.simt.tiny_backward import TINY_VJP
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import FLOATS, ITEMSIZE
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

# Columns of the heads that tiles take in float64 on tensor cores.
_WIDEST_TILES = 128


@dataclass(frozen=True, kw_only=True)
class GemvVjpKernel(BackwardSpec):
    """All gradients of few queries in one launch, by products with vectors.

    Blocks share the keys of an entry, in three launches, if there are more than
    `keys_of_block` and multiprocessors finish sooner that way; each block has at least
    `least_steps` steps of them, and all of them take at most `most_waves` waves. In
    float64 they share more than `keys_if_idle`, too, if all blocks run at once.
    """

    tuning: Tuning
    keys_of_block: int = 512
    keys_if_idle: int = 256
    least_steps: int = 2
    most_waves: int = 4
    keeps_weights: bool = True  # those of float64, where shared memory has room

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        reason = self.tuning.unsupported_reason(forward, device)
        reason = reason or refuse_gradients(problem, "dsinks", "dscore")
        reason = reason or self._refuse_float64(problem, device)
        if reason is not None:
            return reason
        if problem.need_dbias:
            scores = (forward.num_heads, forward.seqlen_q, forward.seqlen_k)
            if math.prod(problem.bias_shape) != math.prod((*forward.batch, *scores)):
                return "computes dbias only if each score has a bias of its own"
        return None

    def _refuse_float64(self, problem, device: Device) -> str | None:
        """Why other rows are faster in float64, or None."""
        forward = problem.forward
        if forward.dtype != "float64":
            return None
        if TINY_VJP.unsupported_reason(problem, device) is None:
            return "a thread for each row is faster in float64"
        queries, widest = forward.seqlen_q, max(forward.head_dim, forward.head_dim_v)
        if (
            queries > 1
            and not has_narrow_vectors(forward)  # other rows are slower still
            and widest <= _WIDEST_TILES
            and self.keeps_weights
            and self.num_splits(forward, device) == 1
            and not self.kept_bytes(forward, device)
        ):
            return f"would read k twice for {queries} queries"
        return None

    def num_splits(self, forward: AttentionProblem, device: Device) -> int:
        """Blocks that share the keys of an entry."""
        of = self.tuning.layout(forward, device)
        least, most_waves = self.keys_of_block, self.most_waves
        if forward.dtype == "float64" and forward.seqlen_k <= least:
            least, most_waves = min(least, self.keys_if_idle), 1
        if forward.seqlen_k <= least or of.entries > 1:
            return 1
        places = device.num_sms * self.tuning.min_blocks(forward, of, device, True)
        steps = -(-forward.seqlen_k // of.keys_of_step)
        heads = num_heads(forward)
        most = min(most_waves * places // heads, steps // self.least_steps)
        # Blocks that share an entry read k twice: five arrays in place of four.
        arrays = (4, 5) if self.kept_bytes(forward, device) else (1, 1)

        def length(splits: int) -> int:
            """Steps of all waves, one after the other."""
            waves = -(-heads * splits // places)
            return waves * -(-steps // splits) * arrays[splits > 1]

        return min(range(1, max(1, most) + 1), key=length)

    def kept_bytes(self, forward: AttentionProblem, device: Device) -> int:
        """Shared memory for the weights of a block in float64, two for each score.

        0 if they are not kept: fewer blocks would be on a multiprocessor. Under a
        softcap there would be three, if the gradient of a bias is computed.
        """
        if forward.dtype != "float64" or not self.keeps_weights:
            return 0
        if forward.bias is not None and forward.softcap:
            return 0
        of = self.tuning.layout(forward, device)
        scores = of.entries * forward.seqlen_q * forward.seqlen_k
        kept = power_of_two(2 * ITEMSIZE[forward.dtype] * scores)
        static = of.shared_bytes if of.warps > 1 else 0
        blocks = self.tuning.min_blocks(forward, of, device)
        return kept if holds_blocks(device, blocks, kept + static) else 0

    def parts(self, forward: AttentionProblem, splits: int) -> tuple[str, ...]:
        """The kernels of a call, in order."""
        sums_first = splits > 1 and forward.dtype in ("float32", "float64")
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
        smem = self.kept_bytes(forward, device) if splits == 1 else 0
        more |= if_on(KEEP_WEIGHTS=smem > 0)
        source, entry = _SOURCES[part], f"attention_vjp_gemv{part}"
        return self.tuning.config(
            source, entry, forward, batch_dims, device, splits, smem, **more
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
            8: {6 << 10: (2, 1), 512 << 10: (2, 4), math.inf: (2, 8)},
        },
        steps_of_more={2: (2, 2), 4: (2, 4), 8: (2, 4)},
        most_queries={
            2: {32: 2, 63: 3, 96: 4, math.inf: 5},
            4: {24: 2, 64: 3, 80: 4, 112: 6, math.inf: 8},
            8: {64: 8, 512: 4, math.inf: 2},
        },
        most_bytes=dict.fromkeys(FLOATS, _ANY_BYTES),
        most_bytes_with_bias=dict.fromkeys(FLOATS, math.inf),
        heads_per_sm={n: {math.inf: 0} for n in (2, 4, 8)},
        heads_per_sm_of_more={2: {math.inf: {512: 0, math.inf: 0.5}}},
        registers={4: (96, 128), 8: (128, 168), 16: (128, 168), 32: (255, 255)},
        registers_of_float64={8: (128, 168), 16: (168, 255), 32: (255, 255)},
        more_if_shared=True,
        parts={8: {1: 2, math.inf: 1}},
    ),
)
