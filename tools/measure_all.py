"""Measure what README, docs and benchmarks/README.md show on a card, in one go.

    python tools/measure_all.py                  all steps, then tables and pictures
    python tools/measure_all.py demo softmax     some of them
    python tools/measure_all.py --part 1/3       a third of the time, no tables
    python tools/measure_all.py --finish         the tables and pictures alone
    python tools/measure_all.py --list           the steps, their seconds and files

(``make numbers`` does it in .venv.) With one card, steps run one after another. With
several of a kind, each card takes the longest step that is left, with an equal share
of the cores; CUDA_VISIBLE_DEVICES says which cards. Each step has its own time limit,
and none runs beyond --minutes (20). A step that fails, or that there is no time for,
is named at the end, and its old files stay as they were.

Parts may run at the same time, each with a card of its own and any number of them on
one host. Tables and pictures need the reports of all, and no GPU: --finish makes them.

Reports end in the name of the card, such as softmax_h100.json, so that one card does
not overwrite another. Each has the commit, the date and the versions of all that it
compares with. Without a repository, CUPYFLASH_COMMIT gives the commit.
"""

import argparse
import contextlib
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import readme_tables

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Step:
    """A command and the files that it is for; {0} in it is where the first goes.

    {card} in the name of a file is the card, as in h100.
    """

    name: str
    seconds: int  # estimated, with an empty kernel cache and 16 cores
    command: tuple[str, ...]
    writes: tuple[str, ...]
    needs: str = ""  # a package without which its table would be empty

    @property
    def limit(self):
        """Seconds after which it is stopped."""
        return 60 + 1.5 * self.seconds


_BESIDE_TORCH = ("benchmarks/results/softmax", "benchmarks/results/attention")


def _benchmark(name, seconds, script, report, *options):
    report = f"benchmarks/results/{report}_{{card}}.json"
    command = (f"benchmarks/{script}.py", *options, "--json", "{0}")
    needs = "torch" if report.startswith(_BESIDE_TORCH) else ""
    return Step(name, seconds, command, (report,), needs)


# What docs/guides/precision.md shows.
_LONG_SUMS_OF_THE_DOCS = (
    *("--dtypes", "float32", "float64"),
    *("--head-dims", "64", "128"),
)

_TURNS = ("--turns", "3")
_TABLE_OF_ATTENTION = ("--part", "table", *_TURNS)

# What costs little and is seen first, first. The seconds add up the calls of old
# reports, and what compiling and other libraries take.
STEPS = (
    Step(
        "demo",
        50,
        ("-m", "cupyflash", "demo", "--output", "{folder}"),
        ("benchmarks/results/demo_{card}.json", "docs/_static/demo.png"),
    ),
    _benchmark("memory", 40, "bench_memory", "memory"),
    _benchmark(
        "softmax", 130, "bench_softmax", "softmax", "--part", "ladder", "picture"
    ),
    _benchmark(
        "attention", 190, "bench_attention", "attention_table", *_TABLE_OF_ATTENTION
    ),
    _benchmark("gradients", 190, "bench_attention_vjp", "attention_vjp_table", *_TURNS),
    _benchmark(
        "long sums", 90, "bench_long_keys", "long_sums", *_LONG_SUMS_OF_THE_DOCS
    ),
    _benchmark("traffic", 80, "dram_bytes", "dram"),
    Step("gallery", 150, ("tools/gpu_pages.py", "--seconds", "200"), ()),
)

# What the demo writes into its folder, in the order of its step.
_OF_DEMO = ("demo.json", "fit.png")

# Made of the reports alone.
AFTERWARDS = (("tools/readme_tables.py",), ("tools/readme_pictures.py",))


