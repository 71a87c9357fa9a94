"""
An array larger than memory
===========================

Softmax of the rows of an array in a Zarr store, through Dask: chunks are read, computed
and written one by one, on all cores, and a progress bar shows how far it is. Chunks cut
the rows, too: what the chunks of a row tell each other are two numbers a row.

Run it: ``python examples/softmax_zarr.py``, or with ``--gigabytes 100`` for an array
that does not fit into memory; ``--folder`` says where there is room for two of them.
"""

import argparse
import tempfile
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import zarr
from _support import choose, host_timed
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
# Rows of 100,000 scores in float32, in chunks of at most 32 MB: 20,000 columns, since
# rows are cut, and as many rows as fit.

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

    # %%
    # From store to store
    # -------------------
    # Nothing is computed before the last line. A row of chunks is held until its total
    # is known; tasks take one chunk each, so memory does not grow with the array.

    y = cupyflash.dask.softmax(da.from_zarr(source), axis=1)
    with ProgressBar(), dask.config.set(scheduler="threads"):
        _, seconds = host_timed(y.to_zarr, target)
    rate = x.nbytes / seconds / 1e9
    print(f"softmax, read and written: {seconds:.2f} s, {rate:.2f} GB/s")

    # %%
    # Some rows again, whole
    # ----------------------

    for row in (0, rows // 2, rows - 1):
        whole = cupyflash.softmax(zarr.open(source, mode="r")[row])
        stored = zarr.open(target, mode="r")[row]
        np.testing.assert_allclose(stored, whole, rtol=1e-5, atol=1e-12)
    print("three rows are those of cupyflash.softmax")
