"""The launch that combines results over splits of the keys."""

import math

from cupyflash._attention.problem import MergeProblem
from cupyflash._core.dtypes import CUDA_TYPES, ITEMSIZE
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import AXES, Struct

_THREADS = 128
# With fewer rows, a lane has one column: more of them hide what loads take. In float64
# the weights of a row, which each of its warps computes, soon take longer than that.
_MANY_ROWS, _MANY_WIDE_WARPS = 1 << 14, 1 << 12
# Of combine_few.cu: splits of a row, and columns of a thread.
_FEW_PARTS, _FEW_COLUMNS, _VECTOR_BYTES = 8, 8, 16

COMBINE_PARAMS = Struct(
    "combine_params_t",
    "attention/combine_params.cuh",
    (
        ("long long", "num_rows", "num_parts", "head_dim_v"),
        ("long long", "outs_part", "outs_col", "lses_part", "out_col"),
        ((AXES, "kRowDims", "kArrays"), "rows"),
    ),
)


def parts_config(
    problem: MergeProblem,
    row_dims: int,
    out_dtype: str | None = None,
    out_lse_dtype: str | None = None,
) -> LaunchConfig:
    """The launch of the kernel; dtypes of the results if the splits have wider ones."""
    num_rows = math.prod(problem.shape)
    wide = problem.in_sums or "float64" in (problem.dtype, problem.lse_dtype)
    most_warps = num_rows * -(-problem.head_dim_v // 32)
    many = most_warps >= _MANY_WIDE_WARPS if wide else num_rows >= _MANY_ROWS
    columns = 1  # of a lane
    while many and columns < 4 and 32 * columns < problem.head_dim_v:
        columns *= 2
    defines = {
        "ELEM_T": CUDA_TYPES[problem.dtype],
        "LSE_T": CUDA_TYPES[problem.lse_dtype],
        "ACCUM_T": "double" if wide else "float",
        "COLUMNS": str(columns),
        "ROW_DIMS": str(row_dims),
        "NUM_THREADS": str(_THREADS),
    }
    if problem.in_sums:
        defines["SUMS"] = "1"
    if out_dtype not in (None, problem.dtype):
        defines["OUT_T"] = CUDA_TYPES[out_dtype]
    if out_lse_dtype is not None:
        defines["OUT_LSE_T"] = CUDA_TYPES[out_lse_dtype]
    num_warps = num_rows * max(-(-problem.head_dim_v // (32 * columns)), 1)
    return LaunchConfig.over_threads(
        "attention/combine.cu", "attention_combine", 32 * num_warps, defines
    )


def is_few(
    problem: MergeProblem, columns: tuple[int, ...], in_bytes: tuple[int, ...]
) -> bool:
    """Whether the kernel for few splits of many rows takes a problem.

    `columns` are the steps of outs and out from column to column, `in_bytes` those of
    their rows and splits, and their addresses.
    """
    return (
        1 <= problem.num_parts <= _FEW_PARTS
        and math.prod(problem.shape) >= _MANY_ROWS
        and ITEMSIZE[problem.dtype] == 2
        and problem.lse_dtype == "float32"
        and 0 < problem.head_dim_v <= 32 * _FEW_COLUMNS
        and problem.head_dim_v % _FEW_COLUMNS == 0
        and all(step == 1 for step in columns)
        and all(n % _VECTOR_BYTES == 0 for n in in_bytes)
    )


def few_config(problem: MergeProblem, row_dims: int) -> LaunchConfig:
    """The launch of the kernel for few splits of many rows."""
    lanes, parts = 8, 2  # of a row
    while lanes * _FEW_COLUMNS < problem.head_dim_v:
        lanes *= 2
    while parts < problem.num_parts:
        parts *= 2
    defines = {
        "ELEM_T": CUDA_TYPES[problem.dtype],
        "LANES": str(lanes),
        "PARTS": str(parts),
        "ROW_DIMS": str(row_dims),
        "NUM_THREADS": str(_THREADS),
    }
    num_threads = math.prod(problem.shape) * lanes
    return LaunchConfig.over_threads(
        "attention/combine_few.cu", "attention_combine_few", num_threads, defines
    )
