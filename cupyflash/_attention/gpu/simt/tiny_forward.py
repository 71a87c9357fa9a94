"""The kernel spec of attention of the tiniest entries: a thread for each query."""

from dataclasses import dataclass

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import compiled_dims, launch_config, num_rows
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig

# Head dimensions that are compiled.
DIMS = (8, 16)
# How many queries or keys are compiled, and the widest heads with them: a thread has
# all keys and values of a head in registers.
WIDEST = {4: 16, 8: 8}
MOST_ROWS = max(WIDEST)
NUM_THREADS = 128


def compiled_keys(most: int) -> int:
    """A number of keys, or of rows of any kind, as it is compiled."""
    return next(n for n in WIDEST if most <= n)


def unsupported_reason(problem: AttentionProblem, device: Device) -> str | None:
    """Why no kernel for the tiniest entries supports `problem`, or None."""
    if reason := kernel.refuse_old_device(problem.dtype, device):
        return reason
    if problem.has_functions:
        return "takes no score or mask function"
    if problem.keys_of_part is not None:
        return "takes all keys at once"
    for name, what in (("seqlen_q", "queries"), ("seqlen_k", "keys")):
        if not 1 <= (n := getattr(problem, name)) <= MOST_ROWS:
            return f"takes entries with 1 to {MOST_ROWS} {what}, not {n}"
    widest = WIDEST[compiled_keys(max(problem.seqlen_q, problem.seqlen_k))]
    return spec.refuse_width(problem, widest)


def defines(problem: AttentionProblem, most: int) -> dict[str, int]:
    """The defines of cuda_src/attention/simt/tiny.cuh, for so many rows."""
    dim, dim_v = compiled_dims(problem, DIMS)
    return {"HEAD_DIM": dim, "HEAD_DIM_V": dim_v, "KEYS": compiled_keys(most)}


@dataclass(frozen=True, kw_only=True)
class TinyKernel(spec.ForwardSpec):
    """Attention with a thread for each query."""

    def unsupported_reason(self, problem, device) -> str | None:
        return unsupported_reason(problem, device)

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        return (
            launch_config(
                problem,
                batch_dims,
                -(-num_rows(problem) // NUM_THREADS),
                NUM_THREADS,
                "attention/simt/tiny_forward.cu",
                "attention_tiny",
                **defines(problem, problem.seqlen_k),
            ),
        )


TINY = TinyKernel(name="tiny")
