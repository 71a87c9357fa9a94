"""The launch that combines results over splits of the keys."""

import math

from cupyflash._attention.problem import MergeProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import AXES, Struct

_MERGE_THREADS = 128
# With fewer rows, a lane has one column: more of them hide what loads take.
_MANY_ROWS = 1 << 14

MERGE_PARAMS = Struct(
    "merge_params_t",
    "attention/combine.cu",
    (
        ("long long", "num_rows", "num_parts", "head_dim_v"),
        ("long long", "outs_part", "outs_col", "lses_part", "out_col"),
        ((AXES, "kRowDims", "kArrays"), "rows"),
    ),
)


def merge_config(
    problem: MergeProblem, row_dims: int, out_dtype: str | None = None
) -> LaunchConfig:
    """The launch of the merge kernel; `out_dtype` if the splits have a wider one."""
    num_rows = math.prod(problem.shape)
    columns = 1  # of a lane
    while num_rows >= _MANY_ROWS and columns < 4 and 32 * columns < problem.head_dim_v:
        columns *= 2
    wide = problem.in_sums or "float64" in (problem.dtype, problem.lse_dtype)
    defines = {
        "ELEM_T": CUDA_TYPES[problem.dtype],
        "LSE_T": CUDA_TYPES[problem.lse_dtype],
        "ACCUM_T": "double" if wide else "float",
        "COLUMNS": str(columns),
        "ROW_DIMS": str(row_dims),
        "NUM_THREADS": str(_MERGE_THREADS),
    }
    if problem.in_sums:
        defines["SUMS"] = "1"
    if out_dtype not in (None, problem.dtype):
        defines["OUT_T"] = CUDA_TYPES[out_dtype]
    variant = Variant("attention/combine.cu", "attention_merge", tuple(defines.items()))
    num_warps = num_rows * max(-(-problem.head_dim_v // (32 * columns)), 1)
    return LaunchConfig.over(
        variant, -(-num_warps * 32 // _MERGE_THREADS), _MERGE_THREADS
    )
