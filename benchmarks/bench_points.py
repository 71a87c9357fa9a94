"""Reductions over all pairs of points, beside what else computes them.

    python benchmarks/bench_points.py --json benchmarks/results/points_h200.json

A call sorts its clouds each time. Points are uniform in the unit cube, log weights and
values normal; "every pair" switches series and skipping off by its bandwidth or by the
registry. Each candidate is compared with float64 in some rows before it is timed.

    python benchmarks/bench_points.py --cpu --json benchmarks/results/points_cpu.json

On NumPy, in float64: the density of a cloud at other points beside SciPy's and
scikit-learn's, and transport beside POT's. Errors are of the log density in some rows,
and the L1 error of the marginals; POT stops at the first look at its errors that is
below what cupyflash came to.
"""

import functools
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import timing

from cupyflash import points
from cupyflash._cli import measure as _measure

_ROWS = 128  # of a result, that are compared


@dataclass(frozen=True)
class Cell:
    """One call."""

    size: int
    reduction: str = "logsumexp"
    bandwidth: float = 0.2
    dim: int = 3
    columns: int = 0
    dtype: str = "float32"
    kernel: str = "gaussian"
    every_pair: bool = False
    peers: bool = False
    precision: str = "float32"

    @property
    def label(self):
        kind = f"{self.reduction} {self.kernel}, V {self.columns}"
        how = ", every pair" if self.every_pair else ""
        size = f"{self.size} x {self.size}, D {self.dim}"
        dtype = self.dtype if self.precision == "float32" else self.precision
        return f"{kind}, {size}, bandwidth {self.bandwidth}, {dtype}{how}"


_MILLION = 1_000_000
CELLS = (
    Cell(_MILLION, bandwidth=0.5, every_pair=True),
    Cell(_MILLION, "kernel_sum", bandwidth=0.5, columns=1, every_pair=True),
    Cell(_MILLION, "mean", bandwidth=0.5, columns=3, every_pair=True),
    *(Cell(_MILLION, bandwidth=h) for h in (0.5, 0.2, 0.1, 0.05, 0.02)),
    Cell(_MILLION, "kernel_sum", columns=1),
    Cell(_MILLION, "mean", columns=3),
    Cell(100_000, peers=True),
    Cell(100_000, every_pair=True),
    Cell(20_000, peers=True),
    Cell(100_000, dtype="float64"),
    Cell(100_000, kernel="laplacian"),
    Cell(100_000, kernel="matern52"),
    Cell(100_000, "kernel_sum", kernel="cauchy", columns=1),
    Cell(100_000, dim=5, bandwidth=0.3),
    Cell(100_000, dim=8, bandwidth=0.5),
    Cell(100_000, dim=16, bandwidth=0.7),
    Cell(100_000, dim=64, bandwidth=1.0, peers=True),
    Cell(100_000, dim=64, bandwidth=1.0, peers=True, precision="tf32"),
    Cell(100_000, dim=256, bandwidth=3.0),
    Cell(100_000, "mean", dim=64, bandwidth=1.5, columns=3),
)


def call_of(cell, x, y, h, b):
    """The call of cupyflash."""
    options = {
        "bandwidth": cell.bandwidth,
        "kernel": cell.kernel,
        "precision": cell.precision,
    }

    def call():
        if cell.reduction == "kernel_sum":
            return points.kernel_sum(x, y, b, **options)
        if cell.reduction == "mean":
            return points.mean(x, y, b, h, **options)
        return points.logsumexp(x, y, h, **options)

    return _every_pair(call) if cell.every_pair else call


def _every_pair(call):
    """`call` without series, with plans of its own."""
    from cupyflash._points.gpu import dispatch, registry

    plans = type(dispatch._plans)()

    def whole():
        kept = registry._SERIES_PAIRS, dispatch._plans
        registry._SERIES_PAIRS, dispatch._plans = 1 << 62, plans
        try:
            return call()
        finally:
            registry._SERIES_PAIRS, dispatch._plans = kept

    return whole


