"""Gradients of random problems of points beside finite differences, in float64.

    python -m tests.support.fuzz_points_vjp --problems 1000 --seed 0

Each argument is moved along a random direction; seeds of bad problems are printed.
"""

import argparse
import sys

import numpy as np

from cupyflash import points
from cupyflash._points.kernels import NAMES

ALLOWED = 2e-6
_FUNCTIONS = (
    lambda d2: 1 / (1 + d2) ** 2,
    lambda d2: np.exp(-np.sqrt(1 + d2)) * (2 + np.tanh(d2)),
)


def draw(seed):
    """(function, its arguments by name, options)."""
    rng = np.random.default_rng(seed)
    reduction = ("logsumexp", "kernel_sum", "mean")[rng.integers(3)]
    kernels = [*NAMES, *_FUNCTIONS]
    if reduction != "kernel_sum":
        kernels.remove("energy")
    kernel = kernels[rng.integers(len(kernels))]
    # Differences are none across a cusp: points lie apart where there are more axes.
    dims = [3, 6, 20] if kernel in ("laplacian", "energy") else [1, 2, 3, 6, 20]
    dim = int(rng.choice(dims))
    num_x, num_y = (int(2 ** rng.uniform(0, 9)) for _ in range(2))
    batch = (2,) if rng.random() < 0.3 else ()
    width = 10 ** rng.uniform(-0.3, 0.7) * np.sqrt(dim)
    if rng.random() < 0.4:
        width = width * 2 ** rng.uniform(-1, 1, dim)
    arguments = {
        "x": rng.normal(size=(*batch, num_x, dim)),
        "y": rng.normal(size=(num_y, dim)),
        "bandwidth": width,
    }
    if reduction != "kernel_sum" and rng.random() < 0.7:
        arguments["log_weights"] = 3 * rng.normal(size=num_y)
    if reduction != "logsumexp":
        name = "b" if reduction == "kernel_sum" else "v"
        arguments[name] = rng.normal(size=(num_y, int(rng.integers(1, 5))))
    return rng, reduction, kernel, arguments


def error(seed):
    """The largest error of a derivative along a direction, as a part of its terms."""
    rng, reduction, kernel, arguments = draw(seed)
    function = getattr(points, reduction)
    vjp = getattr(points, f"{reduction}_vjp")
    result = function(kernel=kernel, **arguments)
    dout = rng.normal(size=np.shape(result))
    dlse = None
    options = {}
    if reduction == "mean":
        dlse = rng.normal(size=dout.shape[:-1])
        options["dlse"] = dlse

    def value(given):
        if dlse is None:
            return (function(kernel=kernel, **given) * dout).sum()
        out, lse = function(kernel=kernel, return_lse=True, **given)
        return (out * dout).sum() + (lse * dlse).sum()

    found = vjp(dout, kernel=kernel, **arguments, **options)._asdict()
    found = {
        "dv" if n == "dvalues" and reduction == "mean" else n: g
        for n, g in found.items()
    }
    found["db"] = found.get("dvalues")
    worst = 0.0
    for name, at in arguments.items():
        gradient = found[f"d{name}"]
        if np.shape(gradient) != np.shape(at):
            return np.inf
        step = 1e-5 * (np.abs(at).min() if name == "bandwidth" else 1.0)
        way = step * rng.normal(size=np.shape(at))
        # Of fourth order, so that a step may be long enough for its rounding.
        sides = [
            value({**arguments, name: at + factor * way}) for factor in (2, 1, -1, -2)
        ]
        exact = (-sides[0] + 8 * sides[1] - 8 * sides[2] + sides[3]) / 12
        terms = np.abs(gradient * way).sum() + 1e-9 * np.abs(sides[1])
        worst = max(worst, abs((gradient * way).sum() - exact) / terms)
    return worst


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad, worst = 0, 0.0
    for seed in range(args.seed, args.seed + args.problems):
        found = error(seed)
        if found < ALLOWED:
            worst = max(worst, found)
        else:
            bad += 1
            print(f"seed {seed}: {found:.1e}, {draw(seed)[1:3]}", flush=True)
    print(f"{args.problems} problems, {bad} bad; the others up to {worst:.1e}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
