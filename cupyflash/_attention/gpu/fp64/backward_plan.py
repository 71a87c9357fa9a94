"""The launches of the float64 gradients on tensor cores."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import Kernels, sinks
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.fallback import fallbacks, recomputed_lse
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def tensor_float64_steps(row, problem, operands, device) -> Steps:
    """delta; dq, factors of the weights, and dsinks; dk and dv; dbias.

    A gradient that is not finite may come from hidden keys, as 0 * NaN: the portable
    kernels then compute dq, dk and dv again.
    """
    forward = problem.forward
    layout = gradient_layout.layout(problem, operands)
    make = Kernels(row, forward, layout, device)
    new_lse, bias = Steps([]), None
    lse: str | int = 0
    if problem.need_dbias and forward.seqlen_k:
        # Computed by the portable kernel, and so with an lse of its rounding.
        new_lse, lse = recomputed_lse(problem, operands, device), "recomputed_lse"
        own = gradient_layout.with_new_lse(problem, operands)
        bias = Kernels(simt_backward.FALLBACK, forward, own, device).bias()
    add_sinks, sink_terms = sinks(problem, make)
    rows_bytes = num_bytes(problem.rows_shape, "float64")
    scratch = {
        "found": 4, "delta": rows_bytes, "factor": rows_bytes, **sink_terms,
        **new_lse.scratch,
    }  # fmt: skip
    launches = [*new_lse.launches, make.rows(lse, 0)]

    def add(part, inputs, *after):
        launches.extend(part.launches(inputs, *after))
        scratch.update(part.terms)

    inputs = ("q", "k", "v", "dout", "lse", "delta")
    of_rows = "dsinks_terms" if add_sinks else 0
    add(make.queries(), (*inputs, "factor", of_rows), "found")
    if forward.seqlen_k:
        add(make.keys(), (*inputs, "factor"), "found")
        for again in fallbacks(forward, layout, device):
            add(again, inputs, "found")
    if bias is not None:
        add(bias, ("q", "k", "v", "dout", lse, "delta"))
    return Steps([*launches, *add_sinks], scratch, cleared=4)