def peers(xp, cell, x, y, h):
    """What other packages that are installed offer for a gaussian log-sum."""
    torch = timing.optional("torch") if cell.peers else None
    if torch is None:
        return {}
    tx, ty, th = (timing.to_torch(torch, a) for a in (x, y, h))
    c = 0.5 / cell.bandwidth**2
    found = {}

    def chunked():
        out = torch.empty(len(tx), device=tx.device)
        for first in range(0, len(tx), 4096):
            rows = slice(first, first + 4096)
            mode = "donot_use_mm_for_euclid_dist"
            d2 = torch.cdist(tx[rows], ty, compute_mode=mode) ** 2
            out[rows] = torch.logsumexp(th - c * d2, 1)
        return timing.from_torch(xp, out)

    if cell.size <= 20_000:
        found["torch.cdist and logsumexp, in chunks"] = chunked
    name = "flash_sinkhorn.kernels.sinkhorn_flashstyle_sqeuclid"
    kernels = timing.optional(name)
    if kernels is not None:
        x2, bias = c * (tx**2).sum(1), th - c * (ty**2).sum(1)

        def half_step(tf32):
            lse = kernels.flashsinkhorn_lse(
                tx, ty, bias, 1 / c, allow_tf32=tf32, autotune=False
            )
            return timing.from_torch(xp, -c * lse - x2)

        found["FlashSinkhorn half step, tf32"] = lambda: half_step(True)
        found["FlashSinkhorn half step, ieee"] = lambda: half_step(False)
    return found


def exact(xp, cell, rows, x, y, h, b):
    """Some rows in float64."""
    x, y = x[rows].astype("f8"), y.astype("f8")
    results = []
    for row in x:
        gap = (row - y) / cell.bandwidth
        d2 = (gap * gap).sum(-1)
        r = xp.sqrt(d2)
        log = {
            "gaussian": lambda d2=d2: -d2 / 2,
            "laplacian": lambda r=r: -r,
            "cauchy": lambda d2=d2: -xp.log1p(d2),
            "matern52": lambda r=r: xp.log1p(5**0.5 * r + 5 / 3 * r * r) - 5**0.5 * r,
        }[cell.kernel]()
        if cell.reduction == "kernel_sum":
            results.append(xp.exp(log) @ b.astype("f8"))
            continue
        score = log + h.astype("f8")
        top = score.max()
        weights = xp.exp(score - top)
        total = weights.sum()
        if cell.reduction == "mean":
            results.append(weights @ b.astype("f8") / total)
        else:
            results.append(top + xp.log(total))
    return xp.stack(results)


def measure(xp, cell, turns):
    """A line for each candidate."""
    rng = xp.random.default_rng(7)
    x, y = (rng.random((cell.size, cell.dim), cell.dtype) for _ in range(2))
    h = rng.standard_normal(cell.size, cell.dtype)
    b = None
    if cell.columns:
        b = rng.standard_normal((cell.size, cell.columns), cell.dtype)
    rows = xp.asarray(np.linspace(0, cell.size - 1, _ROWS).astype(int))
    wanted = exact(xp, cell, rows, x, y, h, b)
    calls = {"cupyflash": call_of(cell, x, y, h, b), **peers(xp, cell, x, y, h)}
    errors = {}
    for name, call in calls.items():
        error = abs(call()[rows].astype("f8") - wanted).max()
        if cell.reduction != "logsumexp":
            error = error / abs(wanted).max()
        errors[name] = float(error)
    times = _measure.interleaved(calls, on_gpu=True, turns=turns)
    return _rows(cell.label, cell.size**2, times, errors)


def _rows(label, num_pairs, times, errors):
    """What the report has of each candidate, ours being the first."""
    first, rows = next(iter(times.values())).seconds, []
    for name, timed in times.items():
        row = {
            "cell": label,
            "name": name,
            "ms": round(timed.seconds * 1e3, 3),
            "pairs a second": float(f"{num_pairs / timed.seconds:.3g}"),
            "times ours": round(timed.seconds / first, 2),
            "error": float(f"{errors[name]:.2g}"),
        }
        print("  " + "  ".join(f"{value}" for value in row.values()), flush=True)
        rows.append(row)
    return rows


