"""New random problems for a time: --fuzz-seconds, 20 unless said.

A failure begins with the line that runs its problem again. tests/support/fuzz_gpu.py
runs thousands, chosen so that all kernels are met.
"""

import itertools
import time

import fuzz_vjp
import pytest
from fuzz_vjp import fuzz

pytestmark = pytest.mark.gpu

SECONDS = 20.0
OF_A_STRUCTURE = 8  # problems, which compile their kernels once
LANES = 3  # tests that share the cores, each with numbers of its own


@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("operation", sorted(fuzz_vjp.fuzz.DRAWS))
def test_random_problems_for_a_time(cupy, operation, lane, request, record_property):
    seconds = request.config.getoption("--fuzz-seconds")
    seconds = SECONDS if seconds is None else seconds
    first = request.config.getoption("--fuzz-seed")
    first = time.time_ns() % 2**40 if first is None else first
    end = time.monotonic() + seconds
    for tried in itertools.count():
        if tried and time.monotonic() > end:
            break
        structure, sizes = divmod(tried, OF_A_STRUCTURE)
        seed = first + LANES * structure + lane
        fuzz.run(cupy, fuzz.draw(operation, seed, sizes, budget=18))
    record_property("cases", tried)
    record_property("first", first)
