"""Random problems of every operation: other ones each day."""

import collections
import datetime
import inspect
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz
import fuzz_gpu
import fuzz_vjp
import numpy as np
import planned
import pytest

import cupyflash

CHUNK = 50
# On a GPU each structure is compiled, about a second a kernel.
OF_A_STRUCTURE = 25
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


def first_of(config):
    """The number of the first problem: as given, or the day's."""
    first = config.getoption("--fuzz-seed")
    return datetime.date.today().toordinal() << 20 if first is None else first


def problems(numbers, seconds, first):
    """The numbers of the problems: as many as are asked for, or until time is up."""
    if numbers is not None:
        yield from (first + number for number in numbers)
        return
    end = time.monotonic() + seconds
    for number in itertools.count(first):
        if time.monotonic() > end:
            return
        yield number


@pytest.mark.parametrize("operation", OPERATIONS)
def test_random_problems(xp, operation, numbers, request, record_property):
    seconds = request.config.getoption("--fuzz-seconds")
    tried = 0
    for number in problems(numbers, seconds, first_of(request.config)):
        seed, sizes = (number, 0) if xp is np else divmod(number, OF_A_STRUCTURE)
        fuzz.run(xp, fuzz.draw(operation, seed, sizes))
        tried += 1
    record_property("cases", tried)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_begins_with_the_line_that_runs_it_again(monkeypatch, operation):
    def fails(xp, problem):
        raise ValueError("out is wrong")

    with monkeypatch.context() as patch:
        patch.setitem(fuzz.CHECKS, operation, fails)
        with pytest.raises(AssertionError) as raised:
            fuzz.run(np, fuzz.draw(operation, 12, 3, 14))
    line, *_ = str(raised.value).splitlines()
    assert (
        line == f"python tests/support/fuzz.py {operation} 12 --sizes 3 "
        f"--budget 14 --xp numpy"
    )
    assert "out is wrong" in str(raised.value)
    env = {n: x for n, x in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *line.split()[1:]],
        cwd=Path(fuzz.__file__).parents[2],
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
    "merge": ("merge_attention_states",),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_option_is_drawn(operation):
    """An option that a function gets later is missed here until it is drawn."""
    drawn = {function: set() for function in FUNCTIONS[operation]}
    for number in range(300):
        problem = fuzz.draw(operation, number, values=False)
        found = drawn[problem.function]
        found |= {*problem.arrays, *problem.options}
        found |= {"out"} if problem.out_form else set()
    for function, found in drawn.items():
        names = {*inspect.signature(getattr(cupyflash, function)).parameters}
        # Functions have a grammar of their own: tests/support/expressions.py.
        names -= {"score", "score_arrays", "mask_arrays", "need_dscore"}
        # The first argument has three names; gradients are given what forward made.
        found |= {"x": {"a", "y"}, "attention_vjp": {"out", "lse"}}.get(
            "x" if operation == "softmax" else function, set()
        )
        assert names <= found, f"{function}: {names - found} is never drawn"


def test_problems_for_a_time_begin_at_a_number():
    numbers = list(itertools.islice(problems(None, 60, 7), 3))
    assert numbers == [7, 8, 9]
    assert list(problems(None, -1, 7)) == []
    assert list(problems(range(50, 53), None, 7)) == [57, 58, 59]


def test_a_problem_is_a_function_of_its_numbers():
    for operation in OPERATIONS:
        first, same, other = (fuzz.draw(operation, 5, sizes) for sizes in (1, 1, 2))
        assert str(first) == str(same)
        for name, x in first.arrays.items():
            np.testing.assert_array_equal(x, same.arrays[name])
        assert {x.dtype for x in first.arrays.values()} == {
            x.dtype for x in other.arrays.values()
        }
        empty = fuzz.draw(operation, 5, 1, values=False)
        assert str(first) == str(empty)


# --- what is drawn -------------------------------------------------------------------


def traits(problem, plan):
    """What a problem of attention shows, of what has to be drawn."""
    arrays, options = problem.arrays, problem.options
    *batch, heads, seqlen_q, seqlen_k = problem.notes["scores"]
    dims = arrays["q"].shape[-1], arrays["v"].shape[-1]
    of_keys = arrays["k"].shape
    kv_heads = 1
    if len(of_keys) > 2:
        kv_heads = of_keys[-3 if options["layout"] == "bhsd" else -2]
    rows = int(np.prod([*batch, heads, seqlen_q]))
    lengths = arrays.get("key_lengths")
    part, is_split = plan.keys_per_split, plan.num_splits > 1
    window = options.get("window")
    yield from (
        name
        for name, holds in {
            "5,000 keys": seqlen_k >= 5000,
            "1,000 queries": seqlen_q >= 1000,
            "odd head": max(dims) % 2 == 1,
            "head above 256": max(dims) > 256,
            "D != Dv": dims[0] != dims[1],
            "group of no power of two": heads // kv_heads not in (1, 2, 4, 8, 16),
            "odd number of rows": rows % 2 == 1 and rows > 1,
            "split": is_split,
            "odd split": is_split and plan.num_splits % 2 == 1,
            "odd split of odd rows": is_split and plan.num_splits * rows % 2 == 1,
            "empty part": is_split
            and lengths is not None
            and bool((lengths <= seqlen_k - part).any()),
            "part beyond a window": is_split
            and isinstance(window, tuple)
            and None not in window
            and sum(window) < seqlen_k - 2 * part,
            "length 0": is_split and lengths is not None and 0 in lengths,
            "no queries": seqlen_q == 0,
            "no keys": seqlen_k == 0,
            "dlse": "dlse" in arrays,
            "dbias": options.get("need_dbias", False),
            "deterministic": options.get("deterministic", False),
            "in any order": options.get("deterministic") is False,
        }.items()
        if holds
    )
    yield from {f"form {form}" for form in problem.forms.values()}
    yield f"method {options['method']}"
    yield plan.rows[-1]


