"""The bytes that each method moves to and from a GPU's memory, by its own counters.

    python benchmarks/dram_bytes.py --json benchmarks/results/dram_h200.json

Nsight Compute (``ncu``, of the CUDA toolkit) counts, over all kernels of one call. The
arrays of softmax and the scores of attention are larger than the L2 cache: what is read
again comes from memory again, unless it was used just before. q, k, v and the result
of attention are smaller. Needs the right to read performance counters.
"""

import csv
import io
import shutil
import subprocess
import sys

import numpy as np
import timing

import cupyflash
from cupyflash._cli import console

METHODS = ("naive", "safe", "online", "tiled")
SOFTMAX, ATTENTION = (16384, 4096), (16384, 64)
_COUNTERS = {
    "dram__bytes_read.sum": "read_bytes",
    "dram__bytes_write.sum": "written_bytes",
}


def calls(cupy, operation):
    """The calls of an operation by name; the bytes of its arguments and its result."""
    rng = cupy.random.default_rng(0)
    if operation == "softmax":
        x = rng.standard_normal(SOFTMAX, dtype=np.float32)
        out = cupy.empty_like(x)
        found = {
            method: lambda method=method: cupyflash.softmax(
                x, axis=1, method=method, out=out
            )
            for method in METHODS
        }
        # copyto would use TMA, which is no kernel and is not counted.
        return found | {"copy": lambda: cupy.positive(x, out=out)}, 2 * x.nbytes
    q, k, v = (rng.standard_normal(ATTENTION, dtype=np.float32) for _ in range(3))
    out = cupy.empty_like(q)
    found = {
        method: lambda method=method: cupyflash.attention(
            q, k, v, method=method, out=out
        )
        for method in METHODS
    }
    return found, 4 * q.nbytes


def run_one(operation, name):
    """One call between the marks that the profiler looks for."""
    import cupy

    found, least = calls(cupy, operation)
    found[name]()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStart()
    found[name]()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStop()
    print("least", least)


def count(operation, name):
    """A row of the report: the bytes of all kernels of one call."""
    command = [
        *("ncu", "--profile-from-start", "off", "--csv", "--print-units", "base"),
        *("--cache-control", "none", "--clock-control", "none"),
        *("--metrics", ",".join(_COUNTERS)),
        *(sys.executable, __file__, "--one", operation, name),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    least = next(int(line.split()[1]) for line in lines if line.startswith("least"))
    table = io.StringIO("\n".join(line for line in lines if line.startswith('"')))
    row = {"operation": operation, "method": name, "least_bytes": least, "kernels": 0}
    row |= dict.fromkeys(_COUNTERS.values(), 0)
    for entry in csv.DictReader(table):
        row[_COUNTERS[entry["Metric Name"]]] += int(
            float(entry["Metric Value"].replace(",", ""))
        )
        row["kernels"] += entry["Metric Name"] == "dram__bytes_read.sum"
    return row


def main():
    """Count, print the table and write the report."""
    if sys.argv[1:2] == ["--one"]:
        run_one(*sys.argv[2:])
        return
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    _, on_gpu = timing.backend(args)
    if not on_gpu:
        sys.exit("the counters are a GPU's, and there is none")
    if shutil.which("ncu") is None:
        sys.exit("ncu is not on the path: install Nsight Compute")
    names = {"softmax": (*METHODS, "copy"), "attention": METHODS}
    rows = [
        count(operation, name)
        for operation, found in names.items()
        for name in found
        if args.only in f"{operation} {name}"
    ]
    console.table(
        ("call", "kernels", "read, MB", "written, MB", "least, MB"),
        [
            (
                f"{row['operation']} {row['method']}",
                str(row["kernels"]),
                f"{row['read_bytes'] / 1e6:.1f}",
                f"{row['written_bytes'] / 1e6:.1f}",
                f"{row['least_bytes'] / 1e6:.1f}",
            )
            for row in rows
        ],
    )
    shapes = {"softmax": SOFTMAX, "attention": ATTENTION}
    timing.save(args.json, "dram", on_gpu, shapes=shapes, rows=rows)


if __name__ == "__main__":
    main()
