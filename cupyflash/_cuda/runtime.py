"""Properties of the devices of this machine."""

import functools

import cupy

from cupyflash._core import extras
from cupyflash._cuda.device import MIN_CC, Device

current_device = cupy.cuda.runtime.getDevice


@functools.cache
def device(device_id: int) -> Device:
    """Properties of a device; RuntimeError if the kernels cannot run on it."""
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
            f"({str(error).splitlines()[0]}); {extras.CUDA} installs it"
        ) from None
