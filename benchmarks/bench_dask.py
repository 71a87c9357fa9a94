"""cupyflash.dask beside the plain functions, and what workers of a cluster hold.

    python benchmarks/bench_dask.py --json benchmarks/results/dask_cpu.json
    python benchmarks/bench_dask.py --part memory --json FILE    # that alone

One core, one thread, from array to array: each function of a whole array; the plain
functions chunk by chunk, as one would write it by hand; and the same by Dask, whose own
cost is what it takes beyond that. By hand, too, a chunk's result is new memory that is
copied to its place, and rows that are cut take two passes over memory: a chunk's share
of its rows is not known before all their chunks have been read.

Then softmax of the rows of an array that is four times as large as the memory limit of
one of two workers, and cut along both axes; the memory of the workers is asked for
every 50 ms.
"""

import contextlib
import functools
import os
import statistics
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


def into(function, x, **options):
    """A plain function of a whole array, into one that is there."""
    out = np.empty_like(x)
    return lambda: function(x, out=out, **options)


def by_chunks(function, x, chunks, out):
    """The same by Dask, each chunk written where it belongs."""
    lazy = da.from_array(x, chunks=chunks)
    return lambda: da.store(function(lazy), out, lock=False)


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
    """(name, chunks, whole, by hand, by Dask, how many calls these make)."""
    rng = np.random.default_rng(0)
    rows = 200 if quick else 4_000
    x = rng.standard_normal((rows, 8_000), dtype=np.float32)
    out, sums = np.empty_like(x), np.empty(rows, np.float32)
    chunkings = [(rows // n, 8_000) for n in (2, 4, 8)]
    chunkings += [(rows // 2, 4_000), (rows, 2_000)]
    soft, logs = cupyflash.dask.softmax, cupyflash.dask.logsumexp
    for chunks in chunkings:
        count = (rows // chunks[0]) * (8_000 // chunks[1])
        yield (
            "softmax", chunks, into(cupyflash.softmax, x, axis=1),
            lambda c=chunks: softmax_by_hand(x, *c, out),
            by_chunks(lambda y: soft(y, axis=1), x, chunks, out), count,
        )  # fmt: skip
        yield (
            "logsumexp", chunks, lambda: cupyflash.logsumexp(x, axis=1),
            lambda c=chunks: logsumexp_by_hand(x, *c, sums),
            by_chunks(lambda y: logs(y, axis=1), x, chunks, sums), count,
        )  # fmt: skip
    seqlen = 512 if quick else 8_192
    q = rng.standard_normal((1, seqlen, 64), dtype=np.float32)
    out_of_attention, attend = np.empty_like(q), cupyflash.dask.attention
    for causal in (False, True):
        options = {"causal": causal}
        for length in (seqlen // 2, seqlen // 4, seqlen // 8):
            count = seqlen // length
            yield (
                f"attention, causal={causal}", (1, length, 64),
                lambda o=options: cupyflash.attention(q, q, q, **o),
                lambda n=length, c=causal: attention_by_hand(q, n, c, out_of_attention),
                by_chunks(lambda y, o=options: attend(y, y, y, **o), q,
                          (1, length, 64), out_of_attention),
                count * (count + 1) // 2 if causal else count**2,
            )  # fmt: skip
    count = 500 if quick else 8_000
    z = rng.standard_normal((count, 8))
    other, sums_of_points = z.copy(), np.empty(count)
    for length in (count // 2, count // 4):
        y = da.from_array(other, chunks=(length, 8))
        yield (
            "points.logsumexp", (length, 8), lambda: points.logsumexp(z, other),
            lambda n=length: points_by_hand(z, other, n, sums_of_points),
            by_chunks(lambda x, y=y: cupyflash.dask.points.logsumexp(x, y), z,
                      (length, 8), sums_of_points),
            (count // length) ** 2,
        )  # fmt: skip


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
    """A row of each case: medians of the three, in turns."""
    with one_core(), dask.config.set(scheduler="sync"):
        for name, chunks, *calls, count in cases(quick):
            if only not in name:
                continue
            times = [[] for _ in calls]
            for turn in range(turns + 1):
                for call, found in zip(calls, times, strict=True):
                    start = time.perf_counter()
                    call()
                    if turn:  # the first warms up
                        found.append(time.perf_counter() - start)
            plain, by_hand, by_dask = map(statistics.median, times)
            row = {
                "function": name, "chunks": chunks, "calls": count,
                "ms_of_a_chunk": 1e3 * by_hand / count, "seconds_plain": plain,
                "seconds_by_hand": by_hand, "seconds_dask": by_dask,
                "overhead": by_dask / plain - 1,
                "overhead_beside_by_hand": by_dask / by_hand - 1,
            }  # fmt: skip
            print(
                f"{name:24} {chunks!s:14} {row['ms_of_a_chunk']:7.1f} ms a chunk, "
                f"overhead {100 * row['overhead']:5.1f} %, beside chunks by hand "
                f"{100 * row['overhead_beside_by_hand']:5.1f} %",
                flush=True,
            )
            yield row


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
    parser.add_argument("--part", choices=("overheads", "memory", "all"), default="all")
    args = parser.parse_args()
    versions = {n: timing.version(n) for n in ("dask", "distributed", "zarr")}
    report = {"versions": versions}
    if args.part != "memory":
        report["overheads"] = list(overheads(args.turns, args.only, args.quick))
    if args.part != "overheads":
        report["memory"] = memory(args.quick)
    timing.save(args.json, "dask", False, **report)


if __name__ == "__main__":
    main()
