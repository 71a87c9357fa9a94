"""Which kernels there are to compile, and a small subset that covers them."""

import functools
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from cupyflash._attention.gpu import backward_coverage
from cupyflash._attention.gpu import coverage as attention_coverage
from cupyflash._cuda import source as _source
from cupyflash._cuda.device import Device, device_of_arch
from cupyflash._cuda.kernel import Variant
from cupyflash._points.gpu import coverage as points_coverage
from cupyflash._reference import exponentials
from cupyflash._softmax.gpu import coverage as softmax_coverage

_TABLES = {
    "softmax": softmax_coverage,
    "attention": attention_coverage,
    "attention_vjp": backward_coverage,
    "points": points_coverage,
    "check": exponentials,
}

# Switches of kernels that run only after a non-finite value was found.
_RARE = {"CAREFUL", "REPAIRS"}

# Defines that come from a call's arguments, besides the types *_T; all others are tile
# parameters.
_OPTIONS = {
    "MASK", "SOFTCAP", "BOUNDS", "TERMS_OF_KEYS", "KEY_BIAS", "UNIT_COLUMNS",
    "PREPARED", "RUN_TILES", "LOG", "SCALED", "HAS_WHERE", "HAS_B",
    "KEY_PARTS", "ALIGNED", "REPAIRS", "CAREFUL", "OWN_LSE", "SUMS_APART", "LARGEST",
}  # fmt: skip

# Numbers of axes to walk over: they affect the start and end of a kernel, not its loop.
_AXES = {"BATCH_DIMS", "OUTER_AXES", "REDUCED_AXES"}

# The dtypes of the arrays that every call has.
_ELEMENTS = {
    "ELEM_T",
    "GRAD_T",
    "ACCUM_T",
    "X_T",
    "Y_T",
    "DY_T",
    "A_T",
    "OUT_T",
    "ACC_T",
}

# Architectures for which the compiler writes the same PTX as for another, and those for
# which the assembler then emits the same code.
_SAME_TEXT = {"sm_86": "sm_80", "sm_89": "sm_80", "sm_120": "sm_100"}
_SAME_CODE = {"sm_89": "sm_86"}

# How a source tests for an architecture.
_ARCH_TEST = re.compile(
    r"(?:!defined\(__CUDA_ARCH__\) \|\| )?__CUDA_ARCH__ (?:>=|<) (\d+)"
)


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    operation: str
    row: str
    fast: bool
    arch: str
    variant: Variant


def jobs_for(*devices: Device, everything: bool = False) -> list[Job]:
    """All kernels that the kernel tables launch on `devices`, or a covering subset."""
    jobs = distinct(
        Job(
            operation,
            row,
            row in _fast_rows(table) and not _RARE & dict(variant.defines).keys(),
            device.name,
            variant,
        )
        for device in devices
        for operation, table in _TABLES.items()
        for row, variant in table.compile_list(device, everything)
    )
    return jobs if everything else enough(jobs)


def distinct(jobs: Iterable[Job]) -> list[Job]:
    """Drop the jobs that compile the same code as another job."""
    found: dict[tuple[Variant, bool, Hashable], Job] = {}
    for job in jobs:
        found.setdefault((job.variant, job.fast, _code_of(job)), job)
    return list(found.values())


def _code_of(job):
    """What the outcome of a job depends on besides its variant.

    Registers and spills are decided by the assembler, so a kernel that must not spill
    is compiled for every architecture with its own machine code, and any other kernel
    for the first architecture with the same PTX. Architectures that an `#if` in the
    source tells apart are kept apart.
    """
    alike = _SAME_CODE if job.fast else _SAME_TEXT
    return alike.get(job.arch, job.arch), _sides(job.variant.source, job.arch)


@functools.cache
def _sides(source, arch):
    """The outcome of each architecture test in a source; `arch` if one is unknown."""
    text = _source.load(source)
    if "__CUDA_ARCH" in _ARCH_TEST.sub("", text):
        return arch
    major, minor = device_of_arch(arch).cc
    bounds = sorted({int(bound) for bound in _ARCH_TEST.findall(text)})
    return tuple(100 * major + 10 * minor >= bound for bound in bounds)


def enough(jobs: Iterable[Job]) -> list[Job]:
    """A small subset of the jobs that covers every trait of them (greedy set cover)."""
    kernels: dict[Hashable, list[Job]] = {}
    for job in jobs:
        kernel = job.operation, job.row, job.variant.source, job.fast
        kernels.setdefault(kernel, []).append(job)
    return [job for of_kernel in kernels.values() for job in _cover(of_kernel)]


def _cover(jobs):
    """Greedy set cover of the jobs of one kernel."""
    names = {name for job in jobs for name, _ in job.variant.defines}
    shown = [traits(job, names) for job in jobs]
    missing = set().union(*shown)
    chosen = []
    while missing:
        best = max(range(len(jobs)), key=lambda i: len(shown[i] & missing))
        missing -= shown[best]
        chosen.append(best)
    return [jobs[i] for i in sorted(chosen)]


def traits(job: Job, names: Iterable[str]) -> set[Hashable]:
    """What compiling a job covers, for a kernel that has defines of these names.

    The traits are pairs: each architecture with each define (its value, or absent).
    Registers depend on the tile in a kernel that must not spill, so for those there are
    also: each tile with each architecture and with each option, and each define with
    each head dimension. A tile is all defines except options and numbers of axes. An
    optional array takes the same registers in any dtype, so each dtype counts once for
    a kernel.
    """
    defines = dict(job.variant.defines)
    entry = job.variant.entry
    code = _code_of(job)
    dim = defines.get("HEAD_DIM", defines.get("DIM")) if job.fast else None
    found: set[Hashable] = {(entry, code)}
    for name in names:
        value = defines.get(name)
        is_type = value is not None and name.endswith("_T") and name not in _ELEMENTS
        found.add((entry, None if is_type else dim, name, value))
        if job.fast:
            found.add((entry, code, name, "" if is_type else value))
    if job.fast:
        tile = tuple(
            item
            for item in defines.items()
            if not _is_option(item[0]) and item[0] not in _AXES
        )
        found.add((entry, code, tile))
        for name, value in defines.items():
            if _is_option(name):
                found.add((entry, tile, name, "" if name.endswith("_T") else value))
    return found


def _is_option(name):
    return name.endswith("_T") or name in _OPTIONS


def _fast_rows(table):
    """Names of the rows whose kernels must not spill."""
    tuples = [value for value in vars(table).values() if isinstance(value, tuple)]
    return {
        row.name
        for rows in tuples
        for row in rows
        if hasattr(row, "methods") and getattr(row, "fast", False)
    }
