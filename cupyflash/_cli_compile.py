"""python -m cupyflash compile: NVRTC over all kernels, with no GPU in the machine."""

import json
import re
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from cupyflash import (
    _attention_kernels,
    _attention_vjp_kernels,
    _console,
    _exponentials,
    _softmax_kernels,
    _source,
    _threads,
)
from cupyflash._kernels import Device, Variant, device_of_arch

EXAMPLES = """
examples:
  python -m cupyflash compile                    for sm_90a, each row and switch once
  python -m cupyflash compile --arch sm_80 --arch sm_120
  python -m cupyflash compile --arch sm_90a --all --jobs 8 --json kernels.json

The exit code is 1 when a kernel does not compile, when a kernel whose row is marked
fast spills registers, or when the assembler serialises its matrix instructions.
"""

_TABLES = {
    "softmax": _softmax_kernels,
    "attention": _attention_kernels,
    "attention_vjp": _attention_vjp_kernels,
    "check": _exponentials,
}

# Switches of kernels that run where something was not finite, and else return at once.
_RARE = {"CAREFUL", "REPAIRS"}

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
        help="every variant, not each row, dtype and switch once",
    )
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    parser.add_argument(
        "--jobs",
        type=int,
        default=_threads.num_cores(),
        help="processes (default: one a core)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="a line a kernel, not a line a variant"
    )


def run(args):
    """Compile; 1 if anything is wrong, 2 if it cannot be tried."""
    try:
        devices = [device_of_arch(arch) for arch in args.arch or ["sm_90a"]]
    except (IndexError, ValueError):
        print(f"--arch must look like sm_80 or sm_90a, got {' '.join(args.arch)}")
        return 2
    if reason := _no_compiler():
        print(reason)
        return 2
    jobs = [job for device in devices for job in jobs_for(device, args.all)]
    start = time.perf_counter()
    outcomes = _compile_all(jobs, max(1, args.jobs))
    failures = [outcome for outcome in outcomes if outcome.problem]
    (_summarize if args.quiet else _report)(outcomes)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(outcome) for outcome in outcomes], file, indent=1)
            file.write("\n")
    for outcome in failures:
        print(f"\n{outcome.operation}/{outcome.row} for {outcome.arch}:")
        print(f"  {outcome.defines}\n  {outcome.problem}")
    archs = ", ".join(device.name for device in devices)
    print(
        f"{len(outcomes)} kernels for {archs} in {time.perf_counter() - start:.0f} s, "
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
    return jobs if everything else list(_each_value_once(jobs))


def _each_value_once(jobs):
    """Those that have a define of a value that their row's kernel did not have yet.

    In a fast row what counts is the value with the head dimension: tiles, and so
    registers, hang on both.
    """
    seen = set()
    for job in jobs:
        defines = dict(job.variant.defines)
        dim = defines.get("HEAD_DIM") if job.fast else None
        kernel = job.operation, job.row, job.variant.source, dim
        values = {(kernel, define) for define in defines.items()}
        if values - seen:
            seen |= values
            yield job


def _fast_rows(table):
    """Names of the rows that must not spill."""
    tuples = [value for value in vars(table).values() if isinstance(value, tuple)]
    return {
        row.name
        for rows in tuples
        for row in rows
        if hasattr(row, "rungs") and getattr(row, "fast", False)
    }


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


def _compile_all(jobs, num_processes):
    """Outcomes in the order of `jobs`."""
    outcomes = {}
    # A fresh interpreter for each process: CUDA libraries do not like to be forked.
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, job): i for i, job in enumerate(jobs)}
        done = as_completed(futures)
        for future in _console.progress(done, "compiling", len(jobs)):
            outcomes[futures[future]] = future.result()
    return [outcomes[i] for i in range(len(jobs))]


def compile_one(job: Job) -> Outcome:
    """Compile one kernel to machine code and read the assembler's report."""
    start = time.perf_counter()
    error, log = _nvrtc(job)
    elapsed = time.perf_counter() - start
    facts = read_report(log, job.variant.entry)
    return Outcome(
        operation=job.operation,
        row=job.row,
        arch=job.variant.arch or job.arch,
        defines=" ".join(f"{name}={value}" for name, value in job.variant.defines),
        **facts,
        dynamic_smem=job.variant.smem,
        seconds=round(elapsed, 3),
        problem=error or _complaint(job, facts, log),
    )


def _nvrtc(job):
    """Compile; return what went wrong (or nothing) and the compiler's log."""
    import cupy  # noqa: F401  (puts the libraries of its wheels on the path)
    from cupy_backends.cuda.libs import nvrtc

    options = [*job.variant.options, "-ftz=true", "--ptxas-options=-v"]
    if job.variant.arch is None:
        # CuPy compiles a portable kernel for the plain architecture of the device.
        options.append(f"-arch={device_of_arch(job.arch).arch}")
    program = None
    try:
        text = _source.load(job.variant.source)
        program = nvrtc.createProgram(text, job.variant.source, (), ())
        nvrtc.compileProgram(program, tuple(options))
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


def _complaint(job, facts, log):
    """What a kernel that compiled must not do."""
    if facts["registers"] is None:
        return f"the compiler reports no entry {job.variant.entry}"
    if match := _SERIALIZED.search(log):
        line = next(line for line in log.splitlines() if match[0] in line)
        return line.strip()
    if job.fast and facts["spill_bytes"]:
        return f"a fast kernel spills {facts['spill_bytes']} bytes"
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
