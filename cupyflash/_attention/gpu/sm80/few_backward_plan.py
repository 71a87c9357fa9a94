"""The launches of the gradients of few queries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import Kernels, last_arguments
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._attention.gpu.sm80.few_backward import FEW_GRADS
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def few_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk and dv in one launch; terms of dq, and their sum, if blocks share keys.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute all of them again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    scratch = {"found": 4, "delta": num_bytes(problem.rows_shape, "float32")}
    splits = row.num_splits(forward, device)
    of_splits: tuple[int, ...] = ()
    dq, sums = "dq", []
    if splits > 1:
        of_splits, dq = (splits,), "dq_terms"
        make = Kernels(row, forward, layout, device)
        sum_of_dq, scratch[dq] = make.sum_of_splits("dq", splits)
        sums.append(sum_of_dq)
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta", *of_splits, dq, "dk",
        "dv", "found", *last_arguments(layout, FEW_GRADS),
    )  # fmt: skip
    launches = [(row.config(forward, dims, device, splits), arguments), *sums]
    inputs = ("q", "k", "v", "dout", "lse", "delta")
    for again in fallbacks(forward, layout, device, overlaps=device.cc >= (9, 0)):
        launches += again.launches(inputs, "found")
    return Steps(launches, scratch, cleared=4)
