"""Streams, threads, processes and devices at once; results equal the serial ones."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mixed
import numpy as np
import pytest
import rows
from accuracy import to_host

import cupyflash

pytestmark = pytest.mark.gpu

ROOT = Path(cupyflash.__file__).resolve().parent.parent
THREADS = 8


# Rows that no mixed call is led to on an H200: of methods that are asked for by name,
# of large arrays (two passes), and portable ones, which wait for nobody.
_TWO_PASS = {"split", "vjp_split"}
NOT_MIXED = {
    "softmax": {"naive", "safe", "online", "vjp", *_TWO_PASS},
    "attention": {"naive", "safe", "tiled"},
    "attention_vjp": {"tiled"},
}

# --- threads -------------------------------------------------------------------------


def test_the_rows_of_the_mixed_calls(cupy, monkeypatch):
    """All but those of NOT_MIXED: a new row gets a call, or its name there."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("other cards choose other rows")
    met = {operation: set() for operation in rows.OPERATIONS}

    def told(name):
        function = getattr(cupyflash, name)
        operation = name if name.startswith("attention") else "softmax"

        def call(*args, **kwargs):
            met[operation].add(cupyflash.explain(function, *args, **kwargs).kernel)
            return function(*args, **kwargs)

        return call

    names = [n for n in cupyflash.__all__ if n.startswith(("attention", "log", "soft"))]
    telling = types.SimpleNamespace(**{name: told(name) for name in names})
    telling.merge_attention_states = cupyflash.merge_attention_states
    monkeypatch.setattr(mixed, "cupyflash", telling)
    for call in mixed.calls(cupy, 1).values():
        call()
    for operation, name in rows.all_rows():
        assert (name in met[operation]) == (name not in NOT_MIXED[operation]), name


def prepared(cupy, seed, device=0):
    """(stream, calls, serial results) on a device."""
    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            calls = mixed.calls(cupy, seed)
            expected = {name: call() for name, call in calls.items()}
        stream.synchronize()
    return stream, calls, expected


def work(cupy, seed, seconds, stream, calls, expected, device=0):
    """Calls of everything on one stream; (how many, names of wrong ones)."""
    order, wrong, tried = random.Random(seed), [], 0
    with cupy.cuda.Device(device), stream:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not wrong:
            names = order.sample(list(calls), 4)
            made = [(name, calls[name]()) for name in names]  # all in flight
            wrong = [name for name, x in made if not mixed.same(x, expected[name])]
            tried += len(made)
        stream.synchronize()
    return tried, wrong


