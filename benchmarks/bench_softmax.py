"""Softmax: our methods, CuPy or SciPy, torch and quack, in GB/s.

    python benchmarks/bench_softmax.py --json benchmarks/results/softmax_h200.json

Three parts. The ladder: all methods over a few shapes, for the table of docs/speed.md.
The table (GPU only): "auto" over every line of what is wanted, beside a copy of the
same array in the same run; "picture" is what docs/speed.md draws of it. The sweep (GPU
only): 200 lengths, to look for dips.

GB/s count what has to move: one read and one write (logsumexp: one read; the vector-
Jacobian products: two reads and a write). The share is that rate over the copy's, for
logsumexp over that of a sweep that only reads.
"""

import contextlib
import json
import math
import time
from pathlib import Path

import numpy as np
import softmax_table
import timing
from timing import from_torch, to_torch

import cupyflash
from cupyflash._cli import bench_cases, console
from cupyflash._cli.bench_cases import SoftmaxCase
from cupyflash._core import arrays as _arrays

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

PARTS = ("ladder", "table", "sweep")


def is_wanted(case, parts):
    """Whether a case of softmax_table belongs to one of the parts."""
    if case.group == "sweep":
        return "sweep" in parts
    return "table" in parts or ("picture" in parts and case.is_drawn)


# --- the ladder ----------------------------------------------------------------------


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
    x = bench_cases.softmax_inputs(xp, case)

    def error_of(y):
        if y is None:  # the copy
            return 0.0
        y = from_torch(xp, y) if type(y).__module__.startswith("torch") else y
        return bench_cases.softmax_error(case, x, y)

    calls = bench_cases.softmax_calls(xp, case, x)
    calls |= other_calls(xp, case, x, torch, quack)
    rows = bench_cases.measure(case, calls, error_of, on_gpu=on_gpu, turns=turns)
    copy = next(row for row in rows if row["provider"] == "copy")
    for row in rows:
        if "rate" in row:
            row["of_copy"] = row["rate"] / copy["rate"]
    return rows


# --- the table -----------------------------------------------------------------------

# Rows of a result that are checked, and the most elements in them.
_CHECKED_ROWS = 8
_CHECKED_ELEMENTS = 1 << 28


