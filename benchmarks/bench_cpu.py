"""The CPU back end beside torch and NumPy with SciPy, in one process.

    python benchmarks/bench_cpu.py

Candidates take turns; the median is reported. Extra memory is what NumPy and Python
allocate beside inputs and result, at its peak; that of torch cannot be seen from here.
The rate of attention counts 4 * heads * seqlen_q * seqlen_k * head_dim operations, that
of softmax one read and one write of the matrix.
"""

import numpy as np
import scipy.special
import timing
from timing import RESULTS

import cupyflash
from cupyflash import _console, _measure, _reference

# (heads, seqlen, head_dim): many, the size of the goals, few but long.
ATTENTION_SHAPES = [(8, 1024, 64), (8, 4096, 64), (1, 16384, 64), (8, 4096, 128)]
SOFTMAX_SHAPES = [(16384, 4096)]
# What the goals ask of cupyflash: (at least this many times as fast as torch, as NumPy
# with SciPy, at most this part of the extra memory of the latter).
ATTENTION_GOALS = {"torch": 0.9, "numpy": 2.5, "memory": 0.05}
SOFTMAX_GOALS = {"torch": 1 / 1.2}
# Largest errors that a result may have to be timed at all (float32).
ATTENTION_ERROR, SOFTMAX_ERROR = 2e-6, 4e-7
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
    exact = _reference.attention(q[..., :CHECKED_ROWS, :], k, v)

    def error_of(out):
        rows = np.asarray(out)[..., :CHECKED_ROWS, :]
        return float(np.abs(rows - exact).max() / np.abs(exact).max())

    return calls, error_of, 4 * heads * seqlen * seqlen * head_dim


def softmax_calls(shape, torch):
    """(calls by provider, error of a result, bytes of a call)."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    calls = {
        "cupyflash": lambda: cupyflash.softmax(x, axis=-1),
        "numpy": lambda: scipy.special.softmax(x, axis=-1),
    }
    if torch is not None:
        tensor = timing.to_torch(torch, x)
        calls["torch"] = lambda: torch.softmax(tensor, dim=-1)
    exact = _reference.softmax(x[:CHECKED_ROWS], axis=-1)

    def error_of(y):
        return float(np.abs(np.asarray(y)[:CHECKED_ROWS] / exact - 1).max())

    return calls, error_of, 2 * x.nbytes


def measure(case, calls, error_of, largest_error, work, turns):
    """One row a provider."""
    errors = {name: error_of(call()) for name, call in calls.items()}
    if errors["cupyflash"] > largest_error:
        raise SystemExit(f"{case}: error {errors['cupyflash']:.2e}, nothing is timed")
    times = _measure.interleaved(calls, on_gpu=False, turns=turns)
    rows = []
    for name in calls:
        row = {
            "case": case,
            "provider": name,
            "seconds": times[name].seconds,
            "best": times[name].best,
            "worst": times[name].worst,
            "rate": work / times[name].seconds / 1e9,
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
    print(f"{'case':34} {'provider':10} {'ms':>8} {'rate':>8} {'MiB':>8} {'error':>8}")
    for row in rows:
        extra = row.get("extra_bytes")
        memory = "-" if extra is None else f"{extra / 2**20:.1f}"
        print(
            f"{row['case']:34} {row['provider']:10} {row['seconds'] * 1e3:8.1f} "
            f"{row['rate']:8.1f} {memory:>8} {row['error']:8.1e}"
        )


def main():
    """Measure all cases, print the table and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.set_defaults(json=RESULTS / "cpu.json", cpu=True, turns=9)
    args = parser.parse_args()
    torch = timing.optional("torch")
    cases = [
        (f"attention fp32 {h} x {n} x {d}", attention_calls, (h, n, d),
         ATTENTION_ERROR, ATTENTION_GOALS)
        for h, n, d in ATTENTION_SHAPES
    ] + [
        (f"softmax fp32 {m} x {n}", softmax_calls, (m, n), SOFTMAX_ERROR, SOFTMAX_GOALS)
        for m, n in SOFTMAX_SHAPES
    ]  # fmt: skip
    rows, ratios = [], []
    for case, make, shape, largest_error, goals in _console.progress(
        [c for c in cases if args.only in c[0]], "cpu"
    ):
        calls, error_of, work = make(shape, torch)
        found = measure(case, calls, error_of, largest_error, work, args.turns)
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
    timing.save(args.json, "cpu", False, rows=rows, ratios=ratios)


if __name__ == "__main__":
    main()
