"""Gradients of attention: ours, unfused, torch's and FlashAttention-4's, in TFLOP/s.

    python benchmarks/bench_attention_vjp.py --json benchmarks/results/vjp_h200.json

The time is that from dout to dq, dk and dv, with what the forward call left behind.
Operations are 2.5 times those of the forward call, whatever is computed twice.
"""

import contextlib

import attention_table
import peers
import timing
from attention_table import GradientCell
from timing import from_torch

from cupyflash._attention.api import attention, attention_vjp
from cupyflash._cli import bench_cases, console
from cupyflash._reference import backward as reference_vjp
from cupyflash._reference import forward as reference
from cupyflash._softmax import api as softmax_api

# Batch, heads, heads of k and v, seqlen_q, seqlen_k, head_dim, dtype, causal.
CPU_CASES = [
    GradientCell(1, 8, 8, 1024, 1024, 64, "float32"),
    GradientCell(1, 8, 8, 1024, 1024, 64, "float32", causal=True),
    GradientCell(1, 8, 8, 1024, 1024, 64, "float64"),
    GradientCell(1, 1, 1, 4096, 4096, 64, "float32"),
]


def unfused(xp, case, dout, q, k, v):
    """Gradients with P, kept by a forward call, and dS in memory."""
    scale = q.dtype.type(case.head_dim**-0.5)
    s = xp.matmul(q, k.swapaxes(-1, -2)) * scale
    if case.causal:
        s = xp.where(xp.tri(*s.shape[-2:], dtype=bool), s, s.dtype.type(-xp.inf))
    p = softmax_api.softmax(s, axis=-1)

    def call():
        ds = softmax_api.softmax_vjp(p, xp.matmul(dout, v.swapaxes(-1, -2)), axis=-1)
        ds *= scale
        columns = ds.swapaxes(-1, -2)
        return (
            xp.matmul(ds, k),
            xp.matmul(columns, q),
            xp.matmul(p.swapaxes(-1, -2), dout),
        )

    return call


def call_each(cases):
    """Our calls of each case, once, for the kernel cache."""
    import cupy

    for case in cases:
        q, k, v = case.inputs(cupy)
        with contextlib.suppress(Exception), attention_table.as_card(case.card):
            # Measuring will report what fails.
            out, lse = attention(q, k, v, causal=case.causal, return_lse=True)
            for order in (False, True):
                attention_vjp(
                    out, q, k, v, out, lse, causal=case.causal, deterministic=order
                )
            peers.compile_flash4(peers.backward, case, out, q, k, v)
    cupy.cuda.Device().synchronize()


def measure(xp, case, on_gpu, turns, others):
    """Rows of one case."""
    q, k, v = case.inputs(xp)
    dout = bench_cases.random(xp, q.shape, case.dtype, 3)
    out, lse = attention(q, k, v, causal=case.causal, return_lse=True)

    def ours(deterministic):
        grads = attention_vjp(
            dout, q, k, v, out, lse, causal=case.causal, deterministic=deterministic
        )
        return grads[:3]

    calls = {"cupyflash": lambda: ours(False)}
    if on_gpu and case.dtype in ("float16", "bfloat16"):
        calls["cupyflash, one order"] = lambda: ours(True)
    if case.dtype != "bfloat16" and case.num_heads == case.num_kv_heads:
        calls["cupy" if on_gpu else "numpy"] = unfused(xp, case, dout, q, k, v)
    calls |= others(case, dout, q, k, v)
    exact = reference_vjp.plain_attention_vjp(
        *(x[-1, -1].astype("float64") for x in (dout, q, k, v)), causal=case.causal
    ).dq

    def error_of(grads):
        dq = grads[0]
        if type(dq).__module__.startswith("torch"):
            dq = from_torch(xp, dq)
        found = reference.to_host(dq[-1, -1])
        best = reference.to_host(exact)
        return float(abs(found - best).max() / abs(best).max())

    # The last query head has the last head of k, whatever the group.
    with attention_table.as_card(case.card):
        rows = bench_cases.measure(case, calls, error_of, on_gpu=on_gpu, turns=turns)
    if on_gpu:
        xp.get_default_memory_pool().free_all_blocks()
    return rows


def main():
    """Measure all cases, print the table and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    peers.add_argument(parser)
    timing.add_jobs(parser)
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    torch = timing.optional("torch") if on_gpu else None
    flash4 = timing.optional(peers.FLASH4_MODULE) if on_gpu else None

    def others(case, dout, q, k, v):
        return peers.backward(torch, flash4, case, dout, q, k, v, args.peers)

    cases = attention_table.BACKWARD if on_gpu else CPU_CASES
    cases = [case for case in cases if args.only in case.label]
    if on_gpu:
        timing.compile_ahead(call_each, cases, jobs=args.jobs)
    table = []
    for case in console.progress(cases, "gradients"):
        table += measure(xp, case, on_gpu, args.turns, others)
    bench_cases.report(
        table, "TFLOP/s" if on_gpu else "GFLOP/s", 1e12 if on_gpu else 1e9
    )
    timing.save(args.json, "attention_vjp", on_gpu, table=table)


if __name__ == "__main__":
    main()
