"""The CPU back end beside torch and NumPy with SciPy, in one process.

    python benchmarks/bench_cpu.py

Candidates take turns; the median is reported. Extra memory is what NumPy and Python
allocate beside inputs and result, at its peak; that of torch cannot be seen from here.
A case of few elements repeats its call within a turn. `--softmax` measures the softmax
family alone and writes results/softmax_cpu.json.

The rate of attention counts 4 * heads * seqlen_q * seqlen_k * head_dim operations, that
of softmax one read and one write of the matrix.
"""

import numpy as np
import scipy.special
import timing
from timing import RESULTS

import cupyflash
from cupyflash._cli import console
from cupyflash._cli import measure as _measure
from cupyflash._reference import forward as reference

# (heads, seqlen, head_dim): many, the size of the goals, few but long.
ATTENTION_SHAPES = [(8, 1024, 64), (8, 4096, 64), (1, 16384, 64), (8, 4096, 128)]
# (function, shape, dtype, calls of a turn, axis): small, long and many rows, and such
# across memory.
SOFTMAX_CASES = [
    ("softmax", (10,), "float64", 1000, -1),
    ("log_softmax", (10,), "float64", 1000, -1),
    ("logsumexp", (10,), "float64", 1000, -1),
    ("softmax", (4_000_000,), "float64", 1, -1),
    ("softmax", (20_000_000,), "float64", 1, -1),
    ("log_softmax", (4_000_000,), "float64", 1, -1),
    ("logsumexp", (4_000_000,), "float64", 1, -1),
    ("softmax", (16384, 4096), "float32", 1, -1),
    ("softmax", (4096, 4096), "float32", 1, 0),
    ("softmax", (1000, 1000), "float32", 10, 0),
    ("softmax", (100_000, 100), "float32", 1, 0),
]
# What the goals ask of cupyflash: (at least this many times as fast as torch, as NumPy
# with SciPy, at most this part of the extra memory of the latter).
ATTENTION_GOALS = {"torch": 0.9, "numpy": 2.5, "memory": 0.05}
SOFTMAX_GOALS = {
    (10,): {"numpy": 0.5},
    (4_000_000,): {"numpy": 1.5},
    (20_000_000,): {"numpy": 1.5},
    (16384, 4096): {"torch": 1 / 1.2, "numpy": 1.6},
}
ACROSS_GOALS = {"numpy": 1.0}
# Largest errors that a result may have to be timed at all (float32).
ATTENTION_ERROR = 2e-6
SOFTMAX_ERRORS = {"float32": 4e-7, "float64": 1e-15}
# Rows of a result that are compared with float64.
CHECKED_ROWS = 256


def unfused_attention(q, k, v):
    """Attention as a NumPy user writes it."""
    s = np.matmul(q, k.swapaxes(-1, -2)) * np.float32(q.shape[-1] ** -0.5)
    return np.matmul(scipy.special.softmax(s, axis=-1), v)


