"""Time and memory of calls, measured the same way in the demo and all benchmarks.

The calls are timed in rounds, interleaved, since a GPU that warms up slows all of them.
"""

import datetime
import gc
import importlib
import math
import os
import platform
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scipy

import cupyflash
from cupyflash._core import threads
from cupyflash._cuda import source

# Length of a round on the GPU: enough to average, too short to heat the card.
_TURN_SECONDS = 0.012
_PAUSE_SECONDS = 0.04
_MAX_LAUNCHES = 40

# A call that takes this long on the CPU is timed once: it averages by itself.
_LONG_CALL_SECONDS = 1.0

# The device spins while the host enqueues a round: the host's cost of a call is
# measured elsewhere, and in some libraries it exceeds the run time of a short kernel.
_WAIT = """
extern "C" __global__ void wait(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over the rounds, and their spread."""

    seconds: float
    best: float
    worst: float
    turns: int


def begin(args: Any) -> tuple[Any, bool, dict[str, Any]]:
    """The array module, whether it is CuPy, and the machine; makes the output folder.

    `args` has `output` and `cpu`; the processor, or the GPU, is printed.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    on_gpu = not args.cpu and cuda_device_count() > 0
    found = machine(on_gpu)
    print(f"Running on {found['gpu' if on_gpu else 'processor']}.")
    return importlib.import_module("cupy" if on_gpu else "numpy"), on_gpu, found


def cuda_device_count() -> int:
    """How many CUDA devices CuPy can use; 0 without CuPy or a driver."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # ImportError, or any error of a driver that is not there
        return 0


def machine(on_gpu: bool) -> dict[str, Any]:
    """The machine's properties that a measurement depends on, for its report."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "cupyflash": cupyflash.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "processor": _processor(),
        "cores": threads.num_cores(),
    }
    return facts | (_gpu_facts() if on_gpu else {})


def _gpu_facts():
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "sm": f"{properties['major']}.{properties['minor']}",
        "driver": runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
    }


def _commit():
    """The commit of the sources, with a + if they have changed since; or nothing.

    Outside a repository, the environment variable CUPYFLASH_COMMIT is used.
    """
    if said := os.environ.get("CUPYFLASH_COMMIT"):
        return said
    root = source.CUDA_SRC.parent
    if Path(_git(root, "rev-parse", "--show-toplevel")) != root.resolve():
        return ""
    changed = _git(root, "status", "--porcelain", "--", "cupyflash", "cuda_src")
    return _git(root, "rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _git(folder, *words):
    """The output of a git command; nothing if it fails."""
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _processor():
    """The name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
        return lines[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def interleaved(
    calls: dict[str, Callable[[], Any]],
    *,
    on_gpu: bool,
    turns: int = 7,
    warm: bool = False,
    once_above: float = _LONG_CALL_SECONDS,
) -> dict[str, Timing]:
    """Time all `calls`, in an order that rotates from round to round.

    With `warm` all of them have run before. On a CPU, a call that takes `once_above`
    seconds is not repeated.
    """
    if not calls:
        return {}
    turn = _GpuTurn(calls) if on_gpu else _CpuTurn(calls, warm)
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(turns):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            if on_gpu or not samples[name] or samples[name][0] < once_above:
                samples[name].append(turn(name))
    return {
        name: Timing(median(times), min(times), max(times), len(times))
        for name, times in samples.items()
    }


class _CpuTurn:
    """One call, timed by the clock of the host."""

    def __init__(self, calls, warm):
        self.calls = calls
        if not warm:
            for call in calls.values():
                call()  # first use: threads, pages, caches

    def __call__(self, name):
        start = time.perf_counter()
        self.calls[name]()
        return time.perf_counter() - start


class _GpuTurn:
    """A dozen milliseconds of launches, each between two events and from a cold L2."""

    def __init__(self, calls):
        import cupy

        self.cupy = cupy
        self.calls = calls
        device = cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
        self.cycles_a_second = 1e3 * device.attributes["ClockRate"]
        self.flush = cupy.empty(max(2 * properties["l2CacheSize"], 1 << 20), cupy.int8)
        self.wait = cupy.RawKernel(_WAIT, "wait")
        self.launches, self.host = {}, {}
        for name, call in calls.items():
            for _ in range(3):
                call()  # compile, fill the plan cache and the memory pool
            estimate, self.host[name] = self._run(name, 2, 0.0)
            launches = math.ceil(_TURN_SECONDS / max(estimate, 1e-6))
            self.launches[name] = min(_MAX_LAUNCHES, launches)

    def __call__(self, name):
        time.sleep(_PAUSE_SECONDS)
        launches = self.launches[name]
        seconds, _ = self._run(name, launches, launches * self.host[name])
        return seconds

    def _run(self, name, launches, ahead):
        """Seconds per launch: on the device (`ahead` queued first), on the host."""
        call = self.calls[name]
        events = []
        self.wait((1,), (1,), (np.int64(ahead * self.cycles_a_second),))
        begin = time.perf_counter()
        for _ in range(launches):
            self.flush.fill(0)
            start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record()
            call()
            end.record()
            events.append((start, end))
        host = (time.perf_counter() - begin) / launches
        self.cupy.cuda.Device().synchronize()
        elapsed = self.cupy.cuda.get_elapsed_time
        return median(elapsed(*pair) * 1e-3 for pair in events), host


@dataclass(frozen=True)
class Run:
    """One call with its result."""

    result: Any
    seconds: float
    extra_bytes: int | None


def run_once(call: Callable[[], Any], *, on_gpu: bool) -> Run:
    """Run `call` once; time it and find its peak memory.

    Extra bytes exclude its inputs and its result. On the CPU they are what Python and
    NumPy allocate; on the GPU, the growth of an empty memory pool.
    """
    gc.collect()
    return _run_on_gpu(call) if on_gpu else _run_on_cpu(call)


def peak_memory(call: Callable[[], Any], *, on_gpu: bool) -> int:
    """The extra bytes of a call after a warm-up."""
    if on_gpu:
        call()  # memory held by compiling does not count
    return run_once(call, on_gpu=on_gpu).extra_bytes or 0


def _run_on_cpu(call):
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Run(result, seconds, max(0, peak - before - _bytes_of(result, np.ndarray)))


def _run_on_gpu(call):
    import cupy

    device = cupy.cuda.Device()
    device.synchronize()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        start = time.perf_counter()
        result = call()
        device.synchronize()
        seconds = time.perf_counter() - start
    own = _bytes_of(result, cupy.ndarray)
    return Run(result, seconds, max(0, pool.total_bytes() - own))


def _bytes_of(result, kind):
    """The bytes of all arrays of a kind in a result."""
    if isinstance(result, (tuple, list)):
        return sum(_bytes_of(part, kind) for part in result)
    return result.nbytes if isinstance(result, kind) else 0
