"""Attention and softmax on a GPU over the whole landscape of shapes.

    python benchmarks/bench_landscape_gpu.py
    python benchmarks/bench_landscape_gpu.py --gradients
    python benchmarks/bench_landscape_gpu.py --draw     # the picture alone, of the file

A cell is a shape with a dtype and an option. Its ratio is the time of the fastest
other to that of cupyflash: above 1 cupyflash is faster. The others are those of torch:
``scaled_dot_product_attention`` and, where all scores are few, the formula by products
and a softmax; ``softmax``. For softmax the time of a copy of the same bytes stands
beside it, which is the limit of memory. A turn is some calls one after the other and a
wait for the last, so that what the host needs counts wherever it is more than what the
device needs.
`--gradients` does the same for attention_vjp, softmax_vjp and logsumexp.
`--add` keeps the cells of the file and measures others alone, `--limit` ends after so
many seconds: so it can go piece by piece. Several cards share it by `--part 1/4` and so
on, each with a file of its own, which `--join` puts together.
"""

import contextlib
import datetime
import itertools
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import bench_landscape
import numpy as np
import timing

import cupyflash
from cupyflash._cli import console

REPORT = timing.RESULTS / "landscape_h200.json"
REPORT_OF_GRADIENTS = timing.RESULTS / "landscape_vjp_h200.json"
# What a cell may ask for: multiply-adds of a dtype, and numbers in an array.
_MOST_WORK = {"float16": 2e12, "float32": 2e11, "float64": 1e11}
_MOST_NUMBERS = 3e8
_MOST_SCORES = 1 << 26  # up to which the formula is tried
_TURN_SECONDS = 2e-3
_SAVE_SECONDS = 5  # between two times that the rows so far are written
_COMPILING_SHARE = 0.4  # of --limit
# Largest difference to torch's results, as a share of the largest number or of 1.
_MOST_OFF = {"float16": 1e-2, "float32": 1e-2, "float64": 1e-11}
NUM_WORST = 20


@dataclass(frozen=True)
class Attention:
    """One shape of (batch, 1, rows, columns), with what is asked of it."""

    batch: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    option: str
    function = "attention"

    @property
    def name(self):
        """As it is listed."""
        shape = f"{self.batch} x {self.queries} x {self.keys} x {self.head_dim}"
        return f"{self.function} {shape} {self.dtype} {self.option}"

    @property
    def panel(self):
        """The part of the picture that it belongs to, its line and its column there."""
        title = f"{self.function}, d = {self.head_dim}, {self.dtype}, {self.option}"
        return title, f"{self.batch} x {self.queries}", self.keys

    @property
    def affordable(self):
        """Whether it is done soon, and its scores fit in memory."""
        scores = self.batch * self.queries * self.keys
        rows = self.batch * max(self.queries, self.keys)
        return (
            2 * scores * self.head_dim <= _MOST_WORK[self.dtype]
            and (self.option == "plain" or scores <= _MOST_NUMBERS)
            and rows * self.head_dim <= _MOST_NUMBERS
        )

    def arrays(self, cupy, fill=True):
        """q, k, v and the bias."""
        shapes = [
            (self.batch, 1, n, self.head_dim)
            for n in (self.queries, self.keys, self.keys)
        ]
        if self.option == "bias":
            shapes.append((self.batch, 1, self.queries, self.keys))
        return [_array(cupy, shape, self.dtype, fill) for shape in shapes]

    def own(self, arrays):
        """The call of cupyflash."""
        q, k, v, *bias = arrays
        options = {"bias": bias[0]} if bias else {}
        causal = self.option == "causal"
        return lambda: cupyflash.attention(q, k, v, causal=causal, **options)

    def others(self, torch, cupy, arrays):
        """Those of others by name, and what of the results is compared."""
        q, k, v, *bias = (timing.to_torch(torch, x) for x in arrays)
        options = {"attn_mask": bias[0]} if bias else self.causal_of(torch)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        # Rows that see no key: zeros here, NaN there.
        blind = max(0, self.queries - self.keys) if self.option == "causal" else 0
        compared = np.s_[:8, :, blind:]
        found = {"torch": lambda: sdpa(q, k, v, **options)}
        if self.has_formula:
            hidden, added = self.hidden(torch), bias[0] if bias else None
            found["formula"] = lambda: _weights(torch, q, k, added, hidden) @ v
        return found, compared

    @property
    def has_formula(self):
        """Whether its scores are few enough to be tried."""
        return self.batch * self.queries * self.keys <= _MOST_SCORES

    def causal_of(self, torch):
        """The option of torch for the causal mask, if there is one."""
        if self.option != "causal":
            return {}
        if self.queries == self.keys:
            return {"is_causal": True}  # torch's begins at the first key
        seen = torch.ones(self.queries, self.keys, device="cuda").bool()
        return {"attn_mask": seen.tril(self.keys - self.queries)}

    def hidden(self, torch):
        """The scores that the causal mask hides, or None."""
        if self.option != "causal":
            return None
        shape = self.queries, self.keys
        hidden = torch.ones(shape, device="cuda", dtype=torch.bool)
        return hidden.triu(1 + self.keys - self.queries)


