"""
An array larger than memory
===========================

Softmax over the rows of an array in a Zarr store, through Dask. Chunks are read,
computed and written one by one, on all cores, with a progress bar. The rows themselves
are split over chunks too: the chunks of a row only exchange two numbers per row.

Run it: ``python examples/softmax_zarr.py``, or with ``--gigabytes 100`` for an array
that does not fit in memory; ``--folder`` is a place with room for two of them.
"""

import argparse
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import zarr
from _support import choose
from dask.diagnostics import ProgressBar

import cupyflash.dask

parser = argparse.ArgumentParser()
parser.add_argument("--gigabytes", type=float)
parser.add_argument("--folder", help="where the stores are made, and removed")
options = parser.parse_args()
gigabytes = options.gigabytes or choose(tiny=0.002, cpu=0.05, gpu=0.05)

# %%
# The array
# ---------
# Rows of 100,000 float32 scores, in chunks of at most 32 MB: 20,000 columns each, and
# as many rows as fit.

COLUMNS, CHUNK = 100_000, (400, 20_000)
rows = max(1, round(gigabytes * 1e9 / 4 / COLUMNS))


def scores(block, block_info=None):
    """Random scores of a chunk."""
    seed = block_info[None]["chunk-location"]
    return 5 * np.random.default_rng(seed).standard_normal(block.shape, np.float32)


with tempfile.TemporaryDirectory(dir=options.folder) as folder:
    source, target = (str(Path(folder) / name) for name in ("scores", "softmax"))
    x = da.zeros((rows, COLUMNS), chunks=CHUNK, dtype=np.float32)
    x = x.map_blocks(scores, dtype=np.float32)
    print(f"{rows:,} x {COLUMNS:,} float32, {x.nbytes / 1e9:.3g} GB")
    x.to_zarr(source)

    # From store to store: nothing is computed before the last line. A row of chunks is
    # kept until its total is known. Each task works on one chunk, so memory does not
    # grow with the array.
    y = cupyflash.dask.softmax(da.from_zarr(source), axis=1)
    with ProgressBar(), dask.config.set(scheduler="threads"):
        start = time.perf_counter()
        y.to_zarr(target)
        seconds = time.perf_counter() - start
    rate = x.nbytes / seconds / 1e9
    print(f"softmax, read and written: {seconds:.2f} s, {rate:.2f} GB/s")

    # Some rows again, whole.
    for row in (0, rows // 2, rows - 1):
        whole = cupyflash.softmax(zarr.open(source, mode="r")[row])
        stored = zarr.open(target, mode="r")[row]
        np.testing.assert_allclose(stored, whole, rtol=1e-5, atol=1e-12)
    print("three rows agree with cupyflash.softmax")
