"""Our kernels beside the same algorithms in Triton, and beside torch's.

    python benchmarks/bench_triton.py --json benchmarks/results/triton_h200.json

The kernels of ``triton_kernels.py`` are checked against float64, then timed by turns:
softmax of rows as a share of a copy's speed, attention in TFLOP/s.
"""

import cupy
import rates
import timing
import torch
import triton_kernels

import cupyflash
from cupyflash._cli import console

# Elements of a row; all arrays have the same bytes.
LENGTHS = (128, 1000, 4096, 32_768, 262_144, 1 << 20)
DTYPES = ("float32", "bfloat16", "float64")
_BYTES = 512 << 20
# Largest error of a softmax, relative to its result.
_MOST_OFF = {"float32": 1e-5, "bfloat16": 1e-2, "float64": 1e-12}

# Batch, heads, queries, keys, columns, causal.
CELLS = (
    (4, 16, 4096, 4096, 64, False),
    (4, 16, 4096, 4096, 64, True),
    (4, 16, 4096, 4096, 128, False),
    (4, 16, 4096, 4096, 128, True),
    (16, 16, 512, 512, 64, False),
    (4, 16, 1000, 1000, 64, True),
)
_MOST_ATTENTION_OFF = 0.02  # of results about 1, in bfloat16


def softmax_rows(turns, only=""):
    """Rows of the report for softmax."""
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        for length in LENGTHS:
            case = f"softmax {length} {dtype}"
            if only not in case:
                continue
            rows = _BYTES // kind.itemsize // length
            x = torch.randn(rows, length, device="cuda", dtype=kind)
            out, copied = torch.empty_like(x), torch.empty_like(x)
            mine, into = (timing.from_torch(cupy, t) for t in (x, out))
            sample = slice(0, max(1, (1 << 22) // length))
            expected = torch.softmax(x[sample].double(), -1)
            calls = {
                "copy": lambda copied=copied, x=x: copied.copy_(x),
                "cupyflash": lambda mine=mine, into=into: cupyflash.softmax(
                    mine, -1, out=into
                ),
                "triton": lambda x=x, out=out: triton_kernels.softmax(x, out),
                "torch": lambda x=x, out=out: torch.softmax(x, -1, out=out),
            }
            errors = {"copy": None}
            for name in ("cupyflash", "triton", "torch"):
                out.fill_(float("nan"))
                calls[name]()
                torch.cuda.synchronize()
                off = (out[sample].double() / expected - 1).abs().max().item()
                if not off <= _MOST_OFF[dtype]:
                    raise SystemExit(f"{case}, {name}: off by {off:.1e}")
                errors[name] = off
            found = rates.timed(calls, turns)
            for name, (seconds, best, worst) in found.items():
                yield {
                    "case": case, "provider": name, "seconds": seconds, "best": best,
                    "worst": worst, "error": errors[name],
                    "rate": 2 * x.nbytes / seconds, "share": found["copy"][0] / seconds,
                }  # fmt: skip
            del x, out, copied, mine, into, expected, calls
            torch.cuda.empty_cache()


def attention_rows(turns, only=""):
    """Rows of the report for attention, in bfloat16 with the log-sum."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for batch, heads, seqlen_q, seqlen_k, dim, causal in CELLS:
        case = f"attention {batch} x {heads} x {seqlen_q} x {seqlen_k} x {dim} bfloat16"
        case += " causal" if causal else ""
        if only not in case:
            continue
        q, k, v = (
            torch.randn(batch, heads, n, dim, device="cuda", dtype=torch.bfloat16)
            for n in (seqlen_q, seqlen_k, seqlen_k)
        )
        mine = [timing.from_torch(cupy, t) for t in (q, k, v)]
        calls = {
            "cupyflash": lambda mine=mine, causal=causal: cupyflash.attention(
                *mine, causal=causal, return_lse=True
            ),
            "triton": lambda q=q, k=k, v=v, causal=causal: triton_kernels.attention(
                q, k, v, causal
            ),
        }
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            calls[f"torch {name.partition('_')[0].lower()}"] = _sdpa(
                sdpa, name, q, k, v, causal
            )
        # One head in float64, and its log-sums.
        s = q[0, 0].double() @ k[0, 0].double().T / dim**0.5
        if causal:
            s.masked_fill_(torch.ones_like(s).triu(1).bool(), float("-inf"))
        expected, lse = torch.softmax(s, -1) @ v[0, 0].double(), torch.logsumexp(s, -1)
        errors = {}
        for name, call in calls.items():
            result = call()
            torch.cuda.synchronize()
            if isinstance(result, tuple):
                result, own = result
                own = torch.from_dlpack(own)[0, 0]
                if not (own - lse).abs().max().item() <= 1e-3:
                    raise SystemExit(f"{case}, {name}: wrong log-sums")
            if not isinstance(result, torch.Tensor):
                result = timing.to_torch(torch, result)
            off = (result[0, 0].double() - expected).abs().max().item()
            if not off <= _MOST_ATTENTION_OFF:
                raise SystemExit(f"{case}, {name}: off by {off:.1e}")
            errors[name] = off
        work = 4.0 * batch * heads * seqlen_q * seqlen_k * dim / (2 if causal else 1)
        for name, (seconds, best, worst) in rates.timed(calls, turns).items():
            yield {
                "case": case, "provider": name, "seconds": seconds, "best": best,
                "worst": worst, "error": errors[name], "rate": work / seconds,
            }  # fmt: skip


def _sdpa(sdpa, name, q, k, v, causal):
    """A back end of torch."""
    back_end = getattr(torch.nn.attention.SDPBackend, name)

    def call():
        with torch.nn.attention.sdpa_kernel(back_end):
            return sdpa(q, k, v, is_causal=causal)

    return call


def report(rows):
    """A line a case: shares of a copy, or TFLOP/s."""
    providers = dict.fromkeys(row["provider"] for row in rows)
    of_case = {}
    for row in rows:
        value = row.get("share") or row["rate"] / 1e12
        of_case.setdefault(row["case"], {})[row["provider"]] = value
    console.table(
        ("share of a copy, or TFLOP/s", *providers),
        [
            (case, *(f"{found[p]:.3g}" if p in found else "-" for p in providers))
            for case, found in of_case.items()
        ],
    )


def main():
    """Measure, print the table and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    rows = []
    for part in (softmax_rows, attention_rows):
        found = list(part(args.turns, args.only))
        report(found)
        rows += found
    timing.save(args.json, "triton", True, rows=rows)


if __name__ == "__main__":
    main()
