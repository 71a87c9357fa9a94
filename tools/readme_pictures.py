"""Draw the pictures of README.md from the JSON of benchmark runs.

    python tools/readme_pictures.py

docs/_static/speed.png is made of the newest report of softmax on a GPU, and of those
that the tables of attention are made of; docs/_static/memory.png of the newest report
of memory. The third picture, demo.png, is what ``make demo`` wrote on a GPU.
"""

from pathlib import Path

import readme_tables
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "_static"

_COLOURS = {
    "cupyflash": "tab:green",
    "torch": "tab:orange",
    "cupyx": "tab:blue",
    "copy": "0.6",
}


def new_figure(width, height, rows, columns, title):
    """A figure with its axes, which needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(rows, columns)


def draw_softmax(axes, rows, dtype):
    """GB/s against the length of a row, a line a library."""
    for provider, colour in _COLOURS.items():
        found = {
            row["length"]: row["rate"] / 1e9
            for row in rows
            if row["provider"] == provider
            and row["function"] == "softmax"
            and row["dtype"] == dtype
            and row["group"] != "sweep"
            and row["inner"] == 1
            and row["shift"] == 0
            and "rate" in row
        }
        style = "--" if provider == "copy" else "o-"
        if found:
            lengths, rates = zip(*sorted(found.items()), strict=True)
            axes.plot(lengths, rates, style, color=colour, markersize=3, label=provider)
    axes.set_xscale("log", base=2)
    axes.set(title=f"softmax, {dtype}", xlabel="row length", ylabel="GB/s")
    axes.set_ylim(0, 5200)
    axes.legend(fontsize=8, loc="upper center", ncols=4)
    axes.grid(alpha=0.3)


def draw_attention(axes, title, kind):
    """TFLOP/s beside the fastest peer: of each kind in a report its longest call."""
    longest, (report, content) = {}, readme_tables.newest(kind)
    for name, _, label, ours, theirs in readme_tables.cells():
        if name == report and label.endswith("full"):
            what, n = label.removesuffix(", full").split(", n = ")
            what = what.removeprefix("gradients, ").removeprefix("gradients ")
            longest[what] = max(longest.get(what, (0,)), (int(n), ours, theirs))
    for i, (library, colour) in enumerate(
        (("cupyflash", "tab:green"), ("the fastest peer", "tab:orange"))
    ):
        rates = [cell[1 + i] for cell in longest.values()]
        places = [at + 0.4 * i for at in range(len(rates))]
        axes.barh(places, rates, 0.38, color=colour, label=library)
    names = [f"{what}, n = {cell[0]}" for what, cell in longest.items()]
    axes.set_yticks([at + 0.2 for at in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set(title=f"{title}, {content['machine']['gpu']}", xlabel="TFLOP/s")
    axes.legend(fontsize=8)
    axes.grid(axis="x", alpha=0.3)


def speed():
    """Softmax and attention beside other libraries."""
    _, softmax = readme_tables.newest("softmax")
    machine = softmax["machine"]
    title = f"{machine['gpu']}, CuPy {machine['cupy']}, torch {machine.get('torch')}"
    figure, axes = new_figure(13, 9, 2, 2, title)
    draw_softmax(axes[0, 0], softmax["table"], "float32")
    draw_softmax(axes[0, 1], softmax["table"], "bfloat16")
    draw_attention(axes[1, 0], "attention", readme_tables.FORWARD)
    draw_attention(axes[1, 1], "its gradients", readme_tables.BACKWARD)
    figure.savefig(PICTURES / "speed.png", dpi=80)


def memory():
    """Extra memory of attention against the number of queries and keys."""
    _, found = readme_tables.newest("memory")
    title = f"{found['machine']['gpu']}, one head, d = {found['head_dim']}, float32"
    figure, axes = new_figure(6.5, 4, 1, 1, title)
    for method in dict.fromkeys(row["method"] for row in found["rows"]):
        line = [
            (row["n"], row["extra_bytes"] / 2**20)
            for row in found["rows"]
            if row["method"] == method
        ]
        axes.plot(*zip(*line, strict=True), "o-", markersize=4, label=method)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)  # some take nothing
    axes.set(xlabel="queries and keys", ylabel="MiB beside q, k, v and out", ylim=-0.1)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(PICTURES / "memory.png", dpi=80)


if __name__ == "__main__":
    speed()
    memory()
