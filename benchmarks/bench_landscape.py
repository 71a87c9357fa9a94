"""Attention over the whole landscape of shapes: how it stands to the fastest other.

    python benchmarks/bench_landscape.py

A cell is a shape (batch, queries, keys, head dimension) with a dtype and an option. Its
ratio is the best time of the fastest other way to the best time of cupyflash, from
calls by turns: above 1 cupyflash is faster. The numbers go to
``results/landscape_cpu.json``, the picture beside it under its name. `--gradients` does
the same for attention_vjp, beside the formulas written in NumPy, `--grouped` for heads
that share keys and few queries, beside products of all rows of a group. `--add` keeps
the cells of that file and measures others alone, `--limit` ends after so many seconds:
so it can go piece by piece.
"""

import datetime
import itertools
import json
import time
from dataclasses import dataclass

import numpy as np
import scipy.special
import timing
from timing import RESULTS

import cupyflash
from cupyflash._cli import console

BATCHES = (1, 16, 256, 10_000)
QUERIES = KEYS = (1, 16, 128, 1024, 4096)
HEAD_DIMS = (4, 64, 256)
# (dtype, option): the first over all head dimensions, the others over one.
KINDS = (
    ("float32", "plain"),
    ("float64", "plain"),
    ("float32", "causal"),
    ("float32", "bias"),
)
OTHER_HEAD_DIM = 64
# The same of gradients, float32 without options.
GRADIENT_LENGTHS, GRADIENT_HEAD_DIMS = (1, 16, 128, 512), (4, 64, 128)
# The same of heads in groups: heads of q for one of k and v.
GROUP = 4
GROUP_QUERIES, GROUP_KEYS, GROUP_HEAD_DIMS = (1, 2, 4), (16, 128, 500, 2048), (64, 128)
# What a cell may ask for: multiply-adds, and numbers in an array.
MOST_WORK, MOST_NUMBERS = 1.5e9, 3e7
# Largest difference to the other results, of float32 and float64.
MOST_OFF = {"float32": 1e-4, "float64": 1e-11}
NUM_WORST = 15
TURN_SECONDS, REST_SECONDS, FEWEST_TURNS = 0.05, 0.15, 2


@dataclass(frozen=True)
class Cell:
    """One shape, with what is asked of it."""

    batch: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    option: str

    @property
    def name(self):
        """As it is listed."""
        shape = f"{self.batch} x {self.queries} x {self.keys} x {self.head_dim}"
        return f"{shape} {self.dtype} {self.option}"

    @property
    def work(self):
        """Multiply-adds of the two products."""
        return 2 * self.batch * self.queries * self.keys * self.head_dim

    @property
    def affordable(self):
        """Whether it is done in a second, and its scores fit in memory."""
        scores = self.batch * self.queries * self.keys
        rows = self.batch * max(self.queries, self.keys)
        return (
            self.work <= MOST_WORK and max(scores, rows * self.head_dim) <= MOST_NUMBERS
        )


def cells():
    """All that are measured."""
    shapes = itertools.product(BATCHES, QUERIES, KEYS, HEAD_DIMS)
    every = (
        Cell(*shape, dtype, option)
        for shape in shapes
        for dtype, option in KINDS
        if (dtype, option) == KINDS[0] or shape[-1] == OTHER_HEAD_DIM
    )
    return [cell for cell in every if cell.affordable]


def gradient_cells():
    """Those of attention_vjp."""
    lengths = GRADIENT_LENGTHS
    shapes = itertools.product(BATCHES, lengths, lengths, GRADIENT_HEAD_DIMS)
    every = (Cell(*shape, "float32", "gradients") for shape in shapes)
    return [
        cell
        for cell in every
        # Five products in place of two.
        if cell.affordable and 5 * cell.work <= 2 * MOST_WORK
    ]


def grouped_cells():
    """Those of heads in groups; a batch entry is a head of k and v."""
    shapes = itertools.product(
        (1, 8, 256), GROUP_QUERIES, GROUP_KEYS, GROUP_HEAD_DIMS, ("float32", "float64")
    )
    every = (Cell(*shape, "grouped") for shape in shapes)
    return [cell for cell in every if cell.affordable]


def unfused(q, k, v, bias=None):
    """Attention as a NumPy user writes it; a causal mask is a bias made beforehand."""
    s = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1] ** 0.5)
    if bias is not None:
        s += bias
    return scipy.special.softmax(s, axis=-1) @ v


