"""Attention: our methods, matmul + softmax + matmul, torch's and FlashAttention-4.

    python benchmarks/bench_attention.py --json benchmarks/results/attention_h200.json

Two parts. The ladder: all methods over a few shapes. The table (GPU only): "auto" over
the cells of attention_table.py, beside torch's back ends and FlashAttention-4 if it can
be imported. Rates are in TFLOP/s, on the CPU GFLOP/s.

Operations are 4 * batch * heads * seqlen_q * seqlen_k * head_dim, half of it if causal.
"""

import contextlib

import attention_table
import peers
import timing
from timing import from_torch

from cupyflash._attention.api import attention
from cupyflash._cli import bench_cases, console
from cupyflash._cli.bench_cases import AttentionCase

# Batch, heads, heads of k and v, seqlen_q, seqlen_k, head_dim, dtype, causal.
GPU_CASES = [
    AttentionCase(16, 32, 32, 1024, 1024, 64, "bfloat16"),
    AttentionCase(4, 32, 32, 4096, 4096, 64, "bfloat16"),
    AttentionCase(4, 16, 16, 4096, 4096, 128, "bfloat16"),
    AttentionCase(4, 16, 16, 4096, 4096, 128, "bfloat16", causal=True),
    AttentionCase(4, 16, 4, 4096, 4096, 128, "float16"),
    AttentionCase(4, 16, 16, 4096, 4096, 64, "float32"),
    AttentionCase(4, 16, 16, 4096, 4096, 128, "float32"),
    AttentionCase(4, 16, 16, 2048, 2048, 64, "float64"),
    AttentionCase(16, 32, 8, 1, 8192, 128, "bfloat16"),
    AttentionCase(1, 1, 1, 4096, 4096, 64, "float32"),
]
CPU_CASES = [
    AttentionCase(1, 8, 8, 1024, 1024, 64, "float32"),
    AttentionCase(1, 8, 8, 4096, 4096, 64, "float32"),
    AttentionCase(1, 8, 8, 4096, 4096, 64, "float32", causal=True),
    AttentionCase(1, 1, 1, 4096, 4096, 64, "float32"),
]

# Above this size a rung of the ladder takes too long to be timed here.
_ONLINE_LIMIT = {True: 1e11, False: 1e10}


def measure(xp, case, on_gpu, turns, others):
    """Rows of one case."""
    q, k, v = bench_cases.attention_inputs(xp, case)

    def error_of(out):
        if type(out).__module__.startswith("torch"):
            out = from_torch(xp, out)
        return bench_cases.attention_error(case, q, k, v, out)

    methods = [
        method
        for method in bench_cases.METHODS
        if method != "online" or case.work <= _ONLINE_LIMIT[on_gpu]
    ]
    calls = bench_cases.attention_calls(xp, case, q, k, v, methods)
    calls |= others(case, q, k, v)
    rows = bench_cases.measure(case, calls, error_of, on_gpu=on_gpu, turns=turns)
    if on_gpu:
        xp.get_default_memory_pool().free_all_blocks()
    return rows


# What an option costs is asked of our own call without it.
WITHOUT = "cupyflash, without"


def call_each(cells):
    """Our call of each cell, once, for the kernel cache."""
    import cupy

    for cell in cells:
        q, k, v = cell.inputs(cupy)
        with contextlib.suppress(Exception), attention_table.as_card(cell.card):
            # Measuring will report what fails.
            attention(q, k, v, causal=cell.causal, **cell.options(cupy))
            if cell.beside == cell:
                peers.compile_flash4(peers.forward, cell, q, k, v)
    cupy.cuda.Device().synchronize()


def measure_cell(cupy, cell, turns, others):
    """Rows of one cell of the table: "auto" and its peers."""
    q, k, v = cell.inputs(cupy)
    options = cell.options(cupy)
    calls = {"cupyflash": lambda: attention(q, k, v, causal=cell.causal, **options)}
    without = {}
    if cell.beside != cell:
        plain = cell.beside.inputs(cupy)
        without[WITHOUT] = lambda: attention(*plain, causal=cell.causal)
    else:
        calls |= others(cell, q, k, v)
        if cell.dtype in ("float16", "bfloat16"):
            calls.pop("torch math", None)  # scores of some cells fill the memory

    def error_of(out):
        if type(out).__module__.startswith("torch"):
            out = from_torch(cupy, out)
        shown = {n: x for n, x in options.items() if n != "precision"}
        return bench_cases.attention_error(cell, q, k, v, out, **shown)

    with attention_table.as_card(cell.card):
        rows = bench_cases.measure(
            cell, calls, error_of, on_gpu=True, turns=turns, unchecked=without
        )
    cupy.get_default_memory_pool().free_all_blocks()
    return rows


def main():
    """Measure all cases, print the tables and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("all", "ladder", "table"), default="all")
    peers.add_argument(parser)
    timing.add_jobs(parser)
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    torch = timing.optional("torch")
    flash4 = timing.optional(peers.FLASH4_MODULE) if on_gpu else None

    def others(case, q, k, v):
        return peers.forward(torch, flash4, case, q, k, v, args.peers)

    unit = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
    rows, table = [], []
    if args.part != "table":
        cases = GPU_CASES if on_gpu else CPU_CASES
        cases = [case for case in cases if args.only in case.label]
        for case in console.progress(cases, "attention"):
            rows += measure(xp, case, on_gpu, args.turns, others)
        bench_cases.report(rows, *unit)
    if on_gpu and args.part != "ladder":
        cells = [c for c in attention_table.FORWARD if args.only in c.label]
        timing.compile_ahead(call_each, cells, jobs=args.jobs)
        for cell in console.progress(cells, "cells"):
            table += measure_cell(xp, cell, args.turns, others)
        bench_cases.report(table, *unit)
    timing.save(args.json, "attention", on_gpu, rows=rows, table=table)


if __name__ == "__main__":
    main()
