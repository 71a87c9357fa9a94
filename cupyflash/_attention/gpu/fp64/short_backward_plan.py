"""The launches of the float64 gradients of few keys."""

import math

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.fp64.short_backward import SHORT_F64
from cupyflash._attention.gpu.gradient_plan import Kernels, sinks
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def short_float64_steps(row, problem, operands, device) -> Steps:
    """dq, dk, dv and terms of dsinks in one launch; sums of blocks that share queries.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute all of them again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    make = Kernels(row, forward, layout, device)
    add_sinks, sink_terms = sinks(problem, make)
    names = ("dk", "dv")
    entries = gradient_layout.all_summed(layout, names)
    summed = math.prod(layout.shape) // entries.num_kept
    team = row.team(forward, device, summed)
    splits = row.splits(forward, device, team, entries.num_kept, summed)
    part = make.part_of("all", team, 1, entries, names, splits=splits)
    of_dq = {"dq": gradient_layout.operands_of_targets(layout)["dq"]}
    more = SHORT_F64.pack(of_dq, kBatchDims=layout.batch_dims)
    inputs = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta",
        "dsinks_terms" if add_sinks else 0, "dq", *((splits,) if splits > 1 else ()),
    )  # fmt: skip
    config, arguments = part.launch(inputs, "found")
    launches = [(config, (*arguments, more)), *part.sums]
    for again in fallbacks(forward, layout, device):
        launches += again.launches(("q", "k", "v", "dout", "lse", "delta"), "found")
    delta = num_bytes(problem.rows_shape, "float64")
    scratch = {"found": 4, "delta": delta, **sink_terms, **part.terms}
    return Steps([*launches, *add_sinks], scratch, cleared=4)
