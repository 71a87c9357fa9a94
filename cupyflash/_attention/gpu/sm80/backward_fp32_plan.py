"""The launches of attention_vjp of float32 by mma.sync."""

import math

from cupyflash._attention.gpu import gradient_layout, mask_bits
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.gradient_plan import FOUND_BYTES, Kernels, Part, sinks
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.fallback import (
    fallback,
    fallback_together,
    portable_bias,
)
from cupyflash._attention.gpu.sm80.backward_fp32 import made_by, makes
from cupyflash._cuda.launch_sequence import Steps


def mma_split_steps(row, problem, operands, device) -> Steps:
    """Delta, split inputs, dq, dk and dv, and fallbacks if they are requested."""
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    # Scores of the portable kernels have other rounding errors, and so need their own
    # lse: the fallback for dq leaves it to the one for dk.
    own = gradient_layout.with_new_lse(problem, operands)
    make = Kernels(row, forward, layout, device)
    slow = Kernels(simt_backward.FALLBACK, forward, own, device)
    new_lse, lse, bias = portable_bias(problem, operands, device)
    add_sinks, sink_terms = sinks(problem, slow)
    num_tiles, split_bytes = row.split_operands(forward)
    prepare = row.config(
        "_prepare", None, forward, layout.batch_dims, "float32", num_tiles
    )
    num_rows = math.prod(problem.rows_shape)
    scratch = {
        "found": FOUND_BYTES,
        "split": split_bytes,
        "stats": row.stats_bytes(forward),
        "fallback_lse": 4 * num_rows,
        "delta": 4 * num_rows,
        **sink_terms,
        **new_lse.scratch,
    }
    rest = (*OPTIONS_AND_OFFSET, make.params, make.grads())
    launches = [
        *new_lse.launches,
        make.rows(lse, "dsinks_terms" if add_sinks else 0),
        (prepare, ("split", "q", "k", "v", "dout", *rest)),
    ]

    of_mask = mask_bits.add_bits(launches, scratch, forward, layout.params)

    def add(part, *inputs, after=()):
        launches.extend(part.launches(inputs, *after))
        scratch.update(part.terms)

    queries, *numbers = _own(make, "_queries", ("dq",))
    if len(numbers) == 1:
        asked = "split", "lse", "delta", "stats", "found", *numbers
        add(queries, *asked, after=of_mask)
    else:
        *_, splits = numbers
        scratch["totals"] = 4 * num_rows * splits
        asked = "split", "lse", "delta", "totals", "found", *numbers
        add(queries.for_finish(), *asked, after=of_mask)
        # The switch makes it read sums of splits, however many there are.
        finish = make.finish("_finish", LOOP_SPLITS=1)
        rows = ("lse", "delta", "stats", "found")
        add(finish, "dq_splits", "totals", *rows, splits)
    for names in made_by("_keys", row.tile("_keys", forward, device)):
        keys, *numbers = _own(make, "_keys", names)
        add(keys, "split", "stats", "found", *numbers, after=of_mask)
    inputs = ("q", "k", "v", "dout")
    again = fallback(("dq",), forward, layout, device, OWN_LSE=1)
    launches.append(again.launch((*inputs, "lse", "delta"), "found", "fallback_lse"))
    for names in fallback_together(own):
        again = fallback(names, forward, own, device)
        launches.append(again.launch((*inputs, "fallback_lse", "delta"), "found"))
    if bias is not None:
        add(bias, *inputs, lse, "delta")
    return Steps([*launches, *add_sinks], scratch, FOUND_BYTES)


def _own(make: Kernels, part, names) -> tuple[Part, *tuple[int, ...]]:
    """The kernel for `names`, entries of a section, and splits of loops if any."""
    forward, layout, device = make.forward, make.layout, make.device
    of_queries = part == "_queries"
    seqlen, other = forward.seqlen_q, forward.seqlen_k
    if not of_queries:
        seqlen, other = other, seqlen
    tile = make.row.tile(part, forward, device)
    targets = {name: layout.targets[name] for name in names}
    blocks, walk = -(-seqlen // tile.rows), -(-other // 32)
    # A block for dq has one entry, since the statistics that it computes belong to one.
    entries = (
        gradient_layout.keep_entries(layout.shape, targets)
        if of_queries
        else gradient_layout.choose_entries(
            layout.shape, targets, blocks, walk, device.num_sms
        )
    )
    splits = make.row.num_splits(part, forward, device, blocks * entries.num_kept)
    made = make.part_of(
        part, tile, blocks, entries, names, splits=splits, **makes(part, names)
    )
    # A kernel that computes only dk or dv has parameters for both.
    if names in (("dk",), ("dv",)):
        made = made._replace(into=made.into * 2)
    num_summed = math.prod(layout.shape) // entries.num_kept
    section = make.row.section(part, forward, device, entries.num_kept, num_summed)
    return (made, section) if splits == 1 else (made, section, splits)
