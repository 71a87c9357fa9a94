"""Sequences of launches: where each argument comes from. Launches are noted only."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupyflash._cuda import launch_sequence  # noqa: E402
from cupyflash._cuda.kernel import LaunchConfig, Variant  # noqa: E402
from cupyflash._cuda.launch_sequence import (  # noqa: E402
    At,
    Counter,
    LaunchSequence,
    PointersAndBytes,
    Result,
    Steps,
)

START = 1 << 40
F4 = np.dtype("f4")


class Scratch:
    """What cupy.cuda.alloc gives."""

    def __init__(self, size, events):
        self.ptr, self.size, self.events = START, size, events

    def memset_async(self, value, size):
        self.events.append(("memset", value, size))

    def __del__(self):
        self.events.append(("free", self.ptr))


@pytest.fixture
def events(monkeypatch):
    """What a sequence does, in its order."""
    noted = []

    def enqueue(launch, *args):
        noted.append((launch.variant.entry, *args))

    def alloc(size):
        noted.append(("alloc", size))
        return Scratch(size, noted)

    counters = SimpleNamespace(of_current_stream=lambda: 4321)
    monkeypatch.setattr(launch_sequence.Launch, "enqueue", enqueue)
    monkeypatch.setattr(launch_sequence.runtime, "current_device", lambda: 0)
    monkeypatch.setattr(launch_sequence.cupy.cuda, "alloc", alloc)
    for name, function in (
        ("keep_if_capturing", lambda memory: noted.append(("keep", memory.ptr))),
        ("counters", lambda *which: noted.append(("counters", *which)) or counters),
    ):
        monkeypatch.setattr(launch_sequence.graphs, name, function)
    monkeypatch.setattr(
        launch_sequence, "fill", lambda x, value: noted.append(("fill", value))
    )
    monkeypatch.setattr(Result, "maker", lambda self: lambda: array(777))
    monkeypatch.setattr(launch_sequence, "_constructor", lambda: None)
    return noted


def array(pointer):
    return SimpleNamespace(data=SimpleNamespace(ptr=pointer))


def config(name, **more):
    return LaunchConfig(Variant("a.cu", name), (3,), (32,), **more)


def test_arguments_come_from_the_call_the_results_and_the_steps(events):
    steps = Steps([(config("one"), ("y", "x", "out", 5, b"params", "lse"))])
    results = {"out": Result((2,), F4), "lse": None}
    plan = LaunchSequence(0, ("x", "y"), results, steps)
    out, lse = plan((10, 20))
    assert (out.data.ptr, lse) == (777, None)
    assert events == [("one", 20, 10, 777, 5, b"params", 0)]
    given = array(30)
    assert plan([10, 20], given) == (given, None)
    assert events[-1] == ("one", 20, 10, 30, 5, b"params", 0)


def test_launches_share_one_piece_of_memory(events):
    steps = Steps(
        [
            (config("one"), ("a", "b", At("b", 8))),
            (config("two"), ("b", "out")),
        ],
        {"a": 100, "b": 700, "c": 1},
        cleared=100,
    )
    plan = LaunchSequence(0, ("x",), {"out": Result((2,), F4)}, steps)
    plan((10,))
    assert events == [
        ("alloc", 256 + 768 + 256),
        ("keep", START),
        ("memset", 0, 100),
        ("one", START, START + 256, START + 264),
        ("two", START + 256, 777),
        # Not before: another thread could get it from the pool, and without a pool
        # the memory would be gone.
        ("free", START),
    ]
    assert [launch.variant.entry for launch in plan.launches] == ["one", "two"]


def test_what_is_found_at_each_call(events):
    packed = PointersAndBytes(("x", "", "out"), b"rest....")
    steps = Steps([(config("one"), (Counter(7), packed)), (config("two"), (packed,))])
    plan = LaunchSequence(3 - 3, ("x",), {"out": Result((2,), F4)}, steps)
    assert events.pop() == ("counters", 0, 7)  # once, not at each call
    plan((10,))
    struct = np.array([10, 0, 777], "u8").tobytes() + b"rest...."
    assert events == [("one", 4321, struct), ("two", struct)]


def test_results_that_no_launch_writes_are_filled(events):
    results = {
        "out": Result((2,), F4, fill=-np.inf),
        "sign": Result((2,), F4),
        "absent": None,
    }
    plan = LaunchSequence(0, ("x",), results, Steps([], zeros=("sign",)))
    out, sign, absent = plan((10,))
    assert events == [("fill", -np.inf), ("fill", 0)]
    assert (out.data.ptr, sign.data.ptr, absent) == (777, 777, None)


def test_an_unknown_name_is_an_error(events):
    steps = Steps([(config("one"), ("x", "nothing"))])
    with pytest.raises(KeyError, match="nothing"):
        LaunchSequence(0, ("x",), {"out": Result((2,), F4)}, steps)
    with pytest.raises(AssertionError, match="two arrays"):
        LaunchSequence(0, ("x",), {"x": Result((2,), F4)}, Steps([]))


def test_it_runs_on_its_device(events, monkeypatch):
    device = [1]

    @contextlib.contextmanager
    def use(device_id):
        before, device[0] = device[0], device_id
        yield
        device[0] = before

    monkeypatch.setattr(launch_sequence.runtime, "current_device", lambda: device[0])
    monkeypatch.setattr(launch_sequence.cupy.cuda, "Device", use)
    steps = Steps([(config("one"), ("x",))])
    plan = LaunchSequence(4, ("x",), {"out": Result((2,), F4)}, steps)
    plan((10,))
    assert events == [("one", 10)]
    assert device == [1]


@pytest.mark.parametrize("in_place", [True, False])
def test_spans_that_meet_the_output(events, in_place):
    """The same elements may be written where they are read, if a call may do that."""
    memory = np.zeros(100, "f4")
    x, out, same = memory[:10], memory[20:30], memory[20:30]
    plan = LaunchSequence(
        0, ("x", "y"), {"out": Result((10,), F4)}, Steps([]), (x, same), out, in_place
    )
    at = 1000
    assert not plan.may_overlap(at, (at + 40, at - 40))
    assert plan.may_overlap(at, (at + 36, at - 40))
    assert plan.may_overlap(at, (at - 36, at - 40))
    assert plan.may_overlap(at, (at + 40, at + 4))
    assert plan.may_overlap(at, (at + 40, at)) == (not in_place)


def test_an_absent_array_is_a_null_pointer_in_all_calls(events):
    """The kernels are told so once, whatever the calls say."""
    steps = Steps([(config("one"), ("x", "bias", "out"))])
    results = {"out": Result((2,), F4)}
    plan = LaunchSequence(0, ("x", "bias"), results, steps, (array(1), None))
    plan((1, 99))
    assert events == [("one", 1, 0, 777)]


@pytest.fixture
def started(monkeypatch, events):
    """What launches find in memory: (entry, stream, where, arguments)."""
    seen = []

    words = {}  # of each argument that is bytes, by entry

    class Launch(launch_sequence.Launch):
        """Compiled by its first call."""

        def enqueue(self, *args):
            words[self.variant.entry] = [
                len(x) // 8 if isinstance(x, bytes) else 0 for x in args
            ]
            self._start = self.go, self.variant.entry
            events.append((self.variant.entry, *args))

        def go(self, entry, stream, address, extra):
            at = (ctypes.c_int64 * len(words[entry])).from_address(address)
            number = ctypes.c_int64.from_address
            args = [ctypes.string_at(x, 8 * n) if n else number(x).value
                    for x, n in zip(at, words[entry], strict=True)]  # fmt: skip
            seen.append((entry, stream, address, args))

    stream = SimpleNamespace(ptr=5)
    monkeypatch.setattr(launch_sequence, "Launch", Launch)
    monkeypatch.setattr(
        launch_sequence.launch, "current_stream", lambda device_id: stream
    )
    return seen


def two_launches():
    """A plan of launches that share arguments, some the same in each call."""
    packed = PointersAndBytes(("y", "", "scratch"), b"rest....")
    steps = Steps(
        [
            (config("one"), ("y", 7, "x", b"8 bytes.", "out")),
            (config("two"), (packed, "lse", "x", 7, "scratch", "bias")),
        ],
        {"scratch": 8},
    )
    results = {"out": Result((2,), F4), "lse": None}
    arrays = (array(1), array(2), None)
    return LaunchSequence(0, ("x", "y", "bias"), results, steps, arrays)


def test_launches_find_their_arguments(events, started):
    plan = two_launches()
    for x, y in ((10, 20), (-30, 1 << 60), (50, 60)):
        out, lse = plan((x, y, 99))
        assert (out.data.ptr, lse) == (777, None)
        packed = np.array([y, 0, START], "i8").tobytes() + b"rest...."
        expected = [
            ["one", y, 7, x, b"8 bytes.", 777],
            ["two", packed, 0, x, 7, START, 0],
        ]
        if x == 10:  # which compiles
            found = [list(x) for x in events if x[0] in ("one", "two")]
            assert not started
        else:
            found = [[entry, *args] for entry, _, _, args in started[-2:]]
        assert found == expected
    assert {stream for _, stream, _, _ in started} == {5}
    # Calls one after another use the same memory.
    assert len({address for _, _, address, _ in started}) == 2


def test_calls_at_the_same_time_have_memory_of_their_own(started):
    plan = two_launches()
    plan((1, 2, 0))
    one = plan.launches[0]
    others = [(3, 4, 0)]

    def interrupted(*args):
        """Another thread runs while the driver is called without Python's lock."""
        if others:
            plan(others.pop())
        one.go(*args)

    one._start = interrupted, "one"
    plan.run = plan._function([launch.starter() for launch in plan.launches])
    plan((5, 6, 0))
    of_one = [(address, args[0]) for entry, _, address, args in started
              if entry == "one"]  # fmt: skip
    (inner, y), (outer, own_y) = of_one
    assert (y, own_y) == (4, 6)
    assert inner != outer


