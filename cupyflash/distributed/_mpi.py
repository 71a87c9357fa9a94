"""Ranks joined by MPI, through mpi4py: arrays in host memory."""

import contextlib
import time

import numpy as np

from cupyflash.distributed._comm import TIMEOUT, Comm, bytes_of, nothing

_ARRAYS, _MESSAGE, _FAILURE = 1, 2, 3
_AT_ONCE = 1 << 30  # bytes of a message: counts of MPI are 32 bits wide
_PAUSE = 5e-5  # seconds between two looks


class MpiComm(Comm):
    """The ranks of a communicator of mpi4py, on a duplicate of it.

    Parameters
    ----------
    mpi : mpi4py.MPI.Comm
        Whose ranks take part.
    timeout : float
        Seconds to wait for each message.
    """

    def __init__(self, mpi, *, timeout=TIMEOUT):
        from mpi4py import MPI

        on_machine = mpi.Split_type(MPI.COMM_TYPE_SHARED)
        super().__init__(
            mpi.Get_rank(),
            mpi.Get_size(),
            timeout=timeout,
            local_rank=on_machine.Get_rank(),
        )
        on_machine.Free()
        self._mpi = mpi.Dup()
        self._any = MPI.ANY_SOURCE
        self._closed = ""

    def exchange(self, sent, target, received, source):
        self._check_open()
        requests = []
        for rank, arrays, post in (
            (source, received, self._mpi.Irecv),
            (target, sent, self._mpi.Isend),
        ):
            if rank is not None:
                requests += [
                    (post(part, rank, _ARRAYS), rank)
                    for x in arrays
                    for part in _parts(bytes_of(x))
                ]
        return (lambda: self._wait(requests)) if requests else nothing

    def all_gather(self, message):
        self._check_open()
        requests = [
            (self._mpi.Isend(message, rank, _MESSAGE), rank) for rank in self._others()
        ]
        found = [message] * self.size
        for rank in self._others():
            self._until(
                lambda rank=rank: self._mpi.Iprobe(rank, _MESSAGE), f"rank {rank}"
            )
            found[rank] = self._receive(rank, _MESSAGE)
        self._wait(requests)
        return found

    def check(self):
        from mpi4py import MPI

        status = MPI.Status()
        if self._mpi.Iprobe(self._any, _FAILURE, status):
            rank = status.Get_source()
            text = self._receive(rank, _FAILURE).decode(errors="replace")
            raise ConnectionError(f"rank {rank} has ended: {text}")

    def abort(self, reason):
        if self._closed:
            return
        self._closed = f"rank {self.rank} has ended, after {reason}"
        for rank in self._others():
            with contextlib.suppress(Exception):  # who cannot be told needs no word
                self._mpi.Isend(reason.encode(), rank, _FAILURE).Free()

    def close(self):
        self._close_gpus()
        if not self._closed:
            self._closed = "this comm is closed"
            self._mpi.Free()

    def _check_open(self):
        if self._closed:
            raise ConnectionError(self._closed)

    def _others(self):
        return [rank for rank in range(self.size) if rank != self.rank]

    def _receive(self, rank, tag):
        from mpi4py import MPI

        status = MPI.Status()
        self._mpi.Probe(rank, tag, status)
        found = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._mpi.Recv(found, rank, tag)
        return found.tobytes()

    def _wait(self, requests):
        for request, rank in requests:
            self._until(request.Test, f"rank {rank}")

    def _until(self, is_done, who):
        """Ask until it is, for the time there is, and until a rank ends."""
        deadline = time.monotonic() + self.timeout
        try:
            while not is_done():
                self.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{who} was not ready within {self.timeout:g} s (timeout= of "
                        "connect); it has died, hangs, or takes longer"
                    )
                time.sleep(_PAUSE)
        except (ConnectionError, TimeoutError) as error:
            self.abort(str(error))
            raise


def _parts(whole):
    return [whole[first : first + _AT_ONCE] for first in range(0, len(whole), _AT_ONCE)]
