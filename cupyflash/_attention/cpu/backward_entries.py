"""Gradients of attention on NumPy arrays where entries are small: many at a time.

The formulas are those of `cpu/backward.py`, with all rows and keys of an entry in one
matrix. NumPy multiplies the matrices of a box one by one, so that no entry depends on
the others.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention.cpu.block import (
    finite_base,
    num_threads,
    product,
    times_values,
)
from cupyflash._attention.cpu.entries import (
    Entries,
    has_whole_entries,
    is_finite,
    split_heads,
    visible_keys,
)
from cupyflash._attention.row_sums import is_whole
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._core import arrays
from cupyflash._core import threads as _threads

# Bytes of a box: scores, what it reads, and what it adds.
_BOX_BYTES = 1 << 20
# Numbers of k up to which a correction costs less than to see whether it matters.
_FEW_NUMBERS = 256
# Of the largest entry of dq, what it may lose to rows of dS whose sums are not right.
MAY_BE_LOST = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-19,
    "float64": 2.0**-48,
}


class Terms(NamedTuple):
    """What a box adds to each gradient, with the axes of `Entries` or (1, ...)."""

    keys: slice  # to which dk, dv and ds belong; the others get nothing
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None
    ds: np.ndarray  # before the derivative of the score
    reads: list[Any]  # of arrays of the score function
    visible: np.ndarray | None  # None if nothing is read


def takes(problem):
    """Whether heads of k and v go by boxes."""
    forward = problem.forward
    return has_whole_entries(forward) and num_heads(forward) >= num_threads(forward)


def heads_of_a_box(problem):
    """Heads of k and v in a box."""
    forward = problem.forward
    rows, keys = forward.seqlen_q * forward.group_size, forward.seqlen_k
    numbers = 2 * rows * keys  # P and dS
    numbers += (rows + keys) * (forward.head_dim + forward.head_dim_v)
    size = numbers * np.dtype(forward.compute_dtype).itemsize
    heads = num_heads(forward)
    if heads > 1:
        heads = -(-heads // num_threads(forward))
    return max(1, min(_BOX_BYTES // size, heads))


def num_heads(forward):
    """Heads of k and v."""
    return math.prod(forward.batch) * forward.num_kv_heads


def is_one_box(problem):
    """Whether the calling thread computes one box that is dq, dk and dv as they are."""
    forward = problem.forward
    heads = num_heads(forward)
    asked = problem.need_dbias or problem.need_dsinks or problem.need_dscore
    shapes = problem.q_shape, problem.k_shape, problem.v_shape
    whole = (0, forward.seqlen_k)
    return (
        not asked
        and forward.layout == "bhsd"
        and heads > 0
        and takes(problem)
        and heads <= heads_of_a_box(problem)
        # No batch axis is shared, and no key is out of sight.
        and all(shape[:-3] == forward.batch for shape in shapes)
        and visible_keys(forward, forward.query_offset, 0, forward.seqlen_q) == whole
    )


def one_box(problem, operands):
    """The gradients by the only box; None if something is not finite."""
    forward = problem.forward
    box = tuple(slice(0, n) for n in (*forward.batch, forward.num_kv_heads))
    entries = EntryGradients(problem, operands)
    terms = _threads.run_with_blas(entries.of_a_box, box, _threads.Scratch())
    if terms is None:
        return None
    dtype = arrays.to_dtype(forward.dtype)
    return AttentionGrads(
        np.ascontiguousarray(terms.dq, dtype).reshape(problem.q_shape),
        np.ascontiguousarray(terms.dk, dtype).reshape(problem.k_shape),
        np.ascontiguousarray(terms.dv, dtype).reshape(problem.v_shape),
    )


class EntryGradients(Entries):
    """The operands of attention_vjp with the axes of `Entries`."""

    def __init__(self, problem, operands):
        forward = operands.forward
        super().__init__(problem.forward, forward, forward.out, operands.lse)
        self._vjp = problem
        self._dout = split_heads(operands.dout, problem.forward)
        self._dlse = operands.dlse
        if operands.dlse is not None:
            self._dlse = split_heads(operands.dlse, problem.forward)

    def terms(self, box, scratch):
        """(box, Terms) of the heads of k and v in a box.

        Where something is not finite, by right or because 0 * NaN came from a key that
        is not seen, the box is halved until the head that has it is alone; that one is
        computed with a look at each key.
        """
        found = self.of_a_box(box, scratch)
        if found is not None:
            yield box, found
            return
        halves = _halves(box)
        for half in halves:
            yield from self.terms(half, scratch)
        if not halves:
            yield box, self.of_a_box(box, scratch, exact=True)

    def of_a_box(self, box, scratch, exact=False):
        """The terms of a box; None if they are not finite, unless they are exact.

        Then what is not seen is 0, though an operand be infinite or NaN.
        """
        rows = slice(0, self.problem.seqlen_q)
        entries = (*box, slice(None))
        here = (*entries, rows)
        first, last = self._visible_keys(rows)
        k, v = self._keys_and_values(entries, first, last, scratch)
        s, q, factor = self._products(entries, rows, k, scratch)
        slope, reads = self._change(s, entries, rows, first, last, scratch)
        visible = s != -np.inf if exact or reads else None

        lse = finite_base(self._lse[here][..., None])
        if self._length_q is not None:  # padding has no P, nor a sink
            padding = self._padding(entries, rows)
            lse = np.where(padding, lse.dtype.type(np.inf), lse)
            if visible is not None:
                visible &= ~padding
        np.subtract(s, lse, out=s)
        if exact:  # of huge scores the rounding alone may be beyond the exponent range
            np.copyto(s, 0, where=s > 1)
        p = np.exp(s, out=s)
        dout = self._load(scratch, "dout", self._dout[here])
        dp = self._matrices(scratch, "ds", p.shape, self.dtype)
        np.matmul(dout, v.swapaxes(-1, -2), out=dp)
        if exact:
            np.copyto(p, 0, where=~visible)
            np.copyto(dp, 0, where=~visible)
        down = self._down(here, visible if exact else None)
        delta = self._products_with_out(dout, here, scratch, exact) - down
        of_sink = None
        if self._sinks is not None:
            of_sink = np.exp(self._sinks[here[-3:-1]] - lse)
        ds = terms = np.multiply(np.subtract(dp, delta, out=dp), p, out=dp)
        if slope is not None:
            ds = ds * slope
        if exact:
            np.copyto(terms, 0, where=~visible)
            np.copyto(ds, 0, where=~visible)
            dq = _times_values(ds, visible, k)
            seen = visible.swapaxes(-1, -2)
            dk = _times_values(ds.swapaxes(-1, -2), seen, q)
            dv = _times_values(p.swapaxes(-1, -2), seen, dout)
        else:
            dq = product(ds, k)
            if not (is_finite(dq) and is_finite(q)):
                return None
            dk = product(ds.swapaxes(-1, -2), q)
            dv = product(p.swapaxes(-1, -2), dout)
        sum_ds, sum_p = _row_sums(terms), _row_sums(p)
        if of_sink is not None:
            sum_ds -= of_sink * delta
            sum_p += of_sink
        missing = down - sum_ds
        has_sum = is_whole(sum_p, lse) & np.isfinite(missing)
        missing = np.where(has_sum, missing, 0)
        matters = has_sum
        if k.shape[-2] * k.shape[-1] > _FEW_NUMBERS:
            matters = has_sum & self._matters(missing, k, dq, exact)
        if matters.any():
            share = np.where(matters, missing, 0) / np.where(has_sum, sum_p, 1)
            weights = p if slope is None else p * slope
            if exact:
                mean = _times_values(np.where(visible, weights, 0), visible, k)
            else:
                mean = product(weights, k)
            np.add(dq, share * mean, out=dq)
        if factor != 1:
            np.multiply(dk, factor, out=dk)
        np.multiply(dq, self.dtype.type(self.problem.scale), out=dq)
        return Terms(
            keys=slice(first, last),
            dq=dq,
            dk=_of_group(dk),
            dv=_of_group(dv),
            dsinks=None if of_sink is None else -(of_sink * delta).sum(axis=(-2, -1)),
            ds=terms,
            reads=reads,
            visible=visible,
        )

    def _change(self, s, entries, rows, first, last, scratch):
        """(derivative of the score or None for 1, reads of arrays); s becomes final."""
        slope, reads = None, []
        self._cap(s)
        if self.problem.softcap:
            slope = s / self.dtype.type(self.problem.softcap)
            slope = np.subtract(1, np.multiply(slope, slope, out=slope), out=slope)
        functions = self._functions(s, entries, rows, first, last)
        if functions is not None and functions.has_score:
            by_s, reads = functions.differentiate(s, self._vjp.need_dscore)
            if by_s is not None:
                slope = by_s if slope is None else slope * by_s
        self._add_and_hide(s, entries, rows, first, last, scratch, functions)
        return slope, reads

    def _products_with_out(self, dout, here, scratch, exact):
        """The sums of dO * out."""
        out = self._load(scratch, "out", self._out[here])
        if exact:  # a row that sees no key has out = 0, whatever flows into it
            dout = np.where(out == 0, 0, dout)
        return np.einsum("...d,...d->...", dout, out)[..., None]

    def _down(self, here, visible):
        """The gradient of lse, 0 without one.

        With `visible`, what is no number does not flow into a row that sees no key.
        """
        if self._dlse is None:
            return self.dtype.type(0)
        down = self._dlse[here][..., None]
        if visible is None:
            return down
        is_blind = ~visible.any(axis=-1, keepdims=True)
        return np.where(is_blind & ~np.isfinite(down), 0, down)

    def _matters(self, missing, k, dq, exact):
        """Of which entries dq loses too much to rows of dS whose sums are not right."""
        if exact:
            k, dq = (np.where(np.isfinite(x), x, 0) for x in (k, dq))
        lost = _largest(missing) * _largest(k)
        return lost > MAY_BE_LOST[self.problem.dtype] * _largest(dq)


def _row_sums(x):
    """The sums over keys; of rows that lie in lines of memory by BLAS, in a third."""
    if x.strides[-1] == x.itemsize and x.shape[-1] > 1:
        return product(x, np.ones((x.shape[-1], 1), x.dtype))
    return np.add.reduce(x, -1, None, None, True)


def _largest(x):
    """The largest size of a number of each matrix, (..., 1, 1)."""
    axes = (-2, -1)
    most, least = x.max(axes, None, True, 0), x.min(axes, None, True, 0)
    return np.maximum(most, -least)


def _halves(box):
    """The two halves of a box; none of a single entry."""
    sizes = [part.stop - part.start for part in box]
    size = max(sizes)
    if size == 1:
        return []
    axis = sizes.index(size)
    middle = box[axis].start + size // 2
    return [
        (*box[:axis], half, *box[axis + 1 :])
        for half in (slice(box[axis].start, middle), slice(middle, box[axis].stop))
    ]


def _times_values(p, seen, v):
    """`times_values` of many matrices."""
    heads = p.shape[:-2]
    v = np.broadcast_to(v, heads + v.shape[-2:])
    seen = np.broadcast_to(seen, p.shape)
    out = [times_values(p[i], seen[i], v[i]) for i in np.ndindex(heads)]
    return np.reshape(out, p.shape[:-1] + v.shape[-1:])


def _of_group(x):
    """The sum over the query heads of a group."""
    return x[..., 0, :, :] if x.shape[-3] == 1 else np.add.reduce(x, -3)
