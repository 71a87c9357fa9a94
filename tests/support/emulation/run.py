"""Rows of the tables on the emulation, against the oracle.

    python tests/support/emulation/run.py --arch sm_80 --rows attention/mma_short
    python tests/support/emulation/run.py --arch sm_75 --seconds 60     # all rows there
    python tests/support/emulation/run.py --rows attention/tiled --fuzz 30 --seed 4

A row runs the cases of tests/support/rows.py that it takes; with `--fuzz` so many
problems of tests/support/fuzz.py, too. Compiled kernels are kept in the folder of
temporary files.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1])]

import emulation  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=None, metavar="attention/tiled")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--sms", type=int, default=None, help="multiprocessors")
    parser.add_argument("--kinds", nargs="*", default=None, help="of rows.py")
    parser.add_argument("--dtypes", nargs="*", default=None)
    parser.add_argument("--fuzz", type=int, default=0, metavar="PROBLEMS")
    parser.add_argument("--budget", type=int, default=11, help="log2 of scores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    cupy = emulation.install(args.arch, args.sms)
    end = time.monotonic() + args.seconds
    wrong = 0
    for name, problem in problems(args):
        if time.monotonic() > end:
            print("stopped: out of time")
            break
        wrong += not tried(cupy, name, problem)
    return 1 if wrong else 0


def problems(args):
    """(name, problem), with the row that it belongs to forced."""
    import numpy as np
    import pytest
    import rows

    names = args.rows or [f"{operation}/{row}" for operation, row in rows.all_rows()]
    for name in names:
        operation, row = name.split("/")
        with pytest.MonkeyPatch.context() as patch:
            rows.force(patch, operation, row)
            for case in rows.cases(operation, row, args.arch):
                if args.kinds and case.kind not in args.kinds:
                    continue
                if args.dtypes and case.dtype not in args.dtypes:
                    continue
                yield str(case), rows.problem_of(case, np.random.default_rng(0))
            found = 0
            for seed in range(args.seed, args.seed + 50 * args.fuzz):
                if found == args.fuzz:
                    break
                problem = rows.fuzz.draw(operation, seed, budget=args.budget)
                if is_taken(name, problem):
                    found += 1
                    yield f"{name} {problem.reproducer(np)}", problem


def is_taken(name, problem):
    import planned

    try:
        return name in planned.plan(problem).rows
    except NotImplementedError:
        return False


def tried(cupy, name, problem):
    """Whether a problem came out right; tells it."""
    import rows

    from emulation import stand_in

    stand_in.launched.clear()
    begin = time.monotonic()
    try:
        rows.check(cupy, problem)
    except NotImplementedError as error:
        print(f"{name}: refused: {str(error).splitlines()[-1]}", flush=True)
        return True
    except Exception:
        print(f"{name}: WRONG\n{problem}")
        traceback.print_exc(limit=-3)
        return False
    seconds = time.monotonic() - begin
    print(f"{name}: {seconds:.1f} s, {' '.join(stand_in.launched)}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