def part(text):
    """The steps of the I-th of N parts that take about equally long, from I/N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"{text} is not like 1/3")
    parts = [[] for _ in range(count)]
    for step in sorted(STEPS, key=lambda step: -step.seconds):
        min(parts, key=lambda steps: sum(s.seconds for s in steps)).append(step)
    return [step for step in STEPS if step in parts[index - 1]]


@dataclass(frozen=True)
class Lane:
    """What one step at a time has to itself: a device, and some of the cores."""

    device: str = ""  # as CUDA_VISIBLE_DEVICES names it
    cores: frozenset[int] = frozenset()  # none: all of them


WHOLE = Lane()


def lanes(devices):
    """A lane for each device, with as many cores as the others."""
    if len(devices) == 1:
        return [WHOLE]
    cores = []
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(devices)
    return [
        Lane(device, frozenset(cores[i * share : (i + 1) * share]))
        for i, device in enumerate(devices)
    ]


def run(step, folder, card, seconds, lane=WHOLE, log=None):
    """Run a step; its files take the place of the old ones only if it succeeds.

    What it prints goes to the file `log`, if there is one.
    """
    names = [name.format(card=card) for name in step.writes]
    fresh = [folder / Path(name).name for name in names]
    if step.name == "demo":
        fresh = [folder / name for name in _OF_DEMO]
    words = [word.format(*fresh, folder=folder) for word in step.command]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # FlashAttention-4 compiles for minutes; the second step that needs it need not.
    more = {"PYTHONPATH": path, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    if lane.device:
        more["CUDA_VISIBLE_DEVICES"] = lane.device
    # A session of its own, so that its workers end with it.
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | more,
        start_new_session=True,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
    )
    try:
        if lane.cores:  # before it has loaded anything that counts them
            os.sched_setaffinity(process.pid, lane.cores)
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    missing = [file.name for file in fresh if not file.exists()]
    if code or missing:
        return f"exit code {code}" + (
            f", without {', '.join(missing)}" if missing else ""
        )
    for file, name in zip(fresh, names, strict=True):
        # Whoever reads the old file meanwhile reads all of it.
        shutil.copyfile(file, ROOT / f"{name}.new")
        os.replace(ROOT / f"{name}.new", ROOT / name)
    return ""


def run_all(steps, on, card, seconds):
    """Run the steps on the lanes `on`; what is missing, and why, a line each."""
    end = time.monotonic() + seconds
    if len(on) > 1:
        steps = sorted(steps, key=lambda step: -step.seconds)
    free = queue.SimpleQueue()
    for lane in on:
        free.put(lane)

    def run_one(step):
        if step.needs and importlib.util.find_spec(step.needs) is None:
            return f"{step.name}: needs {step.needs}"
        lane, begun = free.get(), time.monotonic()
        try:
            if begun + step.seconds / 2 > end:
                return f"{step.name}: no time left"
            where = f" on GPU {lane.device}" if lane.device else ""
            print(f"--- {step.name}{where}, about {step.seconds} s", flush=True)
            limit = min(step.limit, end - begun)
            # A folder and a log of its own where others run at the same time.
            with tempfile.TemporaryDirectory() as folder, _log(len(on)) as log:
                why = run(step, Path(folder), card, limit, lane, log)
                took = f"--- {step.name}: {time.monotonic() - begun:.0f} s"
                print(f"{_text(log)}{took} {why}".rstrip(), flush=True)
            return f"{step.name}: {why}" if why else ""
        finally:
            free.put(lane)

    with ThreadPoolExecutor(len(on)) as pool:
        return list(filter(None, pool.map(run_one, steps)))


def _log(count):
    """A file for what a step prints; none where it is the only one that runs."""
    return tempfile.TemporaryFile("w+") if count > 1 else contextlib.nullcontext()


def _text(log):
    if log is None:
        return ""
    log.seek(0)
    return log.read()


def these_cards():
    """Name of the GPUs in names of files, and how CUDA_VISIBLE_DEVICES names each.

    Stops where a report would lack facts.
    """
    from cupyflash._cli import measure

    try:
        facts = measure.machine(on_gpu=True)
    except Exception as error:  # ImportError, or any error of a driver
        sys.exit(f"no GPU to measure on: {type(error).__name__}: {error}")
    if not facts["commit"]:
        sys.exit(
            "no repository here: set CUPYFLASH_COMMIT to the commit of the sources"
        )
    import cupy

    count = measure.cuda_device_count()
    found = [cupy.cuda.runtime.getDeviceProperties(i)["name"] for i in range(count)]
    if len(set(found)) > 1:
        names = ", ".join(name.decode() for name in found)
        sys.exit(f"cards of several kinds ({names}): choose by CUDA_VISIBLE_DEVICES")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",")[:count] if visible else [*map(str, range(count))]
    return readme_tables.card(facts["gpu"]), devices


def finish():
    """Write tables and pictures from the reports; what failed."""
    missing = []
    for words in AFTERWARDS:
        if code := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
            missing.append(f"{words[0]}: exit code {code}")
    return missing


def main():
    """Run what was asked for; exit code 1 if a step is missing."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument(
        "--part", type=part, metavar="I/N", help="the I-th of N parts, without tables"
    )
    parser.add_argument("--minutes", type=float, default=20, help="default: 20")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument(
        "--finish", action="store_true", help="tables and pictures alone, without a GPU"
    )
    args = parser.parse_args()
    if unknown := set(args.steps) - set(names):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {names}")
    steps = args.part or STEPS
    wanted = [step for step in steps if step.name in (args.steps or names)]
    if args.list:
        for step in wanted:
            files = ", ".join(step.writes) or "docs/on_a_gpu/"
            print(f"{step.name:10}{step.seconds:5} s  {files}")
        print(f"{'in all':10}{sum(step.seconds for step in wanted):5} s")
        return 0
    missing = []
    if not args.finish:
        card, devices = these_cards()
        missing = run_all(wanted, lanes(devices), card, 60 * args.minutes)
    if not args.part:
        missing += finish()
    print("\n".join(missing) or "all steps done")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
