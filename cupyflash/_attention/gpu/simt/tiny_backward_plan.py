"""The launch of the gradients of the tiniest entries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import last_arguments
from cupyflash._attention.gpu.simt.tiny_backward import TINY_GRADS
from cupyflash._cuda.launch_sequence import Steps


def tiny_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk and dv in one launch."""
    layout = gradient_layout.layout(problem, operands)
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv",
        *last_arguments(layout, TINY_GRADS),
    )  # fmt: skip
    return Steps([(row.config(problem.forward, layout.batch_dims), arguments)])
