"""The launches of attention_vjp by mma.sync."""

import math

import numpy as np

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.gradient_layout import grads_dtype
from cupyflash._attention.gpu.gradient_plan import FOUND_BYTES, Kernels, Part, sinks
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._attention.gpu.sm80.backward import FOUND, SCHEDULE
from cupyflash._cuda.launch_sequence import At, Steps

_STILL_NONFINITE = FOUND.offset("still_nonfinite")  # where it stands


class MmaKernels(Kernels):
    """The parts of this kernel spec."""

    def own(self, part, tile, names, **more) -> Part:
        """The kernel for the gradients `names`."""
        forward = self.forward
        of_queries = part == "_queries"
        seqlen, _ = self.matrix(names[0])
        other = forward.seqlen_k if of_queries else forward.seqlen_q
        block, step = tile.block_m, tile.block_n
        if not of_queries:
            block, step = step, block
        return self.part(
            part, tile, -(-seqlen // block), -(-other // step), names, **more
        )

    def fast_bias(self) -> Part:
        """The kernel for dbias."""
        return self.bias_by("_bias", self.row.tile("_bias", self.forward, self.device))

    def careful(self, names, part, tile, made=None, **more) -> Part:
        """The second pass, with scrubbed inputs, into what `made` wrote, if given."""
        forward = self.forward
        grad = forward.compute_dtype if made and made.sums else forward.dtype
        config = self.row.config(
            part, tile, forward, self.layout.batch_dims, grad,
            2 * self.device.num_sms, CAREFUL=1, **more,
        )  # fmt: skip
        params = made.params if made else (self.params, self.grads_of(names))
        return Part(names, config, made.into if made else names, params)


def mma_vjp_steps(row, problem, operands, device) -> Steps:
    """Statistics, all gradients, dq rounded to 16 bits, and fallbacks if requested."""
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    batch_dims = layout.batch_dims
    make = MmaKernels(row, forward, layout, device)
    tile = row.tile("", forward, device)
    own = row.tile("_queries", forward, device)
    stats_m = tile.block_m
    # For a fixed order of sums, dq has a kernel of its own.
    ordered = problem.deterministic
    keys = make.own("", tile, ("dk", "dv"), MAKES_DQ=int(not ordered))
    queries = None
    if ordered:
        queries = make.own("_queries", own, ("dq",), STATS_M=stats_m)

    # Sums of dq: batch entries that share q add to the same slot.
    dq, matrix = layout.targets["dq"], forward.seqlen_q * forward.head_dim
    num_slots = math.prod(problem.q_shape) // matrix
    (grads,) = np.frombuffer(keys.params[-1], grads_dtype(batch_dims))
    num_kept = int(grads["num_kept"])
    num_entries = math.prod(forward.batch) * forward.num_heads
    schedule = SCHEDULE.pack(
        {
            "section": row.section(forward, device, num_kept, num_entries // num_kept),
            "slot": tuple(step // matrix for step in dq.entries[:-2]),
        },
        kBatchDims=batch_dims,
    )

    # Arrays between the kernels, as in attention/sm80/backward.cuh.
    num_blocks = -(-forward.seqlen_q // stats_m)
    num_floats = num_blocks * stats_m
    sums = 0 if ordered else num_slots * num_floats * row.dim(forward)
    slow = Kernels(simt_backward.FALLBACK, forward, layout, device)
    add_sinks, sink_terms = sinks(problem, slow)
    scratch = {
        "found": FOUND_BYTES,
        "sums": 4 * sums,
        "stats": 4 * num_entries * num_floats * 2,
        "delta": 4 * math.prod(problem.rows_shape),
        **sink_terms,
        **keys.terms,
        **(queries.terms if queries else {}),
    }

    def config(part, blocks):
        return row.config(part, tile, forward, batch_dims, forward.dtype, blocks)

    inputs = ("q", "k", "v", "dout", "stats")
    launches = [
        (
            config("_rows", row.rows_blocks(forward, tile)),
            (
                "out", "dout", "lse", "dlse", "stats", "delta",
                "dsinks_terms" if add_sinks else 0, "sums", sums // 4, "found",
                *OPTIONS_AND_OFFSET, make.params, make.grads(),
            ),
        ),
        keys.launch((*inputs, "sums", "found", schedule)),
    ]  # fmt: skip
    if queries:
        launches.append(queries.launch((*inputs, "found")))
    else:
        dq_steps = num_slots, forward.num_heads * matrix, dq.entries[-1], dq.row
        launches.append(
            (
                config("_dq", num_slots * num_blocks),
                ("sums", "dq", *dq_steps, "found", make.params),
            )
        )
    # The second pass with scrubbed inputs, if a gradient is not finite.
    again = make.careful(("dk", "dv"), "", tile, keys, MAKES_DQ=0)
    launches.append(again.launch((*inputs, 0, "found", schedule)))
    again = make.careful(("dq",), "_queries", own, queries, STATS_M=stats_m)
    launches.append(again.launch((*inputs, "found")))
    launches += [*keys.sums, *(queries.sums if queries else ())]
    if problem.need_dbias:
        bias = make.fast_bias()
        launches += bias.launches((*inputs, stats_m))
        scratch |= bias.terms
    of_fallbacks = ("q", "k", "v", "dout", "lse", "delta")
    launches += [
        again.launch(of_fallbacks, At("found", _STILL_NONFINITE))
        for again in fallbacks(forward, layout, device)
    ]
    return Steps([*launches, *add_sinks], scratch, FOUND_BYTES)
