"""The launch of the gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_GRADS
from cupyflash._cuda.launch_sequence import Steps


def gemv_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk, dv and dbias in one launch."""
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    dbias = "dbias" if problem.need_dbias else 0
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv", dbias,
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        GEMV_GRADS.pack(fields, kBatchDims=dims),
    )  # fmt: skip
    return Steps([(row.config(problem.forward, dims, device), arguments)])
