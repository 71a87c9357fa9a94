"""Softmax: our methods, CuPy or SciPy, torch and quack, in GB/s.

    python benchmarks/bench_softmax.py --json benchmarks/results/softmax_h200.json

GB/s count one read and one write of the matrix, whatever a method really moves. The
copy column is a plain copy of the same matrix in the same run: the ceiling.
"""

import timing
from timing import from_torch, to_torch

from cupyflash import _bench, _console
from cupyflash._bench import SoftmaxCase

GPU_CASES = [
    SoftmaxCase(1 << 20, 64, "float32"),
    SoftmaxCase(65536, 1024, "float32"),
    SoftmaxCase(16384, 4096, "float32"),
    SoftmaxCase(8192, 16384, "float32"),
    SoftmaxCase(4096, 32768, "float32"),
    SoftmaxCase(1024, 131072, "float32"),
    SoftmaxCase(64, 1048576, "float32"),
    SoftmaxCase(32768, 8192, "float32", axis=0),
    SoftmaxCase(65536, 1024, "bfloat16"),
    SoftmaxCase(16384, 8192, "bfloat16"),
    SoftmaxCase(16384, 8192, "float16"),
    SoftmaxCase(2048, 131072, "bfloat16"),
    SoftmaxCase(16384, 4096, "float64"),
    SoftmaxCase(1024, 65536, "float64"),
]
CPU_CASES = [
    SoftmaxCase(16384, 1024, "float32"),
    SoftmaxCase(16384, 4096, "float32"),
    SoftmaxCase(256, 65536, "float32"),
    SoftmaxCase(4096, 4096, "float64"),
]


def other_calls(xp, case, x, torch, quack):
    """Providers that are not of the array library, and the copy."""
    calls = {}
    out = xp.empty_like(x)
    calls["copy"] = lambda: xp.copyto(out, x)
    if torch is not None:
        tensor = to_torch(torch, x)
        calls["torch"] = lambda: torch.softmax(tensor, dim=case.axis)
        if quack is not None and case.axis == -1 and case.dtype != "float64":
            calls["quack"] = lambda: quack.softmax(tensor)
    return calls


def measure(xp, case, on_gpu, turns, torch, quack):
    """Rows of one case, with each rate as a share of the copy's."""
    x = _bench.softmax_inputs(xp, case)

    def error_of(y):
        if y is None:  # the copy
            return 0.0
        y = from_torch(xp, y) if type(y).__module__.startswith("torch") else y
        return _bench.softmax_error(case, x, y)

    calls = _bench.softmax_calls(xp, case, x)
    calls |= other_calls(xp, case, x, torch, quack)
    rows = _bench.measure(case, calls, error_of, on_gpu=on_gpu, turns=turns)
    copy = next(row for row in rows if row["provider"] == "copy")
    for row in rows:
        if "rate" in row:
            row["of_copy"] = row["rate"] / copy["rate"]
    return rows


def main():
    """Measure all cases, print the table and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    xp, on_gpu = timing.backend(args)
    torch = timing.optional("torch")
    quack = timing.optional("quack") if on_gpu else None
    cases = [c for c in (GPU_CASES if on_gpu else CPU_CASES) if args.only in c.label]
    rows = []
    for case in _console.progress(cases, "softmax"):
        rows += measure(xp, case, on_gpu, args.turns, torch, quack)
    _bench.report(rows, "GB/s", 1e9)
    timing.save(args.json, "softmax", on_gpu, rows=rows)


if __name__ == "__main__":
    main()
