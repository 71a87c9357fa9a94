"""attention and merge_attention_states."""

from cupyflash import _arrays, _attention_problem


def _on(problem):
    """The back end of a problem."""
    if problem.backend == "numpy":
        from cupyflash import _attention_cpu as backend
    else:
        from cupyflash import _attention_gpu as backend
    return backend


def attention(
    q,
    k,
    v,
    *,
    bias=None,
    mask=None,
    scale=None,
    causal=False,
    query_offset=None,
    window=None,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
    query_lengths=None,
    key_lengths=None,
    layout="bhsd",
    precision="float32",
    return_lse=False,
    out=None,
    method="auto",
):
    """TODO docstring."""
    arguments = (
        q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
        alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
        method,
    )  # fmt: skip
    if _arrays.is_cupy(q):
        from cupyflash import _attention_gpu

        result = _attention_gpu.attention(*arguments)
    else:
        problem, operands = _attention_problem.attention(*arguments)
        result = _on(problem).run(problem, operands)
    return result if return_lse else result[0]


def merge_attention_states(outs, lses, *, axis=0, out=None):
    """TODO docstring."""
    problem, operands = _attention_problem.merge(outs, lses, axis, out)
    return _on(problem).merge(problem, operands)
