"""Write the tables of README.md and two other pages from the JSON of runs.

Usage: readme_tables.py [--check]

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. Its numbers
come from benchmarks/results/: demo_*.json are reports of ``make demo``, softmax_*.json
of benchmarks/bench_softmax.py. A report of a GPU ends in the card's name, such as
softmax_h100.json; of several cards, the newest report counts, and the table says which
card it is of. A table without a report stays empty.
With --check nothing is written; the exit code says whether the tables are up to date.
"""

import json
import re
import sys
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
METHODS = ("naive", "safe", "online", "tiled")

# Pages leave the repository, for PyPI and for the site; their links lead back to it.
FILES = "https://github.com/cupyflash/cupyflash/blob/main/"

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def card(gpu):
    """What the files of a card end in: h100 for NVIDIA H100 80GB HBM3."""
    number = re.search(r"[A-Z]*\d+", gpu)
    return (number[0] if number else gpu).lower()


def newest(kind):
    """(file name, report) of the last run of a benchmark on a GPU."""
    found = []
    for path in RESULTS.glob(f"{kind}_*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        machine = report["machine"]
        if path.stem == f"{kind}_{card(machine.get('gpu', ''))}":
            found.append((machine["date"], path.name, report))
    if not found:
        raise FileNotFoundError(f"no {kind}_CARD.json in {RESULTS}: make numbers")
    return max(found)[1:]


def reports(kind):
    """The reports of a kind with their file names: the newest of a GPU, then CPUs'."""
    found = [
        (path.name, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob(f"{kind}_*.json"))
    ]
    has_tables = _has_ladder if kind == "demo" else _has_providers
    found = [(name, report) for name, report in found if has_tables(report)]
    on_gpu = [item for item in found if "gpu" in item[1]["machine"]]
    last = sorted(on_gpu, key=lambda item: (item[1]["machine"]["date"], item[0]))[-1:]
    return last + [item for item in found if item not in on_gpu]


def _has_ladder(report):
    return bool(report.get("ladder"))


def _has_providers(report):
    """Whether a report is of a whole benchmark, not of a step of the work."""
    rows = report.get("rows")
    return bool(rows) and all("provider" in row for row in rows)


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
    if t < 0.1:
        return f"{t * 1e3:.2g} ms"
    return f"{t:.2g} s" if t < 99.5 else f"{t:.0f} s"


def mebibytes(n):
    """Memory in MiB."""
    return f"{n / 2**20:.1f} MiB"


def ladder():
    """Time, memory and error of each method, from the reports of the demo."""
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
            f"([numbers]({FILES}benchmarks/results/{name}), by `make demo`):\n\n"
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


def demo():
    """The fit and the density of the demo, a column for each machine."""
    found = [(name, r) for name, r in reports("demo") if "fit" in r][::-1]
    fits, densities = ([r[part] for _, r in found] for part in ("fit", "density"))
    columns = [
        f"[{machine_text(r['machine'])}]({FILES}benchmarks/results/{name})"
        for name, r in found
    ]
    problems = [
        f"{fit['side'] ** 2:,} pixels, {fit['simulations']:,} simulations"
        for fit in fits
    ]
    of_fit = _by_method(
        fits,
        [fit["side"] ** 2 for fit in fits],
        "pixels",
        lambda rows: (
            f"{rows[0]['rmse'][0]:.3f}",
            "yes" if rows[0]["posterior_sd"] else "no",
        ),
    )
    of_density = _by_method(
        densities, [density["points"] for density in densities], "points"
    )
    points = [f"{density['points']:,} points" for density in densities]
    return "\n".join(
        (
            markdown(
                ("Bayesian fit", *columns, "error", "error bars"),
                [("", *problems, "", ""), *of_fit],
            ),
            markdown(
                (f"log density, d = {densities[0]['dimensions']}", *columns),
                [("", *points), *of_density],
            ),
        )
    )


# What a method is called on either machine.
_ON_EITHER = re.compile("CuPy|SciPy")


def _by_method(parts, numbers, of, more=lambda rows: ()):
    """A line a method: its time for all on each machine, and what `more` tells.

    A star marks a time that was measured on a part of the problem and scaled up.
    """
    lines = {}
    for part, number in zip(parts, numbers, strict=True):
        for row in part["methods"]:
            name = _ON_EITHER.sub("library", row["method"])
            star = "" if row[of] == number else " *"
            lines.setdefault(name, []).append((row, seconds(row["seconds"]) + star))
    return [
        (name, *(time for _, time in found), *more([row for row, _ in found]))
        for name, found in lines.items()
        if len(found) == len(parts)
    ]


def speed():
    """Rates of softmax of all providers on a GPU, and times on a CPU; a line a case."""
    parts = []
    for name, report in reports("softmax"):
        if "provider" not in report["rows"][0]:  # of some kernels alone, not of a bench
            continue
        providers = list(dict.fromkeys(r["provider"] for r in report["rows"]))
        on_gpu = "gpu" in report["machine"]
        cases = {}
        for row in report["rows"]:
            if "rate" in row:
                rate = f"{row['rate'] / 1e9:.0f}"
                cell = rate if on_gpu else seconds(row["seconds"])
                cases.setdefault(row["case"], {})[row["provider"]] = cell
        rows = [
            (case, *(cells.get(provider, "") for provider in providers))
            for case, cells in cases.items()
        ]
        parts.append(
            f"Softmax on {machine_text(report['machine'])}, "
            f"{'GB/s' if on_gpu else 'time of a call'} "
            f"([numbers]({FILES}benchmarks/results/{name}), by "
            f"`benchmarks/{'bench_softmax.py' if on_gpu else 'bench_cpu.py'}`):\n\n"
            + markdown(("softmax", *providers), rows)
            + (_SEVERAL_DAYS if "sources" in report else "")
        )
    return "\n".join(parts)


_SEVERAL_DAYS = (
    "\nThese rows were not all measured on the same day: the key `sources` in the file "
    "says which version each belongs to.\n"
)


def _by_case(report):
    """The timed rows of a table, by provider, cell by cell."""
    cases = {}
    for row in report["table"]:
        if "rate" in row:
            cases.setdefault(row["case"], {})[row["provider"]] = row
    return cases.values()


# What the tables call those whom a report of the benchmarks compares with.
_PEERS = {
    "torch cudnn": "cuDNN",
    "torch flash": "FlashAttention-2",
    "torch efficient": "memory-efficient attention",
    "torch math": "matmul, softmax, matmul",
    "cupy": "matmul, with P in memory",
    "flash-attn-4": "FlashAttention-4",
}
_OF_OLDER_CARDS = ("torch flash",)  # the others take what only the card itself has


def best_peer(rows):
    """(name, row) of the fastest of those in a cell; nothing where none is."""
    names = _OF_OLDER_CARDS if rows["cupyflash"].get("card") else _PEERS
    peers = [(_PEERS[name], rows[name]) for name in names if name in rows]
    return min(peers, key=lambda peer: peer[1]["seconds"], default=None)


def _beside_the_best(report):
    """Each cell that others compute, too, but for those of one query."""
    for rows in _by_case(report):
        ours, peer = rows["cupyflash"], best_peer(rows)
        if peer and ours["seqlen_q"] > 1:
            mask = "causal" if ours["causal"] else "full"
            label = f"{ours['group']}, n = {ours['seqlen_q']}, {mask}"
            name, theirs = peer
            yield label, ours["rate"] / 1e12, theirs["rate"] / 1e12, name


FORWARD, BACKWARD = "attention_table", "attention_vjp_table"


def cells():
    """(name of the report, the peer, label, our rate, the peer's)."""
    for name, report in map(newest, (FORWARD, BACKWARD)):
        for label, ours, theirs, peer in _beside_the_best(report):
            yield name, peer, label, ours, theirs


def headline():
    """How attention compares with others, a line a dtype and kind of kernel."""
    return _compared(", D =", f"{FILES}benchmarks/")


def tensor_cores():
    """The same, a line a head dimension too."""
    return _compared(", n =", f"{FILES}benchmarks/")


def by_head_dim():
    """The same for the page of the benchmarks."""
    return _compared(", n =", "")


def _cards():
    """The cards of the tables of attention: mostly one."""
    gpus = [newest(kind)[1]["machine"]["gpu"] for kind in (FORWARD, BACKWARD)]
    return " and ".join(f"an {gpu}" for gpu in dict.fromkeys(gpus))


def _compared(rest, folder):
    """A line for all cells whose labels are one up to `rest`."""
    groups = {}
    for name, peer, label, ours, theirs in cells():
        group = groups.setdefault((label[: label.index(rest)], name), ([], []))
        group[0].append(ours / theirs)
        group[1].append(peer)
    rows = [
        (
            what,
            len(ratios),
            *(f"{r:.2f}" for r in (min(ratios), geometric_mean(ratios), max(ratios))),
            f"[{', '.join(dict.fromkeys(peers))}]({folder}results/{name})",
        )
        for (what, name), (ratios, peers) in groups.items()
    ]
    columns = ("attention", "cases", "least", "mean", "most", "fastest peer")
    each = f" (case by case: [benchmarks]({folder}README.md))" if folder else ""
    return (
        f"Our speed divided by that of the fastest peer, on {_cards()}, over all "
        f"lengths, full and causal, from single runs{each}. Rows that say mma.sync "
        "ran the kernels for cards before Hopper, with their tiles for sm_80.\n\n"
        f"{markdown(columns, rows)}"
    )


def attention():
    """All cells of attention beside the fastest peer of each."""
    rows = [
        (
            label,
            f"{ours:.0f}",
            f"{theirs:.0f}",
            f"{ours / theirs:.2f}",
            f"[{peer}](results/{name})",
        )
        for name, peer, label, ours, theirs in cells()
    ]
    columns = ("attention, TFLOP/s", "cupyflash", "best peer", "ratio", "the peer is")
    tables = (markdown(columns, rows), options(), one_query())
    return f"On {_cards()}, single runs:\n\n" + "\n".join(tables)


def options():
    """What an option takes, in times of the call without it."""
    _, report = newest(FORWARD)
    rows = []
    for of_cell in _by_case(report):
        if "cupyflash, without" in of_cell:
            ours, without = of_cell["cupyflash"], of_cell["cupyflash, without"]
            rates = (f"{row['rate'] / 1e12:.0f}" for row in (ours, without))
            times = f"{ours['seconds'] / without['seconds']:.2f}"
            rows.append((ours["group"], *rates, times))
    columns = ("option, TFLOP/s", "with", "without", "times the time")
    return markdown(columns, rows)


def one_query():
    """Decoding: 32 heads on 8 of keys and values, 128 columns, in microseconds."""
    name, report = newest(FORWARD)
    rows = []
    for of_cell in _by_case(report):
        ours, peer = of_cell["cupyflash"], best_peer(of_cell)
        if peer and ours["seqlen_q"] == 1:
            peer_name, theirs = peer
            times = (f"{row['seconds'] * 1e6:.1f}" for row in (ours, theirs))
            ratio = f"{theirs['seconds'] / ours['seconds']:.2f}"
            label = f"{ours['batch']} x {ours['seqlen_k']} keys"
            rows.append((label, *times, ratio, f"[{peer_name}](results/{name})"))
    columns = (
        "one query, 32 / 8 heads, us", "cupyflash", "best peer", "ratio", "the peer is",
    )  # fmt: skip
    return markdown(columns, rows)


_TABLES = {
    "README.md": {"demo": demo},
    "docs/speed.md": {"headline": headline, "ladder": ladder, "speed": speed},
    "benchmarks/README.md": {"attention": attention, "by_head_dim": by_head_dim},
}


def main():
    """Fill the tables; with --check, say whether they are up to date."""
    for name, tables in _TABLES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")

        def filled(match, tables=tables):
            table = tables[match[2]]()
            return f"{match[1]}\n{table}\n{match[3]}" if table else match[1] + match[3]

        new = _TABLE.sub(filled, text)
        if "--check" not in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
        elif new != text:
            sys.exit(f"{name} is older than benchmarks/results: make tables")


if __name__ == "__main__":
    main()