def unfused_gradients(dout, q, k, v):
    """The gradients as a NumPy user writes them."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    p = scipy.special.softmax(q @ k.swapaxes(-1, -2) * scale, axis=-1)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def gradient_calls(cell):
    """The calls of a cell of gradients by provider."""
    rng = np.random.default_rng(0)
    dout, q, k, v = (
        rng.standard_normal((cell.batch, 1, n, cell.head_dim)).astype(cell.dtype)
        for n in (cell.queries, cell.queries, cell.keys, cell.keys)
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    return {
        "cupyflash": lambda: cupyflash.attention_vjp(dout, q, k, v, out, lse)[:3],
        "numpy": lambda: unfused_gradients(dout, q, k, v),
    }


def calls(cell, torch):
    """The calls of a cell by provider."""
    rng = np.random.default_rng(0)
    is_grouped = cell.option == "grouped"
    q, k, v = (
        rng.standard_normal((cell.batch, heads, n, cell.head_dim)).astype(cell.dtype)
        for heads, n in (
            (GROUP if is_grouped else 1, cell.queries), (1, cell.keys), (1, cell.keys)
        )
    )  # fmt: skip
    options, bias = {}, None
    if cell.option == "causal":
        seen = np.tri(cell.queries, cell.keys, cell.keys - cell.queries, bool)
        # A row that sees no key is NaN in the other ways: it sees the first one there.
        bias = np.where(seen, 0, -np.inf).astype(cell.dtype)
        bias[~seen.any(axis=1), 0] = 0
        options = {"causal": True}
    elif cell.option == "bias":
        bias = rng.standard_normal((cell.queries, cell.keys)).astype(cell.dtype)
        options = {"bias": bias}
    found = {
        "cupyflash": lambda: cupyflash.attention(q, k, v, **options),
        "numpy": lambda: unfused(q, k, v, bias),
    }
    if is_grouped:
        rows = cell.batch, 1, GROUP * cell.queries, cell.head_dim
        found["numpy"] = lambda: unfused(q.reshape(rows), k, v).reshape(q.shape)
    if torch is not None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        tensors = [timing.to_torch(torch, x) for x in (q, k, v)]
        mask = None if bias is None else timing.to_torch(torch, bias)
        more = {"enable_gqa": True} if is_grouped else {}
        found["torch"] = lambda: sdpa(*tensors, attn_mask=mask, **more).numpy()
    return found, max(0, cell.queries - cell.keys) if cell.option == "causal" else 0


def best_times(calls, seconds):
    """The least time of each call, by turns.

    Before a turn all rest: after a product the threads of OpenBLAS wait for the next
    one at full speed, on cores that another candidate needs, for a tenth of a second.
    """
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    turns = 0
    while turns < FEWEST_TURNS or time.perf_counter() < end:
        for name, call in calls.items():
            time.sleep(REST_SECONDS)
            start = now = time.perf_counter()
            while now < start + TURN_SECONDS:
                before = now
                call()
                now = time.perf_counter()
                best[name] = min(best[name], now - before)
        turns += 1
    return best


def ratio(best):
    """(how many times as fast as the fastest other, which that is)."""
    others = {name: seconds for name, seconds in best.items() if name != "cupyflash"}
    fastest = min(others, key=others.get)
    return others[fastest] / best["cupyflash"], fastest


def worst(rows, provider=None, number=NUM_WORST):
    """The cells with the least ratios, least first, also to one provider alone."""

    def key(row):
        if provider is None:
            return row["ratio"]
        return row["seconds"][provider] / row["seconds"]["cupyflash"]

    have = [row for row in rows if provider is None or provider in row["seconds"]]
    return [(row["cell"], key(row)) for row in sorted(have, key=key)[:number]]


def grid(rows, head_dim, dtype, option):
    """Ratios as {(batch, queries): {keys: ratio}} of one panel of the picture."""
    found = {}
    for row in rows:
        if (row["head_dim"], row["dtype"], row["option"]) == (head_dim, dtype, option):
            place = found.setdefault((row["batch"], row["queries"]), {})
            place[row["keys"]] = row["ratio"]
    return found


def measure(cell, torch, seconds):
    """The row of a cell; SystemExit where results differ."""
    if cell.option == "gradients":
        by_name = gradient_calls(cell)
        pairs = zip(by_name["cupyflash"](), by_name["numpy"](), strict=True)
    else:
        by_name, blind_rows = calls(cell, torch)
        pairs = [[call()[..., blind_rows:, :] for call in list(by_name.values())[:2]]]
    off = max(float(np.abs(own - other).max(initial=0)) for own, other in pairs)
    if not off <= MOST_OFF[cell.dtype]:
        raise SystemExit(f"{cell.name}: results differ by {off:.1e}")
    best = best_times(by_name, seconds)
    found, fastest = ratio(best)
    return {
        "cell": cell.name,
        **{name: getattr(cell, name) for name in cell.__dataclass_fields__},
        "ratio": found,
        "fastest_other": fastest,
        "seconds": best,
    }


def merged(old, new):
    """Rows of two runs in the order of `cells`; the new one of a cell in both."""
    by_name = {row["cell"]: row for row in (*old, *new)}
    every = *cells(), *gradient_cells(), *grouped_cells()
    names = [cell.name for cell in every]
    order = {name: number for number, name in enumerate(names)}
    return sorted(by_name.values(), key=lambda row: order.get(row["cell"], len(order)))


def draw(rows, path):
    """A panel for each head dimension and kind: (batch, queries) against keys."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    panels = sorted({(r["head_dim"], r["dtype"], r["option"]) for r in rows})
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 5.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    image = None
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        found = grid(rows, *panel)
        places = sorted(found)
        keys = sorted({n for row in found.values() for n in row})
        values = np.array([[found[p].get(n, np.nan) for n in keys] for p in places])
        image = axes.imshow(
            np.log2(values), cmap="RdYlGn", aspect="auto",
            norm=TwoSlopeNorm(0, vmin=-2, vmax=3),
        )  # fmt: skip
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(keys)), keys)
        axes.set_yticks(range(len(places)), [f"{b} x {n}" for b, n in places])
        axes.set_xlabel("keys")
        axes.set_ylabel("batch x queries")
        axes.set_title(f"d = {panel[0]}, {panel[1]}, {panel[2]}", fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="log2 of the ratio", shrink=0.5)
    figure.savefig(path, dpi=100)
    print(f"Picture: {path}")


