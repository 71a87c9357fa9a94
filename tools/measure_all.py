"""Measure what README, docs and benchmarks/README.md show on a card, in one go.

    python tools/measure_all.py                  all steps, then tables and pictures
    python tools/measure_all.py demo softmax     some of them
    python tools/measure_all.py --part 1/3       a third of the time: the first steps
    python tools/measure_all.py --list           the steps, their seconds and files

(``make numbers`` does it in .venv.) Steps run one after another. Each has its own time
limit, and none runs beyond --minutes (20). A step that fails, or that there is no time
for, is named at the end, and its old files stay as they were.

Reports end in the name of the card, such as softmax_h100.json, so that one card does
not overwrite another. Each has the commit, the date and the versions of all that it
compares with. Without a repository, CUPYFLASH_COMMIT gives the commit.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
        "attention", 250, "bench_attention", "attention_table", "--part", "table"
    ),
    _benchmark("gradients", 250, "bench_attention_vjp", "attention_vjp_table"),
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
    total, done, chosen = sum(step.seconds for step in STEPS), 0, []
    for step in STEPS:
        middle = done + step.seconds / 2
        if int(middle * count / total) == index - 1:
            chosen.append(step)
        done += step.seconds
    return chosen


def run(step, folder, card, seconds):
    """Run a step; its files take the place of the old ones only if it succeeds."""
    names = [name.format(card=card) for name in step.writes]
    fresh = [folder / Path(name).name for name in names]
    if step.name == "demo":
        fresh = [folder / name for name in _OF_DEMO]
    words = [word.format(*fresh, folder=folder) for word in step.command]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # FlashAttention-4 compiles for minutes; the second step that needs it need not.
    more = {"PYTHONPATH": path, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    # A session of its own, so that its workers end with it.
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | more,
        start_new_session=True,
    )
    try:
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
        shutil.copyfile(file, ROOT / name)
    return ""


def this_card():
    """The name of the GPU in names of files; stops where a report would lack facts."""
    from cupyflash._cli import measure

    try:
        facts = measure.machine(on_gpu=True)
    except Exception as error:  # ImportError, or any error of a driver
        sys.exit(f"no GPU to measure on: {type(error).__name__}: {error}")
    if not facts["commit"]:
        sys.exit(
            "no repository here: set CUPYFLASH_COMMIT to the commit of the sources"
        )
    return readme_tables.card(facts["gpu"])


def main():
    """Run what was asked for; exit code 1 if a step is missing."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument(
        "--part", type=part, default=STEPS, metavar="I/N", help="the I-th of N parts"
    )
    parser.add_argument("--minutes", type=float, default=20, help="default: 20")
    parser.add_argument("--list", action="store_true", help="print the steps")
    args = parser.parse_args()
    if unknown := set(args.steps) - set(names):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {names}")
    wanted = [step for step in args.part if step.name in (args.steps or names)]
    if args.list:
        for step in wanted:
            files = ", ".join(step.writes) or "docs/on_a_gpu/"
            print(f"{step.name:10}{step.seconds:5} s  {files}")
        print(f"{'in all':10}{sum(step.seconds for step in wanted):5} s")
        return 0
    card, missing = this_card(), []
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for step in wanted:
            begun = time.monotonic()
            if begun + step.seconds / 2 > end:
                missing.append(f"{step.name}: no time left")
                continue
            if step.needs and importlib.util.find_spec(step.needs) is None:
                missing.append(f"{step.name}: needs {step.needs}")
                continue
            print(f"--- {step.name}, about {step.seconds} s", flush=True)
            limit = min(step.limit, end - begun)
            if why := run(step, Path(folder), card, limit):
                missing.append(f"{step.name}: {why}")
            print(f"--- {step.name}: {time.monotonic() - begun:.0f} s", flush=True)
    for words in AFTERWARDS:
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    print("\n".join(missing) or "all steps done")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
