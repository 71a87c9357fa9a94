"""Rows of counters, which no two kernels in flight may share; streams are made up."""

import contextlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cupy")

import cupy

from cupyflash._cuda import graphs


class Stream(cupy.cuda.Stream):
    """A stream with a handle, no device, and work or none."""

    def __init__(self, ptr, done=True):
        self.ptr, self.is_done = ptr, done
        self._foreign_stream_ref = None

    @property
    def done(self):
        return self.is_done

    def __del__(self):
        pass


class Foreign:
    """A stream of another library: its handle alone is known."""

    def __init__(self, ptr):
        self.ptr = ptr


@pytest.fixture
def streams(monkeypatch):
    """The state of _graphs anew, with a current stream for each thread."""
    state = threading.local()
    monkeypatch.setattr(graphs, "_current_stream", lambda *_: state.current)
    monkeypatch.setattr(
        graphs, "_is_capturing_on", lambda _: getattr(state, "captures", False)
    )
    monkeypatch.setattr(graphs, "_beside_captures", contextlib.nullcontext)
    for name, fresh in (
        ("_held", {}),
        ("_foreign", {}),
        ("_watched", {}),
        ("_counters", {}),
        ("_kept_for_graphs", []),
        ("_most_held", graphs._FEW),
        ("_of_thread", threading.local()),
    ):
        monkeypatch.setattr(graphs, name, fresh)
    graphs.counters.cache_clear()
    yield state
    graphs.counters.cache_clear()


@pytest.fixture
def counters(streams, monkeypatch):
    starts = itertools.count(8, 80)

    def grow(self):
        start = next(starts)
        self.free.extend(range(start, start + 80, 8))

    monkeypatch.setattr(graphs.Counters, "_grow", grow)
    return graphs.counters(0, 2)


def row_on(streams, counters, stream):
    streams.current = stream
    try:
        return counters.of_current_stream()
    finally:
        streams.current = None


def test_first_callers_share_the_counters(streams):
    """Eight threads at once, none of which may get counters of its own."""
    slow = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for numbers in range(2, 200):
                barrier = threading.Barrier(8)

                def first(_, numbers=numbers, barrier=barrier):
                    barrier.wait()
                    return graphs.counters(0, numbers)

                assert len({id(x) for x in pool.map(first, range(8))}) == 1
    finally:
        sys.setswitchinterval(slow)


def test_first_calls_at_once_get_rows_of_their_own(streams, counters):
    barrier = threading.Barrier(8)

    def first(i):
        barrier.wait()
        return [row_on(streams, counters, x) for x in (*own[i], shared)]

    own = [[Stream(100 * i + j) for j in range(3, 20)] for i in range(8)]
    shared = Stream(99)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(first, range(8)))
    rows = [row for of_thread in found for row in of_thread[:-1]]
    assert len({*rows}) == len(rows) == 8 * 17
    assert len({of_thread[-1] for of_thread in found} - {*rows}) == 1


