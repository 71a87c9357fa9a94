"""Every kernel that the fast rows of attention may compile, met by a small problem.

The compile list is made of samples. Of each sample some sizes are planned, with each
row forced; calls that launch a listed variant which none before them did are run and
compared with the oracle. So a kernel that is added to a row is met here without a
change. What no size leads to is in `python tests/gpu_record.py --unmet`.
"""

import functools

import fuzz_vjp
import numpy as np
import pytest
import rows
import variants
from fuzz_vjp import fuzz

pytestmark = pytest.mark.gpu

SAMPLES = 8  # in a test
GROUPS = sorted({(operation, row) for operation, row, _ in variants.work()})
FIRST = range(0, len(variants.samples()), SAMPLES)


@functools.cache
def met_here():
    """Variants that this process has met: not run again."""
    return set()


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(("operation", "row"), GROUPS)
def test_every_variant(cupy, monkeypatch, record_property, operation, row, first):
    met, problems = met_here(), []
    for index in range(first, min(first + SAMPLES, len(variants.samples()))):
        for call, _ in variants.reached(operation, row, index, met):
            problems.append((index, call))
    if not problems:
        pytest.skip("its samples lead this row to no variant that was not met here")
    rows.force(monkeypatch, operation, row)
    for index, call in problems:
        problem = variants.problem_of(operation, index, call, values=True)
        fuzz.CHECKS[operation](cupy, problem)
    record_property("cases", len(problems))


def test_merges_copies_and_sums(cupy):
    """Kernels beside the rows: parts of each dtype, whole vectors, narrow results."""
    for dtype in variants.DTYPES:
        for lse in (np.float32, np.float64):
            fuzz.check_merge(cupy, variants.merge_of(dtype, lse))
    for problem in variants.beside():
        fuzz_vjp.fuzz.CHECKS[problem.operation](cupy, problem)
