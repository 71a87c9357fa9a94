"""Measure what README, docs and benchmarks/README.md show on a card, in one go.

    python tools/measure_all.py                  all steps, then tables and pictures
    python tools/measure_all.py demo softmax     some of them
    python tools/measure_all.py --list           the steps, and what each writes

(``make numbers`` does it in .venv.) Steps run one after another. A step that has not
begun after --minutes (25) is left out and named, and so is one that fails: what is
there of it stays as it was. Each report carries commit, date and the versions of all
that it compares with; where there is no repository, CUPYFLASH_COMMIT says the commit.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """A command and the files that it is for; {0} in it is where the first goes."""

    name: str
    command: tuple[str, ...]
    writes: tuple[str, ...]


def _benchmark(name, script, report, *options):
    report = f"benchmarks/results/{report}_h200.json"
    command = (f"benchmarks/{script}.py", *options, "--json", "{0}")
    return Step(name, command, (report,))


# What costs little and is seen first, first.
STEPS = (
    Step(
        "demo",
        ("-m", "cupyflash", "demo", "--output", "{folder}"),
        ("benchmarks/results/demo_h200.json", "docs/_static/demo.png"),
    ),
    Step("gallery", ("tools/gpu_pages.py",), ()),
    _benchmark("memory", "bench_memory", "memory"),
    _benchmark("host", "bench_host", "host"),
    _benchmark("softmax", "bench_softmax", "softmax", "--seconds", "300"),
    _benchmark("ladder", "bench_attention", "attention", "--part", "ladder"),
    _benchmark("attention", "bench_attention", "attention_table", "--part", "table"),
    _benchmark("gradients", "bench_attention_vjp", "attention_vjp_table"),
    _benchmark("long sums", "bench_long_keys", "long_sums"),
    _benchmark("traffic", "dram_bytes", "dram"),
)

# What the demo writes into its folder, in the order of its step.
_OF_DEMO = ("demo.json", "fit.png")

# Made of the reports alone.
AFTERWARDS = (("tools/readme_tables.py",), ("tools/readme_pictures.py",))


def run(step, folder):
    """Run a step; its files take the place of the old ones only if it succeeds."""
    fresh = [folder / Path(name).name for name in step.writes]
    if step.name == "demo":
        fresh = [folder / name for name in _OF_DEMO]
    words = [word.format(*fresh, folder=folder) for word in step.command]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}
    )
    missing = [file.name for file in fresh if not file.exists()]
    if done.returncode or missing:
        return f"exit code {done.returncode}" + (
            f", without {', '.join(missing)}" if missing else ""
        )
    for file, name in zip(fresh, step.writes, strict=True):
        shutil.copyfile(file, ROOT / name)
    return ""


def main():
    """Run what was asked for; exit code 1 if a step is missing."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--minutes", type=float, default=25, help="default: 25")
    parser.add_argument("--list", action="store_true", help="print the steps")
    args = parser.parse_args()
    if unknown := set(args.steps) - set(names):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {names}")
    wanted = [step for step in STEPS if step.name in (args.steps or names)]
    if args.list:
        for step in wanted:
            print(f"{step.name:10} {', '.join(step.writes) or 'docs/on_a_gpu/'}")
        return 0
    start, missing = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for step in wanted:
            begun = time.monotonic()
            if begun - start > 60 * args.minutes:
                missing.append(f"{step.name}: no time left")
                continue
            print(f"--- {step.name}", flush=True)
            if why := run(step, Path(folder)):
                missing.append(f"{step.name}: {why}")
            print(f"--- {step.name}: {time.monotonic() - begun:.0f} s", flush=True)
    for words in AFTERWARDS:
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    print("\n".join(missing) or "all steps done")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
