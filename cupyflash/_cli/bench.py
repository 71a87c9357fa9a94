"""python -m cupyflash bench: small tables of this machine, as JSON and as a plot."""

import functools
import json
from pathlib import Path

from cupyflash._cli import bench_cases, console, measure
from cupyflash._cli.bench_cases import AttentionCase, SoftmaxCase
from cupyflash._core import extras

EXAMPLES = """
examples:
  python -m cupyflash bench
  python -m cupyflash bench --cpu --output results

Writes bench.json and, where matplotlib is installed, bench.png. The scripts in the
benchmarks folder of the repository have larger tables and compare with more libraries.
"""

_SOFTMAX_CPU = [SoftmaxCase(2**22 // n, n, "float32") for n in (256, 1024, 4096, 16384)]
_SOFTMAX_GPU = [
    SoftmaxCase(2**26 // n, n, "float32") for n in (256, 1024, 4096, 16384, 65536)
]
_ATTENTION_CPU = [
    AttentionCase(1, 4, 4, n, n, 64, "float32") for n in (256, 512, 1024, 2048)
]
_ATTENTION_GPU = [
    AttentionCase(4, 16, 16, n, n, 64, "float16") for n in (512, 1024, 2048, 4096)
]


def add_arguments(parser):
    """The back end, the output files and how thorough to be."""
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("bench_output"),
        metavar="FOLDER",
        help="where the numbers and the plot go (default: bench_output)",
    )
    parser.add_argument(
        "--turns",
        type=console.count,
        default=5,
        help="how often each candidate runs (default 5)",
    )


def run(args):
    """Measure, print and write; returns 0."""
    xp, on_gpu, machine = measure.begin(args)
    softmax, attention = [], []
    cases = [
        *(_SOFTMAX_GPU if on_gpu else _SOFTMAX_CPU),
        *(_ATTENTION_GPU if on_gpu else _ATTENTION_CPU),
    ]
    for case in console.progress(cases, "measuring"):
        rows = softmax if isinstance(case, SoftmaxCase) else attention
        rows += measured(xp, case, on_gpu, args.turns)
    console.heading("softmax")
    bench_cases.report(softmax, "GB/s, one read and one write", 1e9)
    console.heading("attention")
    bench_cases.report(
        attention, "TFLOP/s" if on_gpu else "GFLOP/s", 1e12 if on_gpu else 1e9
    )
    path = args.output / "bench.json"
    report = {"machine": machine, "softmax": softmax, "attention": attention}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nNumbers: {path}")
    try:
        _plot(args.output / "bench.png", machine, softmax, attention)
        print(f"Plot: {args.output / 'bench.png'}")
    except ImportError:
        print(f"No plot: {extras.command('bench')} installs matplotlib")
    return 0


def measured(xp, case, on_gpu, turns):
    """Measure one case; a row for each call."""
    if isinstance(case, SoftmaxCase):
        arrays = (bench_cases.softmax_inputs(xp, case),)
        calls_of, error_of = bench_cases.softmax_calls, bench_cases.softmax_error
    else:
        arrays = bench_cases.attention_inputs(xp, case)
        calls_of, error_of = bench_cases.attention_calls, bench_cases.attention_error
    return bench_cases.measure(
        case,
        calls_of(xp, case, *arrays),
        functools.partial(error_of, case, *arrays),
        on_gpu=on_gpu,
        turns=turns,
    )


def _plot(path, machine, softmax, attention):
    """Plot the rate against the size, one line for each call."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(machine.get("gpu", machine["processor"]), fontsize=10)
    on_gpu = "gpu" in machine
    flops, prefix = (1e12, "T") if on_gpu else (1e9, "G")
    panels = (
        ("softmax", softmax, "row_length", 1e9, "GB/s"),
        ("attention", attention, "seqlen_k", flops, f"{prefix}FLOP/s"),
    )
    for axes, panel in zip(figure.subplots(1, 2), panels, strict=True):
        title, rows, size, per_unit, unit = panel
        for provider in dict.fromkeys(row["provider"] for row in rows):
            points = [
                (row[size], row["rate"] / per_unit)
                for row in rows
                if row["provider"] == provider and "rate" in row
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=provider)
        axes.set(title=title, xlabel=size.replace("_", " "), ylabel=unit)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