def density(turns, size=20_000, dim=6):
    """The log density of a cloud at as many other points."""
    from scipy import stats

    rng = np.random.default_rng(7)
    y, x = (rng.standard_normal((size, dim)) for _ in range(2))
    theirs = stats.gaussian_kde(y.T)
    # Its kernels have a full covariance, those of scikit-learn a bandwidth: each is
    # compared with ours of the same kind.
    ours = points.GaussianKDE(y.T)
    width = float(theirs.factor)
    constant = np.log(size) + dim * (np.log(width) + 0.5 * np.log(2 * np.pi))
    calls = {
        "cupyflash GaussianKDE": lambda: ours.logpdf(x.T),
        "scipy gaussian_kde": lambda: np.log(theirs(x.T)),
        "cupyflash logsumexp": lambda: (
            points.logsumexp(x, y, bandwidth=width) - constant
        ),
    }
    neighbors = timing.optional("sklearn.neighbors")
    if neighbors is not None:
        exact = neighbors.KernelDensity(bandwidth=width, rtol=0, atol=0).fit(y)
        calls["scikit-learn KernelDensity, exact"] = lambda: exact.score_samples(x)
    rows = np.linspace(0, size - 1, _ROWS).astype(int)
    wanted = {}
    for name, white in (("gaussian_kde", np.linalg.inv(theirs.cho_cov)), ("", None)):
        a, b = x[rows], y
        if white is not None:
            a, b, scale = a @ white.T, y @ white.T, 1.0
        else:
            scale = width
        gaps = (a[:, None].astype(np.longdouble) - b) / scale
        lse = np.log(np.exp(-0.5 * (gaps * gaps).sum(-1)).sum(-1))
        wanted[name] = lse - (
            np.log(size) + 0.5 * theirs.log_det if white is not None else constant
        )
    errors = {}
    for name, call in calls.items():
        of_scipy = "kde" in name.lower()
        found = call()[rows]
        errors[name] = float(
            abs(found - wanted["gaussian_kde" if of_scipy else ""]).max()
        )
    times = _measure.interleaved(calls, on_gpu=False, turns=turns, warm=True)
    label = f"density of {size} points at {size} others, D {dim}, float64"
    return _rows(label, size**2, times, errors)


# Epsilon and error of the marginals: transport on NumPy.
_SOLUTIONS = ((0.05, 1e-3), (0.05, 1e-6), (0.01, 1e-3))
# An iteration of sinkhorn_log takes two seconds: it solves the first alone, once.
_ONCE_ABOVE = 20.0


def transport(turns, epsilon, tol, size=6000, dim=3):
    """Entropic transport between two clouds, to one error of the marginals."""
    rng = np.random.default_rng(7)
    x, y = rng.random((size, dim)), rng.random((size, dim))
    even = np.full(size, 1 / size)

    def ours():
        return points.sinkhorn(x, y, epsilon=epsilon, tol=tol)

    def our_error(found):
        sides = found.plan, found.plan.T
        return max(float(abs(side.marginal() - even).sum()) for side in sides)

    def plan_error(plan):
        return max(float(abs(plan.sum(axis=axis) - even).sum()) for axis in (0, 1))

    calls = {"cupyflash sinkhorn": ours}
    bregman = timing.optional("ot.bregman")
    if bregman is not None:
        # Of an L2 norm, which is what it looks at.
        stop = tol / np.sqrt(size)
        options = {"numItermax": 10_000, "stopThr": stop, "warn": False}

        def solver(function):
            def call():
                cost = ((x * x).sum(1)[:, None] + (y * y).sum(1)) - 2 * (x @ y.T)
                return function(even, even, cost, epsilon, **options)

            return call

        calls["POT sinkhorn_stabilized"] = solver(bregman.sinkhorn_stabilized)
        if (epsilon, tol) == _SOLUTIONS[0]:
            calls["POT sinkhorn_log"] = solver(bregman.sinkhorn_log)
    results = {}

    def kept(name):
        def call():
            results[name] = calls[name]()

        return call

    times = _measure.interleaved(
        {name: kept(name) for name in calls},
        on_gpu=False,
        turns=turns,
        warm=True,
        once_above=_ONCE_ABOVE,
    )
    errors = {
        name: (our_error if call is ours else plan_error)(results[name])
        for name, call in calls.items()
    }
    label = (
        f"sinkhorn, {size} x {size}, D {dim}, epsilon {epsilon}, error {tol:g}, float64"
    )
    return _rows(label, size**2, times, errors)


