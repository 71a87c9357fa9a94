"""Sequences of launches: where each argument comes from. Launches are noted only."""

import contextlib
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
    assert plan([10, 20], given) == [given, None]
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


def test_what_is_the_same_in_each_call_is_written_once(monkeypatch):
    """Each thread launches with memory of its own, in which only the first change."""
    import ctypes

    from cupyflash._cuda import launch

    seen = []

    def go(stream, address, extra):
        at = (ctypes.c_int64 * 4).from_address(address)
        numbers = [ctypes.c_int64.from_address(at[n]).value for n in (0, 2, 3)]
        seen.append((address, *numbers, ctypes.string_at(at[1], 5)))

    stream = SimpleNamespace(ptr=0)
    monkeypatch.setattr(launch, "_current_stream", lambda device_id: stream)
    one = launch.Launch(config("one"), 0)
    # Neither in the order of the values, nor all of them, nor the fixed ones last.
    picking = one.picking((3, 5, 0, 2), {5: b"fixed", 2: 7})

    def enqueue(first, second):
        picking([second, None, None, first, None, None])

    noted = []
    monkeypatch.setattr(
        launch.Launch, "enqueue", lambda self, *args: noted.append(args)
    )
    enqueue(1, -2)  # not compiled yet
    assert noted == [(1, b"fixed", -2, 7)]
    assert not seen
    one._enqueue = go
    enqueue(1, -2)
    enqueue(3, 1 << 40)
    addresses = {address for address, *_ in seen}
    assert [told for _, *told in seen] == [
        [1, -2, 7, b"fixed"],
        [3, 1 << 40, 7, b"fixed"],
    ]
    assert len(addresses) == 1
    # A launch within a launch, as of another thread, has other memory.
    one._enqueue = lambda *args: (
        go(*args),
        setattr(one, "_enqueue", go),
        enqueue(5, 6),
    )
    enqueue(8, 9)
    assert [told for _, *told in seen[2:]] == [[8, 9, 7, b"fixed"], [5, 6, 7, b"fixed"]]
    assert seen[2][0] != seen[3][0]


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
            found = launch_sequence._new(shape, np.dtype(dtype))()
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
    assert launch_sequence._new((3,), F4).func is cupy.ndarray


def test_keys_look_at_what_cupy_has():
    """Without it each call would pass all checks again."""
    assert hasattr(cupy.ndarray, "_c_contiguous")
