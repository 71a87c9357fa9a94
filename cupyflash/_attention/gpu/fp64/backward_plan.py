"""The launches of the float64 gradients on tensor cores."""

import math

from cupyflash._attention.gpu import gradient_layout, mask_bits
from cupyflash._attention.gpu.gradient_plan import Kernels, Part, sinks
from cupyflash._attention.gpu.simt.fallback import fallbacks, portable_bias
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def tensor_float64_steps(row, problem, operands, device) -> Steps:
    """delta; dq, factors of the weights, and dsinks; dk and dv; dbias.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute dq, dk and dv again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    make = Kernels(row, forward, layout, device)
    new_lse, lse, bias = portable_bias(problem, operands, device)
    add_sinks, sink_terms = sinks(problem, make)
    rows_bytes = num_bytes(problem.rows_shape, "float64")
    scratch = {
        "found": 4, "delta": rows_bytes, "factor": rows_bytes, **sink_terms,
        **new_lse.scratch,
    }  # fmt: skip
    launches = [*new_lse.launches, make.rows(lse, 0)]
    of_mask = mask_bits.add_bits(launches, scratch, forward, layout.params)

    def add(part, inputs, *after):
        launches.extend(part.launches(inputs, *after))
        scratch.update(part.terms)

    inputs = ("q", "k", "v", "dout", "lse", "delta")
    of_rows = "dsinks_terms" if add_sinks else 0
    queries, *splits = _own(make, "queries", ("dq",))
    if splits:
        scratch["totals"] = rows_bytes * splits[0]
        add(queries.for_finish(), (*inputs, "totals", 0, *splits), "found", *of_mask)
        sums = ("dq_splits", "totals", "lse", "delta")
        add(make.finish("finish"), (*sums, "factor", of_rows, *splits), "found")
    else:
        add(queries, (*inputs, "factor", of_rows), "found", *of_mask)
    if forward.seqlen_k:
        keys, *splits = _own(make, "keys", ("dk", "dv"))
        add(keys, (*inputs, "factor", *splits), "found", *of_mask)
        for again in fallbacks(forward, layout, device):
            add(again, inputs, "found")
    if bias is not None:
        add(bias, ("q", "k", "v", "dout", lse, "delta"))
    return Steps([*launches, *add_sinks], scratch, cleared=4)


def _own(make: Kernels, part, names) -> tuple[Part, *tuple[int, ...]]:
    """The kernel for `names`, and splits of its loops if there are any."""
    row, forward, layout, device = make.row, make.forward, make.layout, make.device
    targets = {name: layout.targets[name] for name in names}
    own, other = row.sides(part, forward)
    heads = forward.num_heads if part == "queries" else forward.num_kv_heads
    tile = row.tile(part, forward, device, math.prod(forward.batch) * heads)
    blocks, walk = -(-own // tile.block_m), -(-other // tile.block_n)
    if part == "queries":
        # Each entry has a factor of its own, which is known after the last split.
        entries = gradient_layout.keep_entries(layout.shape, targets)
    else:
        entries = gradient_layout.choose_entries(
            layout.shape, targets, blocks, walk, device.num_sms
        )
    shared, splits = row.sharing(part, forward, device, entries.num_kept)
    if splits == 1:
        return (make.part(part, tile, blocks, walk, names),)
    blocks = -(-own // shared.block_m)
    return make.part_of(part, shared, blocks, entries, names, splits=splits), splits