class AttentionVjp(Attention):
    """Its gradients, from dout to dq, dk and dv."""

    function = "attention_vjp"

    @property
    def affordable(self):
        """As of attention; torch has NaN for queries that see no key."""
        is_blind = self.option == "causal" and self.queries > self.keys
        return super().affordable and not is_blind

    def arrays(self, cupy, fill=True):
        """q, k, v and dout."""
        q = _array(cupy, (self.batch, 1, self.queries, self.head_dim), self.dtype, fill)
        return [*super().arrays(cupy, fill), q]

    def own(self, arrays):
        """The call of cupyflash, with out and lse of a call before."""
        q, k, v, dout = arrays
        causal = self.option == "causal"
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        vjp = cupyflash.attention_vjp
        return lambda: vjp(dout, q, k, v, out, lse, causal=causal)[:3]

    def others(self, torch, cupy, arrays):
        """torch's backward, and the formula with the weights of a call before."""
        q, k, v, dout = (timing.to_torch(torch, x) for x in arrays)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(*inputs, **self.causal_of(torch))
        grad = torch.autograd.grad
        found = {"torch": lambda: grad(out, inputs, dout, retain_graph=True)}
        if self.has_formula:
            p = _weights(torch, q, k, None, self.hidden(torch))
            found["formula"] = lambda: _gradients(dout, q, k, v, p)
        return found, np.s_[:8]


@dataclass(frozen=True)
class Softmax:
    """Softmax of a matrix along an axis."""

    rows: int
    columns: int
    axis: int
    dtype: str
    function = "softmax"

    @property
    def name(self):
        """As it is listed."""
        along = "rows" if self.axis else "columns"
        return f"{self.function} of {along} {self.rows} x {self.columns} {self.dtype}"

    @property
    def panel(self):
        """As of attention."""
        along = "rows" if self.axis else "columns"
        return f"{self.function} of {along}, {self.dtype}", self.rows, self.columns

    @property
    def affordable(self):
        """Whether it fits."""
        return self.rows * self.columns <= _MOST_NUMBERS

    def arrays(self, cupy, fill=True):
        """The matrix."""
        return [_array(cupy, (self.rows, self.columns), self.dtype, fill)]

    def own(self, arrays):
        """The call of cupyflash."""
        (x,) = arrays
        return lambda: cupyflash.softmax(x, self.axis)

    def others(self, torch, cupy, arrays):
        """torch's, and a copy; all of the result is compared."""
        (x,) = arrays
        t = timing.to_torch(torch, x)
        into = cupy.empty_like(x)
        copy = cupy.cuda.runtime.memcpyAsync
        return {
            "torch": lambda: torch.softmax(t, self.axis),
            "copy": lambda: copy(into.data.ptr, x.data.ptr, x.nbytes, 3, 0),
        }, np.s_[:]


class SoftmaxVjp(Softmax):
    """Its gradients, from y and dy to dx."""

    function = "softmax_vjp"

    def arrays(self, cupy, fill=True):
        """y and dy; to both sides y may be any numbers."""
        return super().arrays(cupy, fill) + super().arrays(cupy, fill)

    def own(self, arrays):
        """The call of cupyflash."""
        y, dy = arrays
        return lambda: cupyflash.softmax_vjp(y, dy, self.axis)

    def others(self, torch, cupy, arrays):
        """What torch's autograd calls."""
        y, dy = (timing.to_torch(torch, x) for x in arrays)
        vjp = torch._softmax_backward_data
        return {"torch": lambda: vjp(dy, y, self.axis, y.dtype)}, np.s_[:]


class LogSumExp(Softmax):
    """The logarithm of the sum of its exponentials."""

    function = "logsumexp"

    def own(self, arrays):
        """The call of cupyflash."""
        (x,) = arrays
        return lambda: cupyflash.logsumexp(x, self.axis)

    def others(self, torch, cupy, arrays):
        """torch's."""
        x = timing.to_torch(torch, arrays[0])
        return {"torch": lambda: torch.logsumexp(x, self.axis)}, np.s_[:]


_SIZES = (1, 32, 512, 4096)
_SHAPES = tuple(itertools.product((1, 32, 1024), _SIZES, _SIZES))
# Of heads whose rows are no whole 16-byte vectors, or not all of them.
_ODD_SHAPES = tuple(itertools.product((32, 1024), (1, 8, 512), (32, 512, 4096)))
_ODD_DIMS = (7, 50, 103)
_MATRICES = tuple(
    (rows, columns, axis, dtype)
    for rows in (1, 32, 1024, 8192, 1 << 18)
    for columns in (16, 128, 1000, 8192, 1 << 17, 1 << 20)
    for axis in (1, 0)
    for dtype in ("float16", "float32", "float64")
)


