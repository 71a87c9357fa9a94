"""The launches of the gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import num_rows
from cupyflash._attention.gpu.gradient_plan import Kernels, last_arguments
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_GRADS
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def gemv_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk, dv and dbias in one launch, or by blocks that share entries."""
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    rest = last_arguments(layout, GEMV_GRADS)
    splits = row.num_splits(forward, device)
    of_splits: tuple[str | int, ...] = ()
    launches, sums, scratch, dq = [], [], {}, "dq"
    if splits > 1:
        of_splits, dq = (0, splits), "dq_terms"
        make = Kernels(row, forward, layout, device)
        sum_of_dq, scratch[dq] = make.sum_of_splits("dq", splits)
        sums.append(sum_of_dq)
    if "_totals" in row.parts(forward, splits):
        of_splits = ("totals", splits)
        of_rows = num_rows(forward), splits
        scratch["totals"] = num_bytes(of_rows, forward.compute_dtype)
        config = row.config(forward, dims, device, "_totals", splits)
        launches.append((config, ("q", "k", "lse", *of_splits, *rest)))
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", *of_splits, dq, "dk", "dv",
        "dbias" if problem.need_dbias else 0, *rest,
    )  # fmt: skip
    launches.append((row.config(forward, dims, device, splits=splits), arguments))
    return Steps([*launches, *sums], scratch)
