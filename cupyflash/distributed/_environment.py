"""A comm from what mpirun, torchrun or srun has told this process."""

import functools
import os
from typing import Any

from cupyflash._core import arrays, extras
from cupyflash.distributed._comm import TIMEOUT, Comm

# Rank, size and rank on this machine, as launchers name them; the first that is set.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH and its kin
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_PORT, _LAST_PORT = 29400, 65535


def connect(mpi: Any = None, *, timeout: float = TIMEOUT) -> Comm:
    """Join the other ranks of this job; every rank calls it.

    Parameters
    ----------
    mpi : mpi4py.MPI.Comm, optional
        Use its ranks, over MPI. By default the launcher's environment variables say
        which ranks there are; without any, this process is the only rank.
    timeout : float, default 600
        How many seconds a rank waits for another, here and for each message.

    Returns
    -------
    Comm
        Pass it to the functions of this package. CuPy arrays travel over NCCL,
        which starts with the first call on one.

    Raises
    ------
    TypeError
        If `mpi` is not an mpi4py communicator.
    ValueError
        If `timeout` or an environment variable is not a valid number.
    ImportError
        If MPI started this process on several machines and mpi4py is missing.
    TimeoutError, ConnectionError
        If the other ranks cannot be reached.

    Notes
    -----
    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and you
    can set them yourself. The ranks then join over TCP at that address, one port above
    MASTER_PORT if torchrun itself listens there; CUPYFLASH_PORT names another port.
    Under mpirun and srun they join over MPI if mpi4py is installed, otherwise over TCP
    at MASTER_ADDR, by default this machine.

    The sockets are neither encrypted nor authenticated, and carry no Python objects.

    Examples
    --------
    >>> from cupyflash import distributed
    >>> with distributed.connect() as comm:
    ...     print(f"rank {comm.rank} of {comm.size}")
    rank 0 of 1
    """
    timeout = arrays.finite_number("timeout", timeout)
    if timeout <= 0:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
    if mpi is not None:
        return _over_mpi(mpi, timeout)
    names = next((n for n in _LAUNCHERS if n[0] in os.environ), None)
    if names is None:
        rank, size, local_rank = 0, 1, 0
    else:
        rank, size = (_number(name) for name in names[:2])
        local_rank = _number(names[2], default=rank)
        if not 0 <= rank < size:
            raise ValueError(f"{names[0]}={rank} is not a rank of {names[1]}={size}")
        if not 0 <= local_rank < size:
            raise ValueError(
                f"{names[2]}={local_rank} is not a rank of {names[1]}={size}"
            )
    if size > 1 and "MASTER_ADDR" not in os.environ and names is not _LAUNCHERS[0]:
        world = _mpi_world(size)
        if world is not None:
            return _over_mpi(world, timeout)
        if local_rank != rank:
            raise ImportError(
                "ranks on several machines need mpi4py, or MASTER_ADDR and MASTER_PORT "
                f"in the environment; {extras.command('distributed')} installs mpi4py"
            )
    from cupyflash.distributed._sockets import SocketComm

    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return SocketComm(rank, size, host, _port(), timeout=timeout, local_rank=local_rank)


@functools.cache
def default() -> Comm:
    """The comm of calls that are given none."""
    return connect()


def _mpi_world(size):
    """All ranks by mpi4py, if it is there and was started by this launcher."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # without the package, or a library of MPI
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() == size else None


def _over_mpi(mpi, timeout):
    from cupyflash.distributed._mpi import MpiComm

    if not hasattr(mpi, "Get_rank"):
        raise TypeError(f"mpi must be an mpi4py communicator, got {type(mpi).__name__}")
    return MpiComm(mpi, timeout=timeout)


def _port():
    if "CUPYFLASH_PORT" in os.environ:
        return _number("CUPYFLASH_PORT", least=1, most=_LAST_PORT)
    # Where torchrun's own store listens, the next port.
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    most = _LAST_PORT - taken
    return _number("MASTER_PORT", default=_PORT, least=1, most=most) + taken


def _number(name, default=None, least=None, most=None):
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text)
    except (TypeError, ValueError):
        raise ValueError(
            f"the environment variable {name} must be an integer, got {text!r}"
        ) from None
    if least is not None and not least <= number <= most:
        raise ValueError(
            f"the environment variable {name} must be from {least} to {most}, "
            f"got {text}"
        )
    return number
