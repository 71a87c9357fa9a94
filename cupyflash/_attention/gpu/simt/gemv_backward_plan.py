"""The launches of the gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET, num_rows
from cupyflash._attention.gpu.gradient_plan import Kernels
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_GRADS
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def gemv_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk, dv and dbias in one launch, or by blocks that share entries."""
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    rest = (
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        GEMV_GRADS.pack(fields, kBatchDims=dims),
    )
    splits = row.num_splits(forward, device)
    of_splits: tuple[str | int, ...] = ()
    launches, sums, scratch, dq = [], [], {}, "dq"
    if splits > 1:
        of_splits, dq = (0, splits), "dq_terms"
        target = layout.targets["dq"]
        terms = (splits, *layout.shape, forward.seqlen_q, forward.head_dim)
        strides = (0, *target.entries, target.row, target.col)
        make = Kernels(row, forward, layout, device)
        sums.append(make.sum(terms, strides, forward.dtype, "dq"))
        scratch[dq] = num_bytes(terms, forward.compute_dtype)
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
