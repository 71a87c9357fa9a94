"""What the kernel specs of attention and of its gradients have in common."""

from dataclasses import dataclass

from cupyflash._attention.gpu.config import SplitKV, compiled_dims
from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda.device import Device

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A kernel of a table: the problems that it takes, and how it is launched."""

    name: str
    methods: tuple[str, ...] = ("tiled", "auto")
    fast: bool = True  # must not spill registers

    def unsupported_reason(
        self, problem: AttentionProblem | AttentionVjpProblem, device: Device
    ) -> str | None:
        """Why this kernel does not support `problem` on `device`, or None."""
        raise NotImplementedError

    def counts(
        self, problem: AttentionProblem | AttentionVjpProblem, device: Device
    ) -> dict[str, tuple[int, int]]:
        """What is counted in 32 bits: how many there are, and how many may be."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ForwardSpec(Spec):
    """A kernel of attention."""

    def split_kv(self, problem: AttentionProblem, device: Device) -> SplitKV:
        """The split of the keys; by default there is none."""
        return SplitKV(1, problem.seqlen_k)

    def configs(self, problem, batch_dims, device):
        """The launches; by default one, with the tile for the problem."""
        return (self.config(self.tile(problem, device), problem, batch_dims),)


@dataclass(frozen=True, kw_only=True)
class BackwardSpec(Spec):
    """Kernels of gradients, each of which is a part; `forward` is the forward call."""

    dims: tuple[int, ...] = ()  # head dimensions that are compiled; zeros pad

    def dim(self, forward: AttentionProblem) -> int:
        """The head dimension as it is compiled."""
        return max(compiled_dims(forward, self.dims))

    def configs(self, forward, batch_dims, device, everything):
        """All launches of a problem but the fallbacks, to compile them.

        `everything` asks for all tiles and dtypes, not only the first ones.
        """
        raise NotImplementedError


def refuse_other_arch(arch: str, device: Device) -> str | None:
    """Why a device, or its compiler, is not for kernels bound to `arch`, or None."""
    if f"{device.arch}a" != arch:
        return f"needs {arch}, {device.name} is {device.arch}"
    if device.nvrtc < (12, 9):
        return f"needs NVRTC 12.9 for {arch}, this is {device.nvrtc}"
    return None


def refuse_mma(
    problem: AttentionProblem,
    device: Device,
    dtypes: tuple[str, ...],
    widest: float,
    arch: str | None = None,
) -> str | None:
    """Why tensor cores do not take a problem, or None.

    Kernels bound to `arch` run there alone, others from sm_80 on.
    """
    if arch is not None:
        reason = refuse_other_arch(arch, device)
    elif device.cc < (8, 0):
        reason = f"needs sm_80 or newer, {device.name} is {device.arch}"
    else:
        reason = None
    return reason or refuse_dtype(problem, *dtypes) or refuse_width(problem, widest)


def refuse_dtype(problem: AttentionProblem, *dtypes: str) -> str | None:
    """Why a problem is not one of these dtypes, or None."""
    if problem.dtype not in dtypes:
        *first, last = dtypes
        known = f"{', '.join(first)} and {last}" if first else last
        return f"takes {known}, not {problem.dtype}"
    return None


def refuse_width(problem: AttentionProblem, widest: float) -> str | None:
    """Why a kernel for heads of up to `widest` columns does not take these, or None."""
    for name in ("head_dim", "head_dim_v"):
        if (n := getattr(problem, name)) > widest:
            return f"{name} {n} is above {widest}"
    return None


def refuse_smem(needed: int, device: Device) -> str | None:
    """Why a block cannot have as much shared memory as it needs, or None."""
    if needed > device.smem_optin:
        return (
            f"needs {needed} bytes of shared memory, a block may have "
            f"{device.smem_optin}"
        )
    return None
