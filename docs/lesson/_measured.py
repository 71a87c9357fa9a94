"""What the pages of the lesson share: how they measure, and the results of a GPU."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np

import cupyflash
from cupyflash._cli import measure as _measure
from cupyflash._softmax.cpu.blocks import Block, SmallBlock

METHODS = ("naive", "safe", "online", "tiled")
ROOT = Path(cupyflash.__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

sys.path.insert(0, str(ROOT / "tools"))
import readme_tables  # noqa: E402

# What tutorials promise of the fused kernel: how many times faster, and smaller.
FASTER, SMALLER = (2, 4), (10, 20)

# Extra bytes of a call that are a few blocks of rows, and no copy of its input.
_NEXT_TO_NONE = 4 << 20


def teaching_case(n, head_dim=64):
    """q, k, v and the scores of q and k, in float32."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((n, head_dim), dtype=np.float32) for _ in range(3))
    return q, k, v, (q @ k.T) * np.float32(head_dim**-0.5)


def by_method(function, *arrays, **options):
    """A call of `function` for each of the four methods."""
    return {
        method: lambda method=method: function(*arrays, method=method, **options)
        for method in METHODS
    }


def measure(calls, exact, *, of_each):
    """Time, extra memory and largest error of each call.

    The error is relative to each element, or to the largest one of `exact`.
    """
    size = exact if of_each else np.abs(exact).max()
    rows = {}
    for name, call in calls.items():
        error = float(np.max(np.abs(call() - exact) / size))
        extra = _measure.peak_memory(call, on_gpu=False)
        rows[name] = {"extra_bytes": extra, "max_error": error}
    for name, timing in _measure.interleaved(calls, on_gpu=False, turns=3).items():
        rows[name]["seconds"] = timing.seconds
    return rows


def print_rows(rows):
    """Time, extra memory and error, a line each."""
    width = max(map(len, rows))
    print(f"{'':{width}} {'time':>11} {'extra memory':>14} {'error':>9}")
    for name, row in rows.items():
        time, extra = 1e3 * row["seconds"], row["extra_bytes"] / 2**20
        error = row["max_error"]
        print(f"{name:{width}} {time:8.3g} ms {extra:10.1f} MiB {error:9.0e}")


def check_claims(rows, plain, fused="tiled"):
    """Say what `fused` gains over `plain`, and whether that is what is promised."""
    a, b = rows[plain], rows[fused]
    faster = a["seconds"] / b["seconds"]
    print(f"{fused} against {plain}")
    print(f"  time:   {faster:.2g} times faster; {_verdict(faster, FASTER)}")
    if a["extra_bytes"] < _NEXT_TO_NONE:
        print("  memory: next to none in both")
    elif b["extra_bytes"]:
        smaller = a["extra_bytes"] / b["extra_bytes"]
        print(f"  memory: {smaller:.2g} times less; {_verdict(smaller, SMALLER)}")
    else:
        print(f"  memory: {a['extra_bytes'] / 2**20:.0f} MiB against none")


def _verdict(ratio, promised):
    low, high = promised
    claim = f"{low} to {high} times"
    if ratio < low:
        return f"{claim} does not hold"
    return f"{claim} holds" if ratio <= high else f"more than {claim}"


# How blocks of rows reach x and out.
_COUNTED = (
    (Block, "matrix"),
    (Block, "_lies_ready"),
    (Block, "write"),
    (SmallBlock, "keys"),
    (SmallBlock, "keys_to_read"),
    (SmallBlock, "write"),
)


@contextlib.contextmanager
def counted():
    """Count the elements that softmax on the CPU reads from x and writes to out."""
    count = {"read": 0, "written": 0}
    before = [(kind, name, getattr(kind, name)) for kind, name in _COUNTED]

    def patch(kind, name, method):
        def counted_method(self, *args):
            x = method(self, *args)
            if name == "write":
                count["written"] += args[1].size
            elif name == "_lies_ready" and x is not None:  # in the array itself
                count["read" if args[0] == "x" else "written"] += x.size
            elif name in ("matrix", "keys"):
                count["read"] += 0 if x is None else x.size
            elif name == "keys_to_read" and x is self._x:
                count["read"] += x.size
            return x

        setattr(kind, name, counted_method)

    for method in before:
        patch(*method)
    try:
        yield count
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


def result(name):
    """A report that a run wrote, such as ``hopper_terms_h200``."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def newest(kind):
    """The last report of a benchmark on a GPU, such as ``softmax``."""
    return readme_tables.newest(kind)[1]


def ladder(report, operation):
    """The rows of a demo's report by method, for `print_rows` and `check_claims`."""
    return {row["method"]: row for row in report["ladder"][operation]}


def source(report):
    """One line: which card, versions and commit a report is of."""
    m = report["machine"]
    driver = f"CUDA {m['driver'] // 1000}.{m['driver'] % 1000 // 10}"
    versions = f"cupyflash {m['cupyflash']} ({m['commit']}), CuPy {m['cupy']}"
    return f"{m['gpu']}, {driver}, {versions}, {m['date']}"
