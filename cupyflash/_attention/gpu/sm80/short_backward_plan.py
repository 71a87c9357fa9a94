"""The launches of the gradients of short entries."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.gradient_plan import Kernels
from cupyflash._attention.gpu.params import PARAMS
from cupyflash._attention.gpu.simt.fallback import fallbacks
from cupyflash._attention.gpu.sm80.short_backward import SHORT_GRADS
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def short_vjp_steps(row, problem, operands, device) -> Steps:
    """dq, dk and dv in one launch; terms of dk and dv if blocks share queries.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute all of them again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    scratch = {"found": 4, "delta": num_bytes(problem.rows_shape, "float32")}
    splits = row.num_splits(forward, device)
    of_splits: tuple[int, ...] = ()
    of_keys, sums = ("dk", "dv"), []
    if splits > 1:
        make = Kernels(row, forward, layout, device)
        of_splits, of_keys = (splits,), ("dk_terms", "dv_terms")
        for name in ("dk", "dv"):
            target = layout.targets[name]
            shape = (splits, *layout.shape[:-1], *make.matrix(name))
            strides = (0, *target.entries[:-1], target.row, target.col)
            sums.append(make.sum(shape, strides, forward.dtype, name))
            scratch[f"{name}_terms"] = num_bytes(shape, "float32")
    arguments = (
        "q", "k", "v", "dout", "out", "lse", "dlse", "delta", *of_splits, "dq",
        *of_keys, "found",
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        SHORT_GRADS.pack(fields, kBatchDims=dims),
    )  # fmt: skip
    launches = [(row.config(forward, dims, device, splits), arguments), *sums]
    inputs = ("q", "k", "v", "dout", "lse", "delta")
    for again in fallbacks(forward, layout, device, overlaps=device.cc >= (9, 0)):
        launches += again.launches(inputs, "found")
    return Steps(launches, scratch, cleared=4)
