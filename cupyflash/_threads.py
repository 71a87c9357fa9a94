"""Tasks of the CPU back end, spread over the cores.

NumPy and BLAS release the interpreter lock inside their loops, so threads suffice.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

# Many enough that threads end together, few enough that they stay apart.
_RUNS_PER_THREAD = 8


class Scratch:
    """Buffers of one thread, by name; each is made once and grows when it must."""

    def __init__(self):
        self._buffers = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A contiguous array of `shape`, with whatever was last in it."""
        size = 1
        for n in shape:
            size *= n
        key = name, dtype
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[key] = np.empty(size, dtype)
        return buffer[:size].reshape(shape)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _pool(size):
    # A thread that waits for work costs nothing; the pool lives as long as the process.
    return ThreadPoolExecutor(size, thread_name_prefix="cupyflash")


if hasattr(os, "register_at_fork"):
    # The threads of a pool do not survive a fork.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def for_each(function: Callable, tasks: Iterable[Any], num_threads: int) -> None:
    """Call ``function(task, scratch)`` for every task, on up to `num_threads` threads.

    The calling thread takes part. Which thread does a task is left to chance, so no
    result may depend on it.
    """
    tasks = list(tasks)
    num_threads = min(num_threads, len(tasks))
    # Neighbours go to one thread: two that write to one page for the first time would
    # both have the kernel clear one.
    run = max(1, len(tasks) // (_RUNS_PER_THREAD * max(1, num_threads)))
    runs = [tasks[i : i + run] for i in range(0, len(tasks), run)]
    remaining = iter(runs)  # a list iterator may be shared between threads

    def work():
        scratch = Scratch()
        with np.errstate(all="ignore"):  # inf and NaN are values like others here
            for task in itertools.chain.from_iterable(remaining):
                function(task, scratch)

    if num_threads <= 1:
        work()
        return
    pool = _pool(num_threads - 1)
    others = [pool.submit(work) for _ in range(num_threads - 1)]
    try:
        work()
    finally:
        # One that has not begun by now would find nothing left to do.
        failures = [other.exception() for other in others if not other.cancel()]
    for failure in failures:
        if failure is not None:
            raise failure


@functools.cache
def _blas_controller():
    """What can hold BLAS to one thread, or None."""
    try:
        import threadpoolctl
    except ImportError:
        return None
    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    return controller if len(controller) else None


class _SingleThreadedBlas:
    """BLAS held to one thread while at least one call is inside.

    The setting belongs to the process: only the first call to enter changes it and
    only the last to leave restores it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._inside = 0
        self._limit = None

    def __enter__(self):
        with self._lock:
            if self._inside == 0:
                self._limit = _blas_controller().limit(limits=1)
            self._inside += 1

    def __exit__(self, *_):
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._limit.restore_original_limits()


_single_threaded_blas = _SingleThreadedBlas()


def with_blas(num_threads: int) -> int:
    """How many threads may call BLAS at a time, of `num_threads` wanted.

    BLAS threads inside of ours would wait for each other. Where BLAS cannot be held to
    one thread (that takes the package threadpoolctl), the tasks run one after another
    and BLAS alone uses the cores.
    """
    return num_threads if num_threads > 1 and _blas_controller() is not None else 1


def for_each_with_blas(
    function: Callable, tasks: Iterable[Any], num_threads: int
) -> None:
    """`for_each` for tasks that call BLAS."""
    num_threads = with_blas(num_threads)
    if num_threads == 1:
        for_each(function, tasks, 1)
    else:
        with _single_threaded_blas:
            for_each(function, tasks, num_threads)
