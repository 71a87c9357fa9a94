"""python -m cupyflash compile: NVRTC over all kernels, with no GPU in the machine."""

import ctypes
import functools
import hashlib
import json
import re
import time
from collections.abc import Hashable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from cupyflash import (
    _attention_kernels,
    _attention_vjp_kernels,
    _console,
    _exponentials,
    _softmax_kernels,
    _source,
    _threads,
)
from cupyflash._kernels import MIN_CC, Device, Variant, device_of_arch

EXAMPLES = """
examples:
  python -m cupyflash compile                    for sm_90a, each tile and option once
  python -m cupyflash compile --arch sm_80 --arch sm_120
  python -m cupyflash compile --arch sm_90a --all --jobs 8 --json kernels.json
  python -m cupyflash compile --nvrtc /usr/local/cuda-13.0/lib64/libnvrtc.so.13

The exit code is 1 when a kernel does not compile, when a kernel whose row is marked
fast spills registers, or when the assembler serialises its matrix instructions; it is 2
when the compiler is not there or does not know the architecture.
"""

_TABLES = {
    "softmax": _softmax_kernels,
    "attention": _attention_kernels,
    "attention_vjp": _attention_vjp_kernels,
    "check": _exponentials,
}

# Switches of kernels that run where something was not finite, and else return at once.
_RARE = {"CAREFUL", "REPAIRS"}

# Defines of what a call asks for, beside the types *_T; the others make up a tile.
_OPTIONS = {
    "MASK", "SOFTCAP", "BOUNDS", "TERMS_OF_KEYS", "KEY_BIAS", "UNIT_COLUMNS",
    "PREPARED", "RUN_TILES", "LOG", "SCALED", "HAS_WHERE", "HAS_B",
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

_ARCH = re.compile(r"sm_\d{2,3}[af]?")

# How sources ask for an architecture.
_ARCH_TEST = re.compile(
    r"(?:!defined\(__CUDA_ARCH__\) \|\| )?__CUDA_ARCH__ (?:>=|<) (\d+)"
)

# What CuPy adds. Without the first, generic lambdas are host functions to NVRTC 13.0.
_OF_CUPY = ("--device-as-default-execution-space", "-ftz=true")

# From here on NVRTC keeps what it made where there is a driver; what it has kept, it
# hands out without the assembler's report.
_CACHES_SINCE = (12, 9)

# Warnings that a fast kernel must not have: the assembler waits for each wgmma in turn.
_SERIALIZED = re.compile(r"C75\d\d")


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    operation: str
    row: str
    fast: bool
    arch: str
    variant: Variant


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


def add_arguments(parser):
    """What to compile, and where the report goes."""
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="architecture such as sm_80 or sm_90a; may be repeated (default sm_90a)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every variant, not each row, dtype, tile and option once",
    )
    parser.add_argument(
        "--known",
        type=Path,
        metavar="FILE",
        help="outcomes of earlier runs: read, and kept for the next one",
    )
    parser.add_argument(
        "--nvrtc",
        type=Path,
        metavar="FILE",
        help="the libnvrtc.so to compile with, its libnvrtc-builtins.so beside it "
        "(default: the one that CuPy finds)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the table as JSON"
    )
    parser.add_argument(
        "--jobs",
        type=_console.count,
        default=_threads.num_cores(),
        help="processes (default: one a core)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="a line a kernel, not a line a variant"
    )


def run(args):
    """Compile; 1 if anything is wrong, 2 if it cannot be tried."""
    devices = []
    for arch in args.arch or ["sm_90a"]:
        if not _ARCH.fullmatch(arch) or device_of_arch(arch).cc < MIN_CC:
            _console.complain(
                f"--arch must look like sm_80 or sm_90a, from sm_75 on, got {arch}"
            )
            return 2
        devices.append(device_of_arch(arch))
    reason = _use_nvrtc(args.nvrtc) or _no_compiler()
    for device in devices:
        reason = reason or _unknown_to_nvrtc(device)
    if reason:
        _console.complain(reason)
        return 2
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    jobs = distinct(job for device in devices for job in jobs_for(device, args.all))
    start = time.perf_counter()
    known = Known(args.known)
    outcomes = _compile_all(jobs, args.jobs, known, args.nvrtc)
    known.save()
    failures = [outcome for outcome in outcomes if outcome.problem]
    (_summarize if args.quiet else _report)(outcomes)
    if args.json:
        rows = [asdict(outcome) for outcome in outcomes]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for outcome in failures:
        print(f"\n{outcome.operation}/{outcome.row} for {outcome.arch}:")
        print(f"  {outcome.defines}\n  {outcome.problem}")
    archs = ", ".join(device.name for device in devices)
    print(
        f"{len(outcomes)} kernels for {archs} by NVRTC {_version()} in "
        f"{time.perf_counter() - start:.0f} s, {known.used} of them known, "
        f"{len(failures)} with problems"
    )
    return int(bool(failures))


