"""Thousands of random problems on a GPU, drawn so that all kernels are met alike.

    python tests/support/fuzz_gpu.py --problems 5000 --seconds 560 --json fuzz.json
    python tests/support/fuzz_gpu.py --problems 40 --xp numpy       the same without a
    GPU

1. Structures are drawn (tests/support/fuzz.py). Of some candidates the one is kept
whose row
   and kernels, which the package's own plans tell, were met least so far; then problems
   of other lengths and values that take the same kernels.
2. All kernels are compiled, on all cores, into CuPy's cache folder.
3. The problems run in processes side by side. One that ends its process, or hangs, is
   bad, as one with a wrong result is; the others go on.

The same seed draws the same problems on the same kind of card. The exit code is 1 if a
problem was bad. --record writes what was met into tests/record/gpu_record.json.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import os
import sys
import time
import types
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "record")]

# Shares of the problems, and of the kernels that are compiled.
OPERATIONS = {
    "attention": (0.31, 0.22),
    "attention_vjp": (0.33, 0.47),
    "softmax": (0.33, 0.29),
    "merge": (0.03, 0.02),
}
LANES = 8  # that draw, each for itself: the same problems on any number of cores
OF_A_LANE = 100  # problems at least
CANDIDATES = 36
PER_STRUCTURE = 6
SLOW_ROW = 0.3  # of the problems of a fast row, so many for one that is not
GRACE = 15.0  # seconds after the deadline for what runs
STUCK = 90.0  # seconds without a word from a process that runs a problem
_CONTEXT = multiprocessing.get_context("spawn")


# --- drawing -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem to be run: its numbers, and the kernels that it takes."""

    operation: str
    seed: int
    sizes: int
    budget: int
    row: str = ""
    variants: tuple = ()


class Steering:
    """Chooses structures of an operation whose row and kernels were met least."""

    def __init__(self, most_variants):
        self.most_variants = most_variants
        self.rows = Counter()
        self.variants = Counter()
        self.structures = {}  # seed: (its plan, the number of the next sizes)

    def order(self, planned):
        """The smaller, the sooner a structure with this plan is taken."""
        row = planned.rows[-1]
        met = sum(1 / (1 + self.variants[d]) for d in planned.digests)
        fresh = met / max(1, len(planned.digests))
        share = share_of(row)
        return self.rows[row] / share, -share, -fresh

    @property
    def is_full(self):
        """Whether no more kernels are to be compiled."""
        return len(self.variants) >= self.most_variants

    def again(self):
        """(seed, plan) of a structure that was drawn, of a row that was met least."""
        return min(
            ((seed, plan) for seed, (plan, _) in self.structures.items()),
            key=lambda x: (*self.order(x[1]), self.structures[x[0]][1]),
        )

    def note(self, planned):
        self.rows[planned.rows[-1]] += 1
        self.variants.update(planned.digests)


def share_of(row):
    """The share of a row among those of its operation."""
    import rows

    operation, _, name = row.partition("/")
    if name == "empty":
        return SLOW_ROW / 10
    table = {r.name: r for r in rows.tables()[operation]}
    return 1.0 if name not in table or table[name].fast else SLOW_ROW


def draw_structure(operation, first, budget, steering, candidates=CANDIDATES):
    """(seed of the best of some structures, its plan)."""
    import planned
    from fuzz_vjp import fuzz

    found = []
    for seed in range(first, first + candidates):
        problem = fuzz.draw(operation, seed, 0, budget, values=False)
        plan = planned.plan(problem)
        found.append((steering.order(plan), seed, plan))
    _, seed, plan = min(found, key=lambda x: x[:2])
    return seed, plan


def draw_lane(lane, number, seed, budget, most_variants, card=None):
    """The problems of one lane, as Drawn."""
    import planned

    drawn, undealt = [], 1.0
    with planned.device(card):
        for operation, (share, of_variants) in OPERATIONS.items():
            steering = Steering(most_variants * of_variants)
            # Numbers that no other lane draws from, nor another seed.
            first = (seed * LANES + lane) << 24
            # Shares of what is not dealt yet, so that the last takes what is left.
            wanted, made = round((number - len(drawn)) * share / undealt), 0
            undealt -= share
            while made < wanted:
                if steering.is_full:
                    at, base = steering.again()
                else:
                    at, base = draw_structure(operation, first, budget, steering)
                    first += CANDIDATES
                most = min(PER_STRUCTURE, wanted - made)
                found = draw_sizes(operation, at, base, budget, steering, most)
                drawn += found
                made += len(found)
    return drawn


