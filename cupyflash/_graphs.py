"""What outlives a call: memory that CUDA graphs write to, and counters of streams."""

import functools
import threading
from typing import Any

import cupy
import numpy as np

_current_stream = cupy.cuda.get_current_stream
_is_capturing_on = cupy.cuda.runtime.streamIsCapturing

# Memory that kernels in CUDA graphs write to whenever they are replayed. Other memory
# goes back to the pool, which gives it out again in the order of the stream.
_kept_for_graphs: list[Any] = []


def keep_if_capturing(memory):
    """Keep what a kernel on the current stream will use, if it goes into a graph."""
    if is_capturing():
        _kept_for_graphs.append(memory)


def is_capturing():
    """Whether launches on the current stream go into a CUDA graph."""
    ptr = _current_stream().ptr
    # 0 and 1 are the default stream, which cannot be captured.
    return ptr > 1 and _is_capturing_on(ptr)


class Counters:
    """Rows of zeros on a device; a kernel counts in one and leaves zeros.

    Kernels that may run at one time must not share a row. So each stream has its own,
    and each launch in a CUDA graph, which may be replayed on any stream.
    """

    COUNT = 1 << 13

    def __init__(self, device_id, numbers):
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            raise RuntimeError(
                "the first attention call on a device cannot be captured into a CUDA "
                "graph: make the same call once before the capture, as a warm-up"
            )
        # Rows of 8 bytes and their multiples.
        self._bytes = -(-numbers // 2) * 8
        with cupy.cuda.Device(device_id):
            self._memory = cupy.zeros(self.COUNT * self._bytes // 8, np.int64)
            stream.synchronize()  # other streams will use them, once for all
        self._lock = threading.Lock()
        self._of_stream: dict[Any, Any] = {}
        self._used = 0

    def of_current_stream(self):
        """Address of the row for a launch on the current stream."""
        ptr = _current_stream().ptr
        if ptr > 1 and _is_capturing_on(ptr):
            return self._take()
        # Threads share the number, not the stream, of "per-thread default".
        key = (ptr, threading.get_ident()) if ptr == _PER_THREAD else ptr
        row = self._of_stream.get(key)
        if row is None:
            row = self._of_stream[key] = self._take()
        return row

    def _take(self):
        with self._lock:
            if self._used == self.COUNT:
                raise RuntimeError(
                    f"more than {self.COUNT} streams and captured calls of attention "
                    "on one device"
                )
            self._used += 1
            return self._memory.data.ptr + (self._used - 1) * self._bytes


_PER_THREAD = 2  # cudaStreamPerThread


@functools.cache
def counters(device_id, numbers=2):
    """Those of a device; `numbers` of 4 bytes in each row."""
    return Counters(device_id, numbers)
