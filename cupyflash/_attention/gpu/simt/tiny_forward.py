"""The kernel spec of attention of the tiniest entries: a thread for each query."""

from dataclasses import dataclass

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import compiled_dims, launch_config, num_rows
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

# Head dimensions that are compiled.
DIMS = (8, 16)
# How many queries or keys are compiled, and the widest heads with them: a thread has
# all keys and values of a head in registers. float64 takes twice as many of these.
WIDEST: dict[float, int] = {4: 16, 8: 8}
WIDEST_OF_FLOAT64: dict[float, int] = {4: 8}
NUM_THREADS = 128


def compiled_keys(most: int) -> int:
    """A number of keys, or of rows of any kind, as it is compiled."""
    return next(int(n) for n in WIDEST if most <= n)


def unsupported_reason(problem: AttentionProblem, device: Device) -> str | None:
    """Why no kernel for the tiniest entries supports `problem`, or None."""
    if reason := kernel.refuse_old_device(problem.dtype, device):
        return reason
    if problem.has_functions:
        return "takes no score or mask function"
    if problem.keys_of_part is not None:
        return "takes all keys at once"
    widest = WIDEST_OF_FLOAT64 if problem.dtype == "float64" else WIDEST
    most = max(widest)
    for name, what in (("seqlen_q", "queries"), ("seqlen_k", "keys")):
        if not 1 <= (n := getattr(problem, name)) <= most:
            return f"takes entries with 1 to {most} {what}, not {n}"
    rows = max(problem.seqlen_q, problem.seqlen_k)
    return spec.refuse_width(problem, by_threshold(widest, rows))


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
