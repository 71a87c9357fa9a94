"""python -m cupyflash info: versions, devices and libraries here. Never fails."""

import importlib.metadata
import os
import platform
import sys

import cupyflash
from cupyflash._cli import console
from cupyflash._core import extras, threads
from cupyflash._cuda import source
from cupyflash._cuda.device import MIN_CC

EXAMPLES = """
examples:
  python -m cupyflash info
"""

_OPTIONAL = ("cupy", "ml_dtypes", "threadpoolctl", "rich", "matplotlib", "scikit-learn")


def add_arguments(parser):
    """No arguments."""


def run(args):
    """Print the facts; returns 0."""
    console.heading(f"cupyflash {cupyflash.__version__}")
    console.table(("what", "found"), list(_host()))
    console.heading("GPU")
    console.table(("what", "found"), list(_gpu()))
    return 0


def _host():
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "cores", threads.num_cores()
    yield "numpy, scipy", f"{_version('numpy')}, {_version('scipy')}"
    for name in _OPTIONAL[1:]:
        yield name, _version(name) or "not installed"
    num_kernels = len(list(source.CUDA_SRC.rglob("*.cu")))
    yield "CUDA sources", f"{source.CUDA_SRC} ({num_kernels} kernel files)"
    yield "NumPy back end", "ready"


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu():
    try:
        import cupy
    except Exception as error:  # not installed, or its libraries do not load
        yield "CuPy", f"not usable: {_first_line(error)}"
        yield "CuPy back end", f"needs CuPy: {extras.CUDA}"
        return
    yield "CuPy", cupy.__version__
    yield "NVRTC", _ask(lambda: "{}.{}".format(*cupy.cuda.nvrtc.getVersion()))
    yield "CUDA runtime", _ask(lambda: _dotted(cupy.cuda.runtime.runtimeGetVersion()))
    yield "CUDA driver", _ask(lambda: _dotted(cupy.cuda.runtime.driverGetVersion()))
    yield (
        "kernel cache",
        os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache")),
    )
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a missing driver raises many kinds of exception
        yield "CuPy back end", f"no device: {_first_line(error)}"
        return
    usable = 0
    for device_id in range(count):
        text, is_usable = _device(cupy, device_id)
        usable += is_usable
        yield f"device {device_id}", text
    yield "CuPy back end", "ready" if usable else "no usable device"


def _device(cupy, device_id):
    """One device in words, and whether the kernels can run on it."""
    try:
        facts = cupy.cuda.runtime.getDeviceProperties(device_id)
    except Exception as error:
        return f"not usable: {_first_line(error)}", False
    cc = facts["major"], facts["minor"]
    text = (
        f"{facts['name'].decode()}, sm_{cc[0]}{cc[1]}, "
        f"{facts['multiProcessorCount']} SMs, "
        f"{console.size(facts['totalGlobalMem'])}"
    )
    if cc < MIN_CC:
        return f"{text}; too old, needs sm_{MIN_CC[0]}{MIN_CC[1]} or newer", False
    return text, True


def _dotted(version):
    """13.0 for 13000; the driver returns 0 if it is not installed."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def _ask(question):
    try:
        return question()
    except Exception as error:
        return f"not usable: {_first_line(error)}"


def _first_line(error):
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