def draw_sizes(operation, seed, base, budget, steering, most):
    """Problems of one structure that take the kernels of its first, or one other."""
    import planned
    from fuzz_vjp import fuzz

    _, first = steering.structures.get(seed, (base, 0))
    drawn = []
    for sizes in range(first, first + 2 * most):
        steering.structures[seed] = base, sizes + 1
        problem = fuzz.draw(operation, seed, sizes, budget, values=False)
        plan = planned.plan(problem)
        others = {*plan.digests} - {*base.digests} - steering.variants.keys()
        if plan.rows == base.rows and len(others) <= 1:
            steering.note(plan)
            row, variants = plan.rows[-1], plan.variants
            drawn.append(Drawn(operation, seed, sizes, budget, row, variants))
            if len(drawn) == most:
                break
    if not drawn and len(steering.structures) > 1:  # lengths decide its kernels
        del steering.structures[seed]
    return drawn


def draw_all(number, seed, budget, most_variants, jobs, card=None):
    """All problems, lane by lane, for a card or the made-up one."""
    lanes = max(1, min(LANES, number // OF_A_LANE))
    work = [
        (
            lane,
            number * (lane + 1) // lanes - number * lane // lanes,
            seed,
            budget,
            most_variants // lanes,
            card,
        )
        for lane in range(lanes)
    ]
    with ProcessPoolExecutor(jobs, _CONTEXT) as pool:
        found = list(pool.map(draw_lane, *zip(*work, strict=True)))
    return [problem for of_lane in found for problem in of_lane]


# --- running -------------------------------------------------------------------------


def _work(pipe, xp_name, number):
    """Compile kernels and run problems; the process takes the cards in turn."""
    import workers
    from fuzz_vjp import fuzz

    if cards := os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.environ["CUDA_VISIBLE_DEVICES"] = workers.cards_of(f"gw{number}", cards)
    xp = __import__(xp_name)
    if xp_name == "cupy":
        from cupyflash._cuda import compiler

        workers.compile_once(f"fuzz-{os.getppid()}")
        xp.cuda.Device(0).use()
    while True:
        task = pipe.recv()
        if task is None:
            return
        try:
            if isinstance(task, Drawn):
                asked = task.operation, task.seed, task.sizes, task.budget
                fuzz.run(xp, fuzz.draw(*asked))
            else:
                compiler.get_kernel(task, 0)
            pipe.send(None)
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}"[:4000])
            causes = (error, error.__cause__)
            if any("CUDA" in type(cause).__name__ for cause in causes):
                os._exit(1)  # the context may be lost, and nothing can be freed


class Worker:
    """A process, and what it is at."""

    def __init__(self, xp_name, number):
        self.pipe, theirs = _CONTEXT.Pipe()
        self.number = number
        self.process = _CONTEXT.Process(target=_work, args=(theirs, xp_name, number))
        self.process.start()
        theirs.close()
        self.task = None
        self.since = time.monotonic()

    def give(self, task):
        self.task, self.since = task, time.monotonic()
        with contextlib.suppress(OSError):  # one that is gone is found out later
            self.pipe.send(task)

    def take(self):
        """(the task that ended, None or what was wrong, whether the process lives)."""
        task, self.task = self.task, None
        try:
            return task, self.pipe.recv(), self.process.is_alive()
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode
            return task, f"the process ended with exit code {code}", False

    def stop(self):
        """End the process, which may hang."""
        if self.task is None and self.process.is_alive():
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def run_all(tasks, xp_name, jobs, deadline, stuck=STUCK):
    """Yield (task, None or what was wrong); what is left at the deadline is not."""
    left = deque(tasks)
    crew = [Worker(xp_name, number) for number in range(min(jobs, len(left)))]
    try:
        while crew:
            for worker in crew:
                if worker.task is None and left and time.monotonic() < deadline:
                    worker.give(left.popleft())
            busy = [worker for worker in crew if worker.task is not None]
            if not busy or time.monotonic() > deadline + GRACE:
                return
            ready = connection.wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                if worker.pipe in ready:
                    task, said, lives = worker.take()
                elif time.monotonic() - worker.since > stuck:
                    task, said, lives = worker.task, f"no end after {stuck:g} s", False
                else:
                    continue
                yield task, said
                if not lives or (said and "CUDA" in said):
                    worker.stop()
                    crew.remove(worker)
                    if left and time.monotonic() < deadline:
                        crew.append(Worker(xp_name, worker.number))
    finally:
        for worker in crew:
            worker.stop()


def reproducer(drawn, xp_name):
    """The line that runs a problem again."""
    from fuzz_vjp import fuzz

    problem = fuzz.Problem(drawn.operation, drawn.seed, drawn.sizes, "", {}, {}, {})
    problem.budget = drawn.budget
    return problem.reproducer(types.SimpleNamespace(__name__=xp_name))


def fuzz_gpu(options):
    """Draw, compile and run; what came of it, as it is written."""
    import planned
    import workers

    started = time.monotonic()
    end = started + options.seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of NumPy in each process
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    card = None
    if options.xp == "cupy":
        from cupyflash._cuda import runtime

        card = runtime.device(0)
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", workers.all_cards())
    drawn = draw_all(
        options.problems,
        options.seed,
        options.budget,
        options.variants,
        options.jobs,
        card,
    )
    seconds = {"drawing": round(time.monotonic() - started, 1)}
    kernels = Counter(v for problem in drawn for v in problem.variants)
    bad, ready = [], set(kernels)
    if options.xp == "cupy":
        at, ready = time.monotonic(), set()
        # What many problems wait for comes first.
        ordered = [variant for variant, _ in kernels.most_common()]
        compiled_by = at + (end - at) * 0.7
        for variant, said in run_all(ordered, "cupy", options.jobs, compiled_by, 300):
            if said is None:
                ready.add(variant)
            else:
                bad.append({"line": f"compile {variant}", "error": said})
        seconds["compiling"] = round(time.monotonic() - at, 1)
    at = time.monotonic()
    tasks = [problem for problem in drawn if ready.issuperset(problem.variants)]
    # By turns of the structures, so that a run that is cut short has met all of them.
    tasks.sort(key=lambda problem: problem.sizes)
    rows, variants, passed = Counter(), Counter(), 0
    for problem, said in run_all(tasks, options.xp, options.jobs, end):
        if said is None:
            passed += 1
            rows[problem.row] += 1
            variants.update(planned.digest_of(v) for v in {*problem.variants})
        else:
            line = reproducer(problem, options.xp)
            bad.append({"line": line, "row": problem.row, "error": said})
            print(f"BAD {problem.row}: {line}\n{said[:1500]}", flush=True)
    seconds["running"] = round(time.monotonic() - at, 1)
    return {
        "date": datetime.date.today().isoformat(),
        "seed": options.seed,
        "budget": options.budget,
        "problems": len(drawn),
        "passed": passed,
        "not_run": len(drawn) - passed - sum("row" in x for x in bad),
        "bad": bad,
        "kernels": len(kernels),
        "seconds": seconds,
        "rows": dict(sorted(rows.items())),
        "variants": dict(sorted(variants.items())),
    }


def summary(found):
    """A few lines on a run."""
    times = ", ".join(f"{name} {s:.0f} s" for name, s in found["seconds"].items())
    lines = [
        f"{found['problems']} problems of seed {found['seed']}, {found['kernels']} "
        f"kernels: {found['passed']} passed, {len(found['bad'])} bad, "
        f"{found['not_run']} not run ({times})"
    ]
    lines += [f"  {row:28} {number:5}" for row, number in found["rows"].items()]
    return "\n".join(lines)


def main():
    """Parse the command line; return the exit code."""
    from cupyflash._core import threads

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) // 60, help="default: the minute"
    )
    parser.add_argument("--budget", type=int, default=20, help="log2 of most scores")
    parser.add_argument("--variants", type=int, default=1500, help="kernels, about")
    parser.add_argument("--jobs", type=int, default=threads.num_cores())
    parser.add_argument("--xp", choices=("cupy", "numpy"), default="cupy")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--record", action="store_true", help="and into the record")
    options = parser.parse_args()
    found = fuzz_gpu(options)
    print(summary(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.record:
        import gpu_record

        gpu_record.put_fuzz(gpu_record.RECORD, found)
    return int(bool(found["bad"]))


if __name__ == "__main__":
    sys.exit(main())
