"""Every kernel that the fast rows of attention may compile, met by a small problem.

The compile list is made of samples. Of each sample some sizes are planned, with each
row forced; calls that launch a listed variant which none before them did are run and
compared with the oracle. So a kernel that is added to a row is met here without a
change. What no size leads to is in `python tests/record/gpu_record.py --unmet`.
"""

import fuzz_vjp
import numpy as np
import pytest
import variants
from fuzz_vjp import fuzz

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("first", variants.FIRST)
@pytest.mark.parametrize("row", variants.WHOLE["attention"])
def test_every_variant(cupy, monkeypatch, record_property, row, first):
    tried = variants.check(cupy, monkeypatch, "attention", row, first)
    record_property("cases", tried)


def test_merges_copies_and_sums(cupy):
    """Kernels beside the rows: parts of each dtype, whole vectors, narrow results."""
    for dtype in variants.DTYPES:
        for lse in (np.float32, np.float64):
            fuzz.check_merge(cupy, variants.merge_of(dtype, lse))
    for problem in variants.beside():
        fuzz_vjp.fuzz.CHECKS[problem.operation](cupy, problem)
