"""Attention of one sequence on two GPUs beside one: all that is promised, in one run.

    python benchmarks/bench_two_gpus.py --json benchmarks/results/two_gpus_h200.json

Starts two processes on this machine, which take a GPU each; with ``--cpu`` they compute
small problems with NumPy. Measured are, of bfloat16 with 16 heads of 128 columns:

- forward, and forward with gradients, of 131,072 tokens, full and causal, on one GPU
  and on two; whether two runs give the same bits;
- the same over lengths from 16,384 to a million, with the time of the transfers alone
  and the share of it that is hidden behind the computation;
- random problems beside the plain functions;
- softmax and attention by cupyflash.dask on one GPU and on two, where dask-cuda is
  installed.

What is done is written after each step; a step that the time left does not allow is
left out, and said so.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import timing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cupyflash
from cupyflash import distributed
from cupyflash._core.arrays import to_dtype
from cupyflash.distributed import _bits

RANKS = 2
GOAL = {  # heads, columns, tokens, dtype
    True: (16, 128, 131_072, "bfloat16"),
    False: (2, 16, 256, "float32"),
}
LENGTHS = {
    True: (16_384, 32_768, 65_536, 262_144, 524_288, 1_048_576),
    False: (64, 128),
}
PROBLEMS = {True: 100, False: 6}
# By Dask: (chunks, shape of each, dtype), and softmaxes that follow each other.
DASK = {
    True: {
        "attention": (64, (1, 262_144, 128), "float16"),
        "softmax": (16, (1, 16_384, 32_768), "float32"),
        "passes": 80,
    },
    False: {
        "attention": (4, (1, 64, 8), "float32"),
        "softmax": (4, (1, 16, 256), "float32"),
        "passes": 3,
    },
}
# Two roundings of 16 bits, of the largest number; a split of the keys in float32.
ALLOWED = {"bfloat16": 2**-7, "float32": 2e-6}


class Clock:
    """Seconds of calls that begin at the same time on all ranks."""

    def __init__(self, comm, on_gpu, end):
        self.comm, self.on_gpu, self.end = comm, on_gpu, end

    def left(self):
        """Seconds until the run has to end, the same on all ranks."""
        own = repr(self.end - time.time()).encode()
        return min(float(x) for x in self.comm.all_gather(own))

    def seconds(self, call):
        """Each rank's, of one call; `call` may be None where a rank only waits."""
        self._wait()
        self.comm.all_gather(b"")
        start = time.perf_counter()
        if call is not None:
            call()
        self._wait()
        own = repr(time.perf_counter() - start).encode()
        return [float(x) for x in self.comm.all_gather(own)]

    def medians(self, calls, at_most, compiled=False):
        """{name: median seconds of each rank}, in turns, five of them at most.

        They end after some seconds. Of what is `compiled` the first call counts, too,
        if it is long.
        """
        found = {name: [] for name in calls}
        for name, call in calls.items():
            seconds = self.seconds(call)  # compiles, plans, fills the pool
            if compiled and max(seconds) > at_most / len(calls):
                found[name].append(seconds)

        def spent():
            return sum(max(turn) for turns in found.values() for turn in turns)

        while not all(found.values()) or (
            spent() < at_most and len(found[next(iter(found))]) < 5
        ):
            for name, call in calls.items():
                found[name].append(self.seconds(call))
        return {
            name: [statistics.median(of_rank) for of_rank in zip(*turns, strict=True)]
            for name, turns in found.items()
        }

    def _wait(self):
        if self.on_gpu:
            import cupy

            cupy.cuda.Device().synchronize()


class NoTransfer(distributed.Comm):
    """The ranks of a comm, which compute as ever and send nothing.

    What should come from another rank is a copy of this one's own numbers: a card that
    multiplies zeros draws less power and runs at a higher clock.
    """

    def __init__(self, comm):
        super().__init__(comm.rank, comm.size, timeout=comm.timeout)
        self._comm = comm

    def exchange(self, sent, target, received, source):
        for x, own in zip(received, sent, strict=True):
            x, own = (_bits.bits(y).reshape(-1) for y in (x, own))
            for start in range(0, x.size, own.size):
                here = x[start : start + own.size]
                here[...] = own[: here.size]
        return lambda: None

    def all_gather(self, message):
        return self._comm.all_gather(message)

    def for_arrays(self, like):
        return self


