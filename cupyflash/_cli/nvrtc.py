"""Compile kernels with NVRTC and read its log; needs no GPU."""

import ctypes
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cupyflash._cli.compile_jobs import Job
from cupyflash._core import extras
from cupyflash._cuda import source
from cupyflash._cuda.device import Device, device_of_arch

# Options that CuPy adds. Without the first, NVRTC 13.0 treats generic lambdas as host
# functions.
_OF_CUPY = ("--device-as-default-execution-space", "-ftz=true")

# Since this version NVRTC caches its results where there is a driver; a cached result
# comes without the assembler's report.
_CACHES_SINCE = (12, 9)

# Warnings not allowed in a fast kernel: the assembler waits after each wgmma.
_SERIALIZED = re.compile(r"C75\d\d")


@dataclass(frozen=True)
class Outcome:
    """The result of compiling one kernel."""

    operation: str
    row: str
    arch: str
    defines: str
    registers: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    static_smem: int | None
    dynamic_smem: int
    seconds: float
    problem: str  # empty when all is well


def use(path: Path | None) -> str:
    """Load a compiler before CuPy looks for one; returns why that fails, or nothing."""
    if path is None:
        return ""
    try:
        for library in (*sorted(path.parent.glob("libnvrtc-builtins.so*")), path):
            loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"--nvrtc {path} cannot be loaded: {error}"
    if not hasattr(loaded, "nvrtcVersion"):
        return f"--nvrtc {path} is not a libnvrtc.so"
    return ""


def version() -> str:
    """The version of NVRTC."""
    from cupy_backends.cuda.libs import nvrtc

    return "{}.{}".format(*nvrtc.getVersion())


def unusable() -> str:
    """Why NVRTC cannot be used, or nothing."""
    try:
        import cupy  # noqa: F401  (puts the libraries of its wheels on the path)
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        return (
            f"NVRTC cannot be used ({str(error).strip().splitlines()[0]}); "
            f"{extras.command('nvrtc')} installs it"
        )
    return ""


def unknown(device: Device) -> str:
    """Why NVRTC does not compile for an architecture, or nothing."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram("", "empty.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={device.name}",))
    except nvrtc.NVRTCError:
        return f"NVRTC {version()} does not compile for --arch {device.name}"
    finally:
        nvrtc.destroyProgram(program)
    return ""


@dataclass(frozen=True)
class Finding:
    """The compiler's report on a kernel, before any demand of its kernel row."""

    registers: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    static_smem: int | None
    serialized: str  # the warning that the assembler serialises wgmma, or nothing
    error: str


def find(job: Job) -> tuple[Finding, float]:
    """Compile a kernel; the compiler's report and the seconds it took."""
    start = time.perf_counter()
    text = source.load(job.variant.source, job.variant.generated)
    error, log, _ = compile_text(text, job.variant.source, options_of(job))
    elapsed = time.perf_counter() - start
    return finding_in(log, job.variant.entry, error), elapsed


def finding_in(log: str, entry: str, error: str = "") -> Finding:
    """The finding for an entry in a log."""
    lines = [line.strip() for line in log.splitlines() if _SERIALIZED.search(line)]
    serialized = "".join(lines[:1])
    return Finding(**read_report(log, entry), serialized=serialized, error=error)


def outcome_of(job: Job, finding: Finding, seconds: float) -> Outcome:
    """Judge a finding by the demands of the job's kernel row."""
    return Outcome(
        operation=job.operation,
        row=job.row,
        arch=job.variant.arch or job.arch,
        defines=" ".join(f"{name}={value}" for name, value in job.variant.defines),
        registers=finding.registers,
        stack_bytes=finding.stack_bytes,
        spill_bytes=finding.spill_bytes,
        static_smem=finding.static_smem,
        dynamic_smem=job.variant.smem,
        seconds=round(seconds, 3),
        problem=finding.error or _complaint(job, finding),
    )


def options_of(job: Job) -> tuple[str, ...]:
    """All compiler options except those of its cache."""
    options = [*job.variant.options, *_OF_CUPY, "--ptxas-options=-v"]
    if job.variant.arch is None:
        # CuPy compiles a portable kernel for the plain architecture of the device.
        options.append(f"-arch={device_of_arch(job.arch).arch}")
    return tuple(options)


def compile_text(
    text: str, name: str, options: Sequence[str]
) -> tuple[str, str, bytes]:
    """Compile; returns the error (or nothing), the log and the cubin."""
    import cupy  # noqa: F401  (puts the libraries of its wheels on the path)
    from cupy_backends.cuda.libs import nvrtc

    if nvrtc.getVersion() >= _CACHES_SINCE:
        options = (*options, "--no-cache")
    program = None
    try:
        program = nvrtc.createProgram(text, name, (), ())
        nvrtc.compileProgram(program, tuple(options))
        return "", nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
    except Exception as error:
        log = nvrtc.getProgramLog(program) if program is not None else ""
        return (log or f"{type(error).__name__}: {error}").strip(), log, b""
    finally:
        if program is not None:
            nvrtc.destroyProgram(program)


def in_parallel(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    num_processes: int,
    nvrtc: Path | None = None,
) -> Iterator[tuple[int, Any]]:
    """(index, result) of each item as they complete, one compiler per process."""
    # A fresh interpreter for each process: CUDA libraries do not like to be forked.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, context, use, (nvrtc,))
    try:
        places = {pool.submit(function, item): i for i, item in enumerate(items)}
        for future in as_completed(places):
            yield places[future], future.result()
    finally:  # an interrupted run does not wait for the others
        pool.shutdown(cancel_futures=True)


def read_report(log: str, entry: str) -> dict[str, int | None]:
    """Registers, stack, spills and static shared memory of one entry in a log."""
    facts: dict[str, int | None] = dict.fromkeys(
        ("registers", "stack_bytes", "spill_bytes", "static_smem")
    )
    at = log.find(f"Compiling entry function '{entry}'")
    if at < 0:
        return facts
    part = log[at:]
    following = part.find("Compiling entry function", 1)
    part = part[:following] if following > 0 else part
    if match := re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        part,
    ):
        stack, stores, loads = map(int, match.groups())
        facts |= {"stack_bytes": stack, "spill_bytes": stores + loads}
    if match := re.search(r"Used (\d+) registers", part):
        smem = re.search(r"(\d+) bytes smem", part)
        facts["registers"] = int(match[1])
        facts["static_smem"] = int(smem[1]) if smem else 0
    return facts


def _complaint(job, finding):
    """What the report shows that the kernel must not do, or nothing."""
    if finding.registers is None:
        return f"the compiler reports no entry {job.variant.entry}"
    if finding.serialized:
        return finding.serialized
    if job.fast and finding.spill_bytes:
        return f"a fast kernel spills {finding.spill_bytes} bytes"
    return ""
