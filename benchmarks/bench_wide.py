"""Attention of 16-bit heads above 256 columns, beside what else takes them.

    python benchmarks/bench_wide.py --json benchmarks/results/wide_heads_h200.json

Beside the row that is chosen stand the next row that takes the problem (`tiled`), the
first back end of torch's scaled_dot_product_attention that does, and matmul, softmax
and matmul in the dtype of the input. Each is compared with float64 before it is timed.
"""

import contextlib
import warnings
from dataclasses import dataclass

import timing

import cupyflash
from cupyflash._cli import measure as _measure
from cupyflash._core import arrays

_BACK_ENDS = ("flash", "cudnn", "efficient", "math")
_SDPA = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


@dataclass(frozen=True)
class Cell:
    """One call: batch entries, heads of q and of k and v, lengths, columns."""

    batch: int
    heads: tuple[int, int]
    seqlens: tuple[int, int]
    dims: tuple[int, int]
    dtype: str = "bfloat16"
    causal: bool = False

    @property
    def label(self):
        batch, (q, kv), (n, m), dims = self.batch, self.heads, self.seqlens, self.dims
        kind = " causal" if self.causal else ""
        return f"{batch} x {q}:{kv} heads, {n} x {m}, {dims}, {self.dtype}{kind}"

    @property
    def flops(self):
        n, m = self.seqlens
        seen = m - (n - 1) / 2 if self.causal else m
        return 2 * self.batch * self.heads[0] * n * seen * sum(self.dims)

    @property
    def bytes(self):
        n, m = self.seqlens
        rows = self.heads[0] * n + self.heads[1] * m
        return 2 * self.batch * rows * sum(self.dims)


_LATENT = (576, 512)
CELLS = (
    Cell(1, (16, 16), (4096, 4096), _LATENT),
    Cell(1, (16, 16), (4096, 4096), _LATENT, causal=True),
    Cell(4, (16, 16), (2048, 2048), (512, 512)),
    Cell(4, (16, 16), (2048, 2048), (512, 512), "float16"),
    Cell(4, (16, 16), (2048, 2048), (512, 512), causal=True),
    Cell(4, (16, 16), (2048, 2048), (576, 576)),
    Cell(4, (16, 16), (2048, 2048), (384, 384)),
    Cell(4, (16, 16), (2048, 2048), (320, 320)),
    Cell(1, (128, 1), (512, 512), _LATENT),
    Cell(16, (128, 1), (1, 4096), _LATENT),
    Cell(1, (128, 1), (1, 16_384), _LATENT),
    Cell(64, (16, 1), (1, 8192), _LATENT),
    Cell(16, (8, 8), (1, 4096), (512, 512)),
)


def torch_calls(xp, cell, q, k, v):
    """The first back end that takes the call, and the unfused formula."""
    torch = timing.optional("torch")
    if torch is None:
        return {}
    q, k, v = (timing.to_torch(torch, x) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attention = torch.nn.attention
    group = cell.heads[0] > cell.heads[1]
    causal = cell.causal

    def by(name):
        def call():
            with attention.sdpa_kernel(getattr(attention.SDPBackend, _SDPA[name])):
                return sdpa(q, k, v, is_causal=causal, enable_gqa=group)

        return call

    def unfused():
        rows = cell.batch, cell.heads[1], -1
        s = q.reshape(*rows, cell.dims[0]) @ k.mT * cell.dims[0] ** -0.5
        if causal:
            hidden = torch.ones(cell.seqlens, dtype=torch.bool, device="cuda").triu(1)
            s = s.masked_fill_(hidden, float("-inf"))
        out = torch.softmax(s, -1) @ v
        return out.reshape(*q.shape[:-1], cell.dims[1])

    calls = {}
    for name in _BACK_ENDS:
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")  # why it does not
            by(name)()
            calls[f"torch {name}"] = by(name)
            break
    calls["torch, unfused"] = unfused
    return {
        name: lambda call=call: timing.from_torch(xp, call())
        for name, call in calls.items()
    }


def exact(xp, cell, q, k, v):
    """The first head's last 64 queries in float64."""
    q, k, v = (x[:1, :1].astype("f8") for x in (q[..., -64:, :], k, v))
    s = q @ k.swapaxes(-1, -2) * cell.dims[0] ** -0.5
    if cell.causal:
        n, m = s.shape[-2:]
        s = xp.where(xp.arange(m) > xp.arange(m - n, m)[:, None], -xp.inf, s)
    p = xp.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def measure(xp, cell, turns):
    """A line for each candidate."""
    rng = xp.random.default_rng(7)
    (heads, kv_heads), (n, m), (dim, dim_v) = cell.heads, cell.seqlens, cell.dims
    shapes = (heads, n, dim), (kv_heads, m, dim), (kv_heads, m, dim_v)
    q, k, v = (
        rng.standard_normal((cell.batch, *shape), "f4").astype(
            arrays.to_dtype(cell.dtype)
        )
        for shape in shapes
    )

    def ours():
        return cupyflash.attention(q, k, v, causal=cell.causal)

    told = cupyflash.explain("attention", q, k, v, causal=cell.causal)
    calls = {told.kernel: ours}
    if told.kernel == "hopper_wide":
        calls["before (tiled)"] = timing.without("hopper_wide", ours)
    calls |= torch_calls(xp, cell, q, k, v)
    wanted = exact(xp, cell, q, k, v)
    errors = {}
    for name, call in calls.items():
        rest = call()[:1, :1, -64:].astype("f8") - wanted
        errors[name] = float(abs(rest).max() / abs(wanted).max())
    del rest
    times = _measure.interleaved(calls, on_gpu=True, turns=turns)
    first = next(iter(times.values())).seconds
    for name, time in times.items():
        row = {
            "cell": cell.label,
            "name": name,
            "us": round(time.seconds * 1e6, 1),
            "tflops": round(cell.flops / time.seconds / 1e12, 1),
            "tbytes": round(cell.bytes / time.seconds / 1e12, 2),
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
            timing.save(args.json, "wide_heads", on_gpu, rows=rows)


if __name__ == "__main__":
    main()
