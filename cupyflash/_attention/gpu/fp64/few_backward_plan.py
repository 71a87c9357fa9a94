"""The launches of the float64 gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import num_rows
from cupyflash._attention.gpu.fp64.few_backward import FEW_GRADS
from cupyflash._attention.gpu.gradient_plan import Kernels, last_arguments
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
    rest = last_arguments(layout, FEW_GRADS)
    splits = row.num_splits(forward, device)
    scratch = {"found": 4, "delta": num_bytes(problem.rows_shape, "float64")}
    of_splits: tuple[str | int, ...] = ()
    launches, sums, dq = [], [], "dq"
    if splits > 1:
        of_splits, dq = ("totals", splits), "dq_terms"
        scratch["totals"] = num_bytes((num_rows(forward), splits), "float64")
        config = row.config(forward, dims, device, "_totals", splits)
        launches.append((config, ("q", "k", "lse", *of_splits, *rest)))
        make = Kernels(row, forward, layout, device)
        sum_of_dq, scratch[dq] = make.sum_of_splits("dq", splits)
        sums.append(sum_of_dq)
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta", *of_splits, dq, "dk",
        "dv", "found", *rest,
    )  # fmt: skip
    launches.append((row.config(forward, dims, device, splits=splits), arguments))
    launches += sums
    for again in fallbacks(forward, layout, device):
        launches += again.launches(("q", "k", "v", "dout", "lse", "delta"), "found")
    return Steps(launches, scratch, cleared=4)
