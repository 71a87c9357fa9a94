"""Print the extra of the CUDA version that this machine's NVIDIA driver supports.

``cuda12x`` or ``cuda13x``; nothing when there is no driver or no device. The Makefile
asks before anything is installed, so this needs the standard library alone.
"""

import ctypes
import sys


def main():
    """Ask the driver how many devices it sees and which CUDA it speaks."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return
    if count.value == 0 or driver.cuDriverGetVersion(ctypes.byref(version)):
        return
    major = version.value // 1000
    if major >= 12:
        print("cuda12x" if major == 12 else "cuda13x")


if __name__ == "__main__":
    main()
