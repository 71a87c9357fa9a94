"""What NVRTC, the run-time compiler, says of a kernel; with no GPU in the machine."""

import ctypes
import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cupyflash import _extras, _source
from cupyflash._compile_jobs import Job
from cupyflash._kernels import Device, device_of_arch

# What CuPy adds. Without the first, generic lambdas are host functions to NVRTC 13.0.
_OF_CUPY = ("--device-as-default-execution-space", "-ftz=true")

# From here on NVRTC keeps what it made where there is a driver; what it has kept, it
# hands out without the assembler's report.
_CACHES_SINCE = (12, 9)

# Warnings that a fast kernel must not have: the assembler waits for each wgmma in turn.
_SERIALIZED = re.compile(r"C75\d\d")


@dataclass(frozen=True)
class Outcome:
    """What the compiler said of one kernel."""

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
    """Load a compiler before CuPy looks for one; why it cannot be, or nothing."""
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
    """The version of the compiler."""
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
            f"{_extras.command('nvrtc')} brings it"
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
    """What the compiler says of a kernel, whatever its row asks of it."""

    registers: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    static_smem: int | None
    serialized: str  # the warning that the assembler serialises wgmma, or nothing
    error: str


class Known:
    """Findings of earlier runs, by all that they depend on; those without an error.

    The file keeps as many as two runs over all kernels have, the newest last.
    """

    _MOST = 10_000

    def __init__(self, path: Path | None) -> None:
        self.used = 0
        self._path = path
        self._found: dict[str, Finding] = {}
        if path is not None and path.exists():
            try:
                rows = json.loads(path.read_text(encoding="utf-8"))
                self._found = {key: Finding(*row) for key, row in rows.items()}
            except (ValueError, TypeError, AttributeError):  # of another version
                pass

    def get(self, job: Job) -> Finding | None:
        """The finding of a job, if there is one."""
        key = key_of(job)
        finding = self._found.pop(key, None)
        if finding is not None:
            self.used += 1
            self._found[key] = finding  # the newest
        return finding

    def put(self, key: str, finding: Finding) -> None:
        """Keep what was found of a job with this key."""
        if not finding.error:
            self._found[key] = finding

    def save(self) -> None:
        """Write the file, if there is to be one."""
        if self._path is None:
            return
        newest = list(self._found.items())[-self._MOST :]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".part")
        rows = {key: list(asdict(finding).values()) for key, finding in newest}
        written.write_text(json.dumps(rows), encoding="utf-8")
        written.replace(self._path)


def key_of(job: Job) -> str:
    """A hash of all that a finding depends on: text, entry, options and compiler."""
    from cupy_backends.cuda.libs import nvrtc

    text = _source.load(job.variant.source)
    facts = (text, job.variant.entry, options_of(job), nvrtc.getVersion())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def compile_one(job: Job, known: Known | None = None) -> Outcome:
    """Compile one kernel to machine code and read the assembler's report."""
    finding = known.get(job) if known else None
    return outcome_of(job, finding, 0.0) if finding else outcome_of(job, *_find(job))


def find_of_key(job: Job) -> tuple[str, Finding, float]:
    """The finding of a job and its seconds, and its key: of the text that was read."""
    finding, seconds = _find(job)
    return key_of(job), finding, seconds


def _find(job):
    """The finding of a job and the seconds that it took."""
    start = time.perf_counter()
    error, log = _compile(job)
    elapsed = time.perf_counter() - start
    lines = [line.strip() for line in log.splitlines() if _SERIALIZED.search(line)]
    facts = read_report(log, job.variant.entry)
    return Finding(**facts, serialized="".join(lines[:1]), error=error), elapsed


def outcome_of(job: Job, finding: Finding, seconds: float) -> Outcome:
    """What a finding means for the row of a job."""
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
    """All options of the compiler."""
    from cupy_backends.cuda.libs import nvrtc

    options = [*job.variant.options, *_OF_CUPY, "--ptxas-options=-v"]
    if job.variant.arch is None:
        # CuPy compiles a portable kernel for the plain architecture of the device.
        options.append(f"-arch={device_of_arch(job.arch).arch}")
    if nvrtc.getVersion() >= _CACHES_SINCE:
        options.append("--no-cache")
    return tuple(options)


def _compile(job):
    """Compile; return what went wrong (or nothing) and the compiler's log."""
    import cupy  # noqa: F401  (puts the libraries of its wheels on the path)
    from cupy_backends.cuda.libs import nvrtc

    program = None
    try:
        text = _source.load(job.variant.source)
        program = nvrtc.createProgram(text, job.variant.source, (), ())
        nvrtc.compileProgram(program, options_of(job))
        nvrtc.getCUBIN(program)
        return "", nvrtc.getProgramLog(program)
    except Exception as error:
        log = nvrtc.getProgramLog(program) if program is not None else ""
        return (log or f"{type(error).__name__}: {error}").strip(), log
    finally:
        if program is not None:
            nvrtc.destroyProgram(program)


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
    """What a kernel that compiled must not do."""
    if finding.registers is None:
        return f"the compiler reports no entry {job.variant.entry}"
    if finding.serialized:
        return finding.serialized
    if job.fast and finding.spill_bytes:
        return f"a fast kernel spills {finding.spill_bytes} bytes"
    return ""
