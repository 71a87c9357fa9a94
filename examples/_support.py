"""What the examples share: NumPy or CuPy, the size of a problem, a clock.

CUPYFLASH_SIZE is ``tiny`` (seconds, for tests), ``cpu`` or ``gpu``; without it the
examples of the gallery take ``gpu`` where there is a GPU and ``cpu`` elsewhere.
CUPYFLASH_XP=numpy keeps them on the CPU. (_support.py is no example itself.)
"""

import os
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
    """Result and seconds of a call; on a GPU of the second call, after compiling."""
    if xp is not np:
        function(*args, **kwargs)
        xp.cuda.Device().synchronize()
    start = time.perf_counter()
    result = function(*args, **kwargs)
    if xp is not np:
        xp.cuda.Device().synchronize()
    return result, time.perf_counter() - start


def host_timed(function, *args, **kwargs):
    """Result and seconds of a call that computes on the CPU."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return result, time.perf_counter() - start


def device_name():
    """Where the arrays of `xp` are computed."""
    if xp is np:
        return "NumPy"
    name = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"]
    return f"CuPy on {name.decode()}"
