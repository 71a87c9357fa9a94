"""The launches of attention_vjp by the portable kernels."""

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import Kernels, sinks
from cupyflash._attention.gpu.simt.fallback import recomputed_lse
from cupyflash._cuda.launch_sequence import Steps, num_bytes


def portable_steps(row, problem, operands, device) -> Steps:
    """delta, each kind of gradient, and sums of terms."""
    forward = problem.forward
    make = Kernels(row, forward, gradient_layout.layout(problem, operands), device)
    new_lse = Steps([])
    lse: str | int = 0
    of_rows = make
    if forward.dtype == forward.compute_dtype and forward.seqlen_k:
        new_lse, lse = recomputed_lse(problem, operands, device), "recomputed_lse"
        own = gradient_layout.with_new_lse(problem, operands)
        make = Kernels(row, forward, own, device)
    parts = [make.queries()]
    if forward.seqlen_k:
        parts.append(make.keys())
        if problem.need_dbias:
            parts.append(make.bias())
    add_sinks, sink_terms = sinks(problem, make)
    inputs = ("q", "k", "v", "dout", lse or "lse", "delta")
    scratch = {
        **new_lse.scratch,
        "delta": num_bytes(problem.rows_shape, forward.compute_dtype),
        **sink_terms,
    }
    launches = [
        *new_lse.launches,
        of_rows.rows(lse, "dsinks_terms" if add_sinks else 0),
    ]
    for part in parts:
        launches += part.launches(inputs)
        scratch |= part.terms
    return Steps([*launches, *add_sinks], scratch)
