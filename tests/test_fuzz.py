"""Random problems of attention, its gradients and the softmax family."""

import inspect
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz
import fuzz_vjp
import numpy as np
import pytest

import cupyflash

CHUNK = 50
# Ways to compile, on a GPU: each costs about a second the first time.
VARIANTS = {"attention": 60, "attention_vjp": 30, "softmax": 120}
OPERATIONS = sorted(fuzz_vjp.fuzz.DRAWS)


def pytest_generate_tests(metafunc):
    if "numbers" not in metafunc.fixturenames:
        return
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_begins_with_the_line_that_runs_it_again(monkeypatch, operation):
    def fails(xp, problem):
        raise ValueError("out is wrong")

    with monkeypatch.context() as patch:
        patch.setitem(fuzz.CHECKS, operation, fails)
        with pytest.raises(AssertionError) as raised:
            fuzz.run(np, fuzz.draw(operation, 12, 3))
    line, *_ = str(raised.value).splitlines()
    assert line == f"python tests/fuzz.py {operation} 12 --variants 3 --xp numpy"
    assert "out is wrong" in str(raised.value)
    env = {n: x for n, x in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *line.split()[1:]],
        cwd=Path(fuzz.__file__).parent.parent,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "agrees"


FUNCTIONS = {
    "attention": ("attention",),
    "attention_vjp": ("attention_vjp",),
    "softmax": tuple(dict.fromkeys(fuzz.FUNCTIONS)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_option_is_drawn(operation):
    """An option that a function gets later is missed here until it is drawn."""
    drawn = {function: set() for function in FUNCTIONS[operation]}
    for number in range(300):
        problem = fuzz.draw(operation, number)
        found = drawn[problem.function]
        found |= {*problem.arrays, *problem.options}
        found |= {"out"} if problem.out_form else set()
    for function, found in drawn.items():
        names = {*inspect.signature(getattr(cupyflash, function)).parameters}
        # The first argument has three names; gradients are given what forward made.
        found |= {"x": {"a", "y"}, "attention_vjp": {"out", "lse"}}.get(
            "x" if operation == "softmax" else function, set()
        )
        assert names <= found, f"{function}: {names - found} is never drawn"


def test_problems_for_a_time_begin_at_a_number():
    numbers = list(itertools.islice(problems(None, 60, 7), 3))
    assert numbers == [7, 8, 9]
    assert list(problems(None, -1, 7)) == []
