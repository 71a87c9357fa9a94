"""Properties of a device that a choice of kernel may depend on; name of the driver."""

import sys
from dataclasses import dataclass


def driver_library(platform: str = sys.platform) -> str:
    """The CUDA driver, for functions of it that CuPy lacks."""
    return "nvcuda.dll" if platform == "win32" else "libcuda.so.1"


@dataclass(frozen=True)
class Device:
    """Properties that a choice of kernel may depend on."""

    name: str
    cc: tuple[int, int]  # compute capability
    num_sms: int
    smem_optin: int  # the most shared memory of a block
    nvrtc: tuple[int, int]  # version of the run-time compiler
    l2_bytes: int = 0

    @property
    def arch(self) -> str:
        return f"sm_{self.cc[0]}{self.cc[1]}"


# The most shared memory of a block, by compute capability (CUDA programming guide,
# table "technical specifications per compute capability").
SMEM_OPTIN = {
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (11, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}

MIN_CC = (7, 5)  # Turing: the oldest that CUDA 13 compiles for


def device_of_arch(arch: str) -> Device:
    """A made-up device of `arch`, such as "sm_90a", to choose and compile for."""
    digits = arch.removeprefix("sm_").rstrip("af")
    cc = int(digits[:-1]), int(digits[-1])
    return Device(arch, cc, 132, SMEM_OPTIN.get(cc, 101376), (13, 0), 50 << 20)
