"""What the examples share: NumPy or CuPy, the size of a problem, a clock.

CUPYFLASH_SIZE is ``tiny`` (seconds, for tests), ``cpu`` or ``gpu``; without it the
examples of the gallery take ``gpu`` where there is a GPU and ``cpu`` elsewhere.
CUPYFLASH_XP=numpy keeps them on the CPU. (_support.py is no example itself.)
"""

import os
import socket
import subprocess
import sys
import time

import numpy as np


def array_module():
    """CuPy where it finds a GPU, else NumPy."""
    if os.environ.get("CUPYFLASH_XP") != "numpy":
        try:
            import cupy

            if cupy.is_available():
                return cupy
        except ImportError:
            pass
    return np


xp = array_module()


def choose(tiny, cpu, gpu):
    """The one of three sizes that suits this machine, or that was asked for."""
    size = os.environ.get("CUPYFLASH_SIZE") or ("cpu" if xp is np else "gpu")
    return {"tiny": tiny, "cpu": cpu, "gpu": gpu}[size]


def to_numpy(x):
    """The same numbers on the host."""
    return x if isinstance(x, np.ndarray) else x.get()


def timed(function, *args, **kwargs):
    """Result and seconds of a call; on a GPU, without the time to compile."""

    def call():
        result = function(*args, **kwargs)
        if xp is not np:
            xp.cuda.Device().synchronize()
        return result

    if xp is not np:
        call()
    return host_timed(call)


def host_timed(function, *args, **kwargs):
    """Result and seconds of a call; of the fastest of a few, if they are short."""
    seconds = []
    while len(seconds) < 5 and sum(seconds) < 0.2:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def device_name():
    """Where the arrays of `xp` are computed."""
    if xp is np:
        return "NumPy"
    name = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"]
    return f"CuPy on {name.decode()}"


def is_rank():
    """Whether a launcher has started this process as one of its ranks."""
    names = "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"
    return any(name in os.environ for name in names)


def start_ranks(count):
    """Start the script once per rank on this machine, and wait."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for process in ranks:
        print(process.communicate()[0], end="")
    assert not any(process.returncode for process in ranks)
