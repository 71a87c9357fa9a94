"""Write the tables of README.md from the JSON of benchmark runs.

Usage: readme_tables.py [--check]

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. Its numbers
come from benchmarks/results/: demo_*.json are reports of ``make demo``, softmax_*.json
and attention_*.json of the scripts in benchmarks/. A table without a report stays
empty.
With --check nothing is written; the exit code says whether the tables are up to date.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
METHODS = ("naive", "safe", "online", "tiled")

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def reports(kind):
    """The reports of one kind with their file names, GPUs first."""
    found = [
        (path.name, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob(f"{kind}_*.json"))
    ]
    key = "ladder" if kind == "demo" else "rows"
    found = [(name, report) for name, report in found if key in report]
    return sorted(found, key=lambda item: "gpu" not in item[1]["machine"])


def machine_text(machine):
    """The machine in a few words."""
    return machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"


def markdown(columns, rows):
    """A table, first column to the left and numbers to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    lines = (columns, rule, *rows)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def seconds(t):
    """A duration in the unit that suits it."""
    if t < 1e-3:
        return f"{t * 1e6:.0f} us"
    return f"{t * 1e3:.2g} ms" if t < 0.1 else f"{t:.2g} s"


def mebibytes(n):
    """Memory in MiB."""
    return f"{n / 2**20:.1f} MiB"


def ladder():
    """Time, memory and error of each rung, from the reports of the demo."""
    parts = []
    for name, report in reports("demo"):
        data = report["ladder"]
        softmax = {row["method"]: row for row in data["softmax"]}
        attention = {row["method"]: row for row in data["attention"]}
        library = (
            next(m for m in softmax if m not in METHODS),
            next(m for m in attention if m not in METHODS),
        )
        rows = [
            (
                f"`{a}`" if a in METHODS else f"{a}; {b}",
                seconds(softmax[a]["seconds"]),
                mebibytes(softmax[a]["extra_bytes"]),
                f"{softmax[a]['max_error']:.0e}",
                seconds(attention[b]["seconds"]),
                mebibytes(attention[b]["extra_bytes"]),
                f"{attention[b]['max_error']:.0e}",
            )
            for a, b in [*((m, m) for m in METHODS), library]
        ]
        parts.append(
            f"{machine_text(report['machine'])}, N = {data['n']}, "
            f"d = {data['head_dim']}, one head, float32 "
            f"([numbers](benchmarks/results/{name}), by `make demo`):\n\n"
            + markdown(
                (
                    "method",
                    "softmax",
                    "extra memory",
                    "error",
                    "attention",
                    "extra memory",
                    "error",
                ),
                rows,
            )
        )
    return "\n".join(parts)


def speed():
    """Rates of all providers, a line a case, from the benchmark scripts."""
    parts = []
    for kind, unit, per_unit in (
        ("softmax", "GB/s", {True: 1e9, False: 1e9}),
        ("attention", "FLOP/s", {True: 1e12, False: 1e9}),
    ):
        for name, report in reports(kind):
            on_gpu = "gpu" in report["machine"]
            prefix = "" if kind == "softmax" else "T" if on_gpu else "G"
            providers = list(dict.fromkeys(r["provider"] for r in report["rows"]))
            cases = {}
            for row in report["rows"]:
                if "rate" in row:
                    rate = row["rate"] / per_unit[on_gpu]
                    cell = f"{rate:.0f}" if rate >= 100 else f"{rate:.2g}"
                    cases.setdefault(row["case"], {})[row["provider"]] = cell
            rows = [
                (case, *(cells.get(provider, "") for provider in providers))
                for case, cells in cases.items()
            ]
            parts.append(
                f"{kind.capitalize()} on {machine_text(report['machine'])}, "
                f"{prefix}{unit} ([numbers](benchmarks/results/{name}), by "
                f"`benchmarks/bench_{kind}.py`):\n\n"
                + markdown((kind, *providers), rows)
            )
    return "\n".join(parts)


def main():
    """Fill the tables; with --check, say whether they are up to date."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    tables = {"ladder": ladder, "speed": speed}

    def filled(match):
        table = tables[match[2]]()
        return f"{match[1]}\n{table}\n{match[3]}" if table else match[1] + match[3]

    new = _TABLE.sub(filled, text)
    if "--check" in sys.argv[1:]:
        if new != text:
            sys.exit("README.md is older than benchmarks/results: make tables")
        return
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
