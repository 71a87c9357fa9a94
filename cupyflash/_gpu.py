"""What both operations share on the GPU: device facts, plans, launches."""

import functools
from typing import Any

import cupy
import numpy as np

from cupyflash import _arrays, _compile
from cupyflash._kernels import MIN_CC, Device

# Absent pointers of a kernel's parameter list. Of all forms of 0, CuPy passes this one
# fastest.
NULL = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)

# Plans are small; a stream of ever new shapes must not keep them for ever.
MAX_PLANS = 4096

current_device = cupy.cuda.runtime.getDevice


@functools.cache
def device(device_id: int) -> Device:
    """Facts of a device; RuntimeError for a card that the kernels cannot run on."""
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    cc = properties["major"], properties["minor"]
    name = properties["name"].decode()
    if cc < MIN_CC:
        raise RuntimeError(
            f"device {device_id} ({name}) has compute capability {cc[0]}.{cc[1]}; "
            f"cupyflash needs {MIN_CC[0]}.{MIN_CC[1]} (Turing) or newer. Move the "
            "arrays to the CPU with cupy.asnumpy(...)"
        )
    return Device(
        name=name,
        cc=cc,
        num_sms=properties["multiProcessorCount"],
        smem_optin=properties["sharedMemPerBlockOptin"],
        nvrtc=_nvrtc_version(),
        l2_bytes=properties["l2CacheSize"],
    )


def _nvrtc_version():
    try:
        return cupy.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError, AttributeError) as error:
        raise RuntimeError(
            "NVRTC, CUDA's run-time compiler, cannot be loaded "
            f"({str(error).splitlines()[0]}); pip install cupyflash[cuda13x] (or "
            "[cuda12x]) brings it"
        ) from None


class Launch:
    """One kernel with everything but its arrays; compiled at the first call."""

    def __init__(self, variant, grid, block, device_id):
        self.variant = variant
        self.grid = grid
        self.block = block
        self.device_id = device_id
        self._kernel = None
        self._smem = variant.smem

    def __call__(self, *args):
        """Enqueue on the current stream of the current device."""
        kernel = self._kernel
        if kernel is None:
            kernel = self._kernel = _compile.get_kernel(self.variant, self.device_id)
        kernel(self.grid, self.block, args, self._smem)


class PlanCache:
    """Plans by what they depend on: shapes, strides, dtypes and options."""

    def __init__(self):
        self._plans: dict[Any, Any] = {}

    def get(self, key):
        return self._plans.get(key)

    def put(self, key, plan):
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan


def empty(shape, dtype: str):
    """Uninitialised memory from CuPy's current allocator, on the current device."""
    return cupy.empty(shape, _arrays.to_dtype(dtype))


# CuPy's own wrapper of such an argument, which it would otherwise make at each launch;
# NumPy lists the fields of a struct for it, which takes up to 40 us.
_by_value = getattr(
    cupy.cuda.function, "CNumpyArray", lambda x: x.view(f"V{x.dtype.itemsize}")
)


def pack(fields: dict[str, Any], dtype: np.dtype):
    """A struct of kernel parameters as one argument, passed by value."""
    record = np.zeros(1, dtype)
    for name, value in fields.items():
        record[name] = value
    return _by_value(record)