class Problem:
    """q, k, v and dout of a length: the whole on each rank, and the part of it."""

    def __init__(self, xp, comm, on_gpu, tokens, causal):
        heads, dim, _, dtype = GOAL[on_gpu]
        self.comm, self.causal, self.tokens = comm, causal, tokens
        self.dtype = dtype
        whole = [self._made(xp, seed, heads, tokens, dim) for seed in range(4)]
        self.part = [distributed.shard(x, comm, causal=causal) for x in whole]
        self.whole = whole

    def _made(self, xp, seed, heads, tokens, dim):
        """Random numbers, head by head: those of the dtype alone take memory."""
        rng = xp.random.default_rng(seed)
        found = xp.empty((heads, tokens, dim), to_dtype(self.dtype))
        for head in _bits.bits(found):
            x = rng.standard_normal((tokens, dim), dtype=np.float32)
            head[...] = _bits.bits(_bits.cast(xp, x, found.dtype))
        return found

    def one(self, backward):
        """(out, lse, dq, dk, dv) on one GPU."""
        q, k, v, dout = self.whole
        options = {"causal": self.causal}
        found = cupyflash.attention(q, k, v, return_lse=True, **options)
        if backward:
            found += cupyflash.attention_vjp(
                dout, q, k, v, *found, deterministic=True, **options
            )[:3]
        return found

    def two(self, backward, comm=None):
        """The same of this rank's part."""
        q, k, v, dout = self.part
        comm, options = comm or self.comm, {"causal": self.causal}
        found = distributed.attention(q, k, v, comm, return_lse=True, **options)
        if backward:
            found += distributed.attention_vjp(
                dout, q, k, v, *found, comm, deterministic=True, **options
            )[:3]
        return found

    def transfer(self):
        """What the forward call sends, alone."""
        _, k, v, _ = self.part
        half = k.shape[-2] // 2 if self.causal and self.comm.rank == 0 else None
        comm = self.comm.for_arrays(k)
        other = 1 - self.comm.rank
        mine = [x[:, :half].copy() for x in (k, v)]
        coming = k.shape[-2] // 2 if self.causal and self.comm.rank else k.shape[-2]
        theirs = [x[:, :coming].copy() for x in (k, v)]

        def call():
            comm.exchange(mine, other, theirs, other)()
            comm.finish()

        return call


def speed(clock, problem, backward, at_most, compiled=False, rested=False):
    """A row of the table: seconds of each GPU for the whole and of both, and a ratio.

    Each GPU computes the whole while the other does so, too: one that rests between its
    turns is cooler, and faster for a while than any that has to go on working. No two
    cards are equally fast. Both have equal work, so the slower one decides, and it is
    the one that both are compared with. With `rested`, the same beside cards that rest.
    """
    calls = {
        "one": lambda: problem.one(backward),
        "both": lambda: problem.two(backward),
    }
    seconds = clock.medians(calls, at_most, compiled)
    row = {
        "tokens": problem.tokens,
        "causal": problem.causal,
        "backward": backward,
        "seconds_alone": seconds["one"],
        "seconds_both": max(seconds["both"]),
        "times_one": max(seconds["one"]) / max(seconds["both"]),
    }
    if rested:
        del calls["one"]
        for rank in range(RANKS):
            calls[rank] = calls_of(problem, backward, rank)
        seconds = clock.medians(calls, at_most / 2)
        each = [seconds[rank][rank] for rank in range(RANKS)]
        row |= {
            "seconds_alone_rested": each,
            "seconds_both_rested": max(seconds["both"]),
            "times_one_rested": max(each) / max(seconds["both"]),
        }
    return row


def calls_of(problem, backward, rank):
    """The whole on one rank, while the others rest."""
    own = rank == problem.comm.rank
    return (lambda: problem.one(backward)) if own else None


