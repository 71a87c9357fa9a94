"""The table of bench_softmax.py as one picture: GB/s against the row length.

    python benchmarks/plot_softmax.py benchmarks/results/softmax_h200.json

The picture lies beside the report, under its name.
"""

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from softmax_table import DTYPES

_STYLES = {
    "copy": {"color": "0.6", "linestyle": "--"},
    "cupyflash": {"color": "tab:green", "marker": "o"},
    "quack": {"color": "tab:purple", "marker": "s"},
    "torch": {"color": "tab:orange", "marker": "^"},
    "cupyx": {"color": "tab:blue", "marker": "v"},
}


def points(rows, dtype, provider, *, sweep):
    """Row lengths and rates of softmax over the last axis."""
    found = {
        row["length"]: row["rate"] / 1e9
        for row in rows
        if row["provider"] == provider
        and row["dtype"] == dtype
        and row["function"] == "softmax"
        and row["inner"] == 1
        and row["shift"] == 0
        and (row["group"] == "sweep") == sweep
        and "rate" in row
    }
    return zip(*sorted(found.items()), strict=True) if found else ((), ())


def plot(report, path):
    """A panel a dtype, a line a provider; dots are the sweep over odd lengths."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"softmax over the last axis, {report['machine']['gpu']}")
    rows = report["table"]
    for axes, dtype in zip(figure.subplots(2, 2).flat, DTYPES, strict=True):
        for provider, style in _STYLES.items():
            lengths, rates = points(rows, dtype, provider, sweep=False)
            if lengths:
                axes.plot(lengths, rates, label=provider, markersize=4, **style)
        lengths, rates = points(rows, dtype, "cupyflash", sweep=True)
        axes.plot(lengths, rates, ".", color="tab:green", markersize=2, alpha=0.7)
        axes.set(title=dtype, xlabel="row length", ylabel="GB/s, a read and a write")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    """Draw each report that is named."""
    for name in sys.argv[1:]:
        path = Path(name)
        report = json.loads(path.read_text(encoding="utf-8"))
        plot(report, path.with_suffix(".png"))
        print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
