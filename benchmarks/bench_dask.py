"""cupyflash.dask beside the plain functions, and what workers of a cluster hold.

    python benchmarks/bench_dask.py --json benchmarks/results/dask_cpu.json
    python benchmarks/bench_dask.py --part memory --json FILE    # that alone

One core, one thread. Each function is computed in five ways:

- plain: of the whole array; softmax writes into an array that is there (``out=``);
- plain_new: the same, but the result is a new array;
- by_hand: the plain function chunk by chunk, each result copied to its place;
- dask: by Dask, each chunk stored in an array that is there;
- dask_kept: by Dask, the results kept in their chunks, as the next step of a pipeline
  takes them.

A new array costs time of its own: the system has to map and clear its pages when they
are first touched. So `dask` is compared with `plain` and with `by_hand`, `dask_kept`
with `plain_new`. Softmax is measured with a mere copy of the array, and once more in a
process whose malloc keeps memory that was freed. When rows are cut, each chunk's share
of its rows is not known before all their chunks have been read, so there are two passes
over memory.

Then softmax of the rows of an array that is four times as large as the memory limit of
one of two workers, and cut along both axes; the memory of the workers is asked for
every 50 ms.
"""

import contextlib
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import dask
import dask.array as da
import numpy as np
import threadpoolctl
import timing

import cupyflash
import cupyflash.dask
from cupyflash import points

WORKERS, LIMIT = 2, 400_000_000

# glibc's malloc returns no memory to the system and maps no array by itself.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def into(function, x, **options):
    """A plain function of a whole array, into one that is there."""
    out = np.empty_like(x)
    return lambda: function(x, out=out, **options)


def by_chunks(function, x, chunks, out):
    """The same by Dask: each chunk written where it belongs, and kept as it is."""
    lazy = da.from_array(x, chunks=chunks)
    return {
        "dask": lambda: da.store(function(lazy), out, lock=False),
        "dask_kept": lambda: function(lazy).persist(),
    }


def softmax_by_hand(x, rows, columns, out):
    """Each chunk's own softmax, then its share of the whole rows."""
    for i in range(0, len(x), rows):
        whole = slice(i, i + rows)
        cuts = [slice(j, j + columns) for j in range(0, x.shape[1], columns)]
        parts = [cupyflash.softmax(x[whole, cut], axis=1) for cut in cuts]
        if len(parts) == 1:
            out[whole] = parts[0]
            continue
        # The largest numbers of a chunk and of its softmax tell the log of its sum.
        logs = [
            x[whole, cut].max(axis=1) - np.log(part.max(axis=1))
            for cut, part in zip(cuts, parts, strict=True)
        ]
        total = cupyflash.logsumexp(np.stack(logs), axis=0)
        for cut, part, log in zip(cuts, parts, logs, strict=True):
            np.multiply(part, np.exp(log - total)[:, None], out=out[whole, cut])


def logsumexp_by_hand(x, rows, columns, out):
    """The sums of all chunks of a row, joined."""
    for i in range(0, len(x), rows):
        logs = [
            cupyflash.logsumexp(x[i : i + rows, j : j + columns], axis=1)
            for j in range(0, x.shape[1], columns)
        ]
        out[i : i + rows] = functools.reduce(np.logaddexp, logs)


def attention_by_hand(q, length, causal, out):
    """The results of all chunks of keys that some query of a chunk sees, joined."""
    seqlen = q.shape[1]
    for i in range(0, seqlen, length):
        states = [
            cupyflash.attention(
                q[:, i : i + length], q[:, j : j + length], q[:, j : j + length],
                causal=causal and i == j, return_lse=True,
            )
            for j in range(0, i + length if causal else seqlen, length)
        ]  # fmt: skip
        out[:, i : i + length], _ = cupyflash.merge_attention_states(
            *map(list, zip(*states, strict=True))
        )


def points_by_hand(z, other, length, out):
    """The sums over all chunks of the other cloud, joined."""
    for i in range(0, len(z), length):
        logs = [
            points.logsumexp(z[i : i + length], other[j : j + length])
            for j in range(0, len(other), length)
        ]
        out[i : i + length] = functools.reduce(np.logaddexp, logs)


