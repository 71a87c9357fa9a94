"""Attention: our methods, matmul + softmax + matmul, and torch's, in TFLOP/s.

    python benchmarks/bench_attention.py --json benchmarks/results/attention_h200.json

Two parts. The ladder: all methods over a few shapes. The table (GPU only): "auto" over
the cells of attention_table.py, beside torch's back ends.

Operations are 4 * batch * heads * seqlen_q * seqlen_k * head_dim, half of it if causal.
"""

import contextlib

import attention_table
import timing
from timing import from_torch, to_torch

from cupyflash import _bench, _console
from cupyflash._attention import attention
from cupyflash._bench import AttentionCase

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


def torch_calls(torch, case, q, k, v, on_gpu):
    """torch's scaled_dot_product_attention, each of its back ends by name."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (to_torch(torch, x) for x in (q, k, v))
    # torch's causal mask is top-left; with one query it would see one key.
    causal = case.causal
    if causal and case.seqlen_q != case.seqlen_k:
        return {}
    group = case.num_heads != case.num_kv_heads

    def call(backend):
        chosen = contextlib.nullcontext()
        if backend is not None:
            chosen = torch.nn.attention.sdpa_kernel(backend)
        with chosen, torch.no_grad():
            return sdpa(q, k, v, is_causal=causal, enable_gqa=group)

    if not on_gpu:
        return {"torch": lambda: call(None)}
    backends = torch.nn.attention.SDPBackend
    names = {
        "torch flash": backends.FLASH_ATTENTION,
        "torch cudnn": backends.CUDNN_ATTENTION,
        "torch efficient": backends.EFFICIENT_ATTENTION,
        "torch math": backends.MATH,
    }
    return {name: lambda b=backend: call(b) for name, backend in names.items()}


def measure(xp, case, on_gpu, turns, torch):
    """Rows of one case."""
    q, k, v = _bench.attention_inputs(xp, case)

    def error_of(out):
        if type(out).__module__.startswith("torch"):
            out = from_torch(xp, out)
        return _bench.attention_error(case, q, k, v, out)

    methods = [
        method
        for method in _bench.METHODS
        if method != "online" or case.work <= _ONLINE_LIMIT[on_gpu]
    ]
    calls = _bench.attention_calls(xp, case, q, k, v, methods)
    if torch is not None:
        calls |= torch_calls(torch, case, q, k, v, on_gpu)
    rows = _bench.measure(case, calls, error_of, on_gpu=on_gpu, turns=turns)
    if on_gpu:
        xp.get_default_memory_pool().free_all_blocks()
    return rows


# What an option costs is asked of our own call without it.
WITHOUT = "cupyflash, without"


def measure_cell(cupy, cell, turns, torch):
    """Rows of one cell of the table: "auto" and its peers."""
    q, k, v = cell.inputs(cupy)
    options = cell.options(cupy)
    calls = {"cupyflash": lambda: attention(q, k, v, causal=cell.causal, **options)}
    without = {}
    if cell.beside != cell:
        plain = cell.beside.inputs(cupy)
        without[WITHOUT] = lambda: attention(*plain, causal=cell.causal)
    elif torch is not None:
        calls |= torch_calls(torch, cell, q, k, v, on_gpu=True)
        if cell.dtype in ("float16", "bfloat16"):
            del calls["torch math"]  # the scores of some cells fill the memory

    def error_of(out):
        if type(out).__module__.startswith("torch"):
            out = from_torch(cupy, out)
        shown = {n: x for n, x in options.items() if n != "precision"}
        return _bench.attention_error(cell, q, k, v, out, **shown)

    with attention_table.as_card(cell.card):
        rows = _bench.measure(
            cell, calls, error_of, on_gpu=True, turns=turns, unchecked=without
        )
    cupy.get_default_memory_pool().free_all_blocks()
    return rows


def main():
    """Measure all cases, print the tables and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("all", "ladder", "table"), default="all")
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    torch = timing.optional("torch")
    unit = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
    rows, table = [], []
    if args.part != "table":
        cases = GPU_CASES if on_gpu else CPU_CASES
        cases = [case for case in cases if args.only in case.label]
        for case in _console.progress(cases, "attention"):
            rows += measure(xp, case, on_gpu, args.turns, torch)
        _bench.report(rows, *unit)
    if on_gpu and args.part != "ladder":
        cells = [c for c in attention_table.FORWARD if args.only in c.label]
        for cell in _console.progress(cells, "cells"):
            table += measure_cell(xp, cell, args.turns, torch)
        _bench.report(table, *unit)
    timing.save(args.json, "attention", on_gpu, rows=rows, table=table)


if __name__ == "__main__":
    main()
