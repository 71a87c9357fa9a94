"""Score and mask functions on a GPU beside the NumPy path, row by row.

    python tests/support/functions_gpu.py --rows tiled online --json found.json

Each row of kernels is forced in turn, with the functions of a few calls that together
have all variables, arrays of several dtypes and strides, offsets, lengths, groups of
heads and splits of the keys. The exit code is 1 if a result is bad.
"""

import argparse
import contextlib
import json
import sys
import time
import traceback
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import accuracy  # noqa: E402
import rows as support_rows  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import scores  # noqa: E402

CAP = 3.0
# What each row takes, and the rows of gradients.
DTYPES = {
    "attention": {
        "naive": ("float16", "float32", "float64"),
        "safe": ("bfloat16", "float32", "float64"),
        "online": ("float16", "float32", "float64"),
        "tiled": ("bfloat16", "float32", "float64"),
        "mma": ("float16", "bfloat16", "float32", "tf32"),
        "short_f64": ("float64",),
        "tiled_f64": ("float64",),
        "hopper": ("float16", "bfloat16"),
        "hopper_wide": ("float16", "bfloat16"),
    },
    "attention_vjp": {
        "tiled": ("float16", "float32", "float64"),
        "mma": ("float16", "bfloat16"),
        "mma_split": ("float32",),
        "short_f64": ("float64",),
        "sections_f64": ("float64",),
        "tiled_f64": ("float64",),
        "hopper": ("float16", "bfloat16"),
        "hopper_wide": ("float16", "bfloat16"),
    },
}


def bent(s, b, h, i, j, *, slope, table, gain, kind):
    """All variables, arrays of two axes, one and none, and a branch."""
    near = np.clip(i - j, -8, 8) + 8
    bend = np.where(i >= j, gain * np.sin(s), s) - slope[h] * abs(i - j)
    return bend + table[b, near] + 0.1 * (kind[j] == kind[i % 8])


def within(b, h, i, j, *, document):
    """A mask by arrays and by positions."""
    return (document[b, j] <= 1 + h) & (abs(i - j) < 90) & (j % 5 != 3)


def calls(rng):
    """By name: (batch, heads, key heads, queries, keys, dim, dim of v, options)."""
    slope = rng.uniform(0.01, 0.1, 8)[::2].astype("float32")  # strides of its own
    named = {
        "slope": slope,
        "table": rng.normal(size=(17, 2)).T,
        "gain": np.array(1.5, "float32"),
        "kind": rng.integers(0, 3, 700).astype("int8"),
    }
    mask = {"document": np.sort(rng.integers(0, 4, (2, 700)), axis=1)}
    shape = (2, 4, 2, 150, 700, 64, 64)
    both = {"score": bent, "score_arrays": named, "mask": within, "mask_arrays": mask}
    window = {"mask": scores.sliding_window(60)}
    lengths = {
        "query_lengths": np.array([150, 77]),
        "key_lengths": np.array([700, 300]),
    }
    return {
        "alibi": (*shape, {"score": scores.alibi, "score_arrays": {"slopes": slope}}),
        "both": (*shape, both),
        "causal": (*shape, {**both, "causal": True, "softcap": CAP}),
        "lengths": (*shape, {**both, **lengths}),
        "sinks": (*shape, {**window, "sinks": rng.normal(size=4), "query_offset": 9}),
        "bias": (*shape, {**both, "bias": rng.normal(size=(4, 1, 700))}),
        "decode": (2, 4, 1, 1, 5000, 64, 64, {
            "score": lambda s, h, j: s - 0.01 * h * (j % 7),
            "mask": lambda j: j % 3 > 0,
        }),
        "few": (1, 2, 2, 9, 3000, 64, 64, {
            "score": lambda s, i, j, cap=CAP: cap * np.tanh(s / cap) - (i - j) / 900,
            "mask": scores.sliding_window(2000),
        }),
        "odd": (1, 3, 1, 65, 130, 40, 24, {
            "mask": scores.dilated_window(40, 3), "score": scores.softcap(2.0),
        }),
        "square": (1, 4, 2, 300, 260, 64, 64, {
            "score": lambda s, i, j: s * np.cos(s) - 0.01 * abs(i - j),
            "mask": scores.sliding_window(90),
        }),
        "few keys": (2, 4, 2, 150, 20, 64, 64, both),
        "wide": (2, 4, 2, 150, 170, 136, 136, both),
        "nothing seen": (1, 2, 2, 70, 90, 32, 32, {"mask": lambda i, j: i > j + 60}),
        "hidden by the score": (1, 2, 2, 70, 200, 64, 64, {
            "score": lambda s, i, j: np.where(
                j <= i, np.log(abs(i - j) + s * s), -np.inf
            ),
        }),
    }  # fmt: skip


