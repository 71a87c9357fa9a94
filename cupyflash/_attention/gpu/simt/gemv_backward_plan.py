"""The launch of the gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_GRADS
from cupyflash._cuda.launch_sequence import Steps


def gemv_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk, dv and dbias in one launch."""
    layout = gradient_layout.layout(problem, operands)
    fields = dict(layout.grads)
    none = ((0,) * layout.batch_dims, 0, 0, 0)
    for name in ("dq", "dk", "dv", "dbias"):
        target = layout.targets.get(name)
        if target is None:
            fields[name] = none
            continue
        *batch, head, _ = target.entries
        fields[name] = tuple(batch), head, target.row, target.col
    dims = layout.batch_dims
    dbias = "dbias" if problem.need_dbias else 0
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv", dbias,
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        GEMV_GRADS.pack(fields, kBatchDims=dims),
    )  # fmt: skip
    return Steps([(row.config(problem.forward, dims, device), arguments)])
