"""Gradients computed again if those of a faster kernel are not finite."""

import math
from dataclasses import replace

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import (
    Kernels,
    Part,
    gradient_results,
)
from cupyflash._attention.gpu.plan import fused_steps
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt import forward as simt_forward
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.launch_sequence import Steps


def fallback(names, forward, layout, device, overlaps=False, **more) -> Part:
    """The portable kernel that computes gradients again if they are not all finite."""
    part = "queries" if names == ("dq",) else "keys"
    # What the kernel writes, in its order; 0 for what this one leaves alone.
    targets = ("dq",) if part == "queries" else ("dk", "dv")
    row = simt_backward.FALLBACK
    heads = forward.num_heads if part == "queries" else forward.num_kv_heads
    seqlen = forward.seqlen_q if part == "queries" else forward.seqlen_k
    tile = row.tile(forward, device, math.prod(forward.batch) * heads, seqlen)
    config = row.config(
        part, tile, forward, layout.batch_dims, forward.dtype, device.num_sms,
        REPAIRS=1, **more,
    )  # fmt: skip
    make = Kernels(row, forward, layout, device)
    return Part(
        names,
        replace(config, overlaps=overlaps),
        tuple(name if name in names else 0 for name in targets),
        (make.params, make.grads_of(names)),
    )


def fallback_together(layout):
    """Groups of dk and dv that one kernel can compute again: those summed alike.

    There are no terms here for what one of them shares and the other does not.
    """
    alone = [gradient_layout.all_summed(layout, (name,)).kept for name in ("dk", "dv")]
    return [("dk", "dv")] if alone[0] == alone[1] else [("dk",), ("dv",)]


def fallbacks(forward, layout, device, overlaps=False) -> list[Part]:
    """The kernels that compute dq, and dk and dv, again."""
    return [
        fallback(names, forward, layout, device, overlaps)
        for names in (("dq",), *fallback_together(layout))
    ]


def portable_bias(problem, operands, device) -> tuple[Steps, str | int, Part | None]:
    """dbias by the portable kernel, for rows that compute the other gradients.

    Returns the launches of an lse that is rounded as that kernel rounds scores, the
    name of that lse, and the kernel; no launches, 0 and None where there is no dbias to
    compute.
    """
    forward = problem.forward
    if not problem.need_dbias or not forward.seqlen_k:
        return Steps([]), 0, None
    own = gradient_layout.with_new_lse(problem, operands)
    bias = Kernels(simt_backward.FALLBACK, forward, own, device).bias()
    return recomputed_lse(problem, operands, device), "recomputed_lse", bias


def recomputed_lse(problem, operands, device) -> Steps:
    """A recomputed lse, from scores with the rounding of the portable gradient kernels.

    Kernels that take it are made by gradient_layout.with_new_lse(), not by the layout
    of the call: this lse is contiguous, so that batch axes may merge which do not with
    the lse of the call. The unused out of that launch overwrites a gradient if one has
    room.
    """
    forward = replace(problem.forward, return_lse=True)
    row = next(
        row
        for row in (simt_forward.TILED, simt_forward.ONLINE)
        if row.unsupported_reason(forward, device) is None
    )
    inputs = operands.forward._replace(out=None, given_out=None)
    out_bytes = math.prod(forward.out_shape) * ITEMSIZE[forward.dtype]
    gradients = gradient_results(problem).items()
    unused = {"unused_out": out_bytes}
    room = next((n for n, x in gradients if x and x.nbytes >= out_bytes), "unused_out")
    steps = fused_steps(row, forward, inputs, device, room, "recomputed_lse")
    lse = {
        "recomputed_lse": math.prod(forward.lse_shape) * ITEMSIZE[forward.compute_dtype]
    }
    return Steps(steps.launches, {**lse, **(unused if room in unused else {})})