def test_nobody_waits_for_the_memory_of_another(streams, counters, monkeypatch):
    """While one thread waits for the device, others get rows that are there.

    Otherwise it might wait for a kernel that waits for one of theirs.
    """
    ready = graphs.counters(0, 8)
    ready.free.append(16)
    waits, may_go_on = threading.Event(), threading.Event()

    def grow(self):
        waits.set()
        assert may_go_on.wait(20)
        self.free.append(8)

    monkeypatch.setattr(graphs.Counters, "_grow", grow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(row_on, streams, counters, Stream(5))
        assert waits.wait(20)
        try:
            second = pool.submit(row_on, streams, ready, Stream(6))
            assert second.result(timeout=10) == 16
        finally:
            may_go_on.set()
        assert first.result(timeout=20) == 8


def test_a_finalizer_may_come_in_between(streams, counters, monkeypatch):
    """The garbage collector runs one anywhere; it may call the package itself."""
    # A lock of its own: if the thread below is caught in it, other tests are not.
    monkeypatch.setattr(graphs, "_lock", type(graphs._lock)())
    found = []

    class Finalized(Stream):
        @property
        def done(self):
            current, streams.current = streams.current, Stream(7)
            found.append(counters.of_current_stream())
            streams.current = current
            return True

    row_on(streams, counters, Finalized(5))
    kept = [Stream(6) for _ in range(100)]

    def work():
        return [row_on(streams, counters, stream) for stream in kept]

    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    *inner, rows = found
    assert inner
    assert len({*rows}) == 100


def test_a_stream_keeps_its_row(streams, counters):
    stream, other = Stream(5), Stream(6)
    row = row_on(streams, counters, stream)
    assert row_on(streams, counters, other) != row
    assert row_on(streams, counters, stream) == row
    more = graphs.counters(0, 8)  # of other kernels
    assert more is not counters
    assert row_on(streams, more, stream) == row_on(streams, more, stream)


def test_a_handle_that_comes_again_gets_another_row(streams, counters):
    """As long as the stream that had it before is busy."""
    rows = []
    for _ in range(1000):
        rows.append(row_on(streams, counters, Stream(5, done=False)))
    assert len({*rows}) == 1000


def test_rows_of_idle_streams_come_again(streams, counters):
    kept = [Stream(5) for _ in range(7)]
    theirs = {row_on(streams, counters, stream) for stream in kept}
    rows = {row_on(streams, counters, Stream(6)) for _ in range(20_000)}
    assert not rows & theirs
    assert len(rows) <= 64
    assert len(graphs._held) <= 64
    assert {row_on(streams, counters, stream) for stream in kept} == theirs


def test_a_stream_that_is_current_somewhere_is_not_left(streams, counters):
    """Though its maker has dropped it, and it has nothing to do right now."""
    current = [Stream(5)]
    row = row_on(streams, counters, current[0])
    rows = {row_on(streams, counters, Stream(6)) for _ in range(1000)}
    assert row not in rows
    current.clear()
    rows = {row_on(streams, counters, Stream(6)) for _ in range(1000)}
    assert row in rows


def test_temporaries_hold_their_stream(streams):
    """The pool knows it by its handle, which must not come again too early."""
    streams.current = Stream(5, done=False)
    graphs.keep_if_capturing("memory")
    (held,) = graphs._held.values()
    assert held.stream is streams.current
    streams.current = Foreign(5)  # which is another library's to keep
    graphs.keep_if_capturing("memory")
    assert len(graphs._held) == 1
    assert not graphs._kept_for_graphs


def test_a_foreign_stream_has_the_row_of_its_number(streams, counters, monkeypatch):
    numbers = iter((41, 41, 42))
    monkeypatch.setattr(graphs, "_unique_number", lambda ptr: next(numbers))
    first, same, other = (row_on(streams, counters, Foreign(7)) for _ in range(3))
    assert first == same != other
    wrapped = Stream(7)
    wrapped._foreign_stream_ref = object()
    numbers = iter((42,))
    for _ in range(3):  # asked for once an object
        assert row_on(streams, counters, wrapped) == other
    del wrapped
    assert not graphs._held
    assert not graphs._watched


def test_objects_of_the_default_stream_share_its_row(streams, counters):
    rows = {row_on(streams, counters, Foreign(ptr)) for ptr in (0, 1, 0)}
    assert len(rows) == 1
    null = cupy.cuda.Stream.null
    assert row_on(streams, counters, null) == row_on(streams, counters, null)


def test_each_captured_call_has_a_row_for_ever(streams, counters):
    streams.captures = True
    stream = Stream(5)
    rows = [row_on(streams, counters, stream) for _ in range(10_000)]
    assert len({*rows}) == 10_000
    assert not graphs._held
    streams.captures = False
    assert row_on(streams, counters, stream) not in rows


class Event:
    """An event that is done when the test says so."""

    done = False

    def __init__(self, **_):
        pass

    def record(self, stream):
        assert stream is cupy.cuda.Stream.ptds


def test_a_thread_leaves_its_row_when_its_work_is_done(streams, counters, monkeypatch):
    """Of its own default stream, which has one handle for all threads."""
    per_thread = Foreign(graphs._PER_THREAD)
    monkeypatch.setattr(cupy.cuda, "Event", Event)
    for name in ("getDevice", "setDevice"):
        monkeypatch.setattr(cupy.cuda.runtime, name, lambda *_: 0)
    rows = []

    def work():
        rows.append({row_on(streams, counters, per_thread) for _ in range(3)})

    def run(count):
        for _ in range(count):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    run(50)
    assert all(len(found) == 1 for found in rows)
    assert len(set.union(*rows)) == 50
    assert len(counters.left) == 50
    monkeypatch.setattr(Event, "done", True)
    rows.clear()
    counters.free.clear()
    run(200)
    assert len(set.union(*rows)) <= 51


def test_threads_that_live_have_rows_of_their_own(streams, counters):
    per_thread = Foreign(graphs._PER_THREAD)
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        return row_on(streams, counters, per_thread)

    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(work, range(8))}) == 8
