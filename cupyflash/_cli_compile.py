"""python -m cupyflash compile: NVRTC over all kernels, with no GPU in the machine."""

import json
import re
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from cupyflash import _compile_jobs, _console, _nvrtc, _threads
from cupyflash._kernels import MIN_CC, device_of_arch

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

_ARCH = re.compile(r"sm_\d{2,3}[af]?")


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
    reason = _nvrtc.use(args.nvrtc) or _nvrtc.unusable()
    for device in devices:
        reason = reason or _nvrtc.unknown(device)
    if reason:
        _console.complain(reason)
        return 2
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    jobs = _compile_jobs.distinct(
        job for device in devices for job in _compile_jobs.jobs_for(device, args.all)
    )
    start = time.perf_counter()
    known = _nvrtc.Known(args.known)
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
        f"{len(outcomes)} kernels for {archs} by NVRTC {_nvrtc.version()} in "
        f"{time.perf_counter() - start:.0f} s, {known.used} of them known, "
        f"{len(failures)} with problems"
    )
    return int(bool(failures))


def _compile_all(jobs, num_processes, known, nvrtc=None):
    """Outcomes in the order of `jobs`."""
    found = {i: known.get(job) for i, job in enumerate(jobs)}
    outcomes = {
        i: _nvrtc.outcome_of(jobs[i], finding, 0.0)
        for i, finding in found.items()
        if finding is not None
    }
    todo = {i: job for i, job in enumerate(jobs) if i not in outcomes}
    # A fresh interpreter for each process: CUDA libraries do not like to be forked.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _nvrtc.use, (nvrtc,)) as pool:
        futures = {pool.submit(_nvrtc.find_of_key, job): i for i, job in todo.items()}
        done = as_completed(futures)
        for future in _console.progress(done, "compiling", len(todo)):
            i = futures[future]
            key, finding, seconds = future.result()
            known.put(key, finding)
            outcomes[i] = _nvrtc.outcome_of(jobs[i], finding, seconds)
    return [outcomes[i] for i in range(len(jobs))]


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
    groups: dict[tuple[str, str], list[_nvrtc.Outcome]] = {}
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
