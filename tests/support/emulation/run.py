"""Rows of the tables on the emulation, against the oracle.

    python tests/support/emulation/run.py --arch sm_80 --rows attention/mma_short
    python tests/support/emulation/run.py --arch sm_80 --rows attention/mma --fuzz 30
    python tests/support/emulation/run.py --rows points/mma --fuzz 20 --seed 100
    python tests/support/emulation/run.py --rows attention/hopper --functions both
    python tests/support/emulation/run.py --arch sm_75 --seconds 60     # all rows there

A row of softmax or attention runs the cases of tests/support/rows.py that it takes (or
some: --kinds, --dtypes), and with `--fuzz` so many problems of tests/support/fuzz.py;
with --functions, the calls of tests/support/functions_gpu.py (or some) instead. One of
points runs problems of tests/support/fuzz_points.py, cut to few points. Compiled
kernels are kept in the folder of temporary files.
"""

import argparse
import functools
import sys
import time
import traceback
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1])]

import emulation  # noqa: E402

# Rows of points; "series" is mma with the smooth tiles as series, "tf32" products with
# coordinates of one part.
POINTS = ("mma", "products", "tf32", "direct", "series")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=None, metavar="attention/tiled")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--sms", type=int, default=None, help="multiprocessors")
    parser.add_argument("--kinds", nargs="*", default=None, help="of rows.py")
    parser.add_argument("--dtypes", nargs="*", default=None)
    parser.add_argument("--functions", nargs="*", default=None, metavar="CALL")
    parser.add_argument("--fuzz", type=int, default=0, metavar="PROBLEMS")
    parser.add_argument("--budget", type=int, default=11, help="log2 of scores")
    parser.add_argument("--points", type=int, default=700, help="of a cloud, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    cupy = emulation.install(args.arch, args.sms)
    end = time.monotonic() + args.seconds
    wrong = 0
    for name, check in checks(args, cupy):
        if time.monotonic() > end:
            print("stopped: out of time")
            break
        wrong += not passes(name, check)
    return 1 if wrong else 0


def checks(args, cupy):
    """(name, what to call), with the row that it belongs to forced."""
    import pytest
    import rows

    names = args.rows or [
        *(f"{operation}/{row}" for operation, row in rows.all_rows()),
        *(f"points/{row}" for row in POINTS),
    ]
    for name in names:
        operation, row = name.split("/")
        with pytest.MonkeyPatch.context() as patch:
            if operation == "points":
                yield from of_points(args, cupy, patch, row)
            elif args.functions is not None:
                yield from of_functions(args, operation, row)
            else:
                rows.force(patch, operation, row)
                for told, problem in problems(args, operation, row):
                    yield told, functools.partial(rows.check, cupy, problem)


def problems(args, operation, row):
    """(name, problem) of a row of softmax or attention."""
    import numpy as np
    import planned
    import rows

    for case in rows.cases(operation, row, args.arch):
        if case.kind in (args.kinds or [case.kind]) and case.dtype in (
            args.dtypes or [case.dtype]
        ):
            yield str(case), rows.problem_of(case, np.random.default_rng(0))
    found, seed = 0, args.seed
    while found < args.fuzz and seed < args.seed + 100 * args.fuzz:
        problem = rows.fuzz.draw(operation, seed, budget=args.budget)
        seed += 1
        try:
            planned.plan(problem, row)
        except NotImplementedError:
            continue
        found += 1
        yield problem.reproducer(np), problem


def of_functions(args, operation, row):
    """(name, check) of calls with score and mask functions."""
    import functions_gpu
    import numpy as np

    def check(dtype, name, call):
        errors = functions_gpu.check(operation, row, dtype, name, call)
        assert max(errors) <= 2, errors

    calls = functions_gpu.calls(np.random.default_rng(1))
    for dtype in functions_gpu.DTYPES[operation].get(row, ()):
        if dtype not in (args.dtypes or [dtype]):
            continue
        for name in args.functions or calls:
            yield (
                f"{operation}/{row}/{dtype}/{name}",
                functools.partial(check, dtype, name, calls[name]),
            )


def of_points(args, cupy, patch, row):
    """(name, check) of a row of points, which takes small problems here."""
    from cupyflash._cuda import plan_cache
    from cupyflash._points.gpu import clouds, dispatch, registry
    from tests.support import fuzz_points

    of_row = {"series": "mma", "tf32": "products"}.get(row, row)
    spec = {r.name: r for r in registry.KERNELS}[of_row]
    patch.setattr(registry, "KERNELS", (spec,))
    patch.setattr(dispatch, "_plans", plan_cache.PlanCache())
    patch.setattr(registry, "_FEW_PAIRS", 1)
    patch.setattr(clouds, "_FEW_PAIRS", 1)
    patch.setattr(registry, "_SERIES_PAIRS", 1 if row == "series" else 1 << 60)
    found, seed = 0, args.seed
    most = args.fuzz or 20
    while found < most and seed < args.seed + 100 * most:
        problem = fuzz_points.draw(seed)
        seed += 1
        # The others take less: shapes without NaN of what is left out.
        for name in ("x", "y", "weights", "values"):
            if problem[name] is not None:
                axis = -1 if name == "weights" else -2
                few = [slice(None)] * problem[name].ndim
                few[axis] = slice(args.points)
                problem[name] = problem[name][tuple(few)]
        if _refuses(spec, problem, cupy):
            continue
        if row == "tf32":
            problem["precision"] = "tf32"
        found += 1
        yield (
            f"points/{row} {seed - 1} {fuzz_points.summary(problem)}",
            functools.partial(_within_promise, fuzz_points, problem, cupy),
        )


def _refuses(spec, problem, cupy):
    dim, size = problem["x"].shape[-1], min(problem[n].shape[-2] for n in "xy")
    if spec.name == "direct":
        return False
    if problem["kernel"] != "gaussian" or problem["x"].dtype != "float32":
        return True
    if spec.name == "products":
        return dim < spec.min_dim
    return dim > spec.max_dim or size < 256


def _within_promise(fuzz_points, problem, cupy):
    share = fuzz_points.share_of_promise(problem, cupy)
    assert share <= 1, f"{share} of the promise"


def passes(name, check):
    """Whether a check passes; tells it."""
    from emulation import stand_in

    stand_in.launched.clear()
    begin = time.monotonic()
    try:
        check()
    except NotImplementedError as error:
        print(f"{name}: refused: {str(error).splitlines()[-1]}", flush=True)
        return True
    except Exception as error:
        print(f"{name}: WRONG, {' '.join(stand_in.launched)}")
        told = "".join(traceback.format_exception(error, limit=-3))
        print(told[-4000:], flush=True)
        return False
    seconds = time.monotonic() - begin
    print(f"{name}: {seconds:.1f} s, {' '.join(stand_in.launched)}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