def jobs_for(device: Device, everything: bool) -> list[Job]:
    """What the kernel tables would compile for a device."""
    jobs = [
        Job(
            operation,
            row,
            row in _fast_rows(table) and not _RARE & dict(variant.defines).keys(),
            device.name,
            variant,
        )
        for operation, table in _TABLES.items()
        for row, variant in table.compile_list(device, everything)
    ]
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

    Each define, with its value or absent. In a fast row registers hang on the tile, so
    there it is each of them with each head dimension, and each option with each tile: a
    tile is all defines beside options and axes. An optional array takes the same
    registers in any type, so that its types count once a kernel.
    """
    defines = dict(job.variant.defines)
    entry = job.variant.entry
    dim = defines.get("HEAD_DIM", defines.get("DIM")) if job.fast else None
    found: set[Hashable] = set()
    for name in names:
        value = defines.get(name)
        is_type = value is not None and name.endswith("_T") and name not in _ELEMENTS
        found.add((entry, None if is_type else dim, name, value))
    if job.fast:
        tile = tuple(
            item
            for item in defines.items()
            if not _is_option(item[0]) and item[0] not in _AXES
        )
        found.add((entry, tile))
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
        if hasattr(row, "rungs") and getattr(row, "fast", False)
    }


def _use_nvrtc(path):
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


def _version():
    from cupy_backends.cuda.libs import nvrtc

    return "{}.{}".format(*nvrtc.getVersion())


def _no_compiler():
    """Why NVRTC cannot be used, or nothing."""
    try:
        import cupy  # noqa: F401  (puts the libraries of its wheels on the path)
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        return (
            f"NVRTC cannot be used ({str(error).strip().splitlines()[0]}); "
            "pip install cupyflash[nvrtc] brings it"
        )
    return ""


def _unknown_to_nvrtc(device):
    """Why NVRTC does not compile for an architecture, or nothing."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram("", "empty.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={device.name}",))
    except nvrtc.NVRTCError:
        return f"NVRTC {_version()} does not compile for --arch {device.name}"
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
    facts = (text, job.variant.entry, _options(job), nvrtc.getVersion())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _compile_all(jobs, num_processes, known, nvrtc=None):
    """Outcomes in the order of `jobs`."""
    found = {i: known.get(job) for i, job in enumerate(jobs)}
    outcomes = {i: _outcome(jobs[i], f, 0.0) for i, f in found.items() if f is not None}
    todo = {i: job for i, job in enumerate(jobs) if i not in outcomes}
    # A fresh interpreter for each process: CUDA libraries do not like to be forked.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _use_nvrtc, (nvrtc,)) as pool:
        futures = {pool.submit(_find_of_key, job): i for i, job in todo.items()}
        done = as_completed(futures)
        for future in _console.progress(done, "compiling", len(todo)):
            i = futures[future]
            key, finding, seconds = future.result()
            known.put(key, finding)
            outcomes[i] = _outcome(jobs[i], finding, seconds)
    return [outcomes[i] for i in range(len(jobs))]


def compile_one(job: Job, known: Known | None = None) -> Outcome:
    """Compile one kernel to machine code and read the assembler's report."""
    finding = known.get(job) if known else None
    return _outcome(job, finding, 0.0) if finding else _outcome(job, *_find(job))


def _find_of_key(job):
    """The key of a job, too: of the text that this process had, should it change."""
    finding, seconds = _find(job)
    return key_of(job), finding, seconds


def _find(job):
    """The finding of a job and the seconds that it took."""
    start = time.perf_counter()
    error, log = _nvrtc(job)
    elapsed = time.perf_counter() - start
    lines = [line.strip() for line in log.splitlines() if _SERIALIZED.search(line)]
    facts = read_report(log, job.variant.entry)
    return Finding(**facts, serialized="".join(lines[:1]), error=error), elapsed


def _outcome(job, finding, seconds):
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


def _options(job):
    """All options of the compiler."""
    from cupy_backends.cuda.libs import nvrtc

    options = [*job.variant.options, *_OF_CUPY, "--ptxas-options=-v"]
    if job.variant.arch is None:
        # CuPy compiles a portable kernel for the plain architecture of the device.
        options.append(f"-arch={device_of_arch(job.arch).arch}")
    if nvrtc.getVersion() >= _CACHES_SINCE:
        options.append("--no-cache")
    return tuple(options)


def _nvrtc(job):
    """Compile; return what went wrong (or nothing) and the compiler's log."""
    import cupy  # noqa: F401  (puts the libraries of its wheels on the path)
    from cupy_backends.cuda.libs import nvrtc

    program = None
    try:
        text = _source.load(job.variant.source)
        program = nvrtc.createProgram(text, job.variant.source, (), ())
        nvrtc.compileProgram(program, _options(job))
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


def _report(outcomes):
    _console.table(
        (
            "kernel",
            "arch",
            "variant",
            "registers",
            "spill bytes",
            "shared bytes",
            "seconds",
            "",
        ),
        [
            (
                f"{o.operation}/{o.row}",
                o.arch,
                o.defines,
                _or_dash(o.registers),
                _or_dash(o.spill_bytes),
                (o.static_smem or 0) + o.dynamic_smem,
                f"{o.seconds:.2f}",
                "FAILED" if o.problem else "ok",
            )
            for o in outcomes
        ],
    )


def _summarize(outcomes):
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = f"{outcome.operation}/{outcome.row}", outcome.arch
        groups.setdefault(key, []).append(outcome)
    _console.table(
        (
            "kernel",
            "arch",
            "variants",
            "most registers",
            "most spill bytes",
            "most shared bytes",
            "seconds",
            "",
        ),
        [
            (
                *key,
                len(group),
                max(o.registers or 0 for o in group),
                max(o.spill_bytes or 0 for o in group),
                max((o.static_smem or 0) + o.dynamic_smem for o in group),
                f"{sum(o.seconds for o in group):.1f}",
                "FAILED" if any(o.problem for o in group) else "ok",
            )
            for key, group in groups.items()
        ],
    )


def _or_dash(value):
    return "-" if value is None else value
