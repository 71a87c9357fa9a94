"""The launches of attention_vjp for wide heads and options on sm_90a."""

import math
from typing import Any

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET, is_plain
from cupyflash._attention.gpu.gradient_plan import FOUND_BYTES, Kernels, sinks
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._attention.gpu.sm80.backward import MMA_VJP
from cupyflash._attention.gpu.sm80.backward_plan import MmaKernels
from cupyflash._attention.gpu.sm90 import backward_wide
from cupyflash._attention.gpu.sm90 import forward as sm90_forward
from cupyflash._attention.gpu.sm90.operands import encoder
from cupyflash._cuda.launch_sequence import At, Step, Steps
from cupyflash._cuda.tensor_map import MappedInputs

_COUNTERS = 128  # offset of the kernels' counters, after found_t; zeros at first


def hopper_wide_vjp_steps(row, problem, operands, device) -> Steps:
    """Statistics, dk and dv, dq, and fallbacks if requested."""
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    make = Kernels(row, forward, layout, device)
    makes_dbias = _makes_dbias(problem, layout)
    encoders = {
        name: encoder(
            forward, {**layout.params, **layout.grads}, name, x, backward_wide.BLOCK
        )
        for name, x in (
            *((name, getattr(operands.forward, name)) for name in "qkv"),
            ("dout", operands.dout),
            *(
                (name, getattr(operands.forward, name))
                for name in backward_wide.tiles_of_terms(forward)
            ),
        )
    }
    slow = Kernels(simt_backward.FALLBACK, forward, layout, device)
    add_sinks, sink_terms = sinks(problem, slow)
    # Arrays between the kernels, as in attention/sm90/backward.cuh.
    num_entries = math.prod(forward.batch) * forward.num_heads
    num_blocks = -(-forward.seqlen_q // backward_wide.BLOCK)
    scratch = {
        "found": FOUND_BYTES,
        "stats": 4 * num_entries * num_blocks * backward_wide.BLOCK * 2,
        "delta": 4 * num_entries * forward.seqlen_q,
        **sink_terms,
    }
    params = make.params, make.grads_of(("dk", "dv"))
    rows: tuple[Any, ...] = ("out", "dout", "lse", "dlse", "stats", "delta")
    if is_plain(forward):
        no_sums = 0, 0
        rows = (*rows, *no_sums, "found", *params)
    else:
        of_sinks = "dsinks_terms" if add_sinks else 0
        rows = (*rows, of_sinks, 0, 0, "found", *OPTIONS_AND_OFFSET, *params)
    of_queries = ("dq", "dbias") if makes_dbias else ("dq",)
    lists = []
    if forward.mask_function is not None:
        lists = [row.tile_lists(part) for part in ("_wide_keys", "_wide_queries")]
    for own in lists:
        scratch[own.name] = own.num_bytes(forward)
    launches = [
        (row.rows_config(forward, layout.batch_dims), rows),
        *(own.step(forward, layout.batch_dims, make.params) for own in lists),
        _own(make, "_wide_keys", ("dk", "dv"), encoders, 0),
        _own(make, "_wide_queries", of_queries, encoders, 1),
    ]
    if problem.need_dbias and not makes_dbias:
        bias = MmaKernels(MMA_VJP, forward, layout, device).fast_bias()
        of_bias = ("q", "k", "v", "dout", "stats", backward_wide.BLOCK)
        launches += bias.launches(of_bias)
        scratch |= bias.terms
    again = fallbacks(forward, layout, device)
    if makes_dbias:
        again.append(slow.bias(REPAIRS=1))
    inputs = ("q", "k", "v", "dout", "lse", "delta")
    for part in again:
        launches += part.launches(inputs, "found")
        scratch |= part.terms
    # Hidden scores belong to no tile that writes zeros.
    clears_dbias = makes_dbias and (
        sm90_forward.bounds_of(forward) > 0
        or sm90_forward.has_lengths(forward)
        or forward.mask_function is not None
    )
    zeros = ("dbias",) if clears_dbias else ()
    return Steps([*launches, *add_sinks], scratch, FOUND_BYTES, zeros)


def _own(make: Kernels, part, names, encoders, number) -> Step:
    """The kernel for some of the gradients; `number` is the index of its counter."""
    row, forward, layout, device = make.row, make.forward, make.layout, make.device
    # dbias is written together with dq, and does not decide which entries are kept.
    owners = tuple(n for n in names if n != "dbias")
    entries = gradient_layout.all_summed(layout, owners)
    targets = [layout.targets[name] for name in names]
    fields = gradient_layout.entries_fields(entries, targets)
    schedule = row.schedule(
        part, forward, device, fields["num_kept"], fields["num_summed"]
    )
    struct = backward_wide.INPUTS[backward_wide.has_terms(forward)]
    inputs = MappedInputs(
        encoders,
        lambda maps, pointers: struct.pack({**schedule, "slot": (0, 0), **maps}),
    )
    blocks = min(schedule["num_work_tiles"], device.num_sms)
    config = row.config(part, forward, layout.batch_dims, blocks, "dbias" in names)
    counter = At("found", _COUNTERS + 4 * number)
    params = make.params, make.grads(**fields)
    arguments = (inputs, "stats", *names, "found", counter)
    lists: tuple[Any, ...] = ()
    if forward.mask_function is not None:
        lists = (row.tile_lists(part).argument(forward),)
    return config, (*arguments, *lists, *OPTIONS_AND_OFFSET, *params)


def _makes_dbias(problem, layout):
    """Whether the kernel of queries computes dbias: each score has its own bias."""
    able = backward_wide.can_make_dbias(problem.forward)
    if not problem.need_dbias or not able:
        return False
    target = layout.targets["dbias"]
    entries = zip(layout.shape, target.entries, strict=True)
    own = all(n == 1 or step for n, step in entries)
    return own and bool(target.row) and target.col == 1
