"""Names of arguments in other packages, and their names here."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ATTENTION = {
    "query": "q",
    "key": "k",
    "value": "v",
    "queries": "q",
    "keys": "k",
    "values": "v",
    "Q": "q",
    "K": "k",
    "V": "v",
    "is_causal": "causal=; with as many queries as keys it is the same, otherwise "
    "pass query_offset=0 for PyTorch's diagonal",
    "attn_mask": "mask= if it is bool (True = attend), bias= if it is float",
    "attention_mask": "mask= if it is bool (True = attend), bias= if it is float",
    "key_padding_mask": "mask= (True = attend), with axes that broadcast to "
    "(..., num_heads, seqlen_q, seqlen_k)",
    "attn_bias": "bias=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "logits_soft_cap": "softcap=",
    "attn_logits_soft_cap": "softcap=",
    "logit_cap": "softcap=",
    "window_size": "window=, with None instead of -1",
    "local_window_size": "window=",
    "sliding_window": "window=(n - 1, 0) for n keys, counting the query's own",
    "sink": "sinks=",
    "s_aux": "sinks=",
    "alibi": "alibi_slopes=",
    "return_attn_probs": "return_lse=",
    "return_softmax_lse": "return_lse=",
    "return_residual": "return_lse=",
    "need_weights": "nothing: the weights are never whole (return_lse= returns the "
    "logarithm of their denominators)",
    "enable_gqa": "nothing: heads are shared where k and v have fewer than q",
    "num_heads": "nothing: heads are an axis of q, k and v (see layout=)",
    "tensor_layout": "layout=",
    "cache_seqlens": "key_lengths=",
    "seqused_k": "key_lengths=",
    "seqused_q": "query_lengths=",
    "key_value_seq_lengths": "key_lengths=",
    "query_seq_lengths": "query_lengths=",
    "dropout": "nothing: there is no dropout",
    "dropout_p": "nothing: there is no dropout",
    "dropout_rate": "nothing: there is no dropout",
}
_ATTENTION_VJP = {
    **{n: ours for n, ours in _ATTENTION.items() if not n.startswith("return_")},
    "do": "dout",
    "grad_output": "dout",
    "grad_out": "dout",
    "o": "out",
    "output": "out",
    "softmax_lse": "lse",
    "logsumexp": "lse",
}
_SOFTMAX = {
    "dim": "axis=",
    "input": "x, the first argument",
    "logits": "x, the first argument",
    "mask": "where= (True = takes part)",
    "temperature": "scale=, the reciprocal",
    "beta": "scale=",
}
_SOFTMAX_VJP = {
    "dim": "axis=",
    "output": "y, the first argument",
    "grad_output": "dy, the second argument",
    "grad": "dy, the second argument",
    "temperature": "scale=, the reciprocal",
    "beta": "scale=",
}
_NAMES = {
    "attention": _ATTENTION,
    "attention_vjp": _ATTENTION_VJP,
    "merge_attention_states": {
        "v": "outs", "s": "lses", "outputs": "outs", "lse": "lses", "dim": "axis=",
    },
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "logsumexp": {
        "dim": "axis=",
        "input": "a, the first argument",
        "x": "a, the first argument",
        "logits": "a, the first argument",
        "mask": "where= (True = takes part)",
        "weights": "b=",
        "keepdim": "keepdims=",
    },
    "softmax_vjp": _SOFTMAX_VJP,
    "log_softmax_vjp": _SOFTMAX_VJP,
}  # fmt: skip


# The arguments of each function, those of the plain one where others have its name.
_PARAMETERS: dict[str, list[str]] = {}


def refuse(function: str, unknown: dict[str, Any]) -> NoReturn:
    """TypeError for unknown arguments, with the name that is meant."""
    name = next(iter(unknown))
    text = f"{function}() got an unexpected keyword argument {name!r}"
    if ours := _NAMES.get(function, {}).get(name):
        text += f"; here it is {ours}"
    elif name in (parameters := _PARAMETERS.get(function, [])):
        text += f"; only cupyflash.{function}() takes it"
    elif close := difflib.get_close_matches(name, parameters, 1, cutoff=0.7):
        text += f"; did you mean {close[0]}?"
    raise TypeError(text)


def documented(*needed: str) -> Callable[[F], F]:
    """Show a function that takes ``**unknown``, for `refuse`, as if it did not.

    The arguments `needed` have a default, too: else Python complains of those that are
    missing before a foreign name of theirs is looked at.
    """

    def show(function: F) -> F:
        signature = inspect.signature(function)
        shown = [
            p.replace(default=p.empty) if p.name in needed else p
            for p in signature.parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=shown
        )
        _PARAMETERS.setdefault(function.__name__, [p.name for p in shown])
        return function

    return show
