"""The launches of the float64 gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET, num_rows
from cupyflash._attention.gpu.fp64.few_backward import FEW_GRADS
from cupyflash._attention.gpu.gradient_plan import Kernels
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def few_float64_steps(row, problem, operands, device) -> Steps:
    """Sums of weights of blocks that share entries; all gradients; sums of dq.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute all of them again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    rest = (
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        FEW_GRADS.pack(fields, kBatchDims=dims),
    )
    splits = row.num_splits(forward, device)
    scratch = {"found": 4, "delta": num_bytes(problem.rows_shape, "float64")}
    of_splits: tuple[str | int, ...] = ()
    launches, sums, dq = [], [], "dq"
    if splits > 1:
        of_splits, dq = ("totals", splits), "dq_terms"
        scratch["totals"] = num_bytes((num_rows(forward), splits), "float64")
        config = row.config(forward, dims, device, "_totals", splits)
        launches.append((config, ("q", "k", "lse", *of_splits, *rest)))
        target = layout.targets["dq"]
        terms = (splits, *layout.shape, forward.seqlen_q, forward.head_dim)
        strides = (0, *target.entries, target.row, target.col)
        make = Kernels(row, forward, layout, device)
        sums.append(make.sum(terms, strides, "float64", "dq"))
        scratch[dq] = num_bytes(terms, "float64")
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta", *of_splits, dq, "dk",
        "dv", "found", *rest,
    )  # fmt: skip
    launches.append((row.config(forward, dims, device, splits=splits), arguments))
    launches += sums
    for again in fallbacks(forward, layout, device):
        launches += again.launches(("q", "k", "v", "dout", "lse", "delta"), "found")
    return Steps(launches, scratch, cleared=4)
