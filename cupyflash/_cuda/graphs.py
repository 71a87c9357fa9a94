"""Objects that outlive a call: memory of graphs, streams and their counters."""

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from typing import Any

import cupy
import numpy as np

from cupyflash._cuda.device import driver_library

_current_stream = cupy.cuda.get_current_stream
_is_capturing_on = cupy.cuda.runtime.streamIsCapturing

_PER_THREAD = 2  # cudaStreamPerThread, the handle of each thread's default stream


# --- CUDA graphs ---------------------------------------------------------------------

# Memory that kernels in CUDA graphs write to whenever they are replayed. Other memory
# goes back to the pool, which reuses it in stream order.
_kept_for_graphs: list[Any] = []


def is_capturing(device_id=-1):
    """Whether launches on the current stream of a device go into a CUDA graph."""
    ptr = _current_stream(device_id).ptr
    # 0 and 1 are the default stream, which cannot be captured.
    return ptr > 1 and _is_capturing_on(ptr)


def keep_if_capturing(memory):
    """Keep memory of a kernel on the current stream, if it is captured into a graph.

    Otherwise the memory goes back to the pool, to be reused by the same stream after
    the kernel. The pool identifies a stream by its handle, so the stream must not be
    destroyed before it is idle: another one would get its handle.
    """
    stream = _current_stream()
    ptr = stream.ptr
    if ptr > 1 and _is_capturing_on(ptr):
        _kept_for_graphs.append(memory)
    elif ptr > _PER_THREAD and id(stream) not in _held and _is_owner(stream):
        _hold(stream)


@functools.cache
def _num_devices():
    return cupy.cuda.runtime.getDeviceCount()


def keeps_memory(function):
    """Keep all memory that a captured call takes, including its results.

    It sees every allocation, also those inside CuPy's array operations. A call with a
    plan does not come here: it makes few arrays and keeps them itself, and its result
    belongs to the caller.
    """

    @functools.wraps(function)
    def call(*args):
        # The arrays may be on a device that is not the current one.
        if any(is_capturing(device_id) for device_id in range(_num_devices())):
            with cupy.cuda.using_allocator(_keeping(cupy.cuda.get_allocator())):
                return function(*args)
        return function(*args)

    return call


def _keeping(malloc):
    """An allocator that keeps what it allocates during a capture."""

    def alloc(size):
        memory = malloc(size)
        if is_capturing():  # not a stream on which Counters makes rows
            _kept_for_graphs.append(memory)
        return memory

    return alloc


# --- streams -------------------------------------------------------------------------


class _Held:
    """A stream, and the rows of Counters that its kernels use.

    A stream cannot be identified by its handle, which another one may get as soon as it
    is destroyed, while its kernels still run; nor a thread's default stream by the
    number of the thread. So streams are held until they are idle.
    """

    def __init__(self, stream=None):
        self.stream = stream
        self.rows: dict[Any, int] = {}

    def is_left(self):
        """Whether nobody else holds the stream, and all of its work is done."""
        return _num_references(self) == _OURS and self.stream.done


def _num_references(held):
    return sys.getrefcount(held.stream)


_OURS = _num_references(_Held(object()))

# Nobody waits for the device while holding it: kernels of others may have to start
# first. Reentrant, since the garbage collector may run a finalizer that calls us.
_lock = threading.RLock()
_held: dict[int, _Held] = {}  # by id of the stream's object
# Streams owned by other libraries, by the unique number that the driver gives them.
# CuPy's object for one is not held, only watched for its end.
_foreign: dict[int, _Held] = {}
_watched: dict[int, Any] = {}
_of_thread = threading.local()

# With more streams held, check which of them are no longer in use.
_FEW = 32
_most_held = _FEW


def _held_of(stream):
    """What is held for the current stream."""
    if stream.ptr == _PER_THREAD:
        try:
            return _of_thread.held
        except AttributeError:
            held = _of_thread.held = _HeldOfThread()
            return held
    return _held.get(id(stream)) or _hold(stream)


def _hold(stream):
    """Hold a stream that is new."""
    global _most_held
    key = id(stream)
    if stream is not cupy.cuda.Stream.null and not _is_owner(stream):
        _watched[key] = weakref.ref(stream, functools.partial(_forget, key))
        held = _foreign.setdefault(_unique_number(stream.ptr), _Held())
        return _held.setdefault(key, held)
    with _lock, _beside_captures():
        if key not in _held:
            if len(_held) >= _most_held:
                _let_go()
                _most_held = max(_FEW, 2 * len(_held))
            _held[key] = _Held(stream)
        return _held[key]


def _forget(key, _):
    _held.pop(key, None)
    _watched.pop(key, None)