class Arrays:
    """x, a second input and out of any case, as views of the same three buffers."""

    def __init__(self, cupy, cases, *, fill=True):
        self._cupy = cupy
        self._fill = fill
        num_bytes = max((c.size * c.itemsize for c in cases), default=0) + 256
        self._bytes = [cupy.zeros(num_bytes, np.uint8) for _ in range(3)]
        self._dtype = None

    def of(self, case):
        """The three arrays; the inputs are normal numbers."""
        if self._fill and case.dtype != self._dtype:
            self._dtype = case.dtype
            for seed, memory in enumerate(self._bytes[:2]):
                self._randomize(memory, case.itemsize, seed)
        return [self._view(memory, case) for memory in self._bytes]

    def _randomize(self, memory, itemsize, seed):
        """Normal numbers in all of a buffer, without another as large."""
        cupy, step = self._cupy, 1 << 24
        values = memory[: memory.size // itemsize * itemsize]
        values = values.view(_arrays.to_dtype(self._dtype))
        rng = cupy.random.default_rng(seed)
        for start in range(0, values.size, step):
            part = values[start : start + step]
            normal = rng.standard_normal(part.size, dtype=np.float32)
            part[...] = normal.astype(part.dtype)

    def _view(self, memory, case):
        start = case.shift * case.itemsize
        memory = memory[start : start + case.size * case.itemsize]
        return memory.view(_arrays.to_dtype(case.dtype)).reshape(case.shape)


def our_call(case, x, second, out):
    """The call that the case is about; `out` is only for results of x's shape."""
    function = getattr(cupyflash, case.function)
    if case.function == "logsumexp":
        return lambda: function(x, axis=1)
    if case.function.endswith("_vjp"):
        return lambda: function(x, second, axis=1, out=out)
    return lambda: function(x, axis=1, out=out)


def peer_calls(cupy, case, x, second, torch, quack):
    """The same by others."""
    import cupyx.scipy.special

    calls = {}
    name = case.function
    if case.dtype != "bfloat16" and not name.endswith("_vjp"):
        of_cupyx = getattr(cupyx.scipy.special, name)
        calls["cupyx"] = lambda: of_cupyx(x, axis=1)
    if torch is None:
        return calls
    t = to_torch(torch, x)
    if name.endswith("_vjp"):
        t2 = to_torch(torch, second)
        backward = getattr(torch.ops.aten, f"_{name[:-4]}_backward_data")
        calls["torch"] = lambda: backward(t2, t, 1, t.dtype)
    else:
        of_torch = getattr(torch, name)
        calls["torch"] = lambda: of_torch(t, dim=1)
    is_rows = case.inner == 1 and case.length <= 1 << 18
    if quack is not None and name == "softmax" and is_rows and not case.shift:
        if case.dtype != "float64":
            matrix = t.reshape(case.outer, case.length)
            calls["quack"] = lambda: quack.softmax(matrix)
    return calls


def error_of(cupy, case, x, second, result):
    """Largest error of some rows, relative to each exact value (or to 1 about 0)."""
    count = max(1, min(_CHECKED_ROWS, _CHECKED_ELEMENTS // case.length))
    rng = np.random.default_rng(0)
    places = [(0, 0), (case.outer - 1, case.inner - 1)]
    places += zip(
        rng.integers(case.outer, size=count).tolist(),
        rng.integers(case.inner, size=count).tolist(),
        strict=True,
    )
    places = list(dict.fromkeys(places))[:count]

    def rows(a):
        return cupy.stack([_wide(cupy, a[o, :, i]) for o, i in places])

    exact = _exact(cupy, case, rows(x), rows(second))
    if case.function == "logsumexp":
        got = cupy.stack([_wide(cupy, result[o, i]) for o, i in places])
    else:
        got = rows(result)
    if case.dtype == "float16":  # beyond its numbers infinity is right
        beyond = cupy.abs(exact) >= 65520
        got = cupy.where(beyond & (got == cupy.sign(exact) * np.inf), exact, got)
    # softmax: relative as far as there are normal numbers; the others cross zero.
    floor = 2 * bench_cases.tiny(case.dtype) if case.function == "softmax" else 1.0
    return float((cupy.abs(got - exact) / cupy.maximum(cupy.abs(exact), floor)).max())


def _wide(cupy, a):
    """float64; bfloat16 by way of its bits."""
    if a.dtype.name == "bfloat16":
        bits = cupy.ascontiguousarray(a).view(np.uint16).astype(np.uint32) << 16
        a = bits.view(np.float32).reshape(a.shape)  # which a single number had lost
    return a.astype(np.float64)


def _exact(cupy, case, x, second):
    """The formula in float64, a row a line."""
    if case.function == "softmax_vjp":
        return x * (second - (x * second).sum(1, keepdims=True))
    if case.function == "log_softmax_vjp":
        return second - cupy.exp(x) * second.sum(1, keepdims=True)
    m = x.max(1, keepdims=True)
    e = cupy.exp(x - m)
    total = e.sum(1, keepdims=True)
    if case.function == "softmax":
        return e / total
    log = m + cupy.log(total)
    return x - log if case.function == "log_softmax" else log[:, 0]


def checked_error(cupy, case, x, second, out, call):
    """The error of our call into `out`, of which no element may stay unwritten."""
    if case.function == "logsumexp":
        return error_of(cupy, case, x, second, call())
    bits = out.view(np.dtype(f"u{case.itemsize}"))
    bits.fill(np.iinfo(bits.dtype).max)  # a NaN that no kernel makes
    call()
    if bool((bits == bits.dtype.type(np.iinfo(bits.dtype).max)).any()):
        return float("inf")
    return error_of(cupy, case, x, second, out)


def measure_table_case(cupy, case, arrays, read, turns, peers):
    """Rows of one case: ours, the ceiling, and others."""
    x, second, out = arrays.of(case)
    calls = {"cupyflash": our_call(case, x, second, out)}
    row = {**case.facts, "provider": "cupyflash", "error": np.nan}
    rows = {"cupyflash": row}
    try:
        row["error"] = checked_error(cupy, case, x, second, out, calls["cupyflash"])
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        del calls["cupyflash"]
    else:
        if not row["error"] <= bench_cases._WRONG[case.dtype]:
            row["failed"] = f"error {row['error']:.2e}"
    ceiling = "read" if case.function == "logsumexp" else "copy"
    if ceiling == "read":
        calls["read"] = lambda: read(x.reshape(-1).view(np.uint8))
    else:
        calls["copy"] = lambda: cupy.copyto(out, x)
    if case.group != "sweep" and peers is not None:
        for name, call in peer_calls(cupy, case, x, second, *peers).items():
            try:
                call()
                calls[name] = call
            except Exception as error:  # another library may not take the case
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                rows[name] = {**case.facts, "provider": name, "failed": message}
    moved = case.work
    for name, seconds in timing_of(calls, turns).items():
        # The copy is one read and one write, whatever the case moves.
        work = 2.0 * case.size * case.itemsize if name == "copy" else moved
        rows.setdefault(name, {**case.facts, "provider": name})
        rows[name] |= dict(zip(("seconds", "best", "worst"), seconds, strict=True))
        rows[name]["rate"] = work / seconds[0]
    for row in rows.values():
        if "rate" in row:
            row["share"] = row["rate"] / rows[ceiling]["rate"]
        if not np.isfinite(row.get("error", 0.0)):  # JSON has no NaN
            row["error"] = None
    cupy.get_default_memory_pool().free_all_blocks()
    return list(rows.values())


def timing_of(calls, turns):
    """As rates.timed, which needs a GPU to be imported."""
    import rates

    return rates.timed(calls, turns)


def _call_each(cases):
    import cupy

    arrays = Arrays(cupy, cases, fill=False)
    for case in cases:
        with contextlib.suppress(Exception):  # which measuring will report
            our_call(case, *arrays.of(case))()
    cupy.cuda.Device().synchronize()


def measure_table(cupy, cases, turns, torch, quack, num_processes, deadline):
    """Rows of all cases, and the rates of the ways to read."""
    import rates

    # Neighbours share kernels; the sweep has many cases of few kernels.
    sweep = [case for case in cases if case.group == "sweep"]
    others = [case for case in cases if case.group != "sweep"]
    timing.compile_ahead(_call_each, others, sweep, jobs=num_processes)
    read = rates.ReadSweep()
    limit = softmax_table.ARRAY_BYTES
    shared = Arrays(cupy, [c for c in cases if c.size * c.itemsize <= limit])
    rows = []
    for case in console.progress(cases, "table"):
        if time.monotonic() > deadline:
            break
        # The long row has buffers of its own; they go when it is done.
        is_longer = case.size * case.itemsize > limit
        arrays = Arrays(cupy, [case]) if is_longer else shared
        rows += measure_table_case(cupy, case, arrays, read, turns, (torch, quack))
    return rows, read.rates


def report_table(rows):
    """A line a case, then a line a group with its worst case."""
    ours = [row for row in rows if row["provider"] == "cupyflash"]
    table = [row for row in rows if row["group"] != "sweep"]
    rate_of = {(r["case"], r["provider"]): r["rate"] for r in table if "rate" in r}
    peers = [
        provider
        for provider in ("copy", "read", "torch", "cupyx", "quack")
        if any(row["provider"] == provider for row in table)
    ]

    def cell(row, provider):
        rate = rate_of.get((row["case"], provider))
        return "-" if rate is None else f"{rate / 1e9:.0f}"

    console.table(
        ("GB/s", "cupyflash", "share", "wanted", "error", *peers),
        [
            (
                row["case"],
                cell(row, "cupyflash"),
                f"{row.get('share', 0):.3f}",
                f"{row['wanted']:.2f}",
                "-" if row["error"] is None else f"{row['error']:.1e}",
                *(cell(row, provider) for provider in peers),
            )
            for row in ours
            if row["group"] != "sweep"
        ],
    )
    groups = {}
    for row in ours:
        groups.setdefault((row["group"], row["dtype"]), []).append(row)
    summary = []
    for (group, dtype), members in groups.items():
        least = min(members, key=lambda row: row.get("share", 0))
        share, wanted = least.get("share", 0), least["wanted"]
        verdict = "" if share >= wanted else "BELOW"
        summary.append(
            (group, dtype, len(members), f"{wanted:.2f}", f"{share:.3f}",
             least["case"], verdict)
        )  # fmt: skip
    console.table(
        ("group", "dtype", "cases", "wanted", "least share", "of", ""), summary
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['case']}, {row['provider']}: {row['failed']}")


def main():
    """Measure, print the tables and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--part", nargs="+", choices=("all", *PARTS, "picture"), default=["all"]
    )
    parser.add_argument(
        "--add", type=Path, nargs="*", default=[], metavar="FILE",
        help="reports of other parts: the report is to hold what they do",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=math.inf,
        help="begin no case after so many; another run with --add does the rest",
    )  # fmt: skip
    timing.add_jobs(parser)
    parser.add_argument("--no-peers", action="store_true", help="the table alone")
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    torch = timing.optional("torch")
    quack = timing.optional("quack") if on_gpu else None
    parts = PARTS if "all" in args.part else args.part
    deadline = time.monotonic() + args.seconds
    rows, table, reads = [], [], {}
    for path in args.add:
        other = json.loads(path.read_text("utf-8"))
        rows, table = rows + other["rows"], table + other["table"]
        reads |= other["reads"]
    done = {row["case"] for row in rows}
    done |= {(row["group"], row["case"]) for row in table}
    if "ladder" in parts:
        cases = GPU_CASES if on_gpu else CPU_CASES
        cases = [c for c in cases if args.only in c.label and c.label not in done]
        for case in console.progress(cases, "softmax"):
            if time.monotonic() > deadline:
                break
            rows += measure(xp, case, on_gpu, args.turns, torch, quack)
        bench_cases.report(rows, "GB/s", 1e9)
    if on_gpu and {*parts} != {"ladder"}:
        xp.get_default_memory_pool().free_all_blocks()
        cases = [
            case
            for case in softmax_table.cases()
            if args.only in f"{case.group}: {case.label}"
            and is_wanted(case, parts)
            and (case.group, case.label) not in done
        ]
        peers = (None, None) if args.no_peers else (torch, quack)
        found, of_reads = measure_table(
            xp, cases, args.turns, *peers, args.jobs, deadline
        )
        table, reads = table + found, reads | of_reads
        report_table(table)
    timing.save(args.json, "softmax", on_gpu, rows=rows, table=table, reads=reads)


if __name__ == "__main__":
    main()
