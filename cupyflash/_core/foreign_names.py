"""Names of arguments in other packages, and what stands for them here."""

import inspect
from typing import Any, NoReturn

_ATTENTION = {
    "is_causal": "causal=; with as many queries as keys it is the same, else give "
    "query_offset=0 for the diagonal of PyTorch",
    "attn_mask": "mask= if it is bool (True = attend), bias= if it is float",
    "key_padding_mask": "mask= (True = attend), with axes that broadcast to "
    "(..., num_heads, seqlen_q, seqlen_k)",
    "attn_bias": "bias=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "logits_soft_cap": "softcap=",
    "window_size": "window=, with None in place of -1",
    "local_window_size": "window=",
    "return_attn_probs": "return_lse=",
    "return_softmax_lse": "return_lse=",
    "enable_gqa": "nothing: heads are shared where k and v have fewer than q",
    "num_heads": "nothing: heads are an axis of q, k and v (see layout=)",
    "tensor_layout": "layout=",
    "cache_seqlens": "key_lengths=",
    "key_value_seq_lengths": "key_lengths=",
    "query_seq_lengths": "query_lengths=",
    "dropout_p": "nothing: there is no dropout",
    "dropout_rate": "nothing: there is no dropout",
}
_SOFTMAX = {"dim": "axis=", "input": "x, the first argument"}
_NAMES = {
    "attention": _ATTENTION,
    "attention_vjp": _ATTENTION,
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "logsumexp": {**_SOFTMAX, "input": "a, the first argument", "keepdim": "keepdims="},
}


def refuse(function: str, unknown: dict[str, Any]) -> NoReturn:
    """TypeError for arguments that a function has not, with the name of ours."""
    name = next(iter(unknown))
    text = f"{function}() got an unexpected keyword argument {name!r}"
    if ours := _NAMES.get(function, {}).get(name):
        text += f"; here it is {ours}"
    raise TypeError(text)


def documented(function):
    """Hide from help() the ``**unknown`` of a function, which goes to `refuse`."""
    signature = inspect.signature(function)
    shown = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=shown)
    return function