def test_what_has_to_be_drawn_is_drawn():
    """Each sort of structure, in problems as a GPU gets them; nothing is launched."""
    pytest.importorskip("cupy")
    seen = collections.Counter()
    with planned.device():
        for operation in ("attention", "attention_vjp"):
            for seed in range(400):
                problem = fuzz.draw(operation, seed, 0, fuzz.LARGE, values=False)
                plan = planned.plan(problem)
                if "key_lengths" in problem.arrays and plan.num_splits > 1:
                    problem = fuzz.draw(operation, seed, 0, fuzz.LARGE)
                seen.update(traits(problem, plan))
    wanted = {
        "5,000 keys": 15, "1,000 queries": 15, "odd head": 150, "head above 256": 100,
        "D != Dv": 150, "group of no power of two": 100, "odd number of rows": 30,
        "split": 60, "odd split": 12, "odd split of odd rows": 3, "empty part": 6,
        "part beyond a window": 2, "length 0": 6, "no queries": 3, "no keys": 3,
        "dlse": 60, "dbias": 20, "deterministic": 60, "in any order": 60,
        **{f"form {form}": 30 for form in {*fuzz.FORMS, *fuzz.ROW_FORMS}},
        **{f"method {method}": 20 for method in fuzz.METHODS},
    }  # fmt: skip
    assert not {n: (seen[n], least) for n, least in wanted.items() if seen[n] < least}


def test_problems_are_dealt_evenly_over_rows_and_kernels():
    """Fast rows alike, and no more kernels than were asked for, about."""
    pytest.importorskip("cupy")
    drawn = fuzz_gpu.draw_lane(0, 80, 1, fuzz.LARGE, 40)
    assert len(drawn) == 80
    counts = collections.Counter(problem.row for problem in drawn)
    slow = sum(counts[f"attention/{row}"] for row in ("naive", "safe", "online"))
    assert slow <= 0.5 * sum(
        number for row, number in counts.items() if row.startswith("attention/")
    )
    # Each operation fills its share, and ends with at most one structure more.
    assert len({v for problem in drawn for v in problem.variants}) <= 100
    assert len({(x.operation, x.seed) for x in drawn}) >= 6
    again = fuzz_gpu.draw_lane(0, 80, 1, fuzz.LARGE, 40)
    assert again == drawn
    others = fuzz_gpu.draw_lane(1, 20, 1, fuzz.LARGE, 10)
    assert not {(x.operation, x.seed) for x in drawn} & {
        (x.operation, x.seed) for x in others
    }


def test_steering_takes_what_was_met_least():
    steering = fuzz_gpu.Steering(3)
    variants = [planned.kernel.Variant("a.cu", str(i)) for i in range(3)]
    tiled = planned.Planned(("attention/tiled",), (variants[0],))
    hopper = planned.Planned(("attention/hopper",), (variants[1],))
    same_row = planned.Planned(("attention/hopper",), (variants[2],))
    steering.note(tiled)
    assert min((tiled, hopper), key=steering.order) is hopper
    steering.note(hopper)
    assert min((hopper, same_row), key=steering.order) is same_row
    assert not steering.is_full
    steering.note(same_row)
    assert steering.is_full
    naive = planned.Planned(("attention/naive",), (variants[0],))
    assert steering.order(naive) < steering.order(hopper)


# --- tests/support/fuzz_gpu.py
# ---------------------------------------------------------------


def options_of(**given):
    usual = {
        "problems": 30, "seconds": 120.0, "seed": 2, "budget": 12, "variants": 40,
        "jobs": 2, "xp": "numpy",
    }  # fmt: skip
    return type("Options", (), usual | given)


def test_the_driver_runs_what_it_draws():
    pytest.importorskip("cupy")
    found = fuzz_gpu.fuzz_gpu(options_of())
    assert (found["problems"], found["bad"]) == (30, [])
    assert found["passed"] + found["not_run"] == 30
    assert found["passed"] >= 20
    assert sum(found["rows"].values()) == found["passed"]
    assert "30 problems of seed 2" in fuzz_gpu.summary(found)
    drawn = fuzz_gpu.Drawn("attention", 9, 2, 20)
    line = fuzz_gpu.reproducer(drawn, "numpy")
    assert line == fuzz.draw("attention", 9, 2, 20, values=False).reproducer(np)


def _wrong(pipe, xp_name, number):
    """A process in place of fuzz_gpu._work: some tasks are wrong, end it, or hang."""
    while (task := pipe.recv()) is not None:
        if task == "ends":
            os._exit(7)
        if task == "hangs":
            time.sleep(60)
        pipe.send("AssertionError: no" if task == "wrong" else None)


def test_a_process_that_ends_or_hangs_is_one_bad_problem(monkeypatch):
    monkeypatch.setattr(fuzz_gpu, "_work", _wrong)
    tasks = ["good", "ends", "wrong", "hangs", *["good"] * 5]
    end = time.monotonic() + 60
    found = list(fuzz_gpu.run_all(tasks, "numpy", 2, end, stuck=10))
    said = {task: what for task, what in found if what is not None}
    assert sum(what is None for _, what in found) == 6
    assert said == {
        "ends": "the process ended with exit code 7",
        "wrong": "AssertionError: no",
        "hangs": "no end after 10 s",
    }


def test_what_is_left_at_the_deadline_does_not_run(monkeypatch):
    monkeypatch.setattr(fuzz_gpu, "_work", _wrong)
    assert list(fuzz_gpu.run_all(["good"], "numpy", 1, time.monotonic() - 1)) == []