def _of_shapes(function, kinds):
    """Attention or its gradients: each kind of each shape, and heads of odd widths."""
    odd = [(d, dtype, "plain") for dtype in _MOST_WORK for d in _ODD_DIMS]
    shapes = *itertools.product(_SHAPES, kinds), *itertools.product(_ODD_SHAPES, odd)
    return [function(*shape, *kind) for shape, kind in shapes]


def cells():
    """All that are measured."""
    kinds = (
        *((d, dtype, "plain") for dtype in _MOST_WORK for d in (32, 64, 128, 256)),
        *itertools.product((64,), _MOST_WORK, ("causal", "bias")),
    )
    found = _of_shapes(Attention, kinds)
    found += [Softmax(*matrix) for matrix in _MATRICES]
    return [cell for cell in found if cell.affordable]


def gradient_cells():
    """Those of --gradients."""
    kinds = (
        *((d, dtype, "plain") for dtype in _MOST_WORK for d in (32, 64, 128, 256)),
        *((64, dtype, "causal") for dtype in _MOST_WORK),
    )
    found = _of_shapes(AttentionVjp, kinds)
    found += [kind(*matrix) for kind in (SoftmaxVjp, LogSumExp) for matrix in _MATRICES]
    return [cell for cell in found if cell.affordable]


def _by_name():
    """All cells, in order."""
    return {cell.name: cell for cell in (*cells(), *gradient_cells())}


def _weights(torch, q, k, bias, hidden):
    """The weights of attention as they are written down."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores += bias
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, -1)


def _gradients(dout, q, k, v, p):
    """dq, dk and dv as they are written down."""
    dp = dout @ v.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(-1)[..., None]) * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _array(cupy, shape, dtype, fill):
    """Random numbers, or memory as it comes."""
    if not fill:
        return cupy.empty(shape, dtype)
    wide = dtype if dtype == "float64" else "float32"
    return cupy.random.standard_normal(shape, dtype=wide).astype(dtype, copy=False)


def compile_ahead(asked, num_processes, seconds):
    """Fill CuPy's cache by processes, as a compilation takes longer than a cell.

    Cells of one panel mostly share kernels, so a process takes neighbours.
    """
    ordered = sorted(asked, key=lambda cell: cell.panel[0])
    count = min(num_processes, len(ordered))
    chunks = [timing.part(ordered, n, count) for n in range(count)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn) as pool:
        list(pool.map(_call_each, chunks, [time.time() + seconds] * count))


def _call_each(asked, end):
    import cupy

    for cell in asked:
        if time.time() > end:
            break
        with contextlib.suppress(Exception):  # which measuring will report
            cell.own(cell.arrays(cupy, fill=False))()
            cupy.get_default_memory_pool().free_all_blocks()


def best_times(calls, synchronize, seconds):
    """The least time of each call, by turns of some calls."""
    counts = {}
    for name, call in calls.items():
        call()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        once = time.perf_counter() - start
        counts[name] = max(1, min(100, math.ceil(_TURN_SECONDS / once)))
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 3 or (time.perf_counter() < end and turns < 20):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            synchronize()
            took = (time.perf_counter() - start) / counts[name]
            best[name] = min(best[name], took)
        turns += 1
    return best


def measure(cupy, torch, cell, seconds):
    """The row of a cell; ValueError where results differ."""
    arrays = cell.arrays(cupy)
    own = cell.own(arrays)
    others, compared = cell.others(torch, cupy, arrays)
    for found, expected in zip(_each(own()), _each(others["torch"]()), strict=True):
        best = expected[compared].double()
        if best.numel():
            apart = timing.to_torch(torch, found)[compared].double() - best
            off = apart.abs().max().item() / max(1, best.abs().max().item())
            if not off <= _MOST_OFF[cell.dtype]:
                raise ValueError(f"results differ by {off:.1e}")
    found = expected = apart = best = None  # memory
    best = best_times(
        {"cupyflash": own, **others}, cupy.cuda.Device().synchronize, seconds
    )
    fastest = min((n for n in best if n not in ("cupyflash", "copy")), key=best.get)
    facts = {**asdict(cell), "ratio": best[fastest] / best["cupyflash"]}
    facts["fastest_other"] = fastest
    if "copy" in best:
        facts["share_of_copy"] = best["copy"] / best["cupyflash"]
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
    return {"cell": cell.name, **facts, "seconds": best}


def _each(results):
    """A tuple of results, or the only one."""
    return results if isinstance(results, tuple) else (results,)


def merged(old, new):
    """Rows of two runs in the order of `cells`; the new one of a cell in both."""
    by_name = {row["cell"]: row for row in (*old, *new)}
    order = {name: number for number, name in enumerate(_by_name())}
    return sorted(by_name.values(), key=lambda row: order.get(row["cell"], len(order)))


def panels(rows):
    """{title: {line: {column: ratio}}} of the picture."""
    of_name = _by_name()
    found = {}
    for row in rows:
        if cell := of_name.get(row["cell"]):
            title, line, column = cell.panel
            found.setdefault(title, {}).setdefault(line, {})[column] = row["ratio"]
    return found


def draw(rows, path):
    """A panel for each kind: (batch, queries) against keys, or rows against columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    found = panels(rows)
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    image = None
    for number, (title, panel) in enumerate(found.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        across = sorted({n for line in panel.values() for n in line})
        values = np.array(
            [[line.get(n, np.nan) for n in across] for line in panel.values()]
        )
        image = axes.imshow(
            np.log2(values), cmap="RdYlGn", aspect="auto",
            norm=TwoSlopeNorm(0, vmin=-2, vmax=3),
        )  # fmt: skip
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                text = f"{value:.2g}" if value < 10 else f"{value:.0f}"
                axes.text(j, i, text, ha="center", va="center", fontsize=7)
        is_softmax = not title.startswith("attention")
        axes.set_xticks(range(len(across)), across, fontsize=8)
        axes.set_yticks(range(len(panel)), panel)
        axes.set_xlabel("columns" if is_softmax else "keys")
        axes.set_ylabel("rows" if is_softmax else "batch x queries")
        axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="log2 of the ratio", shrink=0.5)
    figure.savefig(path, dpi=80)
    print(f"Picture: {path}")


