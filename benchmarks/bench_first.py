"""What the first call of a process costs, for every row of the tables of kernels.

    python benchmarks/bench_first.py --json benchmarks/results/first_h100.json
    python benchmarks/bench_first.py --part 1/4 --json part1.json
    python benchmarks/bench_first.py --join part*.json --json all.json

Each call runs in two fresh processes, the first with an empty cache of kernels, the
second with what the first compiled. The time is that of the call until its result is
there; CUDA itself has started before. A row has one call for each dtype that it is made
for, one with options, and is the only row that its process knows. `--jobs` calls run at
a time, which share the cores.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import timing

from cupyflash._cli import console

ROOT = timing.RESULTS.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

COLD, FROM_DISK = "cold", "from the disk cache"
GOALS = {COLD: 3.0, FROM_DISK: 0.1}
# Kinds of calls in tests/support/rows.py that bring all options.
_OPTIONS = ("options", "wider options", "short options")


def cases():
    """One call for each dtype of each row, and one with options."""
    import rows

    found = []
    for operation, name in rows.all_rows():
        of_row = rows.cases(operation, name)
        firsts = {}
        for case in of_row:
            firsts.setdefault((case.dtype, case.kind in _OPTIONS), case)
        if ("bfloat16", False) in firsts:
            firsts.pop(("float16", False), None)  # the same kernels
        plain = [c for (_, has_options), c in firsts.items() if not has_options]
        options = [c for (_, has_options), c in firsts.items() if has_options]
        found += [*plain, *options[:1]]
    return found


def label(case):
    """As it is listed."""
    return f"{case.operation}/{case.row}: {case.function}, {case.kind}, {case.dtype}"


def call_of(case, xp):
    """The call of a case, its arrays on the device."""
    import rows

    import cupyflash

    problem = rows.problem_of(case, np.random.default_rng(0))
    arrays = {name: xp.asarray(x) for name, x in problem.arrays.items()}
    if case.operation == "attention_vjp":
        kind = "f8" if arrays["q"].dtype == "f8" else "f4"
        arrays["out"] = xp.zeros_like(arrays["dout"])
        arrays["lse"] = xp.zeros(arrays["dout"].shape[:-1], kind)
    positional = {
        "softmax": ("x", "dy") if "dy" in arrays else ("x",),
        "attention": ("q", "k", "v"),
        "attention_vjp": ("dout", "q", "k", "v", "out", "lse"),
    }[case.operation]
    given = [arrays.pop(name) for name in positional]
    function = getattr(cupyflash, case.function)
    return lambda: function(*given, **arrays, **problem.options)


def time_here(path):
    """Print the seconds of the case in a file, in this process."""
    import cupy
    import pytest
    import rows

    case = pickle.loads(Path(path).read_bytes())
    call = call_of(case, cupy)
    with pytest.MonkeyPatch.context() as patch:
        rows.force(patch, case.operation, case.row)
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        print(time.perf_counter() - start)


def first_calls(case):
    """The rows of a case: cold, then from the disk cache; or why there is none."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case"
        path.write_bytes(pickle.dumps(case))
        for state in (COLD, FROM_DISK):
            done = subprocess.run(
                [sys.executable, __file__, "--time", str(path)],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=os.environ | {"CUPY_CACHE_DIR": folder},
            )
            row = {"what": label(case), "state": state}
            if done.returncode:
                return [row | {"failed": done.stderr.strip().splitlines()[-1][:300]}]
            row["seconds"] = float(done.stdout.split()[-1])
            # Kernels that the call compiled, and CuPy's own.
            row["kernels"] = sum(1 for _ in Path(folder).rglob("*.cubin"))
            found.append(row)
    return found


def report(rows):
    """The slowest calls of each state, and how many are above its goal."""
    for state, goal in GOALS.items():
        of_state = [r for r in rows if r["state"] == state and "seconds" in r]
        slow = sorted(of_state, key=lambda r: -r["seconds"])
        above = sum(r["seconds"] > goal for r in of_state)
        print(f"{state}: {above} of {len(of_state)} calls above {goal} s")
        console.table(
            ("call", "seconds", "kernels"),
            [(r["what"], f"{r['seconds']:.3f}", r["kernels"]) for r in slow[:20]],
        )
    for row in rows:
        if "failed" in row:
            print(f"failed: {row['what']}: {row['failed']}")


def main():
    """Measure, print the slowest calls and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--part", type=timing.part_of_many, default=(1, 1))
    parser.add_argument("--jobs", type=int, default=4, help="calls at a time")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds of all calls"
    )
    parser.add_argument("--join", nargs="+", type=Path, help="reports of parts")
    parser.add_argument("--time", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.time:
        time_here(args.time)
        return
    if args.join:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in args.join]
        rows = [row for one in parts for row in one["rows"]]
        report(rows)
        if args.json:
            joined = json.dumps(parts[0] | {"rows": rows}, indent=1)
            args.json.write_text(joined + "\n", encoding="utf-8")
        return
    index, count = args.part
    asked = [c for c in cases() if args.only in label(c)][index - 1 :: count]
    end = time.perf_counter() + args.limit
    rows = []

    def measure(case):
        return first_calls(case) if time.perf_counter() < end else []

    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(measure, asked):
            rows += found
    report(rows)
    left = len(asked) - len({row["what"] for row in rows})
    print(f"{left} calls are left")
    timing.save(args.json, "first calls", True, jobs=args.jobs, rows=rows)


if __name__ == "__main__":
    main()
