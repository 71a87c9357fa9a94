"""New random problems for a time: --fuzz-seconds, 20 unless said.

A failure begins with the line that runs its problem again. The kernels are some of
those of test_fuzz.py, which tries the same numbers in every run.
"""

import itertools
import time

import fuzz_vjp
import pytest
from fuzz_vjp import fuzz

pytestmark = pytest.mark.gpu

SECONDS = 20.0
# Ways to compile, the first of those of test_fuzz.py; more where there is more time.
VARIANTS = {"attention": 8, "attention_vjp": 4, "softmax": 16}
LANES = 3  # tests that share the cores, each with numbers of its own


def variants_of(operation, seconds):
    """How many kernels pay in this time."""
    return max(VARIANTS[operation], int(VARIANTS[operation] * seconds / 60))


@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("operation", sorted(fuzz_vjp.fuzz.DRAWS))
def test_random_problems_for_a_time(cupy, operation, lane, request, record_property):
    seconds = request.config.getoption("--fuzz-seconds")
    seconds = SECONDS if seconds is None else seconds
    first = request.config.getoption("--fuzz-seed")
    first = time.time_ns() % 2**40 if first is None else first
    variants = variants_of(operation, seconds)
    end = time.monotonic() + seconds
    for tried in itertools.count():
        if tried and time.monotonic() > end:
            break
        number = first + LANES * tried + lane
        fuzz.run(cupy, fuzz.draw(operation, number, variants))
    record_property("cases", tried)
    record_property("first", first)
