"""python -m cupyflash compile: compile every kernel with NVRTC; needs no GPU."""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from cupyflash._cli import compile_jobs, console
from cupyflash._cli import nvrtc as _nvrtc
from cupyflash._cli import outcomes as _outcomes
from cupyflash._core import threads
from cupyflash._cuda import source
from cupyflash._cuda.device import MIN_CC, device_of_arch

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
    """What to compile, and where to write the report."""
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="architecture such as sm_80 or sm_90a; may be repeated (default sm_90a)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every variant, instead of each kernel, dtype, tile and option once",
    )
    parser.add_argument(
        "--known",
        type=Path,
        metavar="FILE",
        help="reuse the outcomes of earlier runs, and add those of this run; with "
        f"another NVRTC, one in {_outcomes.SAMPLE} is compiled again",
    )
    parser.add_argument(
        "--full", action="store_true", help="also compile what --known has"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="drop kernels from --known that are not part of this run",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="compile nothing: say how many kernels are missing from --known",
    )
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="compile nothing: write the kernels and their sources as JSON",
    )
    parser.add_argument(
        "--nvrtc",
        type=Path,
        metavar="FILE",
        help="the libnvrtc.so to compile with, next to its libnvrtc-builtins.so "
        "(default: the one that CuPy finds)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the table as JSON"
    )
    parser.add_argument(
        "--jobs",
        type=console.count,
        default=threads.num_cores(),
        help="processes (default: one per core)",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="one line per kernel instead of one per variant",
    )


def run(args):
    """Compile; returns 1 if a kernel fails, 2 if there is no usable compiler."""
    devices = []
    for arch in args.arch or ["sm_90a"]:
        if not _ARCH.fullmatch(arch) or device_of_arch(arch).cc < MIN_CC:
            console.complain(
                f"--arch must look like sm_80 or sm_90a, from sm_75 on, got {arch}"
            )
            return 2
        devices.append(device_of_arch(arch))
    if (args.full or args.prune or args.missing) and not args.known:
        console.complain("--full, --prune and --missing need --known FILE")
        return 2
    jobs = compile_jobs.jobs_for(*devices, everything=args.all)
    known = _outcomes.Outcomes(args.known)
    if known.is_foreign:
        console.complain(
            f"{args.known} has no outcomes of earlier runs, and is left as it is: name "
            "another file, or one that is not there yet"
        )
        return 2
    if args.missing:
        return _tell_missing(jobs, known, args.known)
    if args.list:
        return _list(jobs, args.list)
    reason = _nvrtc.use(args.nvrtc) or _nvrtc.unusable()
    for device in devices:
        reason = reason or _nvrtc.unknown(device)
    if reason:
        console.complain(reason)
        return 2
    for path in filter(None, (args.json, args.known)):
        if path.is_dir():  # said now, not after all was compiled
            raise IsADirectoryError(f"{path} is a folder: name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    outcomes = _compile_all(jobs, args, known)
    if args.prune:
        known.prune(jobs)
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
        f"{time.perf_counter() - start:.0f} s, {known.used} of them known"
        + (f" ({known.of_others} by another NVRTC)" if known.of_others else "")
        + f", {len(failures)} with problems"
    )
    return int(bool(failures))


def _compile_all(jobs, args, known):
    """Outcomes in the order of `jobs`; each is kept as soon as it is found."""
    nvrtc = _nvrtc.version()
    found = (
        {} if args.full else {i: known.get(job, nvrtc) for i, job in enumerate(jobs)}
    )
    outcomes = {
        i: _nvrtc.outcome_of(jobs[i], finding, 0.0)
        for i, finding in found.items()
        if finding is not None
    }
    todo = [i for i in range(len(jobs)) if i not in outcomes]
    done = _nvrtc.in_parallel(
        _outcomes.find, [jobs[i] for i in todo], args.jobs, args.nvrtc
    )
    try:
        for place, result in console.progress(done, "compiling", len(todo)):
            digest, finding, seconds = result
            known.put(digest, finding, nvrtc)
            outcomes[todo[place]] = _nvrtc.outcome_of(
                jobs[todo[place]], finding, seconds
            )
    except BaseException:
        known.save()  # an interrupted run continues from here
        raise
    return [outcomes[i] for i in range(len(jobs))]


def _tell_missing(jobs, known, path):
    missing, stale = known.missing(jobs)
    print(
        f"{path} has all of {len(jobs)} kernels"
        if not missing and not stale
        else f"{path} lacks {missing} of {len(jobs)} kernels and has {stale} that are "
        "gone; make compile writes it"
    )
    return 0


def _list(jobs, path):
    """Write all that a compiler needs, for tools that compare other NVRTC versions."""
    kernels = [
        {
            "operation": job.operation,
            "row": job.row,
            "fast": job.fast,
            "arch": job.arch,
            "source": job.variant.source,
            "entry": job.variant.entry,
            "options": _nvrtc.options_of(job),
            "generated": job.variant.generated,
        }
        for job in jobs
    ]
    # Keyed by source and generated code.
    texts = dict.fromkeys((job.variant.source, job.variant.generated) for job in jobs)
    sources = {"".join(key): source.load(*key) for key in texts}
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = {"kernels": kernels, "sources": sources}
    path.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return 0


def _report(outcomes):
    console.table(
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
    console.table(
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