def _let_go():
    """Release the streams that are no longer in use, and their rows."""
    for key, held in list(_held.items()):
        if held.stream is None:
            continue
        # Removed first: a thread that finds the stream again from now on gets other
        # rows.
        if _held.pop(key, None) is None:
            continue
        if not held.is_left():
            _held[key] = held
            continue
        for counters_of_device, row in held.rows.items():
            counters_of_device.free.append(row)


def _is_owner(stream):
    """Whether the CUDA stream lives exactly as long as this CuPy object."""
    return (
        stream.ptr > _PER_THREAD
        and isinstance(stream, cupy.cuda.Stream)
        and getattr(stream, "_foreign_stream_ref", None) is None
    )


class _HeldOfThread(_Held):
    """The default stream of a thread; its rows are free when the thread ends."""

    def __init__(self):
        super().__init__()
        self._thread = threading.get_ident()

    def __del__(self, is_ending=sys.is_finalizing, thread=threading.get_ident):
        # In another thread the handle means another stream: the rows are lost then.
        if is_ending() or thread() != self._thread:
            return
        with contextlib.suppress(Exception), _beside_captures():
            before = cupy.cuda.runtime.getDevice()
            for counters_of_device, row in self.rows.items():
                cupy.cuda.runtime.setDevice(counters_of_device.device_id)
                event = cupy.cuda.Event(disable_timing=True)
                event.record(cupy.cuda.Stream.ptds)
                counters_of_device.left.append((event, row))
            cupy.cuda.runtime.setDevice(before)


# --- counters ------------------------------------------------------------------------


class Counters:
    """Rows of zeros on a device; a kernel counts in one and leaves zeros.

    Kernels that may run concurrently must not share a row. So each stream has its own,
    and so has each launch in a CUDA graph, which may be replayed on any stream.
    """

    _ROWS = 1 << 10  # allocated at a time

    def __init__(self, device_id, numbers):
        self.device_id = device_id
        self.free: list[int] = []  # addresses of unused rows
        self.left: list[tuple[Any, int]] = []  # from threads that ended, and when
        self._bytes = -(-numbers // 2) * 8  # per row: a multiple of 8
        self._blocks: list[Any] = []  # the memory of all rows

    def of_current_stream(self):
        """Address of the row for a launch on the current stream."""
        stream = _current_stream()
        ptr = stream.ptr
        if ptr > 1 and _is_capturing_on(ptr):
            return self._take()
        held = _held.get(id(stream)) or _held_of(stream)
        return held.rows.get(self) or self._row_for(held)

    def _row_for(self, held):
        """The row of a stream that has none yet."""
        taken = self._take()
        # Of two threads on one stream, the first to come here wins.
        row = held.rows.setdefault(self, taken)
        if row != taken:
            self.free.append(taken)
        return row

    def _take(self):
        """A row that no kernel uses."""
        with _beside_captures():
            while True:
                with _lock:
                    if not self.free:
                        self._reclaim()
                    if self.free:
                        return self.free.pop()
                self._grow()

    def _reclaim(self):
        """Free the rows of threads that ended, if their kernels have ended too."""
        for event, row in [self.left.pop() for _ in range(len(self.left))]:
            if event.done:
                self.free.append(row)
            else:
                self.left.append((event, row))

    def _grow(self):
        """Add rows, which are zero before any stream sees them."""
        with (
            cupy.cuda.Device(self.device_id),
            cupy.cuda.Stream(non_blocking=True) as stream,
        ):
            memory = cupy.zeros(self._ROWS * self._bytes // 8, np.int64)
            stream.synchronize()
        self._blocks.append(memory)
        start = memory.data.ptr
        self.free.extend(range(start, start + memory.nbytes, self._bytes))


_counters: dict[Any, Counters] = {}


@functools.cache
def counters(device_id, numbers=2):
    """The counters of a device; `numbers` of 4 bytes per row."""
    # functools.cache may run for two threads at once: both get the same object.
    return _counters.setdefault((device_id, numbers), Counters(device_id, numbers))


# --- the driver ----------------------------------------------------------------------


@functools.cache
def _driver():
    return ctypes.CDLL(driver_library())


def _unique_number(ptr):
    """The number of a stream, unique within the process."""
    if ptr < _PER_THREAD:
        return 0  # the default stream; there is only one
    number = ctypes.c_ulonglong()
    status = _driver().cuStreamGetId(ctypes.c_void_p(ptr), ctypes.byref(number))
    if status:
        raise cupy.cuda.driver.CUDADriverError(status)
    return number.value


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def _beside_captures():
    """Let this thread allocate and query during captures, also its own."""
    # A thread has no context before it uses the runtime, and the driver needs one.
    cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    status = exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if not status:
            exchange(ctypes.byref(mode))