def operands(rng, call, dtype):
    """q, k, v of a call in a dtype, "tf32" being float32."""
    *batch, heads, kv_heads, num_q, num_k, dim, dim_v = call[:-1]
    shapes = (
        (*batch, heads, num_q, dim),
        (*batch, kv_heads, num_k, dim),
        (*batch, kv_heads, num_k, dim_v),
    )
    made = accuracy.dtype_of("float32" if dtype == "tf32" else dtype)
    return [rng.normal(size=shape).astype(made) for shape in shapes]


def on(xp, options):
    """The options with all arrays as those of `xp`."""

    def moved(x):
        if isinstance(x, dict):
            return {name: moved(y) for name, y in x.items()}
        if not isinstance(x, np.ndarray) or xp is np:
            return x
        copy = xp.asarray(x.copy())
        is_turned = x.ndim > 1 and not x.flags.c_contiguous
        return xp.asfortranarray(copy) if is_turned else copy

    return {name: moved(x) for name, x in options.items()}


def run(xp, q, k, v, options, need_grads, more=None):
    """(out, lse) or (out, lse, dq, dk, dv, ...) on the host."""
    options = on(xp, options) | (more or {})
    q, k, v = (xp.asarray(x) for x in (q, k, v))
    method = options.pop("method", "auto")
    out, lse = cupyflash.attention(q, k, v, return_lse=True, method=method, **options)
    if not need_grads:
        return [accuracy.to_host(x) for x in (out, lse)]
    dout = xp.asarray(np.random.default_rng(5).normal(size=out.shape).astype(q.dtype))
    need = {}
    if "bias" in options:
        need["need_dbias"] = True
    if "sinks" in options:
        need["need_dsinks"] = True
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **options, **need)
    found = [x for x in grads[:5] if x is not None]
    return [accuracy.to_host(x) for x in (out, lse, *found)]


# What is granted beside twice the error of NumPy; that of float64 is not known.
UNITS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2.4e-7, "tf32": 2e-3,
         "float64": 2e-15}  # fmt: skip


def worst(actual, exact, standard, dtype):
    """Errors beside that of NumPy in the same dtype; bad where above 4 times."""
    found = []
    for got, truth, plain in zip(actual, exact, standard, strict=True):
        got, truth, plain = (accuracy.wide(x, np.float64) for x in (got, truth, plain))
        if not np.array_equal(np.isinf(got) & (got < 0), np.isinf(truth) & (truth < 0)):
            return [float("inf")]
        if not np.isfinite(np.where(np.isneginf(truth), 0, truth)).all():
            return [float("nan")]
        size = np.abs(np.where(np.isfinite(truth), truth, 0)).max(initial=0)
        unit = UNITS[dtype]
        finite = np.isfinite(truth)
        error = np.abs(got[finite] - truth[finite]).max(initial=0)
        floor = np.abs(plain[finite] - truth[finite]).max(initial=0)
        found.append(float(error / (2 * floor + 2 * unit * size + 1e-300)))
    return found


@contextlib.contextmanager
def forced(operation, name):
    """One row alone, for every method."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            support_rows.force(patch, operation, name)
        yield


def check(operation, row, dtype, name, call):
    """What a call gives on a GPU, beside NumPy."""
    import cupy

    rng = np.random.default_rng(7)
    q, k, v = operands(rng, call, dtype)
    options = call[-1]
    grads = operation == "attention_vjp"
    more = {"precision": "tf32"} if dtype == "tf32" else {}
    with forced(operation, row):
        if operation == "attention":
            method = support_rows.row_of("attention", row).methods[0]
            actual = run(cupy, q, k, v, {**options, "method": method}, False, more)
        else:
            actual = run(cupy, q, k, v, options, True, more)
    wide = [accuracy.wide(x, np.float64) for x in (q, k, v)]
    exact = run(np, *wide, options, grads)
    standard = run(np, q, k, v, options, grads)
    return worst(actual, exact, standard, dtype)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--operations", nargs="*", default=list(DTYPES))
    parser.add_argument("--calls", nargs="*")
    parser.add_argument("--dtypes", nargs="*")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    found, bad = {}, 0
    for operation in args.operations:
        for row, dtypes in DTYPES[operation].items():
            if args.rows and row not in args.rows:
                continue
            for dtype in [x for x in dtypes if x in (args.dtypes or dtypes)]:
                for name, call in calls(np.random.default_rng(1)).items():
                    if args.calls and name not in args.calls:
                        continue
                    start = time.perf_counter()
                    key = f"{operation}/{row}/{dtype}/{name}"
                    try:
                        errors = check(operation, row, dtype, name, call)
                        is_bad = not max(errors) <= 2
                    except NotImplementedError as error:
                        found[key] = str(error).splitlines()[-1]
                        print(f"  -   {key}: {found[key]}", flush=True)
                        continue
                    except Exception as error:
                        traceback.print_exc()
                        errors, is_bad = repr(error)[:300], True
                    bad += is_bad
                    found[key] = errors
                    took = f"{time.perf_counter() - start:.1f} s"
                    word = "BAD " if is_bad else "good"
                    print(word, key, errors, took, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    print(f"{len(found)} calls, {bad} bad")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main()))
