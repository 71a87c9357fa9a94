"""Threads of the CPU back end: Ctrl-C, forks, callers side by side."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import threadpoolctl

import cupyflash
from cupyflash._core import threads


def blas_threads():
    return [x["num_threads"] for x in threadpoolctl.threadpool_info()]


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C raises, though a shell that starts a job behind it has it ignored.

    What is raised inside of a callback of the garbage collector is lost, and hypothesis
    has one that it leaves behind: one interrupt in 1,400 came there.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = callbacks
    signal.signal(signal.SIGINT, before)


def until_interrupted(function):
    """Call a function again and again; an interrupt that is lost is a failure."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        function()
    pytest.fail("the interrupt was lost")


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 2)


def assert_nothing_is_left(blas_before):
    assert not threads._shared.callers
    assert not threads._shared.at_work
    assert not threads._shared.helpers
    assert blas_threads() == blas_before


def random_sleep(task, scratch):
    scratch.array("x", (1,), np.float32)
    time.sleep(0.002)


def test_every_task_is_done_once(two_cores):
    before, done = blas_threads(), []
    threads.for_each_with_blas(lambda task, _: done.append(task), range(1000), 2)
    assert sorted(done) == list(range(1000))
    assert_nothing_is_left(before)


def test_blas_has_one_thread_inside_and_its_own_afterwards(two_cores):
    before, inside = blas_threads(), []
    threads.for_each_with_blas(lambda *_: inside.append(blas_threads()), range(4), 2)
    numpy_alone = threads._blas_libraries()
    assert len(inside) == 4
    for found in inside:
        assert found.count(1) >= len(numpy_alone)
    assert_nothing_is_left(before)


def test_blas_has_one_thread_inside_of_a_single_call():
    before = blas_threads()
    inside = threads.run_with_blas(blas_threads)
    assert inside.count(1) >= len(threads._blas_libraries())
    assert_nothing_is_left(before)
    with pytest.raises(ZeroDivisionError):
        threads.run_with_blas(lambda: 1 / 0)
    assert_nothing_is_left(before)


@pytest.mark.skipif(
    threads._getcpu() is None or threads.num_cores() < 2,
    reason="one core, or no choice",
)
def test_a_helper_keeps_off_the_core_of_its_caller(two_cores):
    caller, found = threading.get_ident(), []

    def look(task, scratch):
        time.sleep(0.002)
        if threading.get_ident() != caller:
            found.append(os.sched_getaffinity(0))

    threads.for_each(look, range(50), 2)
    own = os.sched_getaffinity(0)
    assert found
    assert all(cores < own and len(own - cores) == 1 for cores in found)


@pytest.mark.skipif(threads.num_cores() < 2, reason="one core")
def test_a_helper_counts_the_cores_of_its_caller():
    """Tasks that are cut by their number are cut alike, whoever takes them."""
    caller, found, cores = threading.get_ident(), [], threads.num_cores()

    def look(task, scratch):
        time.sleep(0.002)
        if threading.get_ident() != caller:
            found.append(threads.num_cores())

    for _ in range(2):
        threads.for_each(look, range(50), 2)
    assert found
    assert set(found) == {cores} == {threads.num_cores()}


def test_calls_inside_of_calls_of_other_threads_share_the_hold():
    before, found = blas_threads(), []

    def outer():
        other = threading.Thread(target=threads.run_with_blas, args=(blas_threads,))
        other.start()
        other.join()
        found.append(blas_threads())

    threads.run_with_blas(outer)
    assert found[0].count(1) >= len(threads._blas_libraries())
    assert_nothing_is_left(before)


@pytest.mark.parametrize("in_helper", [False, True])
def test_a_failure_ends_the_call(two_cores, in_helper):
    before, main, done = blas_threads(), threading.get_ident(), []

    def work(task, scratch):
        random_sleep(task, scratch)
        if (threading.get_ident() != main) == in_helper:
            raise ZeroDivisionError(task)
        done.append(task)

    with pytest.raises(ZeroDivisionError):
        threads.for_each_with_blas(work, range(2000), 2)
    assert len(done) < 1000
    assert_nothing_is_left(before)


def test_interrupts_at_any_time_leave_nothing(two_cores):
    """Ctrl-C at random moments, most of them between the steps of the bookkeeping."""
    before = blas_threads()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 300, 32)).astype(np.float32)
    expected = cupyflash.attention(x, x, x)
    interrupted = 0
    for delay in rng.uniform(0, 0.01, size=60):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            until_interrupted(lambda: cupyflash.attention(x, x, x))
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
    assert interrupted == 60
    np.testing.assert_array_equal(cupyflash.attention(x, x, x), expected)
    assert_nothing_is_left(before)


