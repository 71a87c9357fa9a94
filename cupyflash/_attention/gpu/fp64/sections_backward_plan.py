"""The launches of the float64 gradients by sections."""

import math
from typing import Any

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.fp64.sections_backward import SECTION
from cupyflash._attention.gpu.gradient_plan import Kernels, sinks
from cupyflash._attention.gpu.simt.fallback import fallbacks, portable_bias
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def sections_float64_steps(row, problem, operands, device) -> Steps:
    """delta; for each section P and dS, factors, dq, dk and dv; sums; dbias.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute dq, dk and dv again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    make = Kernels(row, forward, layout, device)
    new_lse, lse, bias = portable_bias(problem, operands, device)
    add_sinks, sink_terms = sinks(problem, make)
    of_rows = "dsinks_terms" if add_sinks else 0

    names = ("dk", "dv")
    targets = {name: layout.targets[name] for name in names}
    heads = math.prod(layout.shape)
    entries = gradient_layout.choose_entries(
        layout.shape, targets, -(-forward.seqlen_k // 128), forward.seqlen_q // 128,
        device.num_sms,
    )  # fmt: skip
    summed = heads // entries.num_kept
    sections = [*row.sections(problem, entries.num_kept, summed)]
    most = max(sections, key=lambda s: s.num_entries * s.num_rows)
    of_section = most.num_entries
    dims = forward.head_dim, forward.head_dim_v

    def tile(part, count, rows, cols, length, splits):
        asked = count, rows, cols, length, splits
        return row.tile(part, forward, device, *asked)

    queries, keys = most.num_rows, forward.seqlen_k
    scores, _ = tile("scores", of_section, queries, keys, sum(dims), False)
    of_dq, dq_splits = tile("queries", of_section, queries, dims[0], keys, True)
    of_dk, dk_splits = tile(
        "keys", 2 * most.num_kept, keys, max(dims), most.num_summed * queries, True
    )
    part = make.part_of("keys", of_dk, 1, entries, names, splits=dk_splits)
    all_kept = gradient_layout.keep_entries(layout.shape, {"dq": layout.targets["dq"]})
    dq = make.part_of("queries", of_dq, 1, all_kept, ("dq",))
    params, grads = part.params
    rows = _up(queries, max(scores.block_m, of_dq.block_m))
    cols = _up(keys, max(scores.block_n, of_dk.block_m))
    num_parts = _up(keys, scores.block_n) // scores.warp_n
    rows_bytes = num_bytes(problem.rows_shape, "float64")
    scratch = {
        "found": 4, "delta": rows_bytes, "factor": rows_bytes,
        "weights": 8 * of_section * rows * cols,
        "score_grads": 8 * of_section * rows * cols,
        "totals": 8 * of_section * rows * num_parts,
        **sink_terms, **part.terms, **dq.terms, **new_lse.scratch,
    }  # fmt: skip
    if dq_splits > 1:
        scratch["dq_splits"] = 8 * dq_splits * of_section * queries * dims[0]
    launches = [*new_lse.launches, make.rows(lse, 0)]

    def add(name, blocks, arguments, more, tile=None, splits=1):
        config = row.config(
            name, tile, forward, layout.batch_dims, "float64", blocks * splits,
            splits=splits,
        )  # fmt: skip
        launches.append((config, (*arguments, *OPTIONS_AND_OFFSET, params, *more)))

    for section in sections:
        count = section.num_entries
        asked: dict[str, Any] = {
            **vars(section),
            "rows": rows,
            "cols": cols,
            "num_parts": num_parts,
            "part_size": scores.warp_n,
            "adds": int(section.adds),
        }
        asked["num_splits"] = dq_splits
        packed = SECTION.pack(asked)
        n = section.num_rows
        add(
            "scores", count * scores.blocks(n, keys),
            ("q", "k", "v", "dout", "lse", "delta", "weights", "score_grads", "totals"),
            (grads, packed), scores,
        )  # fmt: skip
        add(
            "rows", row.blocks_of_rows(count, n),
            ("lse", "delta", "totals", "factor", of_rows), (grads, packed),
        )  # fmt: skip
        into = dq.into if dq_splits == 1 else ("dq_splits",)
        add(
            "queries", count * of_dq.blocks(n, dims[0]),
            ("k", "score_grads", "factor", *into, "found"),
            (grads, dq.params[1], packed), of_dq, dq_splits,
        )  # fmt: skip
        if dq_splits > 1:
            add(
                "sum", row.blocks_of_sum(count * n * dims[0]),
                ("dq_splits", "factor", *dq.into, "found"),
                (grads, dq.params[1], packed),
            )  # fmt: skip
        packed = SECTION.pack({**asked, "num_splits": dk_splits})
        blocks = section.num_kept * sum(of_dk.blocks(keys, d) for d in dims)
        add(
            "keys", blocks,
            ("q", "dout", "weights", "score_grads", "factor", *part.into, "found"),
            (grads, packed), of_dk, dk_splits,
        )  # fmt: skip
    launches += [*dq.sums, *part.sums]
    for again in fallbacks(forward, layout, device):
        launches += again.launches(("q", "k", "v", "dout", "lse", "delta"), "found")
    if bias is not None:
        launches += bias.launches(("q", "k", "v", "dout", lse, "delta"))
        scratch.update(bias.terms)
    return Steps([*launches, *add_sinks], scratch, cleared=4)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
