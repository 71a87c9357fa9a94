"""Reductions over all pairs of points, beside what else computes them.

    python benchmarks/bench_points.py --json benchmarks/results/points_h200.json

A call sorts its clouds each time. Points are uniform in the unit cube, log weights and
values normal; "every pair" switches series and skipping off by its bandwidth or by the
registry. Each candidate is compared with float64 in some rows before it is timed.
"""

from dataclasses import dataclass

import numpy as np
import timing

from cupyflash import points
from cupyflash._cli import measure as _measure
from cupyflash._points.gpu import dispatch, registry

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

    @property
    def label(self):
        kind = f"{self.reduction} {self.kernel}, V {self.columns}"
        how = ", every pair" if self.every_pair else ""
        size = f"{self.size} x {self.size}, D {self.dim}"
        return f"{kind}, {size}, bandwidth {self.bandwidth}, {self.dtype}{how}"


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
    Cell(100_000, dim=256, bandwidth=3.0),
    Cell(100_000, "mean", dim=64, bandwidth=1.5, columns=3),
)


def call_of(cell, x, y, h, b):
    """The call of cupyflash."""
    options = {"bandwidth": cell.bandwidth, "kernel": cell.kernel}

    def call():
        if cell.reduction == "kernel_sum":
            return points.kernel_sum(x, y, b, **options)
        if cell.reduction == "mean":
            return points.mean(x, y, b, h, **options)
        return points.logsumexp(x, y, h, **options)

    return _every_pair(call) if cell.every_pair else call


def _every_pair(call):
    """`call` without series, with plans of its own."""
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
    first = next(iter(times.values())).seconds
    for name, time in times.items():
        row = {
            "cell": cell.label,
            "name": name,
            "ms": round(time.seconds * 1e3, 3),
            "pairs a second": float(f"{cell.size**2 / time.seconds:.3g}"),
            "times ours": round(time.seconds / first, 2),
            "error": float(f"{errors[name]:.2g}"),
        }
        print("  " + "  ".join(f"{value}" for value in row.values()), flush=True)
        yield row


def main():
    """Measure, print and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    xp, on_gpu = timing.backend(args)
    if not on_gpu:
        raise SystemExit("this benchmark needs a GPU")
    rows = []
    for cell in CELLS:
        if args.only in cell.label:
            rows += measure(xp, cell, args.turns)
            timing.save(args.json, "points", on_gpu, rows=rows)


if __name__ == "__main__":
    main()
