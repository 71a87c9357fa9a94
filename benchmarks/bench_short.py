"""Attention of many entries with few queries and keys, beside a copy of its bytes.

    python benchmarks/bench_short.py --json benchmarks/results/short_h200.json

Beside the row that is chosen stand the row that takes the call without it ("before"),
and a copy that moves as many bytes as the arrays have which must be read or written: q,
k, v and out; or q, k, v, dout, dq, dk and dv. Gradients are compared with float64
before they are timed.
"""

from dataclasses import dataclass

import timing

import cupyflash
from cupyflash._cli import measure as _measure
from cupyflash._core import arrays
from cupyflash._reference import backward as reference_vjp


@dataclass(frozen=True)
class Cell:
    """One call: batch entries, heads of q and of k and v, lengths, columns."""

    batch: int
    heads: tuple[int, int]
    seqlens: tuple[int, int]
    dim: int
    dtype: str = "float16"

    @property
    def label(self):
        batch, (q, kv), (n, m) = self.batch, self.heads, self.seqlens
        return f"{batch} x {q}:{kv} heads, {n} x {m} x {self.dim}, {self.dtype}"


CELLS = (
    Cell(4096, (16, 16), (40, 40), 64),
    Cell(4096, (16, 16), (40, 40), 64, "bfloat16"),
    Cell(4096, (16, 16), (40, 40), 64, "float32"),
    Cell(4096, (8, 8), (16, 16), 32),
    Cell(8000, (1, 1), (4, 4), 8, "float32"),
    Cell(4096, (1, 1), (1, 100), 64),
    Cell(4096, (1, 1), (1, 100), 64, "float32"),
    Cell(1024, (16, 16), (64, 64), 64),
    Cell(1024, (16, 16), (64, 64), 128),
    Cell(512, (16, 16), (64, 64), 64, "float32"),
    Cell(1024, (16, 4), (40, 40), 64),
    Cell(4096, (1, 1), (1, 100), 64, "bfloat16"),
    Cell(4096, (1, 1), (2, 100), 64),
    Cell(4096, (1, 1), (4, 100), 64),
    Cell(4096, (1, 1), (2, 100), 64, "float32"),
    Cell(4096, (1, 1), (4, 100), 64, "float32"),
    Cell(4096, (1, 1), (1, 33), 64),
    Cell(4096, (1, 1), (1, 300), 128),
    Cell(1024, (1, 1), (1, 512), 32),
    Cell(1024, (1, 1), (1, 512), 64, "float32"),
    Cell(1024, (1, 1), (1, 4096), 32),
)


def copy_of(xp, num_bytes):
    """A copy that reads and writes so many bytes together."""
    source = xp.zeros(num_bytes // 2, xp.int8)
    target = xp.empty_like(source)
    return lambda: xp.copyto(target, source)


def measure(xp, cell, turns):
    """A line for the forward and one for the gradients."""
    rng = xp.random.default_rng(7)
    (heads, kv_heads), (n, m), dim = cell.heads, cell.seqlens, cell.dim
    q, k, v, dout = (
        rng.standard_normal((cell.batch, *shape, dim), "f4").astype(
            arrays.to_dtype(cell.dtype)
        )
        for shape in ((heads, n), (kv_heads, m), (kv_heads, m), (heads, n))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)

    def forward():
        return cupyflash.attention(q, k, v)

    def gradients():
        return cupyflash.attention_vjp(dout, q, k, v, out, lse)

    exact = reference_vjp.plain_attention_vjp(
        *(x[-1, -1].astype("f8") for x in (dout, q, k, v))
    ).dq
    of_inputs = q.nbytes + k.nbytes + v.nbytes
    rows = (
        cupyflash.explain("attention", q, k, v).kernel,
        cupyflash.explain("attention_vjp", dout, q, k, v, out, lse).kernel,
    )
    for name, row_name, call, num_bytes in (
        ("forward", rows[0], forward, of_inputs + out.nbytes),
        ("backward", rows[1], gradients, 2 * of_inputs + dout.nbytes),
    ):
        calls = {
            "ours": call,
            "before": timing.without(row_name, call),
            "copy": copy_of(xp, num_bytes),
        }
        times = _measure.interleaved(calls, on_gpu=True, turns=turns)
        ours, before, copy = (times[n].seconds for n in calls)
        rest = gradients().dq[-1, -1].astype("f8") - exact
        row = {
            "cell": cell.label,
            "direction": name,
            "row": row_name,
            "ms": round(ours * 1e3, 4),
            "before, ms": round(before * 1e3, 4),
            "copy, ms": round(copy * 1e3, 4),
            "share of copy": round(copy / ours, 3),
            "times before": round(before / ours, 2),
            "error of dq": float(f"{float(abs(rest).max() / abs(exact).max()):.2g}"),
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
            timing.save(args.json, "short_entries", on_gpu, rows=rows)


if __name__ == "__main__":
    main()
