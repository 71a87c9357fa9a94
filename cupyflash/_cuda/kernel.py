"""Building blocks of kernel tables: variants, launches, the choice of a kernel."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cupyflash._cuda.device import Device


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled: an entry of a source with a set of defines."""

    source: str  # below cuda_src/
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    arch: str | None = None  # for a kernel bound to one architecture
    smem: int = 0  # bytes of dynamic shared memory
    cooperative: bool = (
        False  # all blocks are resident, so that they can wait for each other
    )
    cluster: int = 1  # blocks per cluster; more than 8 must be allowed
    generated: str = field(default="", repr=False)  # CUDA that the source includes

    @property
    def options(self) -> tuple[str, ...]:
        """Options of NVRTC, in addition to those of CuPy."""
        language, lines, *arch = self.flags
        defines = [f"-D{name}={value}" for name, value in self.defines]
        return (language, lines, *defines, *arch)

    @property
    def flags(self) -> tuple[str, ...]:
        """The same without the defines, which are also in `prelude`."""
        flags = ("-std=c++17", "-lineinfo")
        return flags if self.arch is None else (*flags, f"-arch={self.arch}")

    @property
    def prelude(self) -> str:
        """The defines as lines before the source."""
        return "".join(f"#define {name} {value}\n" for name, value in self.defines)


# The longest first axis of a grid in use; further blocks are along the second.
_GRID_X = 1 << 30


@dataclass(frozen=True)
class LaunchConfig:
    """One launch of a kernel: what is compiled, the grid and the block."""

    variant: Variant
    grid: tuple[int, ...]
    block: tuple[int, ...]
    overlaps: bool = False  # may start before the previous kernel ends
    scratch: int = 0  # bytes of memory shared by the launches of a call

    @classmethod
    def over(cls, variant: Variant, num_blocks: int, num_threads: int, **more):
        """A grid with two axes, for kernels that use block_index()."""
        grid = min(num_blocks, _GRID_X), -(-num_blocks // _GRID_X)
        return cls(variant, grid, (num_threads,), **more)

    @classmethod
    def over_threads(
        cls, source: str, entry: str, num_threads: int, defines: dict[str, Any]
    ):
        """The same with enough blocks for `num_threads`, NUM_THREADS in each."""
        variant = Variant(
            source, entry, tuple((name, str(x)) for name, x in defines.items())
        )
        block = int(defines["NUM_THREADS"])
        return cls.over(variant, -(-num_threads // block), block)

    @property
    def num_blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def num_threads(self) -> int:
        return math.prod(self.block)


class KernelSpec(Protocol):
    """What a kernel of a table supports."""

    @property
    def name(self) -> str: ...

    @property
    def methods(self) -> tuple[str, ...]: ...

    def unsupported_reason(self, problem: Any, device: Device) -> str | None: ...


def refuse_old_device(dtype: str, device: Device) -> str | None:
    """Reasons common to all kernel specs: an old device, or bfloat16 before sm_80."""
    if dtype == "bfloat16" and device.cc < (8, 0):
        return f"bfloat16 needs sm_80 or newer, {device.name} is {device.arch}"
    return None


def check_results(results: Mapping[str, Any], device: Device) -> None:
    """Raise if a device cannot round to the dtype of a result, which an input has."""
    for name, result in results.items():
        if result and (reason := refuse_old_device(result.dtype.name, device)):
            raise NotImplementedError(
                f"{name} has the dtype of its input, and {reason}: give that input in "
                "another dtype"
            )


def by_threshold(ladder: Mapping[float, Any], size: float) -> Any:
    """The value of the first upper bound that `size` fits under."""
    return next(value for bound, value in ladder.items() if size <= bound)


def select(
    specs: Iterable[KernelSpec], problem: Any, device: Device
) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """The first kernel spec that supports `problem`, and why those before it do not."""
    refused: list[tuple[str, str]] = []
    for spec in specs:
        if problem.method not in spec.methods:
            continue
        reason = spec.unsupported_reason(problem, device)
        if reason is None:
            return spec, tuple(refused)
        refused.append((spec.name, reason))
    raise NotImplementedError(
        f"no kernel for method={problem.method!r} takes this problem on {device.name} "
        f"({device.arch}):\n"
        + "\n".join(f"  {kernel}: {reason}" for kernel, reason in refused)
    )