def test_errors_of_a_launch(events, started, monkeypatch):
    """A thread's first use of a device is repaired; what does not fit is said."""
    from cupyflash._cuda import launch

    class DriverError(RuntimeError):
        def __init__(self, status):
            self.status = status

    monkeypatch.setattr(launch, "DriverError", DriverError)
    used = []
    monkeypatch.setattr(launch.cupy.cuda.runtime, "setDevice", used.append)
    plan = two_launches()
    plan((1, 2, 0))
    for status, kind in (
        (201, None),
        (701, launch.DoesNotFitError),
        (720, launch.DoesNotFitError),
        (912, launch.DoesNotFitError),
        (700, DriverError),
    ):
        failed = []

        def fail_once(*args, status=status, failed=failed):
            if not failed:
                failed.append(args)
                raise DriverError(status)
            plan.launches[1].go(*args)

        plan.launches[1]._start = fail_once, "two"
        plan.run = plan._function([launch.starter() for launch in plan.launches])
        started.clear()
        if kind is None:
            plan((3, 4, 0))
            assert [entry for entry, *_ in started] == ["one", "two"]
        else:
            with pytest.raises(kind):
                plan((3, 4, 0))
            assert [entry for entry, *_ in started] == ["one"]
        plan((5, 6, 0))  # the next call has memory, too
        assert started[-1][3][2] == 5
    assert used == [0]


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "c8", "bfloat16"])
def test_new_arrays_are_those_of_cupy(monkeypatch, dtype):
    """Made without the constructor's checks: nothing may differ but the time."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 40, 4096, None, 0), 0)
    asked = []

    def alloc(size):
        asked.append(size)
        return memory

    assert launch_sequence._constructor() is not None
    with cupy.cuda.using_allocator(alloc):
        for shape in ((3, 5), (), (4,), (2, 0, 3), (1, 2, 3, 4, 5)):
            known = {}
            lines = Result(shape, np.dtype(dtype)).making("x", 3, known)
            exec("\n".join(lines), known)
            found = known["x"]
            expected = cupy.ndarray(shape, np.dtype(dtype))
            assert type(found) is cupy.ndarray
            for name in ("shape", "strides", "dtype", "size", "base"):
                assert getattr(found, name) == getattr(expected, name)
            assert found.dtype.type is expected.dtype.type
            assert found.data.ptr == expected.data.ptr
            assert str(found.flags) == str(expected.flags)
            assert asked[-1] == asked[-2]


def test_without_the_parts_of_the_constructor(monkeypatch):
    monkeypatch.setattr(launch_sequence, "_constructor", lambda: None)
    known = {}
    assert Result((3,), F4).making("x", 0, known) == ["x = new0()"]
    assert known["new0"].func is cupy.ndarray


def test_keys_look_at_what_cupy_has():
    """Without it each call would pass all checks again."""
    assert hasattr(cupy.ndarray, "_c_contiguous")
