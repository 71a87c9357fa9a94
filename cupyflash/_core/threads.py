"""Tasks of the CPU back end, spread over the cores.

NumPy and BLAS release the interpreter lock inside their loops, so threads suffice. All
calls of the process share its cores: each has its own thread, and helpers join it as
long as there are no more threads at work than cores.
"""

import collections
import contextvars
import ctypes
import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

# Many enough that threads end together, few enough that they stay apart.
_RUNS_PER_THREAD = 8


class Scratch:
    """Buffers of one thread, by name; each is made once and grows when it must."""

    def __init__(self, job=None):
        self._buffers = {}
        self._job = job

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A contiguous array of `shape`, with whatever was last in it.

        Raises if the call has been given up: tasks ask for a buffer every few
        milliseconds, and so none goes on for long after Ctrl-C. A fork that another
        thread wants happens here, too.
        """
        if _shared.fork_ended is not None:
            _shared.let_fork(threading.get_ident())
        if self._job is not None and self._job.cancelled:
            raise _Cancelled
        size = 1
        for n in shape:
            size *= n
        key = name, dtype
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[key] = np.empty(size, dtype)
        return buffer[:size].reshape(shape)


class _Cancelled(BaseException):
    """Another thread of the same call has failed or was interrupted."""


# What NumPy warns of is a variable of the context; in this one it is silent.
_silent = contextvars.Context()
_silent.run(np.seterr, all="ignore")


def silently(function: Callable, *args: Any) -> Any:
    """``function(*args)``, of which NumPy warns of nothing.

    For calls of some microseconds, of which `np.errstate` takes one.
    """
    return _silent.copy().run(function, *args)


_helper = threading.local()


def num_cores() -> int:
    """Cores that the call of this thread may use.

    A helper, which is kept off one of them, has those of its caller: tasks are cut by
    their number, so that their results would depend on who takes them.
    """
    cores = getattr(_helper, "num_cores", None)
    if cores is not None:
        return cores
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- which core a helper is on -------------------------------------------------------


@functools.cache
def _getcpu():
    """What tells the core of a thread, or None where helpers cannot be moved."""
    if not (hasattr(os, "sched_getaffinity") and hasattr(os, "sched_setaffinity")):
        return None
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)


class _Place(NamedTuple):
    """A thread, and the core that it is on; None if that is not known."""

    thread: int
    core: int | None


def _place():
    getcpu = _getcpu()
    return _Place(threading.get_native_id(), getcpu and getcpu())


def _keep_off(caller):
    """Keep this helper off the core of its caller.

    Some kernels, mostly those of virtual machines, wake it there and leave it there
    though another core is idle: then two threads take longer than one.
    """
    if caller.core == getattr(_helper, "avoided", None):
        return
    _helper.avoided = caller.core
    try:
        others = os.sched_getaffinity(caller.thread) - {caller.core}
        if others:
            os.sched_setaffinity(0, others)
    except OSError:  # the caller has ended, or the system lets nobody choose
        pass


# --- what the calls of a process share -----------------------------------------------


class _Shared:
    """Threads at work, the pool of helpers, and the threads of BLAS.

    Ctrl-C may raise between any two steps of the main thread. So there are no counters
    that could be left one too high: threads are in a set by their number, and what one
    call leaves behind the next one of that thread repairs.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.callers = set()
        self.helpers = set()
        self.at_work = set()  # threads that may be inside of BLAS
        self.fork_ended = None  # an event, while a thread forks or waits to
        self._blas_users = set()
        self._blas_threads = None  # [(library, its own number of threads)] while held
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()  # what helpers call
        self._pool_size = 0

    def crowded(self, cores):
        """Whether more threads are at work than there are cores."""
        return len(self.callers) + len(self.helpers) > cores

    def call_helpers(self, function, number):
        """Have `number` helpers call a function, soon: one wakes in 15 us."""
        if self._pool_size < number:
            with self.lock:
                while self._pool_size < number:
                    name = f"cupyflash_{self._pool_size}"
                    args = (self._wanted,)
                    threading.Thread(None, _help, name, args, daemon=True).start()
                    self._pool_size += 1
        for _ in range(number):
            self._wanted.put(function)

    def hold_blas(self, thread):
        """Hold BLAS to one thread until no call needs that any more."""
        self._blas_users.add(thread)
        with self.lock:
            if self._blas_threads is None:
                self._blas_threads = held = []
                for library in _blas_libraries():
                    num_threads = library.get_num_threads()
                    held.append((library, num_threads))
                    if num_threads != 1:
                        library.set_num_threads(1)

    def release_blas(self, thread):
        """What `hold_blas` has begun; any number of times."""
        self._blas_users.discard(thread)
        with self.lock:
            if not self._blas_users:
                self._restore_blas()

    def leave(self, caller):
        """End the call of a thread, whatever of it has begun."""
        try:
            self.at_work.discard(caller)
            self.callers.discard(caller)
            self.release_blas(caller)
        except KeyboardInterrupt:
            self.release_blas(caller)
            raise

    def _restore_blas(self):
        for library, num_threads in self._blas_threads or ():
            if num_threads != 1:
                library.set_num_threads(num_threads)
        self._blas_threads = None

    # A child of a fork finds the locks of BLAS as they were: one that another thread
    # held stays locked for good. So no thread of ours is inside of BLAS meanwhile, nor
    # in a change of its threads.

    def before_fork(self):
        """Wait until the other threads are between two steps of their tasks."""
        self.lock.acquire()
        self.fork_ended = threading.Event()
        while self.at_work - {threading.get_ident()}:
            time.sleep(0.0002)

    def let_fork(self, thread):
        """In a thread at work: wait while another one forks."""
        while (ended := self.fork_ended) is not None:
            self.at_work.discard(thread)
            ended.wait()
            self.at_work.add(thread)

    def after_fork(self):
        """In the parent: all go on."""
        ended, self.fork_ended = self.fork_ended, None
        ended.set()
        self.lock.release()

    def begin_anew(self):
        """In the child of a fork, where no other thread is left and no pool."""
        self._restore_blas()
        self.__init__()


