"""The launches that make gradients of the arrays which a score function reads."""

from dataclasses import replace
from typing import Any

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu import gradient_config, gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.gradient_plan import Kernels
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._core import arrays as _arrays
from cupyflash._cuda.launch_sequence import At, Result, Steps, num_bytes, sections

# What makes them, whatever kernel makes the other gradients.
_ROW = simt_backward.FALLBACK


def result_name(name: str) -> str:
    """What launches call the gradient of an array."""
    return f"dscore[{name}]"


def results(problem, operands) -> dict[str, Result]:
    """The gradients of named arrays, as kernels write them."""
    return {
        result_name(name): Result(
            array.shape, _arrays.to_dtype(_arrays.dtype_name(array))
        )
        for name, array in _named(problem, operands).items()
    }


def with_dscore(steps: Steps, problem, operands, device) -> Steps:
    """The launches of other gradients, and those of named arrays behind them."""
    named = _named(problem, operands)
    # One that the function does not read has a gradient of 0.
    reads = operands.forward.functions.score.expression.reads if named else ()
    read = {name: [r for r in reads if r[0] == name] for name in named}
    names = tuple(name for name, of in read.items() if of and named[name].size)
    if not names or not problem.forward.seqlen_k:
        return steps
    forward = attention_problem.with_cuda(
        problem.forward, operands.forward.functions, names
    )
    if reason := _ROW.unsupported_reason(replace(problem, forward=forward), device):
        raise NotImplementedError(f"need_dscore: {reason}")
    layout = gradient_layout.layout(problem, operands)
    make = Kernels(_ROW, forward, layout, device)
    heads = attention_config.num_heads(forward)
    pairs = heads * forward.seqlen_q * forward.seqlen_k
    # A word of 64 bits holds the sum of that many terms.
    bits = 62 - (pairs * max(len(of) for of in read.values())).bit_length()
    bits = max(bits, 1)
    sizes = [named[name].size for name in names]
    first = [sum(sizes[:k]) for k in range(len(names))]
    words = {
        "dscore_high": num_bytes((sum(sizes),), "int64"),
        "dscore_low": num_bytes((sum(sizes),), "int64"),
        "dscore_flags": num_bytes((sum(sizes),), "uint32"),
        "dscore_largest": num_bytes((len(names),), "uint64"),
    }
    delta = num_bytes(problem.rows_shape, forward.compute_dtype)
    rows = gradient_config.rows_config(forward, layout.batch_dims)
    rest = (*OPTIONS_AND_OFFSET, make.params, make.grads())
    launches = [
        *steps.launches,
        (rows, ("out", "dout", "lse", 0, "dlse", "dscore_delta", 0, *rest)),
    ]
    tile = _ROW.tile(forward, device, heads, forward.seqlen_q)
    for largest in (1, 0):
        arguments = ("q", "k", "v", "dout", "lse", "dscore_delta", *words, bits, *rest)
        of_pass = simt_backward.dscore_config(forward, layout.batch_dims, tile, largest)
        launches.append((of_pass, arguments))
    for k, name in enumerate(names):
        parts = [
            At(word, width * at)
            for word, width, at in zip(
                words, (8, 8, 4, 8), (first[k], first[k], first[k], k), strict=True
            )
        ]
        dtype = _arrays.dtype_name(named[name])
        of_array = simt_backward.dscore_finish_config(dtype, sizes[k])
        arguments = (*parts, result_name(name), sizes[k], bits)
        launches.append((of_array, arguments))
    return steps._replace(
        launches=launches,
        scratch={**words, **steps.scratch, "dscore_delta": delta},
        cleared=sections(*words.values())[1] + steps.cleared,
    )


def _named(problem, operands) -> dict[str, Any]:
    """The arrays whose gradients are asked for."""
    if not problem.need_dscore:
        return {}
    arrays = operands.forward.functions.score.arrays
    return {name: arrays[name] for name in problem.need_dscore}
