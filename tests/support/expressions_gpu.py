"""Random score and mask functions on a GPU, beside the same call on NumPy.

    python tests/support/expressions_gpu.py --count 500 --json expressions.json
    python tests/support/expressions_gpu.py --count 20 --xp numpy      without a GPU

Functions are grown from the grammar (expressions.py). q and k hold small integers and
the scale is a power of two, so that scores are the same numbers in both, and a floor or
a comparison of them cuts at the same place. The exit code is 1 if a result is bad.
"""

import argparse
import json
import multiprocessing
import random
import sys
import traceback
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import expressions  # noqa: E402
import functions_gpu  # noqa: E402

import cupyflash  # noqa: E402

# Rows of kernels by turns: the forward's, and that of gradients, or None.
ROWS = (("online", None), ("tiled", "tiled"), ("tiled_f64", "tiled_f64"))
SCALE = 0.25
# Of the largest number of a result. A function may amplify roundings of its steps.
TOLERANCE = 1e-9


def problem(seed):
    """(q, k, v, dout, options): float64, 2 batch entries, 4 heads."""
    r, rng = random.Random(seed), np.random.default_rng(seed)
    num_q, num_k = r.choice([(20, 33), (65, 40), (7, 70)])
    q = rng.integers(-2, 3, (2, 4, num_q, 32)).astype(float)
    k = rng.integers(-2, 3, (2, 2, num_k, 32)).astype(float)
    v = rng.normal(size=(2, 2, num_k, 32))
    score = expressions.function(expressions.Grammar(r.choice).number(seed % 4 + 1))
    grammar = expressions.Grammar(r.choice, positions=True)
    mask = expressions.function(grammar.boolean(seed % 4), "i, j")
    named = expressions.arrays()
    options = {"scale": SCALE, "query_offset": r.choice([0, 5])}
    if seed % 5:
        options |= {"score": score, "score_arrays": named}
    if seed % 5 < 3:
        options["mask"] = mask
    return q, k, v, rng.normal(size=(2, 4, num_q, 32)), options


def results(xp, arrays, options, has_gradients):
    """out, lse and the gradients on the host."""
    q, k, v, dout = (xp.asarray(x) for x in arrays)
    given = functions_gpu.on(xp, options)
    with np.errstate(all="ignore"):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **given)
        found = [out, lse]
        if has_gradients:
            grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **given)
            found += grads[:3]
    return [functions_gpu.accuracy.to_host(x) for x in found]


def check(seed, xp_name):
    """What is wrong with a random call, or nothing."""
    xp = __import__(xp_name)
    *arrays, options = problem(seed)
    forward, gradients = ROWS[seed % len(ROWS)]
    is_gpu = xp_name == "cupy"
    try:
        exact = results(np, arrays, options, gradients is not None)
    except IndexError:  # which a GPU does not raise
        return ""
    with (
        functions_gpu.forced("attention", forward if is_gpu else None),
        functions_gpu.forced("attention_vjp", gradients if is_gpu else None),
    ):
        actual = results(xp, arrays, options, gradients is not None)
    for name, got, truth in zip(("out", "lse", "dq", "dk", "dv"), actual, exact,
                                strict=False):  # fmt: skip
        finite = np.isfinite(truth)
        if not np.array_equal(np.isnan(got), np.isnan(truth)):
            return f"{name}: NaN elsewhere"
        size = np.abs(truth[finite]).max(initial=0) + 1e-30
        error = np.abs(got[finite] - truth[finite]).max(initial=0) / size
        if not error <= TOLERANCE:
            return f"{name}: {error:.2e}"
    return ""


def _checked(arguments):
    try:
        return arguments[0], check(*arguments)
    except Exception:
        return arguments[0], traceback.format_exc(limit=-3)


def main(argv=None):
    """Run; the number of bad functions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--xp", default="cupy")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    seeds = [(seed, args.xp) for seed in range(args.first, args.first + args.count)]
    bad = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes) as pool:
        for seed, wrong in pool.imap_unordered(_checked, seeds, chunksize=4):
            if wrong:
                bad[seed] = wrong
                print(seed, wrong, flush=True)
    print(f"{args.count} functions, {len(bad)} bad")
    if args.json:
        Path(args.json).write_text(json.dumps({"count": args.count, "bad": bad}))
    return len(bad)


if __name__ == "__main__":
    sys.exit(bool(main()))
