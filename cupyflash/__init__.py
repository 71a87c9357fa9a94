"""Softmax and attention for NumPy and CuPy arrays, from naive to fused."""

from cupyflash import scores as scores
from cupyflash._attention.api import attention, attention_vjp, merge_attention_states
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._explain import explain
from cupyflash._softmax.api import (
    log_softmax,
    log_softmax_vjp,
    logsumexp,
    softmax,
    softmax_vjp,
)

__version__ = "0.2.0"

__all__ = [
    "AttentionGrads",
    "attention",
    "attention_vjp",
    "explain",
    "log_softmax",
    "log_softmax_vjp",
    "logsumexp",
    "merge_attention_states",
    "softmax",
    "softmax_vjp",
]