def test_eight_threads(cupy, request, record_property):
    """Each with a stream and shapes of its own, for --thread-seconds."""
    seconds = request.config.getoption("--thread-seconds")
    ready = [prepared(cupy, seed) for seed in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(
            pool.map(lambda i: work(cupy, i, seconds, *ready[i]), range(THREADS))
        )
    assert [wrong for _, wrong in found] == [[]] * THREADS
    assert all(tried for tried, _ in found)
    record_property("cases", sum(tried for tried, _ in found))


@pytest.mark.parametrize("name", mixed.NAMES)
def test_capture_beside_another_thread(cupy, name):
    """A graph is captured on one stream while a second thread works on another."""
    call = mixed.call(cupy, 3, name)
    expected = call()
    others = [mixed.call(cupy, 4, n) for n in ("softmax", "attention bfloat16")]
    for busy in others:
        busy()
    cupy.cuda.get_current_stream().synchronize()
    stop = threading.Event()
    errors = []

    def keep_busy():
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                started.wait()
                while not stop.is_set():
                    for busy in others:
                        busy()
                    stream.synchronize()
        except Exception as error:
            errors.append(error)

    started = threading.Event()
    thread = threading.Thread(target=keep_busy)
    thread.start()
    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        with stream:
            kept = [call() for _ in range(3)]
            stream.synchronize()
            del kept
            started.set()
            stream.begin_capture()
            result = call()
            graph = stream.end_capture()
            for _ in range(3):
                for x in mixed.arrays(result):
                    mixed.clear(x)
                graph.launch(stream)
                stream.synchronize()
                assert mixed.same(result, expected)
    finally:
        started.set()
        stop.set()
        thread.join()
    assert not errors


# --- streams and threads that end ----------------------------------------------------


def attended(cupy, n):
    """(inputs of a causal call of many tiles, its result)."""
    random = cupy.random.RandomState(n)
    q = random.standard_normal((1, 32, n, 64), dtype="f4").astype(np.float16)
    return q, cupyflash.attention(q, q, q, causal=True)


def test_streams_that_are_destroyed_while_busy(cupy):
    """Their handles come again at once; their counters and scratch must not."""
    (q, right), (few, of_few) = attended(cupy, 4096), attended(cupy, 1024)
    one, of_one = few[:, :, :1], cupyflash.attention(few[:, :, :1], q, q)
    cupy.cuda.Device().synchronize()
    outs, handles = [], []
    for _ in range(100):
        for args, expected in (
            ((q, q, q), right), ((few, few, few), of_few), ((one, q, q), of_one)
        ):  # fmt: skip
            out = cupy.zeros_like(expected)
            cupy.cuda.get_current_stream().synchronize()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                handles.append(stream.ptr)
                cupyflash.attention(*args, causal=args[0] is not one, out=out)
            del stream
            outs.append((out, expected))
    cupy.cuda.Device().synchronize()
    assert all(bool((out == expected).all()) for out, expected in outs)


def test_twenty_thousand_streams(cupy):
    """More than there ever were rows of counters."""
    q, right = attended(cupy, 256)
    out = cupy.zeros_like(q)
    cupy.cuda.Device().synchronize()
    for _ in range(20_000):
        with cupy.cuda.Stream(non_blocking=True):
            cupyflash.attention(q, q, q, causal=True, out=out)
    cupy.cuda.Device().synchronize()
    assert bool((out == right).all())


# Calls of a new thread, which ends before its kernels do; with streams of threads.
SHORT_LIVED = """
import threading
import cupy
import cupyflash

errors = []
threading.excepthook = lambda args: errors.append(args.exc_value)
random = cupy.random.RandomState(0)
q = random.standard_normal((1, 64, 4096, 64), dtype="f4").astype("f2")
few = q[:, :16, :1024].copy()
given = [few if n % 2 else q for n in range(12)]
right = {id(x): cupyflash.attention(x, x, x, causal=True) for x in (q, few)}
outs = [cupy.empty_like(x) for x in given]
bad = 0
for turn in range(20):
    for out in outs:
        out.fill(0)
    cupy.cuda.Device().synchronize()
    for x, out in zip(given, outs):
        # A copy that no thread has seen, and none but the first call of the thread.
        thread = threading.Thread(
            target=lambda: cupyflash.attention(x, x, x, causal=True, out=out)
        )
        thread.start()
        thread.join()
    cupy.cuda.Device().synchronize()
    bad += sum(not bool((o == right[id(x)]).all()) for x, o in zip(given, outs))
print(bad, errors)
"""


@pytest.mark.parametrize("per_thread", ["0", "1"])
def test_threads_that_end_before_their_kernels(cupy, per_thread):
    process = subprocess.run(
        [sys.executable, "-c", SHORT_LIVED],
        env=os.environ
        | {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": per_thread, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stdout.split(" ", 1) == ["0", "[]\n"], process.stderr


@pytest.mark.parametrize("name", mixed.NAMES)
def test_the_first_call_of_a_thread(cupy, name):
    """A new thread has no context of the device, which the driver's own calls want."""
    expected = mixed.call(cupy, 7, name)()
    call = mixed.call(cupy, 7, name)  # the same at addresses that no plan has seen
    cupy.cuda.Device().synchronize()
    found, errors = [], []

    def first():
        try:
            found.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert not errors
    assert mixed.same(found[0], expected)


def test_the_very_first_calls_from_threads(cupy):
    """Of a process that has no counters yet."""
    from cupyflash._cuda import graphs

    random = cupy.random.RandomState(0)
    q, k, v = (
        random.standard_normal((1, 4, n, 64), dtype="f4").astype(np.float16)
        for n in (1, 8192, 8192)
    )
    right = cupyflash.attention(q, k, v)
    cupy.cuda.Device().synchronize()

    def call(barrier):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            barrier.wait()
            out = cupyflash.attention(q, k, v)
            stream.synchronize()
            return bool((out == right).all())

    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            graphs.counters.cache_clear()
            graphs._counters.clear()
            barrier = threading.Barrier(8)
            assert all(pool.map(call, [barrier] * 8))


# --- first compilations --------------------------------------------------------------

# Prints the result of a few calls; arguments: threads, and what to print before.
FIRST = """
import hashlib, sys, threading
import numpy as np
import cupy
import cupyflash

x = cupy.asarray((np.arange(3000) % 17 / 4).reshape(3, 1000).astype(np.float32))
q = x.reshape(1, 3, 25, 40)
threads = int(sys.argv[1])
barrier, found = threading.Barrier(threads), []

def call():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        barrier.wait()
        results = (
            cupyflash.softmax(x, -1, scale=0.75), cupyflash.attention(q, q, q),
            cupyflash.logsumexp(x, -1), cupyflash.attention(q, q, q, method="online"),
        )
        stream.synchronize()
        text = b"".join(r.get().tobytes() for r in results)
    found.append(hashlib.sha256(text).hexdigest())

cupy.cuda.get_current_stream().synchronize()
print("compiling", flush=True)
workers = [threading.Thread(target=call) for _ in range(threads)]
[w.start() for w in workers]
[w.join() for w in workers]
assert len(found) == threads and len(set(found)) == 1, found
print(found[0], flush=True)
"""


def start(cache, threads=1):
    """A process that computes FIRST with its kernels cached in a folder."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    env = os.environ | {
        "CUPY_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    env.pop("CUPY_CACHE_IN_MEMORY", None)
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", FIRST, str(threads)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process):
    """What a process printed last; it must have ended well."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out.split()[-1]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """(a folder with all kernels, the right answer)."""
    folder = tmp_path_factory.mktemp("warm")
    return folder, answer(start(folder))


def test_first_compilation_from_many_threads(cupy, warm, tmp_path):
    assert answer(start(tmp_path, threads=8)) == warm[1]


def test_four_processes_on_one_cold_cache_folder(cupy, warm, tmp_path):
    processes = [start(tmp_path) for _ in range(4)]
    assert {answer(p) for p in processes} == {warm[1]}
    # Nothing half-written is left, and what is there serves the next.
    names = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {p.suffix for p in warm[0].rglob("*") if p.is_file()}
    assert answer(start(tmp_path)) == warm[1]


@pytest.mark.parametrize("delay", [0.0, 0.4, 1.5])
def test_killed_during_a_compilation(cupy, warm, tmp_path, delay):
    """The next start is clean."""
    process = start(tmp_path)
    assert process.stdout.readline().strip() == "compiling"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert answer(start(tmp_path)) == warm[1]


# --- two devices ---------------------------------------------------------------------


@pytest.fixture
def second(cupy):
    """The number of another device."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    return 1


@pytest.mark.parametrize("name", mixed.NAMES)
def test_arrays_of_a_device_that_is_not_current(cupy, second, name):
    """The work is done where they are, and the current device stays current."""
    here = mixed.call(cupy, 5, name)
    with cupy.cuda.Device(second):
        there = mixed.call(cupy, 5, name)
    expected = [to_host(x) for x in mixed.arrays(here())]
    for _ in range(3):  # compiled, planned, and from the plan
        result = mixed.arrays(there())
        assert cupy.cuda.runtime.getDevice() == 0
        for x, wanted in zip(result, expected, strict=True):
            assert x.device.id == second
            np.testing.assert_array_equal(to_host(x), wanted)


def test_threads_on_two_devices(cupy, second, request, record_property):
    seconds = min(10.0, request.config.getoption("--thread-seconds"))
    ready = [prepared(cupy, i, i % 2) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda i: work(cupy, i, seconds, *ready[i], i % 2), range(4))
        )
    assert [wrong for _, wrong in found] == [[]] * 4
    record_property("cases", sum(tried for tried, _ in found))


def test_a_graph_on_the_second_device(cupy, second):
    with cupy.cuda.Device(second):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for name, call in mixed.calls(cupy, 6).items():
                expected = call()
                kept = [call() for _ in range(3)]
                stream.synchronize()
                del kept
                stream.begin_capture()
                result = call()
                graph = stream.end_capture()
                for x in mixed.arrays(result):
                    mixed.clear(x)
                graph.launch(stream)
                stream.synchronize()
                assert mixed.same(result, expected), name


def test_inputs_on_two_devices_are_refused(cupy, second):
    here = cupy.ones((2, 3, 40, 16), np.float32)
    with cupy.cuda.Device(second):
        there = cupy.ones((2, 3, 40, 16), np.float32)
    lse = here[..., 0].copy()
    wrong = (
        lambda: cupyflash.attention(here, there, there),
        lambda: cupyflash.attention(here, here, here, out=there),
        lambda: cupyflash.attention(here, here, here, bias=there[..., :1, :1]),
        lambda: cupyflash.attention_vjp(there, here, here, here, here, lse),
        lambda: cupyflash.softmax(here, -1, out=there),
        lambda: cupyflash.softmax_vjp(here, there, -1),
        lambda: cupyflash.logsumexp(here, -1, b=there),
    )
    for call in wrong * 2:
        with pytest.raises(ValueError, match="device"):
            call()