def below_goal(rows):
    """The names of cells below 0.95."""
    return [row["cell"] for row in rows if row["ratio"] < 0.95]


def report(rows):
    """Print the worst cells."""
    for name, found in bench_landscape.worst(rows, number=NUM_WORST):
        print(f"  {found:5.2f}  {name}")
    print(f"{len(below_goal(rows))} of {len(rows)} cells below 0.95")


def save(path, rows):
    """Write the file of these rows."""
    timing.save(
        path, "landscape", True, date=datetime.date.today().isoformat(),
        below_095=below_goal(rows), rows=rows,
    )  # fmt: skip


def main():
    """Measure all cells, list the worst, write the report and the picture."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="of measuring a cell, at least"
    )
    parser.add_argument(
        "--add", action="store_true", help="measure what the file does not have"
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds of all cells"
    )
    parser.add_argument(
        "--jobs", type=int, default=12, help="processes that compile ahead (0: none)"
    )
    parser.add_argument(
        "--draw", action="store_true", help="draw what the file has, and nothing else"
    )
    parser.add_argument(
        "--gradients", action="store_true", help="gradients and logsumexp instead"
    )
    parser.add_argument("--part", type=timing.part_of_many, default=(1, 1))
    parser.add_argument("--join", nargs="+", type=Path, help="reports of parts")
    args = parser.parse_args()
    args.json = args.json or (REPORT_OF_GRADIENTS if args.gradients else REPORT)
    if args.join:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in args.join]
        rows = merged([], [row for one in parts for row in one["rows"]])
        report(rows)
        facts = {"below_095": below_goal(rows), "rows": rows}
        joined = json.dumps(parts[0] | facts, indent=1)
        args.json.write_text(joined + "\n", encoding="utf-8")
        draw(rows, args.json.with_suffix(".png"))
        return
    old = []
    if (args.add or args.draw) and args.json.exists():
        old = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    if args.draw:
        draw(old, args.json.with_suffix(".png"))
        return
    import cupy
    import torch

    end = time.perf_counter() + args.limit
    known = {row["cell"] for row in old}
    every = gradient_cells() if args.gradients else cells()
    asked = [c for c in every if args.only in c.name and c.name not in known]
    index, count = args.part
    asked = asked[index - 1 :: count]
    asked = asked[::2] + asked[1::2]  # so that a run cut short has seen all panels
    if args.jobs and asked:
        compile_ahead(asked, args.jobs, args.limit * _COMPILING_SHARE)
    new, failed = [], []
    saved = time.perf_counter()
    for cell in console.progress(asked, "landscape"):
        if time.perf_counter() > end:
            break
        if time.perf_counter() > saved + _SAVE_SECONDS:
            save(args.json, merged(old, new))
            saved = time.perf_counter()
        try:
            new.append(measure(cupy, torch, cell, args.seconds))
        except (ValueError, RuntimeError, MemoryError) as error:
            failed.append(f"{cell.name}: {str(error).splitlines()[0]}")
    rows = merged(old, new)
    print(f"{len(asked) - len(new) - len(failed)} cells are left")
    report(rows)
    save(args.json, rows)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