def _help(wanted):
    """What a helper does for as long as the process lives."""
    while True:
        wanted.get()()


_shared = _Shared()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _shared.before_fork(),
        after_in_parent=lambda: _shared.after_fork(),
        after_in_child=lambda: _shared.begin_anew(),
    )


class _Blas(NamedTuple):
    """How to ask and to set the number of threads of a BLAS library."""

    get_num_threads: Callable
    set_num_threads: Callable
    architecture: str | None = None  # of the CPU whose kernels it has chosen


@functools.cache
def _blas_libraries():
    """The BLAS libraries of the process whose number of threads can be set."""
    import threadpoolctl

    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    return [
        _blas(library)._replace(architecture=getattr(library, "architecture", None))
        for library in controller.lib_controllers
    ]


def _blas(library):
    """The two functions of a library that threadpoolctl has found.

    Of OpenBLAS they are its own: a call of a tenth of a millisecond would feel the
    other way.
    """
    if getattr(library, "threading_layer", None) == "pthreads":
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            get, set_ = (
                getattr(
                    library.dynlib, f"{prefix}openblas_{name}_num_threads{suffix}", None
                )
                for name in ("get", "set")
            )
            if get is not None and set_ is not None:
                return _Blas(get, set_)
    return _Blas(library.get_num_threads, functools.partial(_set_num_threads, library))


def _set_num_threads(library, num_threads):
    """Set it from any thread.

    threadpoolctl lets one thread alone set that of OpenBLAS, the first to do so, and
    ignores all others; the lock of `_Shared` does what that is for.
    """
    give_up = getattr(library, "clear_controlling_thread", lambda **_: None)
    give_up(force=True)
    library.set_num_threads(num_threads)
    give_up(force=True)


# --- jobs ----------------------------------------------------------------------------


