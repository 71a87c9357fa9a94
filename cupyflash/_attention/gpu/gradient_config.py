"""Launches common to all gradients: delta, and sums of terms."""

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig

_ROW_THREADS = 256
_SUM_THREADS = 256
# Sums that leave most of a device without work if each has one thread.
_FEW_SUMS = 1 << 14


def rows_config(forward: AttentionProblem, batch_dims: int) -> LaunchConfig:
    """The launch that computes delta, one warp per row."""
    # Only these two options matter to it.
    few = attention_config.without_options(forward, "sinks", "query_lengths")
    num_blocks = -(-attention_config.num_rows(forward) * 32 // _ROW_THREADS)
    return attention_config.launch_config(
        few,
        batch_dims,
        num_blocks,
        _ROW_THREADS,
        "attention/simt/backward_preprocess.cu",
        "attention_vjp_rows",
        GRAD_T=CUDA_TYPES[forward.dtype],
    )


def sum_lanes(num_sums: int, num_terms: int) -> int:
    """Threads that share a sum."""
    if num_terms > num_sums:
        return _SUM_THREADS
    # A thread adds its terms one after the other, each once it has come from memory.
    # It has a sum of its own where sums are many, and neighbours share cache lines.
    if num_sums > _FEW_SUMS or num_terms < 4:
        return 1
    return 8 if num_terms <= 8 else 32


def sum_config(
    accum: str, grad: str, num_axes: int, num_sums: int, num_terms: int
) -> LaunchConfig:
    """The launch that adds up terms."""
    lanes = sum_lanes(num_sums, num_terms)
    defines = {
        "ACCUM_T": CUDA_TYPES[accum],
        "GRAD_T": CUDA_TYPES[grad],
        "AXES": str(num_axes),
        "LANES": str(lanes),
        "NUM_THREADS": str(_SUM_THREADS),
    }
    source, entry = "attention/simt/backward_reduce.cu", "attention_vjp_sum"
    return LaunchConfig.over_threads(source, entry, num_sums * lanes, defines)
