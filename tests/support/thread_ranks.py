"""Ranks as threads of one process, whose arrays are copied: for ranks on one GPU."""

import queue
import threading

from cupyflash.distributed import Comm, _bits
from cupyflash.distributed._comm import shifted


class ThreadComm(Comm):
    """Boxes from each rank to each; CuPy arrays wait for the stream that made them."""

    def __init__(self, rank, size, boxes):
        super().__init__(rank, size, timeout=60.0)
        self._boxes, self._kept = boxes, []

    def exchange(self, sent, target, received, source):
        if target is not None:
            events = [_made(x) for x in sent]
            self._boxes[self.rank, target].put((events, list(sent)))

        def wait():
            if source is None:
                return
            events, arrays = self._boxes[source, self.rank].get(timeout=self.timeout)
            for event, mine, other in zip(events, received, arrays, strict=True):
                _wait_for(event)
                _bits.bits(mine)[...] = _bits.bits(other)
            self._kept += arrays  # until the copies are done

        return wait

    def all_gather(self, message):
        found = [message] * self.size
        for shift in range(1, self.size):
            target, source = shifted(self, shift)
            self._boxes[self.rank, target].put(message)
            found[source] = self._boxes[source, self.rank].get(timeout=self.timeout)
        return found

    def for_arrays(self, like):
        return self

    def finish(self):
        if self._kept and hasattr(self._kept[0], "get"):
            _stream().synchronize()
        self._kept = []


def run(size, function, *arguments):
    """Results of ``function(comm, *arguments)`` on ranks that are threads."""
    boxes = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    results = [None] * size

    def work(rank):
        try:
            results[rank] = function(ThreadComm(rank, size, boxes), *arguments)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _stream():
    import cupy

    return cupy.cuda.get_current_stream()


def _made(x):
    return _stream().record() if hasattr(x, "get") else None


def _wait_for(event):
    if event is not None:
        _stream().wait_event(event)
