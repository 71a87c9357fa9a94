"""The launches of attention_vjp on sm_90a."""

import math
from dataclasses import replace
from typing import Any

from cupyflash._attention.gpu import gradient_layout, gradient_limits, mask_bits
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.functions import without_functions
from cupyflash._attention.gpu.gradient_plan import FOUND_BYTES, Kernels
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._attention.gpu.sm90 import backward as sm90_backward
from cupyflash._attention.gpu.sm90.operands import encoder
from cupyflash._cuda.launch_sequence import At, Counter, Step, Steps
from cupyflash._cuda.tensor_map import MappedInputs


def hopper_vjp_steps(row, problem, operands, device) -> Steps:
    """Statistics, all gradients, dq rounded to 16 bits, and fallbacks if requested."""
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    batch_dims = layout.batch_dims
    make = Kernels(row, forward, layout, device)
    entries = gradient_layout.entries_fields(
        gradient_layout.all_summed(layout, ("dk", "dv")),
        [layout.targets[name] for name in ("dk", "dv")],
    )
    num_kept, num_summed = entries["num_kept"], entries["num_summed"]

    dq = layout.targets["dq"]
    seqlen_q, heads = forward.seqlen_q, forward.num_heads
    *rows, columns = problem.written_shape("q")
    head_step = seqlen_q * columns
    num_slots = math.prod(rows) // seqlen_q
    # Where an entry has one tile of keys and a slot of its own, that tile stores dq.
    num_entries = num_kept * num_summed
    stores_dq = row.num_tiles(forward) == 1 and num_slots == num_entries
    ordered = problem.deterministic and not stores_dq
    slot = [0, 0]
    slot[:batch_dims] = (step // head_step for step in dq.entries[:-2])
    schedule = {
        **row.schedule(forward, device, num_kept, num_summed, ordered),
        "slot": slot,
    }
    block_m, block_n = row.block_m(forward), sm90_backward.BLOCK_N
    encoders = {
        name: encoder(forward, {**layout.params, **layout.grads}, name, x, rows)
        for name, x, rows in (
            ("q", operands.forward.q, block_m),
            ("k", operands.forward.k, block_n),
            ("v", operands.forward.v, block_n),
            ("dout", operands.dout, block_m),
        )
    }
    inputs = MappedInputs(
        encoders,
        lambda maps, pointers: gradient_limits.INPUTS.pack({**schedule, **maps}),
    )

    # Arrays between the kernels, as in attention/sm90/backward.cuh.
    num_blocks = row.num_blocks(forward)
    sums = num_slots * num_blocks * block_m * row.dim(forward) * (not stores_dq)
    semaphores = num_slots * num_blocks * ordered
    num_split = schedule["num_split"]
    semaphores += num_split * sm90_backward.NUM_WARPS  # parts that have finished
    semaphores = -(-semaphores // 4) * 4
    scratch = {
        "found": FOUND_BYTES,
        # _rows clears both at once.
        "sums": 4 * (sums + semaphores),
        "parts": (
            4 * num_split * schedule["num_parts"] * block_n * 2 * row.dim(forward)
        ),
        "stats": 4 * num_entries * num_blocks * block_m * 2,
        "delta": 4 * num_entries * seqlen_q,
    }

    def config(part, blocks):
        config = row.config(part, forward, batch_dims, blocks, ordered, stores_dq)
        # _rows is the first launch, or follows lists of tiles or bits of a mask.
        return replace(config, overlaps=part != "_rows")

    # The launch that makes lists, or bits of a mask, and arguments of the kernel.
    lists: list[Step] = []
    more: list[Any] = []
    if forward.mask is not None:
        bits = mask_bits.MaskWords.of(forward, layout.params)
        scratch[mask_bits.NAME] = bits.num_bytes
        lists.append(bits.step())
        more.append(bits.argument())
    if forward.mask_function is not None:
        own = row.tile_lists(forward)
        scratch[own.name] = own.num_bytes(forward)
        lists.append(own.step(forward, batch_dims, make.params))
        more.append(own.argument(forward))
    dq_steps = heads * head_step, dq.entries[-1], dq.row
    # Zeros, in vectors of 16 bytes. Without sums they are for rows of dq that no tile
    # stores; where there are such rows, no tile is cut.
    zeros: tuple[str, int] = "sums", (sums + semaphores) // 4
    if stores_dq:
        more += ["dq", *dq_steps]
        if not row.visits_all(forward):
            zeros = "dq", num_slots * head_step // 8
    grads = make.grads(**entries)
    plain = without_functions(make.params), grads
    # A block of _rows has a quarter of the queries of a block.
    launches = [
        *lists,
        (
            config("_rows", num_entries * num_blocks * 4),
            (
                "out", "dout", "lse", "dlse", "stats", "delta", *zeros, "found",
                *plain,
            ),
        ),
        (
            config("", min(schedule["num_work_tiles"], device.num_sms)),
            (
                inputs, "stats", "sums", At("sums", 4 * sums), "parts", "dk", "dv",
                "found", Counter(), *more, *OPTIONS_AND_OFFSET, make.params, grads,
            ),
        ),
    ]  # fmt: skip
    if not stores_dq:
        arguments = ("sums", "dq", num_slots, *dq_steps, "found", *plain)
        launches.append((config("_dq", 2 * num_slots * num_blocks), arguments))
    launches += [
        again.launch(("q", "k", "v", "dout", "lse", "delta"), "found")
        for again in fallbacks(forward, layout, device, overlaps=True)
    ]
    # _rows needs zeros where it computes a maximum; it sets the rest of found_t.
    cleared = FOUND_BYTES if forward.dtype == "float16" else 0
    return Steps(launches, scratch, cleared)
