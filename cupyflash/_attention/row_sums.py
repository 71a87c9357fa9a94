"""Gradients where a row's keys come in several calls, on NumPy.

dq is wrong by what a row of dS lacks of its sum (see `cpu/backward.py`). A call over
all keys mends that; one over some of them cannot, but says what its rows add up to.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._attention import vjp_problem
from cupyflash._attention.vjp_problem import AttentionGrads


@dataclass
class RowSums:
    """Sums along rows of dS and of P, and of P times the keys, over the keys so far.

    `mean` is the derivative of dq by the sum of dS, but for the factor `scale`; a sink
    counts in the sums of dS and P.
    """

    ds: Any
    p: Any
    mean: Any

    @classmethod
    def zeros(cls, rows_shape, head_dim, dtype):
        """Those of no keys."""
        ds, p = np.zeros((2, *rows_shape))
        return cls(ds, p, np.zeros((*rows_shape, head_dim), dtype))

    def add(self, rows, other: "RowSums") -> None:
        """Add to some rows, an index of `ds`, what others have for them."""
        self.ds[rows] += other.ds
        self.p[rows] += other.p
        self.mean[rows] += other.mean

    def lack(self, due, lse):
        """What to add to the rows of dq, but for the factor `scale`.

        `due` is what a row of dS should add up to: the gradient of its lse.
        """
        with np.errstate(all="ignore"):
            missing = due - self.ds
            whole = is_whole(self.p, lse, self.mean.dtype)
            has_sum = np.isfinite(missing) & whole
            share = np.where(has_sum, missing, 0) / np.where(has_sum, self.p, 1)
            return share[..., None] * self.mean


def is_whole(sum_p, lse, dtype=None):
    """Whether P adds up to 1; not with lse over more keys than these.

    `dtype` is that of P, if not that of its sum.
    """
    allowed = may_be_off(dtype or sum_p.dtype) * (1 + np.abs(lse))
    return (sum_p > 0) & (np.abs(sum_p - 1) <= allowed)


# The distance of the numbers behind 1, and that of the subnormal ones.
_SPACING = {
    "float16": (2.0**-10, 2.0**-24),
    "bfloat16": (2.0**-7, 2.0**-133),
    "float32": (2.0**-23, 2.0**-149),
    "float64": (2.0**-52, 2.0**-1074),
}


def delta_for_sinks(own, of_sink, whole, dout, out, down, dtype):
    """delta as the gradient of a sink takes it: `own`, that of P and dP, or of `out`.

    A sink may have nearly all the weight of a row, and `out` little but its rounding
    to `dtype`; lse does not tell then whether it is over other keys, too. So `own` it
    is where the two differ by no more than that rounding. Where sinks have at most
    half, `whole` tells.
    """
    if np.maximum.reduce(of_sink, None, initial=0) <= 0.5 and np.all(whole):
        return own
    terms = np.where(out == 0, 0, dout * out)  # 0 where no key is seen
    of_out = terms.sum(axis=-1, keepdims=True) - down
    relative, least = _SPACING[dtype]
    rounding = relative * np.abs(terms).sum(axis=-1, keepdims=True)
    rounding += least * np.abs(dout).sum(axis=-1, keepdims=True)
    rounding += 4 * np.finfo(own.dtype).eps * np.abs(down)
    is_same = whole & ~(np.abs(own - of_out) > rounding)
    return np.where(is_same, own, of_out)


def may_be_off(dtype):
    """How far the sum of P may be from 1, where lse is 0."""
    return dtype.type(8 * np.finfo(dtype).eps)


@functools.cache
def _cpu_vjp():
    """The back end, imported by the first call that runs on it."""
    from cupyflash._attention.cpu import backward

    return backward


def attention_vjp(
    dout, q, k, v, out, lse, *, bias=None, mask=None, scale=None, causal=False,
    query_offset=None, window=None, softcap=0.0, sinks=None, alibi_slopes=None,
    query_lengths=None, key_lengths=None, precision="float32", method="auto",
    dlse=None, deterministic=False,
) -> tuple[AttentionGrads, RowSums]:  # fmt: skip
    """`cupyflash.attention_vjp` over some of the keys, and the sums of its rows."""
    problem, operands = vjp_problem.attention_vjp(
        dout, q, k, v, out, lse, bias, mask, scale, causal, query_offset, window,
        softcap, sinks, alibi_slopes, query_lengths, key_lengths, "bhsd", precision,
        method, dlse, False, False, deterministic,
    )  # fmt: skip
    forward = problem.forward
    sums = RowSums.zeros(problem.rows_shape, forward.head_dim, forward.compute_dtype)
    return _cpu_vjp().run(problem, operands, sums), sums
