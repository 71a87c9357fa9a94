"""The launches of the gradients of short entries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._attention.gpu.sm80.short_backward import SHORT_GRADS
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def short_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk and dv in one launch.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute all of them again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta", "dq", "dk", "dv", "found",
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        SHORT_GRADS.pack(fields, kBatchDims=dims),
    )  # fmt: skip
    launches = [(row.config(forward, dims, device), arguments)]
    inputs = ("q", "k", "v", "dout", "lse", "delta")
    for again in fallbacks(forward, layout, device, overlaps=device.cc >= (9, 0)):
        launches += again.launches(inputs, "found")
    scratch = {"found": 4, "delta": num_bytes(problem.rows_shape, "float32")}
    return Steps(launches, scratch, cleared=4)