def cases(quick):
    """(name, chunks, {way: call}, how many calls of a chunk these make)."""
    rng = np.random.default_rng(0)
    rows = 200 if quick else 4_000
    x = rng.standard_normal((rows, 8_000), dtype=np.float32)
    out, sums = np.empty_like(x), np.empty(rows, np.float32)
    chunkings = [(rows // n, 8_000) for n in (2, 4, 8)]
    chunkings += [(rows // 2, 4_000), (rows, 2_000)]
    soft, logs = cupyflash.dask.softmax, cupyflash.dask.logsumexp
    for chunks in chunkings:
        count = (rows // chunks[0]) * (8_000 // chunks[1])
        ways = {
            "plain": into(cupyflash.softmax, x, axis=1),
            "plain_new": lambda: cupyflash.softmax(x, axis=1),
            "by_hand": lambda c=chunks: softmax_by_hand(x, *c, out),
            "copy": lambda: np.copyto(out, x),
            **by_chunks(lambda y: soft(y, axis=1), x, chunks, out),
        }
        yield "softmax", chunks, ways, count
        ways = {
            "plain": lambda: cupyflash.logsumexp(x, axis=1),
            "by_hand": lambda c=chunks: logsumexp_by_hand(x, *c, sums),
            **by_chunks(lambda y: logs(y, axis=1), x, chunks, sums),
        }
        yield "logsumexp", chunks, ways, count
    seqlen = 512 if quick else 8_192
    q = rng.standard_normal((1, seqlen, 64), dtype=np.float32)
    out_of_attention, attend = np.empty_like(q), cupyflash.dask.attention
    for causal in (False, True):
        for length in (seqlen // 2, seqlen // 4, seqlen // 8):
            count = seqlen // length
            ways = {
                "plain": lambda c=causal: cupyflash.attention(q, q, q, causal=c),
                "by_hand": lambda n=length, c=causal: attention_by_hand(
                    q, n, c, out_of_attention
                ),
                **by_chunks(
                    lambda y, c=causal: attend(y, y, y, causal=c),
                    q, (1, length, 64), out_of_attention,
                ),
            }  # fmt: skip
            count = count * (count + 1) // 2 if causal else count**2
            yield f"attention, causal={causal}", (1, length, 64), ways, count
    count = 500 if quick else 8_000
    z = rng.standard_normal((count, 8))
    other, sums_of_points = z.copy(), np.empty(count)
    for length in (count // 2, count // 4):
        y = da.from_array(other, chunks=(length, 8))
        ways = {
            "plain": lambda: points.logsumexp(z, other),
            "by_hand": lambda n=length: points_by_hand(z, other, n, sums_of_points),
            **by_chunks(
                lambda x, y=y: cupyflash.dask.points.logsumexp(x, y),
                z, (length, 8), sums_of_points,
            ),
        }  # fmt: skip
        yield "points.logsumexp", (length, 8), ways, (count // length) ** 2


@contextlib.contextmanager
def one_core():
    """This process and its BLAS on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with threadpoolctl.threadpool_limits(1):
            yield
    finally:
        os.sched_setaffinity(0, cores)


def overheads(turns, only, quick):
    """A row of each case: medians of all ways, in turns."""
    with one_core(), dask.config.set(scheduler="sync"):
        for name, chunks, ways, count in cases(quick):
            if only not in name:
                continue
            found = {way: [] for way in ways}
            for turn in range(turns + 1):
                for way, call in ways.items():
                    took = measured(call)
                    if turn:  # the first warms up
                        found[way].append(took)
            medians = {
                way: [statistics.median(x) for x in zip(*of_turns, strict=True)]
                for way, of_turns in found.items()
            }
            seconds = {way: took[0] for way, took in medians.items()}
            plain_new = seconds.get("plain_new", seconds["plain"])
            row = {
                "function": name, "chunks": chunks, "calls": count,
                "ms_of_a_chunk": 1e3 * seconds["by_hand"] / count,
                **{f"seconds_{way}": took for way, took in seconds.items()},
                "page_faults": {way: took[1] for way, took in medians.items()},
                "overhead": seconds["dask"] / seconds["plain"] - 1,
                "overhead_beside_by_hand": seconds["dask"] / seconds["by_hand"] - 1,
                "overhead_kept": seconds["dask_kept"] / plain_new - 1,
            }  # fmt: skip
            print(
                f"{name:24} {chunks!s:14} {row['ms_of_a_chunk']:6.1f} ms a chunk; "
                f"overhead stored {100 * row['overhead']:5.1f} %, beside chunks by "
                f"hand {100 * row['overhead_beside_by_hand']:5.1f} %; kept "
                f"{100 * row['overhead_kept']:5.1f} %",
                flush=True,
            )
            yield row


def measured(call):
    """(seconds, page faults) of a call; what it returns is freed afterwards."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del kept
    return seconds, faults


def overheads_with_memory_kept(turns, quick):
    """The rows of softmax from a process whose malloc keeps what was freed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "report.json")
        options = ["--part", "overheads", "--only", "softmax", "--json", path]
        subprocess.run(
            [sys.executable, __file__, "--turns", str(turns), *options]
            + ["--quick"] * quick,
            env=os.environ | KEEP_MEMORY,
            check=True,
        )
        with open(path, encoding="utf-8") as file:
            return json.load(file)["overheads"]


def memory(quick):
    """Softmax by a cluster, and the most that a worker held meanwhile."""
    import psutil
    from distributed import Client, LocalCluster

    columns = 50_000
    rows = 200 if quick else 4 * LIMIT // (4 * columns)
    chunks = (min(rows, 250), 10_000)

    def made(block, block_info=None):
        seed = block_info[None]["chunk-location"]
        return np.random.default_rng(seed).standard_normal(block.shape, np.float32)

    peaks, done = [], threading.Event()

    def watch(processes):
        while not done.wait(0.05):
            peaks.append([p.memory_info().rss for p in processes])

    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, memory_limit=LIMIT,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        x = da.zeros((rows, columns), chunks=chunks, dtype=np.float32)
        y = cupyflash.dask.softmax(x.map_blocks(made, dtype=np.float32), axis=1)
        pids = client.run(os.getpid)
        processes = [psutil.Process(pid) for pid in pids.values()]
        idle = [p.memory_info().rss for p in processes]
        thread = threading.Thread(target=watch, args=(processes,))
        thread.start()
        start = time.perf_counter()
        sums = y.sum(axis=1, dtype=np.float64).compute()
        seconds = time.perf_counter() - start
        done.set()
        thread.join()
        np.testing.assert_allclose(sums, 1, rtol=1e-5)
        same = client.run(os.getpid) == pids  # none was killed and started again
    report = {
        "workers": WORKERS, "limit": LIMIT, "bytes": 4 * rows * columns,
        "chunks": chunks, "seconds": seconds, "idle": max(idle),
        "peak": max(map(max, peaks)), "workers_lived": same,
    }  # fmt: skip
    print(report, flush=True)
    return report


def main():
    """Measure, print and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="sizes of a test")
    parts = ("overheads", "memory_kept", "memory", "all")
    parser.add_argument("--part", choices=parts, default="all")
    args = parser.parse_args()
    versions = {n: timing.version(n) for n in ("dask", "distributed", "zarr")}
    report = {"versions": versions}
    if args.part in ("overheads", "all"):
        report["overheads"] = list(overheads(args.turns, args.only, args.quick))
    if args.part in ("memory_kept", "all"):
        report["environment_memory_kept"] = KEEP_MEMORY
        report["overheads_memory_kept"] = overheads_with_memory_kept(
            args.turns, args.quick
        )
    if args.part in ("memory", "all"):
        report["memory"] = memory(args.quick)
    timing.save(args.json, "dask", False, **report)


if __name__ == "__main__":
    main()