def attention_calls(shape, torch):
    """(calls by provider, error of a result, operations of a call)."""
    heads, seqlen, head_dim = shape
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(1, heads, seqlen, head_dim)).astype(np.float32)
        for _ in range(3)
    )
    calls = {
        "cupyflash": lambda: cupyflash.attention(q, k, v),
        "numpy": lambda: unfused_attention(q, k, v),
    }
    if torch is not None:
        tensors = [timing.to_torch(torch, x) for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch"] = lambda: sdpa(*tensors)
    exact = reference.attention(q[..., :CHECKED_ROWS, :], k, v)

    def error_of(out):
        rows = np.asarray(out)[..., :CHECKED_ROWS, :]
        return float(np.abs(rows - exact).max() / np.abs(exact).max())

    return calls, error_of, 4 * heads * seqlen * seqlen * head_dim


def softmax_calls(case, torch):
    """(calls by provider, error of a result, bytes of a call)."""
    function, shape, dtype, repeats, axis = case
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    own, scipys = getattr(cupyflash, function), getattr(scipy.special, function)
    calls = {
        "cupyflash": lambda: own(x, axis=axis),
        "numpy": lambda: scipys(x, axis=axis),
    }
    if torch is not None:
        tensor, torchs = timing.to_torch(torch, x), getattr(torch, function)
        calls["torch"] = lambda: torchs(tensor, dim=axis)

    def some_rows(a):
        if a.ndim < 2:
            return a
        return a[:CHECKED_ROWS] if axis else a[:, :CHECKED_ROWS]

    exact = getattr(reference, function)(some_rows(x).astype(np.longdouble), axis=axis)

    def error_of(y):
        y = some_rows(np.asarray(y))
        # A logarithm passes 0: its error is relative to 1, if that is larger.
        size = np.abs(exact)
        size = size if function == "softmax" else np.maximum(size, 1)
        return float((np.abs(y - exact) / size).max())

    def repeated(call):
        return lambda: [call() for _ in range(repeats)][-1]

    if repeats > 1:
        calls = {name: repeated(call) for name, call in calls.items()}
    return calls, error_of, 2 * x.nbytes * repeats


def measure(case, calls, error_of, largest_error, work, turns, repeats):
    """One row a provider, with the time of one call."""
    errors = {name: error_of(call()) for name, call in calls.items()}
    if errors["cupyflash"] > largest_error:
        raise SystemExit(f"{case}: error {errors['cupyflash']:.2e}, nothing is timed")
    times = _measure.interleaved(calls, on_gpu=False, turns=turns)
    rows = []
    for name in calls:
        row = {
            "case": case,
            "provider": name,
            "seconds": times[name].seconds / repeats,
            "best": times[name].best / repeats,
            "worst": times[name].worst / repeats,
            "rate": work / times[name].seconds,
            "error": errors[name],
        }
        if name != "torch":
            row["extra_bytes"] = _measure.peak_memory(calls[name], on_gpu=False)
        rows.append(row)
    return rows


def compare(rows, goals):
    """How cupyflash stands to the others in one case, beside the goals."""
    by_name = {row["provider"]: row for row in rows}
    own = by_name.pop("cupyflash")
    found = {name: row["seconds"] / own["seconds"] for name, row in by_name.items()}
    found["memory"] = own["extra_bytes"] / max(1, by_name["numpy"]["extra_bytes"])
    return {
        "case": own["case"],
        "speed_to_torch": found.get("torch"),
        "speed_to_numpy": found["numpy"],
        "memory_to_numpy": found["memory"],
        "goals": goals,
    }


def print_rows(rows):
    """The table of the measurements."""
    print(f"{'case':34} {'provider':10} {'ms':>9} {'rate':>8} {'MiB':>8} {'error':>8}")
    for row in rows:
        extra = row.get("extra_bytes")
        memory = "-" if extra is None else f"{extra / 2**20:.1f}"
        print(
            f"{row['case']:34} {row['provider']:10} {row['seconds'] * 1e3:9.4g} "
            f"{row['rate'] / 1e9:8.1f} {memory:>8} {row['error']:8.1e}"
        )


def main():
    """Measure all cases, print the table and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--softmax", action="store_true", help="the softmax family")
    parser.set_defaults(cpu=True, turns=9)
    args = parser.parse_args()
    report = "softmax_cpu" if args.softmax else "cpu"
    torch = timing.optional("torch")
    cases = [
        (f"attention fp32 {h} x {n} x {d}", attention_calls, (h, n, d),
         ATTENTION_ERROR, ATTENTION_GOALS, 1)
        for h, n, d in ATTENTION_SHAPES
    ] if not args.softmax else []  # fmt: skip
    for case in SOFTMAX_CASES:
        function, shape, dtype, repeats, axis = case
        name = f"{function} fp{dtype[5:]} {' x '.join(map(str, shape))}"
        name += ", axis 0" if axis == 0 else ""
        largest_error = SOFTMAX_ERRORS[dtype]
        goals = ACROSS_GOALS if axis == 0 else SOFTMAX_GOALS[shape]
        cases.append((name, softmax_calls, case, largest_error, goals, repeats))
    rows, ratios = [], []
    for case, make, shape, largest_error, goals, repeats in console.progress(
        [c for c in cases if args.only in c[0]], "cpu"
    ):
        calls, error_of, work = make(shape, torch)
        found = measure(case, calls, error_of, largest_error, work, args.turns, repeats)
        rows += found
        ratios.append(compare(found, goals))
    print_rows(rows)
    for ratio in ratios:
        to_torch = ratio["speed_to_torch"]
        print(
            f"{ratio['case']:34} "
            + (f"{to_torch:.2f} x torch, " if to_torch else "")
            + f"{ratio['speed_to_numpy']:.2f} x NumPy, "
            f"{ratio['memory_to_numpy']:.1%} of its extra memory"
        )
    path = args.json or RESULTS / f"{report}.json"
    timing.save(path, report, False, rows=rows, ratios=ratios)


if __name__ == "__main__":
    main()
