"""Score functions that add what depends on i - j: a table of it, made before.

Kernels read an element for each diagonal of a tile then, where they would compute it
for each, with its logarithms and divisions.
"""

import struct
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention import functions as _functions
from cupyflash._attention.gpu.config import FUNCTIONS, launch_config
from cupyflash._attention.problem import AttentionProblem, with_cuda
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.kernel import LaunchConfig

NAME = "diagonals"  # of the memory that holds the table
_THREADS = 256
# The table pays for its launch from this many scores a diagonal.
_SCORES_OF_A_DIAGONAL = 64


class DiagonalTable(NamedTuple):
    """Arguments of the function that reads the table."""

    rest: bytes  # behind the table's address
    replaced: int  # bytes of the arguments of the caller's score function


def _by_heads(shift):
    return lambda s, h, i, j, *, table: s + table[h, i - j + shift]


def _of_all_heads(shift):
    return lambda s, i, j, *, table: s + table[i - j + shift]


def tabled(problem: AttentionProblem, operands: Any) -> AttentionProblem:
    """The problem with the function that reads the table in place of the caller's.

    The same problem if no table would pay.
    """
    score = operands.functions.score if operands.functions else None
    if (
        score is None
        or (free := score.expression.sum_of_diagonals) is None
        or problem.method in ("naive", "safe")  # which keep all scores in memory
        or not isinstance(problem.query_offset, int)
        or problem.seqlen_q * problem.seqlen_k
        < _SCORES_OF_A_DIAGONAL * _num_diagonals(problem)
    ):
        return problem
    accum, count = problem.compute_dtype, _num_diagonals(problem)
    shift = problem.seqlen_k - 1 - problem.query_offset
    by_heads = "h" in free
    function = _by_heads(shift) if by_heads else _of_all_heads(shift)
    shape = (problem.num_heads, count)[not by_heads :]
    reader = _functions.bound(function, {"table": np.empty((1,) * len(shape), accum)})
    strides = (count, 1)[-len(shape) :]
    table = DiagonalTable(
        struct.pack(f"{2 * len(shape) + 1}q", *shape, *strides, shift),
        score.expression.packer.size(accum),
    )
    problem = replace(problem, score=reader.expression.key, table=table)
    return with_cuda(problem, operands.functions._replace(score=reader))


def with_table(steps: Any, given: AttentionProblem, problem: AttentionProblem) -> Any:
    """The launches, behind one that makes the table if `problem` has one."""
    if problem.table is None:
        return steps
    heads = problem.num_heads if len(problem.table.rest) > 3 * 8 else 1
    count = _num_diagonals(problem)
    first = problem.query_offset - (problem.seqlen_k - 1)  # type: ignore[operator]
    arguments = (NAME, FUNCTIONS, first, count, heads)
    size = heads * count * ITEMSIZE[problem.compute_dtype]
    return steps._replace(
        launches=[(config(given, heads * count), arguments), *steps.launches],
        scratch={**steps.scratch, NAME: size},
    )


def config(problem: AttentionProblem, num_elements: int = 1) -> LaunchConfig:
    """The launch that makes the table, by the caller's functions."""
    blocks, source = -(-num_elements // _THREADS), "attention/score/diagonals.cu"
    return launch_config(problem, 1, blocks, _THREADS, source, "attention_diagonals")


def _num_diagonals(problem):
    return problem.seqlen_q + problem.seqlen_k - 1
