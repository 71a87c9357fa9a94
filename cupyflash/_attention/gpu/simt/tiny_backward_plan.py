"""The launch of the gradients of the tiniest entries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.tiny_backward import TINY_GRADS
from cupyflash._cuda.launch_sequence import Steps


def tiny_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk and dv in one launch."""
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv",
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        TINY_GRADS.pack(fields, kBatchDims=dims),
    )  # fmt: skip
    return Steps([(row.config(problem.forward, dims), arguments)])
