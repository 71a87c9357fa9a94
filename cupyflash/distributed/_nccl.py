"""Ranks joined by NCCL: CuPy arrays, one GPU a process."""

import contextlib
import threading
import time

from cupyflash._core import extras
from cupyflash.distributed._comm import Comm

_PAUSE = 2e-5  # seconds between two looks
_LOOK = 0.05  # the same while ranks connect, which takes seconds
_GRACE = 1.0  # for a connection that is there, beside a rank that has left


def _modules():
    """CuPy and its binding of NCCL."""
    import cupy
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError(
            "CuPy does not find NCCL, which carries arrays between GPUs; "
            f"{extras.command('distributed')} installs it on Linux"
        )
    return cupy, nccl


def _ended(thread, seconds):
    """Whether a thread has ended, waiting for that so long."""
    thread.join(seconds)
    return not thread.is_alive()


class NcclComm(Comm):
    """GPUs of the ranks of another comm, which goes on carrying messages.

    Parameters
    ----------
    host : Comm
        Ranks that send each other short messages.
    device : int
        Number of the GPU; that of no other rank.

    Notes
    -----
    Transfers run on a stream of their own: after what the current stream has been
    given before them, beside what it is given then, up to the wait.

    NCCL connects ranks when the communicator is made and when a pair first exchanges
    arrays, and waits for them without end. It does so on a thread, while this one keeps
    the time and watches the host's connections.
    """

    def __init__(self, host: Comm, device: int):
        super().__init__(
            host.rank, host.size, timeout=host.timeout, local_rank=host.local_rank
        )
        self._host, self._device = host, device
        self._last = None
        self._closed = ""
        self._ranks = None
        self._connected: set[tuple[int | None, int | None]] = set()
        key = self._agree()
        with self._cupy.cuda.Device(device):
            self._stream = self._cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._ranks = self._connecting(
            lambda: self._nccl.NcclCommunicator(self.size, key, self.rank)
        )

    def _agree(self):
        """The name of this communicator, or what keeps some rank from taking part."""
        try:
            self._cupy, self._nccl = _modules()
            key = b"+" + (self._nccl.get_unique_id() if self.rank == 0 else b"")
        except Exception as error:
            failure, key = error, f"-{error}".encode()
        keys = self._host.all_gather(key)
        for rank, found in enumerate(keys):
            if found[:1] == b"-":
                if rank == self.rank:
                    raise failure
                raise ImportError(f"rank {rank} has no NCCL: {found[1:].decode()}")
        return keys[0][1:]

    @contextlib.contextmanager
    def _ending_all(self):
        """An error within ends this comm on all ranks; of NCCL, as ConnectionError."""
        try:
            yield
        except self._nccl.NcclError as error:
            self.abort(str(error))
            raise ConnectionError(f"NCCL has failed: {error}") from None
        except (ConnectionError, TimeoutError) as error:
            self.abort(str(error))
            raise

    def _connecting(self, function):
        """The result of what waits for other ranks; an error ends this comm."""
        results, errors = [], []

        def work():
            try:
                with self._cupy.cuda.Device(self._device):
                    results.append(function())
            except BaseException as error:
                errors.append(error)

        # A daemon, as nothing ends it if NCCL never comes back.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        deadline = time.monotonic() + self.timeout
        with self._ending_all():
            while not _ended(thread, _LOOK):
                try:
                    self._host.check()
                except ConnectionError:
                    if _ended(thread, _GRACE):
                        break  # the other was done before this one, and left
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "NCCL did not connect all ranks within "
                        f"{self.timeout:g} s (timeout= of connect); a rank hangs, or "
                        "the ranks cannot reach each other (NCCL_DEBUG=INFO says more)"
                    )
            if errors:
                raise errors[0]
        return results[0]

    def exchange(self, sent, target, received, source):
        if self._closed:
            raise ConnectionError(self._closed)
        cuda = self._cupy.cuda
        with cuda.Device(self._device):
            current = cuda.get_current_stream()
            self._stream.wait_event(current.record())
            # A kernel that fills the GPU would keep a transfer out until it ends, and
            # the other rank's transfer would hold its multiprocessors and wait. So what
            # comes next here starts only when the transfer can.
            current.wait_event(self._stream.record())
            if (target, source) in self._connected:
                with self._ending_all():
                    self._post(sent, target, received, source)
            else:
                self._connecting(lambda: self._post(sent, target, received, source))
                self._connected.add((target, source))
            done = self._last = self._stream.record()
        return lambda: cuda.get_current_stream().wait_event(done)

    def _post(self, sent, target, received, source):
        """All sends and receives of an exchange as one group."""
        self._nccl.groupStart()
        for rank, arrays, post in (
            (target, sent, self._ranks.send),
            (source, received, self._ranks.recv),
        ):
            for x in arrays if rank is not None else ():
                post(
                    x.data.ptr,
                    x.nbytes,
                    self._nccl.NCCL_UINT8,
                    rank,
                    self._stream.ptr,
                )
        self._nccl.groupEnd()

    def finish(self):
        """Wait on the host: a rank that has died leaves a kernel that never ends."""
        deadline = time.monotonic() + self.timeout
        with self._ending_all():
            while self._last is not None and not self._last.done:
                self._host.check()
                self._ranks.check_async_error()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "arrays of another rank did not arrive within "
                        f"{self.timeout:g} s (timeout= of connect); a rank hangs, or "
                        "takes longer"
                    )
                time.sleep(_PAUSE)
        self._last = None

    def all_gather(self, message):
        return self._host.all_gather(message)

    def check(self):
        self._host.check()

    def abort(self, reason):
        if not self._closed:
            self._closed = f"rank {self.rank} has ended, after {reason}"
            if self._ranks is not None:
                self._ranks.abort()  # its kernels end, too
        self._host.abort(reason)

    def close(self):
        if not self._closed:
            self._closed = "this comm is closed"
            self._ranks.destroy()