def main():
    """Measure all cells, list the worst, write the report and the picture."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=0.25, help="of measuring a cell"
    )
    parser.add_argument(
        "--add", action="store_true", help="measure what the file does not have"
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds of all cells"
    )
    parser.add_argument(
        "--gradients", action="store_true", help="attention_vjp in place of attention"
    )
    parser.add_argument(
        "--grouped", action="store_true", help="heads that share keys, and few queries"
    )
    parser.set_defaults(json=RESULTS / "landscape_cpu.json", cpu=True)
    args = parser.parse_args()
    every = cells()
    if args.gradients:
        every = gradient_cells()
        if args.json == RESULTS / "landscape_cpu.json":
            args.json = RESULTS / "landscape_vjp_cpu.json"
    elif args.grouped:
        every = grouped_cells()
        if args.json == RESULTS / "landscape_cpu.json":
            args.json = RESULTS / "landscape_grouped_cpu.json"
    torch = timing.optional("torch")
    old = []
    if args.add and args.json is not None and args.json.exists():
        old = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    known = {row["cell"] for row in old}
    asked = [c for c in every if args.only in c.name and c.name not in known]
    if not asked and not old:
        raise SystemExit(f"no cell has {args.only!r} in its name")
    new, end = [], time.perf_counter() + args.limit
    for cell in console.progress(asked, "landscape"):
        new.append(measure(cell, torch, args.seconds))
        if time.perf_counter() > end:
            break
    rows = merged(old, new)
    print(f"{len(asked) - len(new)} cells are left")
    for provider in (None, "numpy"):
        print(f"Worst beside {provider or 'the fastest other'}:")
        for name, found in worst(rows, provider):
            print(f"  {found:5.2f}  {name}")
    below = [row for row in rows if row["ratio"] < 0.95]
    print(f"{len(below)} of {len(rows)} cells below 0.95")
    timing.save(
        args.json, "landscape", False,
        date=datetime.date.today().isoformat(),
        below_095=[row["cell"] for row in below], rows=rows,
    )  # fmt: skip
    if args.json is not None:
        draw(rows, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
