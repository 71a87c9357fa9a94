"""What there is to compile, and how few kernels show all that is to see in them."""

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

# Switches of kernels that run where something was not finite, and else return at once.
_RARE = {"CAREFUL", "REPAIRS"}

# Defines of what a call asks for, beside the types *_T; the others make up a tile.
_OPTIONS = {
    "MASK", "SOFTCAP", "BOUNDS", "TERMS_OF_KEYS", "KEY_BIAS", "UNIT_COLUMNS",
    "PREPARED", "RUN_TILES", "LOG", "SCALED", "HAS_WHERE", "HAS_B",
    "KEY_PARTS", "ALIGNED", "REPAIRS", "CAREFUL", "OWN_LSE", "SUMS_APART", "LARGEST",
}  # fmt: skip

# How many axes a kernel walks over: at its begin and end, not in its loop.
_AXES = {"BATCH_DIMS", "OUTER_AXES", "REDUCED_AXES"}

# The types of what every call has.
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

# Architectures for which the compiler writes the same text (PTX) as for another, and
# those for which the assembler makes the same code of it.
_SAME_TEXT = {"sm_86": "sm_80", "sm_89": "sm_80", "sm_120": "sm_100"}
_SAME_CODE = {"sm_89": "sm_86"}

# How sources ask for an architecture.
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
    """What the kernel tables would compile for devices: all of it, or enough of it."""
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
    """Without those that would compile what another job compiles."""
    found: dict[tuple[Variant, bool, Hashable], Job] = {}
    for job in jobs:
        found.setdefault((job.variant, job.fast, _code_of(job)), job)
    return list(found.values())


def _code_of(job):
    """What the outcome of a job hangs on beside its variant.

    Registers and spills are the assembler's work, so a kernel that must not spill is
    compiled for each architecture with code of its own, and any other for the first
    with its text. A test in the source that parts two architectures parts them here.
    """
    alike = _SAME_CODE if job.fast else _SAME_TEXT
    return alike.get(job.arch, job.arch), _sides(job.variant.source, job.arch)


@functools.cache
def _sides(source, arch):
    """The sides of `arch` in the tests of a source; itself if there are others."""
    text = _source.load(source)
    if "__CUDA_ARCH" in _ARCH_TEST.sub("", text):
        return arch
    major, minor = device_of_arch(arch).cc
    bounds = sorted({int(bound) for bound in _ARCH_TEST.findall(text)})
    return tuple(100 * major + 10 * minor >= bound for bound in bounds)


def enough(jobs: Iterable[Job]) -> list[Job]:
    """Few of the jobs that show all that there is to see in them, one by one."""
    kernels: dict[Hashable, list[Job]] = {}
    for job in jobs:
        kernel = job.operation, job.row, job.variant.source, job.fast
        kernels.setdefault(kernel, []).append(job)
    return [job for of_kernel in kernels.values() for job in _cover(of_kernel)]


def _cover(jobs):
    """Of jobs of one kernel: again and again the one that shows most that is new."""
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
    """What compiling a job shows, in a kernel that has defines of these names.

    Pairs: each architecture with each define, its value or absent. In a fast row
    registers hang on the tile, so there it is also each tile with each architecture and
    with each option, and each define with each head dimension: a tile is all defines
    beside options and axes. An optional array takes the same registers in any type, so
    that its types count once a kernel.
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
    """Names of the rows that must not spill."""
    tuples = [value for value in vars(table).values() if isinstance(value, tuple)]
    return {
        row.name
        for rows in tuples
        for row in rows
        if hasattr(row, "methods") and getattr(row, "fast", False)
    }
