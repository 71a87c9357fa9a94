"""The launches of the gradients of few queries or keys, which come from one kernel."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import Kernels, last_arguments
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def short_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk and dv in one launch; terms of row.of_splits if blocks share a loop.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute all of them again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    scratch = {"found": 4, "delta": num_bytes(problem.rows_shape, "float32")}
    splits = row.num_splits(forward, device)
    of_splits: tuple[int, ...] = ()
    into, sums = {name: name for name in ("dq", "dk", "dv")}, []
    if splits > 1:
        of_splits = (splits,)
        make = Kernels(row, forward, layout, device)
        for name in row.of_splits:
            into[name] = f"{name}_terms"
            step, scratch[into[name]] = make.sum_of_splits(name, splits)
            sums.append(step)
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta", *of_splits,
        *into.values(), "found", *last_arguments(layout, row.grads),
    )  # fmt: skip
    launches = [(row.config(forward, dims, device, splits), arguments), *sums]
    inputs = ("q", "k", "v", "dout", "lse", "delta")
    for again in fallbacks(forward, layout, device, overlaps=device.cc >= (9, 0)):
        launches += again.launches(inputs, "found")
    return Steps(launches, scratch, cleared=4)
