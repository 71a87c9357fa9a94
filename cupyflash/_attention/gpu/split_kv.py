"""Launches over splits of the keys, whose results are combined."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import combine
from cupyflash._attention.gpu.config import SplitKV
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.launch_sequence import Steps, num_bytes

# For splits, m and l of lse = m + log l: row_lse_t of attention/score/score.cuh.
_ROW_LSE = np.dtype("complex128")
# Names of the combined results; out and lse are those of the splits.
RESULTS = ("combined_out", "combined_lse")


def split_steps(
    steps_of: Callable[..., Steps], row, problem, operands, device, split: SplitKV
) -> Steps:
    """The launches of a kernel spec over splits of the keys, and of the combination."""
    steps = steps_of(row, *split_kv(problem, operands, split), device)
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q)
    states = attention_problem.MergeProblem(
        problem.backend,
        split.num_splits,
        shape,
        problem.head_dim_v,
        problem.compute_dtype,
        problem.compute_dtype,
        in_sums=True,
    )
    config, params = combine.combine_splits(problem, operands, states)
    rows = (split.num_splits, *shape)
    memory = {
        "out": num_bytes((*rows, problem.head_dim_v), problem.compute_dtype),
        "lse": num_bytes(rows, _ROW_LSE),
    }
    return steps._replace(
        launches=[*steps.launches, (config, ("out", "lse", *RESULTS, params))],
        scratch={**steps.scratch, **memory},
    )


def split_kv(
    problem: AttentionProblem, operands, split: SplitKV
) -> tuple[AttentionProblem, Any]:
    """The call over splits of the keys, a new first batch axis, without out."""

    def spread(x):
        if x is None:
            return None
        return cupy.ndarray(
            (split.num_splits, *x.shape), x.dtype, x.data, (0, *x.strides)
        )

    splits = replace(
        problem,
        batch=(split.num_splits, *problem.batch),
        keys_of_part=split.keys_per_split,
        layout="bhsd",
        heads_axis=True,
        return_lse=True,
    )
    kept = {"out", "given_out", "sinks", "functions", "taken"}
    names = set(operands._fields) - kept
    views = {name: spread(getattr(operands, name)) for name in names}
    return splits, operands._replace(out=None, given_out=None, **views)
