"""Score and mask functions beside the options that do the same, on one row of kernels.

    python benchmarks/bench_functions.py --row mma --json functions.json

Both run in one process, one after the other, on the same arrays. The ratio is that of
the medians, forward and gradients apart.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import rows as support_rows  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import scores  # noqa: E402

CAP, WINDOW = 30.0, 1024


def cases(cupy, heads, n):
    """By name: the option, and the function that does the same."""
    slopes = cupy.asarray(2.0 ** -np.arange(1, heads + 1), "float32")
    seen = cupy.random.default_rng(0).random((n, n)) > 0.1
    return {
        "alibi": (
            {"alibi_slopes": slopes},
            {"score": scores.alibi, "score_arrays": {"slopes": slopes}},
        ),
        "softcap": ({"softcap": CAP}, {"score": scores.softcap(CAP)}),
        "window": ({"window": WINDOW}, {"mask": scores.sliding_window(WINDOW)}),
        "mask": (
            {"mask": seen},
            {"mask": lambda i, j, *, seen: seen[i, j], "mask_arrays": {"seen": seen}},
        ),
    }


def timed(cupy, call, repeats):
    """Milliseconds of one call, by events."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / repeats


def main(argv=None):
    import cupy
    import pytest

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", default="mma")
    parser.add_argument("--gradients-row")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    heads = 16
    rng = cupy.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((1, heads, args.n, args.dim), "float32").astype(args.dtype)
        for _ in range(4)
    )
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        if args.row != "auto":
            support_rows.force(patch, "attention", args.row)
            support_rows.force(patch, "attention_vjp", args.gradients_row or args.row)
        for name, options in cases(cupy, heads, args.n).items():
            calls = {}
            for which, given in zip(("option", "function"), options, strict=True):
                out, lse = cupyflash.attention(q, k, v, return_lse=True, **given)
                calls["forward", which] = lambda given=given: cupyflash.attention(
                    q, k, v, **given
                )
                calls["gradients", which] = lambda given=given, out=out, lse=lse: (
                    cupyflash.attention_vjp(dout, q, k, v, out, lse, **given)
                )
            for call in calls.values():
                call()
            times = {key: [] for key in calls}
            for _ in range(args.rounds):
                for key, call in calls.items():
                    times[key].append(timed(cupy, call, 3))
            medians = {key: statistics.median(x) for key, x in times.items()}
            for what in ("forward", "gradients"):
                option, own = medians[what, "option"], medians[what, "function"]
                found[f"{name} {what}"] = [option, own, own / option]
                print(
                    f"{name:8} {what:9} {option:.3f} ms {own:.3f} ms {own / option:.3f}"
                )
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
