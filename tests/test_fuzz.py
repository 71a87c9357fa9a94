"""Random problems of attention, its gradients and the softmax family."""

import itertools
import time

import fuzz
import fuzz_vjp
import numpy as np
import pytest

CHUNK = 100
# Ways to compile, on a GPU: each costs about a second the first time.
VARIANTS = {"attention": 100, "attention_vjp": 40, "softmax": 220}
OPERATIONS = sorted(fuzz_vjp.fuzz.DRAWS)


def pytest_generate_tests(metafunc):
    config = metafunc.config
    seconds = config.getoption("--fuzz-seconds")
    total = config.getoption("--fuzz-problems")
    if seconds is not None:
        chunks = [pytest.param(None, id=f"{seconds:g}s")]
    else:
        starts = range(0, total, CHUNK)
        chunks = [
            pytest.param(range(a, min(a + CHUNK, total)), id=f"from-{a}")
            for a in starts
        ]
    metafunc.parametrize("numbers", chunks)


def problems(numbers, seconds, first=None):
    """The numbers of the problems: those given, or new ones until time is up."""
    if numbers is not None:
        yield from numbers
        return
    end = time.monotonic() + seconds
    if first is None:
        first = time.time_ns() % 2**40
    for number in itertools.count(first):
        if time.monotonic() > end:
            return
        yield number


@pytest.mark.parametrize("operation", OPERATIONS)
def test_random_problems(xp, operation, numbers, request, record_property):
    variants = None if xp is np else VARIANTS[operation]
    seconds = request.config.getoption("--fuzz-seconds")
    seed = request.config.getoption("--fuzz-seed")
    tried = 0
    for number in problems(numbers, seconds, seed):
        fuzz.run(xp, fuzz.draw(operation, number, variants))
        tried += 1
    record_property("cases", tried)