class _Job:
    """The tasks of one call, and the threads that take them."""

    def __init__(self, function, runs, num_threads):
        self._function = function
        self._remaining = collections.deque(runs)
        self._num_cores = num_cores()
        # A test, perhaps, wants more threads than there are cores.
        self.cores = max(self._num_cores, num_threads)
        self._lock = threading.Lock()
        self._closed = False  # helpers that come now are too late
        self._num_helping = 0
        self._helped = threading.Lock()  # until the last helper has ended
        self._helped.acquire()
        self._failure = None
        self._caller = _place()
        self.cancelled = False

    def work(self, goes_on=lambda: True):
        """Take tasks until none is left."""
        scratch, thread = Scratch(self), threading.get_ident()
        try:
            _shared.at_work.add(thread)
            with np.errstate(all="ignore"):  # inf and NaN are values like others here
                while goes_on() and not self.cancelled:
                    try:
                        run = self._remaining.popleft()
                    except IndexError:
                        return
                    for task in run:
                        if _shared.fork_ended is not None:
                            _shared.let_fork(thread)
                        self._function(task, scratch)
        finally:
            _shared.at_work.discard(thread)

    def help(self):
        """`work` in a helper, while there is a core for it."""
        with self._lock:
            if self._closed:
                return
            self._num_helping += 1
        thread = threading.get_ident()
        _shared.helpers.add(thread)
        try:
            _helper.num_cores = self._num_cores
            _keep_off(self._caller)
            self.work(lambda: not _shared.crowded(self.cores))
        except BaseException as failure:
            self.cancel(failure)
        finally:
            _shared.helpers.discard(thread)
            with self._lock:
                self._num_helping -= 1
                if self._closed and self._num_helping == 0:
                    self._helped.release()

    def cancel(self, failure):
        """Have all threads stop soon; the first failure is the one that counts."""
        with self._lock:
            if not self.cancelled:
                self._failure = failure
            self.cancelled = True

    def wait(self):
        """Let no helper begin any more, and wait for those that have."""
        with self._lock:
            self._closed = True
            if self._num_helping == 0:
                return
        with self._helped:  # released once; a second wait passes, too
            pass

    def check(self):
        """Raise what a thread has raised."""
        if self._failure is not None:
            raise self._failure


def for_each(
    function: Callable,
    tasks: Iterable[Any],
    num_threads: int,
    *,
    blas: bool = False,
    is_a_step: bool = False,
) -> None:
    """Call ``function(task, scratch)`` for every task, on up to `num_threads` threads.

    The calling thread takes part. Which thread does a task is left to chance, so no
    result may depend on it. With `blas`, for tasks that call BLAS, that is held to one
    thread meanwhile. After Ctrl-C, or a failure, no thread goes on. `is_a_step`: this
    is part of a task or of `run_with_blas`, which goes on afterwards. It is not looked
    up, since an interrupted call may have left its thread among those at work.
    """
    tasks = list(tasks)
    num_threads = min(num_threads, len(tasks))
    # Neighbours go to one thread: two that write to one page for the first time would
    # both have the kernel clear one.
    run = max(1, len(tasks) // (_RUNS_PER_THREAD * max(1, num_threads)))
    runs = [tasks[i : i + run] for i in range(0, len(tasks), run)]
    job = _Job(function, runs, num_threads)
    caller = threading.get_ident()
    try:
        _shared.callers.add(caller)
        if blas:
            _shared.hold_blas(caller)
        if num_threads > 1 and not _shared.crowded(job.cores - 1):
            _shared.call_helpers(job.help, num_threads - 1)
        job.work()
        job.wait()
    except BaseException as failure:
        _shared.at_work.discard(caller)
        job.cancel(failure)
        job.wait()
        if not isinstance(failure, _Cancelled):
            raise
    finally:
        if is_a_step:
            _shared.callers.discard(caller)
            _shared.at_work.add(caller)
        else:
            _shared.leave(caller)
    job.check()


def run_with_blas(function: Callable, *args: Any) -> Any:
    """``function(*args)``, which calls BLAS, in this thread alone.

    What `for_each_with_blas` does for one short task, without what many need.
    """
    shared, thread = _shared, threading.get_ident()
    try:
        shared.hold_blas(thread)
        shared.at_work.add(thread)
        if shared.fork_ended is not None:
            shared.let_fork(thread)
        return silently(function, *args)
    finally:
        shared.leave(thread)


def with_blas(num_threads: int) -> int:
    """How many threads may call BLAS at a time, of `num_threads` wanted.

    BLAS threads inside of ours would wait for each other. Where BLAS cannot be held to
    one thread, the tasks run one after another and BLAS alone uses the cores.
    """
    return num_threads if num_threads > 1 and _blas_libraries() else 1


def blas_architectures() -> set[str | None]:
    """The CPUs whose kernels the BLAS libraries of the process have chosen."""
    return {library.architecture for library in _blas_libraries()}


def for_each_with_blas(
    function: Callable, tasks: Iterable[Any], num_threads: int
) -> None:
    """`for_each` for tasks that call BLAS."""
    for_each(function, tasks, with_blas(num_threads), blas=True)