def hidden(clock, problem):
    """How much of the transfers of a forward call its computation hides."""
    quiet = NoTransfer(problem.comm)
    seconds = clock.medians(
        {
            "two": lambda: problem.two(False),
            "computing": lambda: problem.two(False, quiet),
            "transfer": problem.transfer(),
        },
        3.0,
    )
    seconds = {name: max(each) for name, each in seconds.items()}
    shown = max(0.0, seconds["two"] - seconds["computing"])
    seconds["share_hidden"] = max(0.0, 1 - shown / seconds["transfer"])
    return seconds


def same_bits(xp, problem):
    """Whether two runs give the same bits on this rank."""
    return all(
        bool(xp.array_equal(a.view(np.uint8), b.view(np.uint8)))
        for a, b in zip(problem.two(True), problem.two(True), strict=True)
    )


def errors(problem):
    """Largest difference from one GPU, of the largest number, by result."""
    from accuracy import to_host

    axes = (-2, -1, -2, -2, -2)
    found = [
        distributed.unshard(x, problem.comm, axis, causal=problem.causal)
        for x, axis in zip(problem.two(True), axes, strict=True)
    ]
    if problem.comm.rank:
        return {}
    names = ("out", "lse", "dq", "dk", "dv")
    pairs = zip(names, found, problem.one(True), strict=True)
    hosts = ((n, *(to_host(x).astype(np.float64) for x in pair)) for n, *pair in pairs)
    return {n: float(abs(a - b).max() / abs(b).max()) for n, a, b in hosts}


def label(tokens, causal):
    """What --only is compared with."""
    return f"{tokens} tokens, causal={causal}"


def rank_of_two(args, end):
    """What each rank does; rank 0 writes the report."""
    with distributed.connect(timeout=120) as comm:
        xp, on_gpu = timing.backend(args)
        if on_gpu:
            xp.cuda.Device(comm.local_rank).use()
        clock = Clock(comm, on_gpu, end)
        report = {"ranks": comm.size, "goal": [], "lengths": [], "left_out": []}

        def write(what):
            print(f"{time.strftime('%X')} {what}", flush=True) if not comm.rank else 0
            if comm.rank == 0:
                timing.save(args.json, "two_gpus", on_gpu, **report)

        def may(what, seconds):
            if clock.left() > seconds:
                return True
            report["left_out"].append(what)
            return False

        tokens = GOAL[on_gpu][2]
        for causal in (False, True):
            if args.only not in label(tokens, causal):
                continue
            problem = Problem(xp, comm, on_gpu, tokens, causal)
            for backward in (False, True):
                row = speed(clock, problem, backward, 5.0, rested=True)
                report["goal"].append(row)
                write(row)
            same = comm.all_gather(b"%d" % same_bits(xp, problem))
            report["goal"][-1]["same_bits"] = set(same) == {b"1"}
            report["goal"][-1]["hidden"] = hidden(clock, problem)
            write(report["goal"][-1])
            del problem
        small = Problem(xp, comm, on_gpu, min(tokens, 16_384), True)
        report["errors"] = errors(small)
        report["allowed"] = ALLOWED[small.dtype]
        write(report["errors"])
        del small
        count = PROBLEMS[on_gpu] if args.problems is None else args.problems
        problems(comm, clock, xp, on_gpu, count, report, write)
        for tokens in args.lengths or LENGTHS[on_gpu]:
            for causal in (True, False):
                # At 600 TFLOP/s: by each GPU and by both; a short turn is timed apart
                # from the first one.
                turn = 8192 * tokens**2 / 6e14 / (1 + causal) if on_gpu else 0
                few = min(turn, 3.0)
                what = label(tokens, causal)
                if args.only not in what or not may(what, 1.5 * (turn + few) + 5):
                    continue
                problem = Problem(xp, comm, on_gpu, tokens, causal)
                row = speed(clock, problem, False, 3.0, compiled=True)
                if may(f"transfers of {what}", 2 * turn + 5):
                    row["hidden"] = hidden(clock, problem)
                report["lengths"].append(row)
                write(row)
                del problem
        write("ranks are done")


def problems(comm, clock, xp, on_gpu, count, report, write):
    """Random problems, as many as there is time for."""
    import fuzz_ranks

    report["problems"] = {"done": 0, "bad": []}
    until = clock.left() / 2
    for seed in range(90_000, 90_000 + count):
        if clock.left() < until:
            report["left_out"].append(f"problems from {seed} on")
            break
        text = fuzz_ranks.solve(comm, seed, few=on_gpu, xp=xp) or ""
        said = filter(None, comm.all_gather(text.encode()))
        report["problems"]["bad"] += [f"{seed}: {x.decode()}" for x in said]
        report["problems"]["done"] += 1
    write(report["problems"])


