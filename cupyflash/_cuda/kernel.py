"""What a kernel table is made of: facts of a device, tiles, and the choice of a row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Device:
    """What a choice of kernel may depend on."""

    name: str
    cc: tuple[int, int]  # compute capability
    num_sms: int
    smem_optin: int  # bytes of shared memory that one block may ask for
    nvrtc: tuple[int, int]  # version of the run-time compiler
    l2_bytes: int = 0

    @property
    def arch(self) -> str:
        return f"sm_{self.cc[0]}{self.cc[1]}"


# Shared memory that one block may ask for, by compute capability
# (CUDA programming guide, table "technical specifications per compute capability").
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


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled: an entry of a source under a set of switches."""

    source: str  # below cuda_src/
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    arch: str | None = None  # for a kernel bound to one architecture
    smem: int = 0  # bytes of dynamic shared memory
    cooperative: bool = False  # all blocks run at once, to wait for one another
    cluster: int = 1  # blocks of a cluster; more than 8 has to be asked for

    @property
    def options(self) -> tuple[str, ...]:
        """Options of NVRTC, beside those that CuPy adds itself."""
        options = ["-std=c++17", "-lineinfo"]
        options += [f"-D{name}={value}" for name, value in self.defines]
        if self.arch is not None:
            options.append(f"-arch={self.arch}")
        return tuple(options)


@dataclass(frozen=True)
class Step:
    """One launch of a kernel."""

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    scratch: int = 0  # bytes of memory that the launches of one call share


class Row(Protocol):
    """One kernel of a table."""

    @property
    def name(self) -> str: ...

    @property
    def rungs(self) -> tuple[str, ...]: ...

    def refusal(self, problem: Any, device: Device) -> str | None: ...


# The C++ type of an array element, by dtype name; half_t and bfloat16_t are ours
# (cuda_src/common/types.cuh).
CUDA_TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def refuse_old_device(dtype: str, device: Device) -> str | None:
    """The refusal that all rows share: an old card, or bfloat16 before sm_80."""
    if dtype == "bfloat16" and device.cc < (8, 0):
        return f"bfloat16 needs sm_80 or newer, {device.name} is {device.arch}"
    return None


def by_threshold(ladder: Sequence[tuple[float, Any]], size: float) -> Any:
    """The value of the first step ``(upper bound, value)`` that `size` fits under."""
    return next(value for bound, value in ladder if size <= bound)


def select(
    rows: Iterable[Row], problem: Any, device: Device, *, name: str | None = None
) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """The first row that takes `problem`, and why the rows before it did not.

    `name` forces one row, whatever its rung (tests and benchmarks do that).
    """
    refused: list[tuple[str, str]] = []
    for row in rows:
        if name is not None and row.name != name:
            continue
        if name is None and problem.method not in row.rungs:
            continue
        reason = row.refusal(problem, device)
        if reason is None:
            return row, tuple(refused)
        refused.append((row.name, reason))
    asked = f"method={problem.method!r}" if name is None else f"kernel {name!r}"
    raise NotImplementedError(
        f"no kernel for {asked} takes this problem on {device.name} ({device.arch}):\n"
        + "\n".join(f"  {kernel}: {reason}" for kernel, reason in refused)
    )
