"""Random problems of points, any back end, beside float64 sums of the same inputs.

    python -m tests.support.fuzz_points --problems 1000 --seed 0 --xp cupy

Sizes, dimensions, bandwidths, offsets, weights, values, batches and kernels are drawn
together; what is checked is what is promised, of some rows and the row that has the
largest result, by which sums are measured. The seed of each bad problem is printed.

Log-sums of float64 may be off by 1e-13 of their size. Sums may cancel to any size, and
their terms are rounded before they do: they are measured by the largest of all, but by
no less than a fifth of the root of the sum of the squares of a row's terms. So are
means on a GPU, whose terms are the values times their weights, which sum to 1.
"""

import argparse
import json
import math
import sys
import time

import numpy as np

from cupyflash import points
from tests.support import pairs

REDUCTIONS = ("logsumexp", "kernel_sum", "mean")
MOST_PAIRS = 1 << 26
ROWS = 96  # of a result that are compared


def draw(seed):
    """A problem as NumPy arrays and options."""
    rng = np.random.default_rng(seed)
    reduction = REDUCTIONS[rng.integers(3)]
    kernels = list(pairs.KERNELS if reduction == "kernel_sum" else pairs.POSITIVE)
    kernel = "gaussian" if rng.random() < 0.5 else kernels[rng.integers(len(kernels))]
    dtype = np.dtype("float32" if rng.random() < 0.75 else "float64")
    # Each dimension has kernels of its own, which have to be compiled.
    dims = [1, 2, 3, 3, 3, 5, 8, 20, 64] if kernel == "gaussian" else [3, 20]
    dim = int(rng.choice(dims))
    num_x, num_y = (int(2 ** rng.uniform(0, 14.5)) for _ in range(2))
    if rng.random() < 0.1:
        num_x = int(2 ** rng.uniform(14, 17))
    num_y = max(1, min(num_y, MOST_PAIRS // num_x // max(1, dim // 8)))
    batch = (int(rng.integers(1, 4)),) if rng.random() < 0.2 and num_x < 4096 else ()
    bandwidth = float(10 ** rng.uniform(-2.5, 1))
    if rng.random() < 0.15 and dim in (3, 20):
        bandwidth = tuple((bandwidth * 2 ** rng.uniform(-1, 1, dim)).tolist())
    offset = float(rng.choice([0, 0, 1e3, 1e6])) * np.asarray(bandwidth)
    x = _cloud(rng, (*batch, num_x, dim))
    y = _cloud(rng, (*batch, num_y, dim))
    if rng.random() < 0.3:  # points of y stand among those of x
        n = min(num_x, num_y) // 2
        y[..., :n, :] = x[..., :n, :]
    if rng.random() < 0.1:
        y = y + rng.uniform(0, 20) * np.asarray(bandwidth)
    weights = None
    if reduction != "kernel_sum" and rng.random() < 0.7:
        weights = rng.standard_normal((*batch, num_y)) * rng.choice([1, 1, 10, 300])
        if rng.random() < 0.3:
            weights[rng.random(weights.shape) < rng.random()] = -np.inf
    columns = int(rng.choice([1, 1, 3, 4, 9]))
    values = rng.standard_normal((*batch, num_y, columns)) * 10 ** rng.uniform(-6, 6)
    if rng.random() < 0.3:
        values = np.abs(values)
    return {
        "reduction": reduction,
        "x": (x + offset).astype(dtype),
        "y": (y + offset).astype(dtype),
        "weights": None if weights is None else weights.astype(dtype),
        "values": None if reduction == "logsumexp" else values.astype(dtype),
        "kernel": kernel,
        "bandwidth": bandwidth,
    }


def _cloud(rng, shape):
    """Uniform, normal, in clusters, on a line, or few points many times."""
    kind = rng.integers(5)
    if kind == 0:
        return rng.random(shape)
    if kind == 1:
        return rng.standard_normal(shape)
    if kind == 2:
        middles = 5 * rng.random((20, shape[-1]))
        which = rng.integers(20, size=shape[:-1])
        return middles[which] + 0.02 * rng.standard_normal(shape)
    if kind == 3:
        return rng.random((*shape[:-1], 1)) * rng.standard_normal(shape[-1])
    few = rng.random((max(1, shape[-2] // 50), shape[-1]))
    return few[rng.integers(len(few), size=shape[:-1])]


def exact(problem, rows, xp):
    """(the result of some rows, what sums are measured by at least), in float64.

    With NumPy in long double, which float64 needs.
    """
    wide = np.longdouble if xp is np else np.float64
    reduction, kernel = problem["reduction"], problem["kernel"]
    x, y = (xp.asarray(problem[name]).astype(wide) for name in "xy")
    x = x[..., rows, :]
    widths = np.broadcast_to(np.asarray(problem["bandwidth"], np.float64), y.shape[-1])
    d2 = xp.zeros((*x.shape[:-1], y.shape[-2]), wide)
    for axis, width in enumerate(widths.tolist()):
        gap = (x[..., :, None, axis] - y[..., None, :, axis]) / width
        d2 += gap * gap
    distance = xp.sqrt(d2)
    values = problem["values"]
    values = None if values is None else xp.asarray(values).astype(wide)
    if reduction == "kernel_sum":
        kernels = pairs.KERNELS[kernel](distance)
        squares = (kernels * kernels) @ (values * values)
        return kernels @ values, 0.2 * float(xp.sqrt(squares.max()))
    scores = pairs.LOGS[kernel](distance)
    if problem["weights"] is not None:
        scores += xp.asarray(problem["weights"]).astype(wide)[..., None, :]
    largest = scores.max(axis=-1, keepdims=True)
    largest = xp.where(xp.isfinite(largest), largest, 0.0)
    weights = xp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if reduction == "mean":
        total = xp.where(total == 0, 1.0, total)
        squares = (weights * weights) @ (values * values) / (total * total)
        return weights @ values / total, 0.2 * float(xp.sqrt(squares.max()))
    with np.errstate(divide="ignore"):
        return (largest + xp.log(total))[..., 0], 0.0


def run(problem, xp):
    """The whole result."""
    x, y = xp.asarray(problem["x"]), xp.asarray(problem["y"])
    options = {"kernel": problem["kernel"], "bandwidth": problem["bandwidth"]}
    options["precision"] = problem.get("precision", "float32")
    weights, values = (
        None if problem[name] is None else xp.asarray(problem[name])
        for name in ("weights", "values")
    )
    if problem["reduction"] == "kernel_sum":
        return points.kernel_sum(x, y, values, **options)
    if problem["reduction"] == "mean":
        return points.mean(x, y, values, weights, **options)
    return points.logsumexp(x, y, weights, **options)


def tf32_allowance(problem, rows):
    """What rounding coordinates to 11 bits may change of some rows, and what of it.

    The logarithm of a kernel changes by up to e d + e^2 / 2, e being 2^-11 times both
    distances from midway between the means of the clouds. Rows of x further from there
    than 19 bandwidths are computed as in float32.
    """
    x, y = (problem[name].astype(np.float64) for name in "xy")
    middle = 0.5 * (x.mean(-2, keepdims=True) + y.mean(-2, keepdims=True))
    width = np.asarray(problem["bandwidth"], np.float64)
    x, y = (x[..., rows, :] - middle) / width, (y - middle) / width
    x2, y2 = (x * x).sum(-1)[..., None], (y * y).sum(-1)[..., None, :]
    d2 = np.maximum(x2 + y2 - 2 * x @ np.swapaxes(y, -1, -2), 0)
    e = 2.0**-11 * (np.sqrt(x2) + np.sqrt(y2))
    change = np.minimum(e * np.sqrt(d2) + e * e / 2, 300)
    change = np.where(x2 > 19**2, 0.0, change)
    weights, values = problem["weights"], problem["values"]
    scores = -d2 / 2
    if problem["reduction"] == "kernel_sum":
        return (np.exp(scores) * np.expm1(change)) @ np.abs(values)
    if weights is not None:
        scores = scores + weights[..., None, :]
    top = scores.max(axis=-1, keepdims=True)
    kernels = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = np.maximum(kernels.sum(-1), 1e-300)
    if problem["reduction"] == "logsumexp":
        more = (kernels * np.expm1(change)).sum(-1) / total
        less = (kernels * -np.expm1(-change)).sum(-1) / total
        return np.maximum(np.log1p(more), -np.log1p(-np.minimum(less, 1 - 1e-9)))
    least = np.maximum((kernels * np.exp(-change)).sum(-1), 1e-300)[..., None]
    moved, mean = kernels * np.expm1(change), kernels @ values / total[..., None]
    # Of |v - mean|, by columns.
    gaps = [
        (moved * np.abs(values[..., None, :, c] - mean[..., :, None, c])).sum(-1)
        for c in range(values.shape[-1])
    ]
    return np.stack(gaps, -1) / least


def share_of_promise(problem, xp):
    """The largest error over what is promised; infinite where finiteness differs."""
    num_x = problem["x"].shape[-2]
    is_wide = problem["x"].dtype == np.float64
    most = ROWS // 4 if is_wide else ROWS
    rows = np.unique(np.linspace(0, num_x - 1, min(num_x, most)).astype(int))
    is_lse = problem["reduction"] == "logsumexp"
    found = run(problem, xp)
    if not is_lse:
        rows = np.union1d(rows, _row_of_largest(found))
    found = found[..., rows] if is_lse else found[..., rows, :]
    dtype = found.dtype
    want, least = exact(problem, rows, np if is_wide else xp)
    if xp is np and problem["reduction"] == "mean":
        least = 0.0  # weights are float64 there, whatever the dtype
    found, want = (
        np.asarray(a.get() if hasattr(a, "get") else a) for a in (found, want)
    )
    finite = np.isfinite(want)
    if not (np.isfinite(found) == finite).all():
        return math.inf
    if not finite.any():
        return 0.0
    error = np.abs(found[finite].astype(np.float64) - want[finite].astype(np.float64))
    if problem.get("precision") == "tf32":
        allowed = np.broadcast_to(tf32_allowance(problem, rows), want.shape)[finite]
        error = np.maximum(error - 1.001 * allowed, 0)
    promise = pairs.PROMISED[dtype.name]
    if is_lse:
        ulp = np.spacing(np.abs(want[finite]).astype(dtype)).astype(np.float64)
        own = promise * np.abs(want[finite]) if is_wide else 0.0
        return float((error / (promise + own + 2 * ulp)).max())
    largest = max(float(np.abs(want[finite]).max()), least)
    # Sums below the smallest normal numbers have fewer digits.
    floor = 2 * float(np.finfo(dtype).tiny)
    return float(error.max() / max(promise * largest, floor, 1e-300))


def _row_of_largest(found):
    """The row of the largest sum; of one that is not finite, if there is any."""
    sizes = np.abs(np.asarray(found.get() if hasattr(found, "get") else found))
    sizes = np.where(np.isfinite(sizes), sizes, np.inf).max(axis=-1)
    return np.unravel_index(sizes.argmax(), sizes.shape)[-1]


def summary(problem):
    """A problem in a line."""
    shapes = {
        name: None if problem[name] is None else problem[name].shape
        for name in ("x", "y", "weights", "values")
    }
    names = ("reduction", "kernel", "bandwidth")
    options = {name: problem[name] for name in names}
    if "precision" in problem:
        options["precision"] = problem["precision"]
    return f"{problem['x'].dtype} {options} {shapes}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--xp", default="cupy")
    parser.add_argument("--json")
    args = parser.parse_args()
    xp = np if args.xp == "numpy" else __import__(args.xp)
    start, bad, worst, n = time.perf_counter(), [], 0.0, 0
    for n in range(args.problems):
        if time.perf_counter() - start > args.seconds:
            break
        problem = draw(args.seed + n)
        share = share_of_promise(problem, xp)
        if not share <= 1:
            bad.append({"seed": args.seed + n, "share": share})
            print(f"seed {args.seed + n}: {share:.2f} of the promise, "
                  f"{summary(problem)}", flush=True)  # fmt: skip
        else:
            worst = max(worst, share)
    print(f"{n + 1} problems, {len(bad)} bad; the others up to {worst:.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"problems": n + 1, "bad": bad, "worst": worst}, file)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
