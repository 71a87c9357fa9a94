"""What a transport does: arrays to one rank and from another, and short messages."""

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Never, Self

import numpy as np

from cupyflash._core.typing import Array

TIMEOUT = 600.0


class Comm(abc.ABC):
    """The ranks of one job, and how arrays get from one to another.

    `connect` returns one. To add a transport, write a subclass with `exchange`,
    `all_gather` and, if it needs them, `finish`, `abort` and `close`. Every rank calls
    the same methods in the same order.

    Attributes
    ----------
    rank, size : int
        The number of this process, counted from 0, and how many there are.
    local_rank : int
        The number of this process on its machine, which is also that of its GPU.
    timeout : float
        How many seconds a rank waits for another.
    """

    def __init__(
        self, rank: int, size: int, *, timeout: float = TIMEOUT, local_rank: int = 0
    ):
        self.rank, self.size = rank, size
        self.timeout, self.local_rank = timeout, local_rank
        # What calls have made of what all ranks were given, by that.
        self.made: dict[Any, Any] = {}
        # Of calls by several threads each is whole, one after another.
        self.lock = threading.Lock()
        self._on_gpus: dict[int, Comm] = {}

    @abc.abstractmethod
    def exchange(
        self,
        sent: Sequence[Array],
        target: int | None,
        received: Sequence[Array],
        source: int | None,
    ) -> Callable[[], None]:
        """Start sending arrays to one rank and receiving others from another.

        Parameters
        ----------
        sent, received : sequence of ndarray
            Contiguous arrays; before the wait, the caller keeps them alive, does not
            write to them, and does not read `received`.
        target, source : int or None
            The ranks; None where there is nothing to send, or to receive.

        Returns
        -------
        callable
            Waits until `received` may be read and `sent` may be written; on a GPU, by
            work that is put on the current stream from then on.
        """

    @abc.abstractmethod
    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order."""

    def finish(self) -> None:  # noqa: B027
        """Return once everything in flight has arrived, or raise."""

    def for_arrays(self, like: Array) -> "Comm":
        """The transport for arrays of the kind, and on the device, of `like`."""
        if isinstance(like, np.ndarray):
            return self
        device = like.device.id
        if device not in self._on_gpus:
            from cupyflash.distributed._nccl import NcclComm

            self._on_gpus[device] = NcclComm(self, device)
        return self._on_gpus[device]

    def check(self) -> None:  # noqa: B027
        """Raise if another rank is known to have ended; does not wait."""

    def abort(self, reason: str) -> None:
        """Tell the others why this rank is ending; nothing can be sent afterwards."""
        self.close()

    def close(self) -> None:
        """Close the connections; every rank does so after its last call."""
        self._close_gpus()

    def _close_gpus(self):
        for comm in self._on_gpus.values():
            comm.close()

    def __reduce__(self) -> Never:
        raise TypeError(
            f"a {type(self).__name__} holds open connections and can be neither copied "
            "nor pickled: call connect() in the process that needs one"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{kind.__name__}: {error}")


def checked(comm: Any) -> Comm:
    """`comm`, if it is one."""
    if not isinstance(comm, Comm):
        raise TypeError(
            f"comm must come from cupyflash.distributed.connect(), got "
            f"{type(comm).__name__}; pass mpi4py communicators to connect()"
        )
    return comm


@contextlib.contextmanager
def ending_all(comm: Comm) -> Iterator[None]:
    """An error within ends the call on the other ranks, too."""
    try:
        yield
    except BaseException as error:
        if comm.size > 1:
            comm.abort(f"{type(error).__name__}: {error}")
        raise


def nothing() -> None:
    """The wait for an exchange of nothing."""


def bytes_of(x: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return x.reshape(-1).view(np.uint8).data if x.size else memoryview(b"")


def shifted(comm: Comm, shift: int) -> tuple[int, int]:
    """(target, source): the ranks that many places after and before this one."""
    return (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