def by_dask(args, on_gpu):
    """Seconds of softmax and attention by Dask on two workers and on one.

    A compute() costs Dask some 0.1 s, whatever it computes, so the calls are long: the
    heads of a sequence, and one softmax after the other of the same chunks.
    """
    cluster = timing.optional("dask_cuda") if on_gpu else timing.optional("distributed")
    if cluster is None:
        return None
    from distributed import Client

    import cupyflash.dask

    xp = timing.backend(args)[0]
    kind = cluster.LocalCUDACluster if on_gpu else cluster.LocalCluster
    more = {} if on_gpu else {"processes": False}
    sizes = DASK[on_gpu]

    def softmax(x):
        for _ in range(sizes["passes"]):
            x = cupyflash.dask.softmax(x, axis=-1)
        return x.sum()

    def attention(q):
        return cupyflash.dask.attention(q, q, q).sum()

    found = {}
    for workers in (2, 1):
        with (
            kind(
                n_workers=workers,
                threads_per_worker=1,
                dashboard_address=":0",
                **more,
            ) as local,
            Client(local) as client,
        ):
            for call in (attention, softmax):
                x = _random(xp, client, *sizes[call.__name__])
                times = []
                for _ in range(4):  # the first one compiles
                    start = time.perf_counter()
                    call(x).compute()
                    times.append(time.perf_counter() - start)
                    print(f"{workers}: {call.__name__} {times[-1]:.3f} s", flush=True)
                row = found.setdefault(call.__name__, {})
                row[f"seconds_{workers}"] = min(times[1:])
                del x
    for name, row in found.items():
        row["times_one"] = row["seconds_1"] / row["seconds_2"]
        row["chunks"], row["chunk"], row["dtype"] = sizes[name]
    found["softmax"]["passes"] = sizes["passes"]
    return found


def _random(xp, client, count, shape, dtype):
    """A Dask array of random numbers in chunks, equally many on each worker."""
    import dask.array as da

    def made(seed):
        x = xp.empty(shape, dtype)
        rng = xp.random.default_rng(seed)
        for matrix in x:
            matrix[...] = rng.standard_normal(matrix.shape, dtype=np.float32)
        return x

    workers = list(client.scheduler_info()["workers"])
    chunks = [
        client.submit(made, i, workers=[workers[i * len(workers) // count]], pure=False)
        for i in range(count)
    ]
    meta = xp.empty((0,) * len(shape), dtype)
    return da.concatenate(
        [da.from_delayed(x, shape, dtype=dtype, meta=meta) for x in chunks]
    )


def start_ranks(args, end):
    """This script once more for each rank; how long they may take."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        told = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUPYFLASH_END": end,
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:]],
                env={**os.environ, **{n: str(x) for n, x in told.items()}},
            )
        )
    try:
        return [p.wait(max(1.0, end + 30 - time.time())) for p in processes]
    finally:
        for process in processes:
            process.kill()


def main():
    """Start the ranks, or be one."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=270, help="after these no step is begun"
    )
    parser.add_argument("--problems", type=int, help="random ones (default 100)")
    parser.add_argument("--lengths", type=int, nargs="*", help="beside the first one")
    parser.add_argument("--dask", action="store_true", help="only the part by Dask")
    args = parser.parse_args()
    if "CUPYFLASH_END" in os.environ:
        return rank_of_two(args, float(os.environ["CUPYFLASH_END"]))
    _, on_gpu = timing.backend(args)
    if args.dask:
        timing.save(args.json, "two_gpus_dask", on_gpu, dask=by_dask(args, on_gpu))
        return None
    failed = start_ranks(args, time.time() + args.seconds)
    if any(failed):
        return sys.exit(f"ranks ended with {failed}")
    if args.json is not None:
        report = json.loads(args.json.read_text(encoding="utf-8"))
        report["dask"] = by_dask(args, on_gpu)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(report["dask"])
    return None


if __name__ == "__main__":
    main()
