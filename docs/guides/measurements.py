"""
Benchmarks
==========

Every number in the documentation comes from a run whose report is in the repository,
under ``benchmarks/results/``. This page draws those reports. Each one says which card
and which versions it was made with.

To run the benchmarks on your machine:

.. code-block:: console

   $ python -m cupyflash bench --output bench_output

For the full tables, run ``python benchmarks/bench_attention.py`` and
``python benchmarks/bench_softmax.py`` in a clone. Each result is checked before it is
timed, and times are medians of several rounds. A `design note
<https://github.com/cupyflash/cupyflash/blob/main/docs/design/decisions/timing.md>`__
describes how time is measured.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

import cupyflash

ROOT = Path(cupyflash.__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

sys.path.insert(0, str(ROOT / "tools"))
import readme_tables  # noqa: E402


def report(name):
    """A report, by name."""
    return name, json.loads((RESULTS / name).read_text("utf-8"))


def rows_of(name, content):
    """The rows of a report, after a line on where it was made."""
    machine = content["machine"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    versions = [f"{p} {machine[p]}" for p in ("cupy", "torch", "numpy") if p in machine]
    print(f"{name}: {where}, {machine['date']}, {', '.join(versions)}")
    return content["rows"]


def bars(rows, unit, factor, providers, title):
    """A group of bars for each case, a bar for each provider."""
    rows = [row for row in rows if "rate" in row]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    rates = {(row["case"], row["provider"]): row["rate"] * factor for row in rows}
    figure, axis = plt.subplots(
        figsize=(9, 1.2 + 0.6 * len(cases)), layout="constrained"
    )
    height = 0.8 / len(providers)
    for i, provider in enumerate(providers):
        places = [
            (case + i * height, rates[name, provider])
            for case, name in enumerate(cases)
            if (name, provider) in rates
        ]
        if places:
            at, rate = zip(*places, strict=True)
            axis.barh(at, rate, height, label=provider)
    axis.set_yticks([case + 0.4 for case in range(len(cases))], cases)
    axis.invert_yaxis()
    axis.set(xlabel=unit, title=title)
    figure.legend(loc="outside lower center", ncols=len(providers))


# %%
# Softmax
# -------
# Memory bandwidth is the limit: ``copy`` is the rate at which the card copies the same
# number of bytes.

rows = rows_of(*readme_tables.newest("softmax"))
bars(rows, "GB/s", 1e-9, ("tiled", "cupyx", "torch", "copy"), "softmax")

# %%
# Attention compared with others
# ------------------------------
# Each tensor-core kernel against the fastest of the others, run alternately in one
# process. A ratio above 1 means that cupyflash is faster.

print(f"{'TFLOP/s':56} cupyflash  other  ratio")
for _, peer, label, ours, theirs in readme_tables.cells():
    print(f"{label:56} {ours:9.0f} {theirs:6.0f} {ours / theirs:6.2f}  {peer}")

# %%
# Attention by kernels for every card
# -----------------------------------
# Here ``tiled`` is the portable kernel, which uses no tensor cores and is what cards
# older than Ampere run. First float32 and float64, then 16 bits, where the other
# libraries use tensor cores.

rows = rows_of(*report("attention_h200.json"))
providers = ("tiled", "safe", "cupy + cupyx", "torch efficient", "torch math")
full = [row for row in rows if row["dtype"] in ("float32", "float64")]
bars(full, "TFLOP/s", 1e-12, providers, "attention, float32 and float64")

# %%

half = [row for row in rows if row["dtype"] in ("float16", "bfloat16")]
providers = ("tiled", "safe", "torch flash", "torch cudnn", "torch math")
bars(half, "TFLOP/s", 1e-12, providers, "attention, 16 bits")

# %%
# On a CPU
# --------

for row in rows_of(*report("cpu.json")):
    if "seconds" in row:
        extra = row.get("extra_bytes")
        memory = f"{extra / 2**20:8.1f} MiB extra memory" if extra else ""
        name = f"{row['case']:<40} {row['provider']:<10}"
        print(f"{name} {row['seconds'] * 1e3:8.1f} ms {memory}".rstrip())

plt.show()