def test_the_next_call_repairs_what_an_interrupt_left():
    """At worst that is a thread among those at work, and BLAS held to one thread."""
    before, caller = blas_threads(), threading.get_ident()
    threads._shared.hold_blas(caller)
    threads._shared.at_work.add(caller)
    threads.for_each_with_blas(lambda *_: None, range(4), 2)
    assert_nothing_is_left(before)


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="needs signals")
@pytest.mark.parametrize("method", ["auto", "online"])
def test_an_interrupt_takes_effect_soon(two_cores, method):
    before = blas_threads()
    x = np.random.default_rng(0).normal(size=(1, 8, 4000, 64)).astype(np.float32)
    sent = []

    def interrupt():
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    late = []
    for _ in range(3):  # the least counts: others may have the cores
        timer = threading.Timer(0.1, interrupt)
        try:
            timer.start()
            until_interrupted(lambda: cupyflash.attention(x, x, x, method=method))
        except KeyboardInterrupt:
            late.append(time.perf_counter() - sent[-1])
        timer.join()
        assert_nothing_is_left(before)
    assert min(late) < 0.1


def run_python(code):
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_the_middle_of_a_call():
    said = run_python("""
        import os, threading, time, warnings
        import numpy as np, threadpoolctl, cupyflash
        from cupyflash._core import threads as _threads
        warnings.simplefilter("ignore")
        _threads.num_cores = lambda: 2
        own = [x["num_threads"] for x in threadpoolctl.threadpool_info()]
        x = np.random.default_rng(0).normal(size=(4, 2000, 64)).astype(np.float32)
        expected = cupyflash.attention(x[:, :700], x, x)
        stop = []
        def calls():
            while not stop:
                cupyflash.attention(x, x, x)
        thread = threading.Thread(target=calls)
        thread.start()
        for _ in range(5):
            while not _threads._shared._blas_users:
                time.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                at_start = [x["num_threads"] for x in threadpoolctl.threadpool_info()]
                got = cupyflash.attention(x[:, :700], x, x)
                after = [x["num_threads"] for x in threadpoolctl.threadpool_info()]
                right = np.array_equal(got, expected) and at_start == after == own
                os._exit(0 if right else 1)
            assert os.waitpid(pid, 0)[1] == 0
        stop.append(True)
        thread.join()
        assert [x["num_threads"] for x in threadpoolctl.threadpool_info()] == own
        print("right")
    """)
    assert said == "right\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_until_no_thread_is_inside_of_blas():
    said = run_python("""
        import os, threading, time, warnings
        from cupyflash._core import threads as _threads
        warnings.simplefilter("ignore")
        _threads.num_cores = lambda: 2
        inside, begun = set(), threading.Event()
        def task(_, scratch):
            scratch.array("x", (1,), float)
            inside.add(threading.get_ident())
            begun.set()
            time.sleep(0.01)
            inside.discard(threading.get_ident())
        caller = threading.Thread(
            target=_threads.for_each_with_blas, args=(task, range(100), 2)
        )
        caller.start()
        for _ in range(5):
            begun.clear()
            assert begun.wait(10)
            pid = os.fork()
            if pid == 0:
                shared = _threads._shared
                clean = not (inside or shared.at_work or shared.callers)
                _threads.for_each_with_blas(task, range(3), 2)
                os._exit(0 if clean and shared.fork_ended is None else 1)
            assert os.waitpid(pid, 0)[1] == 0
        caller.join()
        assert not _threads._shared.at_work
        print("right")
    """)
    assert said == "right\n"


@pytest.mark.parametrize("num_callers", [2, 5])
def test_callers_side_by_side_share_the_cores(two_cores, num_callers):
    before, most, lock = blas_threads(), [], threading.Lock()
    at_work = set()

    def task(_, scratch):
        with lock:
            at_work.add(threading.get_ident())
            most.append(len(at_work))
        time.sleep(0.001)
        with lock:
            at_work.discard(threading.get_ident())

    begin = threading.Barrier(num_callers)

    def call():
        begin.wait()
        threads.for_each_with_blas(task, range(60), 2)

    callers = [threading.Thread(target=call) for _ in range(num_callers)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    # A helper of the first call may do one run of tasks more when the second comes.
    assert max(most) <= num_callers + 1
    assert most[len(most) // 2] <= num_callers
    assert_nothing_is_left(before)


def test_callers_side_by_side_are_right():
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(3, 200 + n, 16)).astype(np.float32) for n in range(6)]
    expected = [cupyflash.attention(x, x, x) for x in inputs]
    found = [None] * len(inputs)

    def call(n):
        for _ in range(5):
            found[n] = cupyflash.attention(inputs[n], inputs[n], inputs[n])

    callers = [threading.Thread(target=call, args=(n,)) for n in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
