"""Ranks as real processes that are started once and then given function after function.

with Ranks() as ranks:
    results = ranks.run(3, function, argument)  # function(comm, argument) on each
"""

import contextlib
import itertools
import multiprocessing
import socket
import sys
import time
import traceback
from pathlib import Path

SIZES = (2, 3, 4)
TIMEOUT = 60.0  # of a comm; a test that waits for it is a failure


class Failed(Exception):
    """What a rank raised: its type's name and its words."""

    def __init__(self, rank, kind, text, trace):
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Ranks:
    """Processes that join as 2, 3 or 4 ranks, and run functions of modules."""

    def __init__(self, sizes=SIZES):
        self._ports = {size: free_port() for size in sizes}
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(max(sizes)):
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self._ports, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, size, function, *arguments, within=TIMEOUT):
        """Results of ``function(comm, *arguments)`` on ranks 0 .. size - 1.

        What a rank raises is its result, as `Failed`.
        """
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        deadline = time.monotonic() + within
        found = []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"rank {rank} has not answered in {within} s")
            found.append(pipe.recv())
        return found

    def all(self, size, function, *arguments):
        """The same, where no rank may raise."""
        found = self.run(size, function, *arguments)
        for result in found:
            if isinstance(result, Failed):
                raise result
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(pipe, rank, ports, path):
    sys.path[:] = path
    from cupyflash.distributed._sockets import SocketComm

    comms = {}
    while (job := pipe.recv()) is not None:
        size, function, arguments = job
        try:
            if size not in comms:
                comms[size] = SocketComm(
                    rank, size, "127.0.0.1", ports[size], timeout=TIMEOUT
                )
            result = function(comms[size], *arguments)
        except Exception as error:
            result = Failed(rank, type(error).__name__, str(error), "")
            result.args = (rank, result.kind, result.text, traceback.format_exc())
        pipe.send(result)


def cuts(rng, total, size):
    """Lengths of parts, some of them empty."""
    edges = sorted(int(rng.integers(0, total + 1)) for _ in range(size - 1))
    return [b - a for a, b in itertools.pairwise([0, *edges, total])]


if str(Path(__file__).parent) not in sys.path:  # of a process that was started here
    sys.path.append(str(Path(__file__).parent))