# Points, dimensions, epsilon: transport on a GPU.
TRANSPORTS = ((100_000, 3, 0.08), (100_000, 64, 0.5))
_SECONDS = 2.0  # of one solution by a peer, at most; the next would take twice as long


def transport_on_gpu(xp, size, dim, epsilon, turns):
    """Entropic transport in float32, to one error of the marginals.

    FlashSinkhorn makes the fewest iterations that bring its error below ours, to a
    quarter of their number, or as many as there is time for: its error tells.
    """
    rng = xp.random.default_rng(7)
    x, y = (rng.random((size, dim), "float32") for _ in range(2))

    def ours(precision="float32"):
        return points.sinkhorn(x, y, epsilon=epsilon, precision=precision)

    def error_of(f, g):
        log_even, width = -np.log(size), (epsilon / 2) ** 0.5
        errors = []
        for a, b, own, other in ((x, y, f, g), (y, x, g, f)):
            scores = other / epsilon + log_even
            lse = points.logsumexp(a, b, scores, bandwidth=width)
            errors.append(float(abs(xp.exp(own / epsilon + lse) - 1).mean()))
        return max(errors)

    calls = {"cupyflash sinkhorn": ours}
    if dim > 8:  # others ignore it
        calls["cupyflash sinkhorn, tf32"] = lambda: ours("tf32")
    errors = {}
    for name, call in calls.items():
        found = call()
        errors[name] = error_of(found.f, found.g)
    solvers = timing.optional("flash_sinkhorn.sinkhorn_solvers")
    if solvers is not None:
        torch = timing.optional("torch")
        tx, ty = (timing.to_torch(torch, a) for a in (x, y))
        even = torch.full((size,), 1 / size, device=tx.device)

        def solver(iterations, tf32):
            def call():
                f, g = solvers.sinkhorn_flashstyle_alternating(
                    tx, ty, even, even, eps=epsilon, n_iters=iterations,
                    allow_tf32=tf32, autotune=False,
                )  # fmt: skip
                return timing.from_torch(xp, f), timing.from_torch(xp, g)

            return call

        for tf32 in (True, False):
            iterations, seconds = 2, 0.0
            solver(1, tf32)()  # compiles
            while True:
                call = solver(iterations, tf32)
                seconds, found = _seconds(xp, call)
                error = error_of(*found)
                if error <= errors["cupyflash sinkhorn"] or seconds > _SECONDS / 2:
                    break
                iterations = max(iterations + 1, iterations * 5 // 4)
            name = f"FlashSinkhorn, {'tf32' if tf32 else 'ieee'}, {iterations}"
            calls[name], errors[name] = call, error
    # Each has run, and takes so long that the host's clock tells.
    samples = {name: [] for name in calls}
    for _ in range(min(turns, 3)):
        for name, call in calls.items():
            samples[name].append(_seconds(xp, call)[0])
    times = {
        name: _measure.Timing(median(took), min(took), max(took), len(took))
        for name, took in samples.items()
    }
    label = f"sinkhorn, {size} x {size}, D {dim}, epsilon {epsilon}, float32"
    return _rows(label, size**2, times, errors)


def _seconds(xp, call):
    """Seconds of a call from an idle card to an idle card, and what it returns."""
    xp.cuda.Device().synchronize()
    start = time.perf_counter()
    found = call()
    xp.cuda.Device().synchronize()
    return time.perf_counter() - start, found


def main():
    """Measure, print and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    xp, on_gpu = timing.backend(args)
    rows = []
    if not on_gpu:
        parts = {"density": density} | {
            f"transport {epsilon} {tol:g}": functools.partial(
                transport, epsilon=epsilon, tol=tol
            )
            for epsilon, tol in _SOLUTIONS
        }
        for name, part in parts.items():
            if args.only in name:
                rows += part(args.turns)
                timing.save(args.json, "points", on_gpu, rows=rows)
        return
    for size, dim, epsilon in TRANSPORTS:
        if args.only in f"transport {dim}":
            rows += transport_on_gpu(xp, size, dim, epsilon, args.turns)
            timing.save(args.json, "points", on_gpu, rows=rows)
    for cell in CELLS:
        if args.only in cell.label:
            rows += measure(xp, cell, args.turns)
            timing.save(args.json, "points", on_gpu, rows=rows)


if __name__ == "__main__":
    main()
