"""Attention on NumPy arrays where heads of q share one of k and v, beside few queries.

The queries of some heads of a group are rows of one product by their k, and of one by
their v: each key is read once for these heads, and dk and dv are sums over them as they
are. That is a call with fewer heads, whose rows are (head, query), where each option is
the same for all rows or can be given for each.
"""

from dataclasses import replace

import numpy as np

from cupyflash._attention.cpu.block import (
    WORTH_A_THREAD,
    as_blas_reads,
    cost_of_an_entry,
)
from cupyflash._attention.cpu.entries import visible_keys
from cupyflash._attention.problem import heads_first
from cupyflash._core import threads as _threads

# Queries of a head up to which heads go together, and rows that they then have at most.
_MOST_QUERIES, _MOST_ROWS = 4, 32


def as_rows(problem):
    """The problem whose rows are those of some heads each, or None if each is apart.

    What decides is the same for an entry alone and for one of a batch, as are its bits.
    """
    if not (
        problem.group_size > 1
        and 0 < problem.seqlen_q <= _MOST_QUERIES
        and problem.seqlen_k > 1
        and problem.method in ("auto", "tiled")
        # Most of the time of 16 bits goes into their conversion.
        and problem.dtype == problem.compute_dtype
        and (problem.left is problem.right is None or _sees_all_keys(problem))
        and problem.sinks is problem.alibi_slopes is problem.query_lengths is None
        and not problem.has_functions
    ):
        return None
    size = problem.group_size
    while size > 1:
        if problem.group_size % size == 0 and size * problem.seqlen_q <= _MOST_ROWS:
            found = _of_heads(problem, problem.num_heads // size)
            if _has_heads_enough(found):
                return found
        size -= 1
    return None


def _of_heads(problem, heads):
    rows = problem.seqlen_q * (problem.num_heads // heads)
    return replace(
        problem,
        num_heads=heads,
        seqlen_q=rows,
        left=None,
        right=None,
        query_offset=0,
        query_offsets=None,
        layout="bhsd",
    )


def _sees_all_keys(problem):
    """Whether a single query has all keys within its bounds, as the host knows."""
    return (
        problem.seqlen_q == 1
        and isinstance(problem.query_offset, int)
        and visible_keys(problem, problem.query_offset, 0, 1) == (0, problem.seqlen_k)
    )


def _has_heads_enough(joined):
    """Whether all cores have a head, if one is worth a thread."""
    is_small = cost_of_an_entry(joined) < WORTH_A_THREAD
    return is_small or joined.num_heads >= _threads.num_cores()


def vjp_as_rows(problem, in_layout=True):
    """The same of a problem of gradients, in the layout of the call or heads first.

    `forward` is the problem of its scores.
    """
    given, forward = problem.forward, as_rows(problem.forward)
    if forward is None or problem.need_dbias or problem.need_dscore:
        return None
    layout = given.layout if in_layout else forward.layout
    *batch, _, _, dim = problem.q_shape
    shape = forward.num_heads, forward.seqlen_q
    if layout != "bhsd":
        forward, shape = replace(forward, layout=layout), shape[::-1]
    found = replace(problem, forward=forward, q_shape=(*batch, *shape, dim))
    if layout == given.layout:
        return found
    k_shape, v_shape = (_turned(x) for x in (problem.k_shape, problem.v_shape))
    return replace(found, k_shape=k_shape, v_shape=v_shape)


def _turned(shape):
    """The shape of an array with heads first where it has them second."""
    if len(shape) == 2:
        return shape
    *batch, keys, heads, dim = shape
    return (*batch, heads, keys, dim)


# Of arrays: `joined` is the problem that `as_rows` found.


def join(x, joined, layout):
    """An array shaped like q, as heads first with rows of several heads."""
    x = heads_first(x, layout)
    return x.reshape((*x.shape[:-3], joined.num_heads, joined.seqlen_q, x.shape[-1]))


def split(x, problem, out=None):
    """What `join` makes of an array, as that array; in `out`, if there is one."""
    *batch, _, _, dim = x.shape
    x = x.reshape((*batch, problem.num_heads, problem.seqlen_q, dim))
    x = heads_first(x, problem.layout)  # its own inverse
    if out is None:
        return np.ascontiguousarray(x)
    np.copyto(out, x)
    return out


def _join_numbers(x, joined):
    """Numbers of rows, as lse."""
    return None if x is None else x.reshape(joined.lse_shape)


def _join_terms(x, problem, joined):
    """A bias or a mask, which may lack axes or have them once.

    One that is neither for all heads and queries nor for each is copied.
    """
    if x is None or np.ndim(x) < 2:
        return x
    heads = x.shape[-3] if x.ndim > 2 else 1
    if heads == x.shape[-2] == 1:
        return x
    batch, keys = x.shape[:-3], x.shape[-1]
    size = joined.seqlen_q // problem.seqlen_q
    of_each = problem.num_heads if heads > 1 else size
    if heads != of_each or x.shape[-2] != problem.seqlen_q:
        if x.ndim == 2:
            x = x[None]
        x = np.broadcast_to(x, (*batch, of_each, problem.seqlen_q, keys))
    return x.reshape((*batch, of_each // size, joined.seqlen_q, keys))


def join_operands(problem, joined, operands):
    """Operands of attention, without `out`."""
    scores = (*joined.batch, joined.num_heads, joined.seqlen_q, joined.seqlen_k)
    bias, mask = operands.bias, operands.mask
    if not (bias is mask is None):
        bias, mask = (
            x
            if x is None
            else x.reshape(scores)
            if all(x.strides)
            else np.broadcast_to(_join_terms(_once(x), problem, joined), scores)
            for x in (bias, mask)
        )
    return operands._replace(
        q=join(operands.q, joined, "bhsd"),
        bias=bias,
        mask=mask,
        query_offsets=None,
        out=None,
        given_out=None,
    )


def _once(x):
    """A view with one element of each axis along which all are the same."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)]


def join_vjp_operands(problem, joined, operands):
    """Operands of attention_vjp."""
    forward = join_operands(problem, joined, operands.forward)
    out, dout = (join(x, joined, "bhsd") for x in (operands.forward.out, operands.dout))
    return operands._replace(
        forward=forward._replace(out=out),
        dout=dout,
        lse=_join_numbers(operands.lse, joined),
        dlse=_join_numbers(operands.dlse, joined),
    )


class Direct:
    """A call that a `Direct` of `entries` makes, with rows of several heads.

    That one has arrays with heads first, which BLAS reads as they lie.
    """

    def __init__(self, problem, joined, direct):
        self._problem, self._joined, self._direct = problem, joined, direct

    def __call__(self, q, k, v, out, bias, functions, mask, *others):
        """(out, lse or None), or None where it takes the long way."""
        problem, joined = self._problem, self._joined
        k, v = (as_blas_reads(heads_first(x, problem.layout), "bhsd") for x in (k, v))
        found = self._direct.of_views(
            np.ascontiguousarray(join(q, joined, problem.layout)), k, v, None,
            _join_terms(bias, problem, joined), functions,
            _join_terms(mask, problem, joined), *others,
        )  # fmt: skip
        if found is None:
            return None
        rows, lse = found
        if lse is not None:
            lse = lse.reshape(problem.lse_shape)
        return split(rows, problem, out), lse

    def gradients(self, out, dout, q, k, v, lse, dlse, bias, mask, *others):
        """The gradients, or None where they take the long way."""
        problem, joined = self._problem, self._joined
        shapes, layout = (k.shape, v.shape), problem.layout
        k, v = (as_blas_reads(heads_first(x, layout), "bhsd") for x in (k, v))
        out, dout, q = (
            np.ascontiguousarray(join(x, joined, layout)) for x in (out, dout, q)
        )
        lse, dlse = (_join_numbers(x, joined) for x in (lse, dlse))
        bias, mask = (_join_terms(x, problem, joined) for x in (bias, mask))
        found = self._direct.gradients_of_views(
            out, dout, q, k, v, lse, dlse, bias, mask, *others
        )
        if found is None:
            return None
        dk, dv = (
            np.ascontiguousarray(heads_first(x, layout)).reshape(shape)
            for x, shape in zip(found[1:3], shapes, strict=True)
        )
        return found._replace(dq=split(found.dq, problem), dk=dk, dv=dv)
