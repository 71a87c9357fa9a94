"""Gradients of attention on NumPy arrays where entries are small: many at a time.

The formulas are those of `cpu/backward.py`, with all rows and keys of an entry in one
matrix. So delta comes from P and dP themselves, and dS adds up to what it must; only
where lse is over more keys than the call has, it comes from `out`. NumPy multiplies the
matrices of a box one by one, so that no entry depends on the others.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention.cpu import entries
from cupyflash._attention.cpu.block import (
    as_blas_reads,
    cost_of_an_entry,
    finite_base,
    num_threads,
    product_of_long_sums,
    row_sums,
    times_values,
)
from cupyflash._attention.cpu.entries import (
    Entries,
    cut_in_two,
    half_problem,
    halves_of,
    has_whole_entries,
    is_finite,
    is_small_dot,
    split_heads,
)
from cupyflash._attention.cpu.pieces import multiply_transposed
from cupyflash._attention.problem import heads_first
from cupyflash._attention.row_sums import delta_for_sinks, is_whole, may_be_off
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._core import arrays
from cupyflash._core import threads as _threads

# Bytes of a box: scores, what it reads, and what it adds. Each of its steps is long, so
# that two threads seldom wait for the interpreter; less where entries share a gradient,
# which has those of all of a box in memory, and most where a box is a whole call.
_BOX_BYTES, _SHARED_BYTES, _DIRECT_BYTES = 1 << 22, 1 << 20, 1 << 24
# Of the largest entry of dq, what it may lose to rows of dS whose sums are not right.
MAY_BE_LOST = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-19,
    "float64": 2.0**-48,
}

# Norms below which a product is finite however it is rounded, by the size of a number.
_WELL_BELOW_INFINITY = {4: 1e37, 8: 1e307}


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


def vjp_halves_of(problem):
    """`halves_of` for gradients, with the scores of the forward call to the bit."""
    forward = problem.forward
    total = math.prod(forward.batch) * forward.num_heads
    if problem.need_dbias or problem.need_dsinks or not _is_direct(forward):
        return None
    if total == 1:
        return halves_of(forward)
    cost = total * cost_of_an_entry(forward)
    if not takes(problem) or cost < entries.WORTH_HALVES[1]:
        return None
    return cut_in_two(forward)


def _is_direct(forward):
    """Whether all heads of k and v fit into one box."""
    return num_heads(forward) * _bytes_of_a_head(forward) <= _DIRECT_BYTES


def heads_of_a_box(problem):
    """Heads of k and v in a box."""
    forward = problem.forward
    heads = num_heads(forward)
    if heads > 1:
        heads = -(-heads // num_threads(forward))
    bytes_ = _SHARED_BYTES if _shares(problem) else _BOX_BYTES
    return max(1, min(bytes_ // _bytes_of_a_head(forward), heads))


def _shares(problem):
    """Whether entries share a batch axis of q, k or v."""
    shapes = problem.q_shape, problem.k_shape, problem.v_shape
    return any(shape[:-3] != problem.forward.batch for shape in shapes)


def _bytes_of_a_head(forward):
    """Bytes of what a head of k and v reads, and adds, and of its P and dS."""
    rows, keys = forward.seqlen_q * forward.group_size, forward.seqlen_k
    numbers = 2 * rows * keys + (rows + keys) * (forward.head_dim + forward.head_dim_v)
    return numbers * np.dtype(forward.compute_dtype).itemsize


def num_heads(forward):
    """Heads of k and v."""
    return math.prod(forward.batch) * forward.num_kv_heads


class Direct(entries.Direct):
    """Gradients of one box in the calling thread; a call like it had the checks.

    It does what `EntryGradients.of_a_box` does, and leaves to it what is not finite.
    """

    @classmethod
    def takes_vjp(cls, problem):
        """Whether calls like this one can be made this way."""
        forward = problem.forward
        return (
            cls.takes(forward, problem.q_shape, problem.k_shape)
            and (
                vjp_halves_of(problem) is not None
                or (takes(problem) and num_threads(forward) == 1)
            )
            and _is_direct(forward)
            and not forward.has_functions
            and not _shares(problem)
        )

    _LACKS = 0, 0, 0, 0, 1, 1, 0, 0, 2, 2, 3, 3
    _KEYS = 2, 3
    _IN_SHORT_SUMS = False

    def __init__(self, problem, whole=None):
        super().__init__(problem.forward, whole or problem.forward)
        self._problem = problem
        self._cut_in_halves(
            None if whole else vjp_halves_of(problem),
            lambda *half: Direct(
                replace(problem, forward=half_problem(problem.forward, *half)),
                problem.forward,
            ),
        )
        self._may_hide |= bool(problem.forward.query_lengths)
        self._has_one_key = problem.forward.seqlen_k == 1
        self._one, self._may_be_off = (
            self._dtype.type(1),
            float(may_be_off(self._dtype)),
        )
        self._is_small_for_blas &= all(
            is_small_dot(problem.forward, math.prod(shape))
            for shape in (problem.q_shape, problem.k_shape)
        )

    def gradients(self, out, dout, q, k, v, *others):
        """The gradients, or None where they take the long way."""
        dout, q = np.ascontiguousarray(dout), np.ascontiguousarray(q)
        k, v = (as_blas_reads(x, self._layout) for x in (k, v))
        return self.gradients_of_views(out, dout, q, k, v, *others)

    def gradients_of_views(self, out, dout, q, k, v, *others):
        """The same of arrays whose matrices are known to lie as BLAS reads them."""
        if not self._halves:
            small = self._is_small_for_blas
            run = _threads.silently if small else _threads.run_with_blas
            if self._matrices is not None:
                lse, dlse, bias = others[:3]
                if dlse is None and not self._problem.need_dbias:
                    arguments = dout, q, k, v, lse, bias
                    found = run(self._gradients_of_matrices, *arguments)
                    if found is not None:
                        return found
            return run(self._gradients, dout, q, k, v, *others, out)
        results = self._in_halves(Direct._gradients, dout, q, k, v, *others)
        if None in results:
            return None
        axis, (dq, dk, dv) = self._axis, zip(*(x[:3] for x in results), strict=True)
        if axis == -2:  # both have all keys
            return AttentionGrads(
                np.concatenate(dq, axis), np.add(*dk, dk[0]), np.add(*dv, dv[0])
            )
        return AttentionGrads(*(np.concatenate(x, axis) for x in (dq, dk, dv)))

    def _gradients(
        self, dout, q, k, v, lse, dlse, bias, mask, sinks, slopes, query_lengths,
        key_lengths, out=None,
    ):  # fmt: skip
        shapes = q.shape, k.shape, v.shape
        if self._groups is not None:
            dout, q, k, v = (self._heads(x) for x in (dout, q, k, v))
            bias, mask = (self._split(x, -3) for x in (bias, mask))
            lse, dlse = (self._split(x, -2) for x in (lse, dlse))
            slopes, sinks = (self._split(x, -1) for x in (slopes, sinks))
        q, s = self._products(q, k)
        slope = None
        if self._cap:
            np.multiply(np.tanh(np.divide(s, self._cap, s), s), self._cap, s)
            slope = _derivative_of_cap(s, self._cap)
        self._add_and_hide(s, bias, mask, slopes, query_lengths, key_lengths)
        lse = lse[..., None]
        if self._may_hide:
            lse = finite_base(lse)
        if query_lengths is not None:  # padding has no P, nor a sink
            lse = np.where(self._padding(query_lengths), self._dtype.type(np.inf), lse)
        p = np.exp(np.subtract(s, lse, s), s)
        has_one_term = self._has_one_key and sinks is None
        sum_p, of_sink = p if has_one_term else row_sums(p), None
        if sinks is not None:
            of_sink = np.exp(self._sinks(sinks) - lse)
            np.add(sum_p, of_sink, sum_p)
        if self._may_hide:  # in a row without P it does not matter
            sum_p = np.where(sum_p == 0, self._one, sum_p)
        off = np.subtract(sum_p, self._one).ravel()
        if not (  # what is quicker first; it is enough where rows are few, or lse small
            off.dot(off) <= self._may_be_off**2
            or np.maximum.reduce(np.abs(off, off)) <= self._may_be_off
            or is_whole(sum_p, lse).all()
        ):
            return None  # lse is over more keys than there are here
        dp = self._product(dout, v)
        if has_one_term and dlse is None and not self._problem.need_dbias:
            return self._gradients_of_one_key(p, dp, dout, shapes)
        down = None if dlse is None else dlse[..., None]
        delta = _subtract_delta(p, dp, sum_p, of_sink, down)
        ds = np.multiply(dp, p, dp)
        by_score = ds if slope is None else ds * slope
        dq, dk = product_of_long_sums(by_score, k), self._sum_over_rows(by_score, q)
        if not (is_finite(dq) and _is_finite_product(by_score, q, dk)):
            return None
        dv = self._sum_over_rows(p, dout)
        np.multiply(dq, self._factor, dq)
        if not self._folds:  # else it is in q
            np.multiply(dk, self._factor, dk)
        problem, dbias, dsinks = self._problem, None, None
        if problem.need_dbias:
            dtype = arrays.to_dtype(problem.forward.bias)
            dbias = _sum_to(self._joined(ds), problem.bias_shape, dtype)
        if problem.need_dsinks:
            dtype = arrays.to_dtype(problem.forward.sinks)
            out = out if self._groups is None else self._heads(out)
            down = 0 if down is None else down
            delta = delta_for_sinks(
                delta, of_sink, True, dout, out, down, problem.forward.dtype
            )
            of_rows = self._joined(of_sink * -delta)
            of_heads = of_rows.sum((-2, -1), np.float64)
            dsinks = _sum_to(of_heads, problem.sinks_shape, dtype)
        if self._groups is None:
            return AttentionGrads(dq, dk, dv, dbias, dsinks)
        dk, dv = (_of_group(x)[..., None, :, :] for x in (dk, dv))
        return AttentionGrads(*map(self._as_given, (dq, dk, dv), shapes), dbias, dsinks)

    def _gradients_of_matrices(self, dout, q, k, v, lse, bias):
        """`_gradients` of a single entry with few scores, in steps that begin sooner.

        None where rows of P may not add up to 1, or a gradient is not finite.
        """
        shapes = q.shape, k.shape, v.shape
        of_q, of_k, of_v, of_out = self._matrices
        q, k, dout = q.reshape(of_q), k.reshape(of_k), dout.reshape(of_out)
        q, s = self._scores_of_matrices(q, k, bias)
        lse = lse.reshape(() if self._has_one_row else (of_q[0], 1))
        p = np.exp(np.subtract(s, lse, s), s)
        sums = row_sums(p) if self._side_by_side else self._sums_of_matrices(p)
        off = np.subtract(sums, self._one).ravel()
        if not off.dot(off) <= self._may_be_off**2:
            return None
        ds = self._product_of_matrices(dout, v.reshape(of_v))
        _subtract_delta_of_matrices(p, ds, sums)
        np.multiply(ds, p, ds)
        dq, dk, dv = self._times_values(ds, k), ds.T.dot(q), p.T.dot(dout)
        if not (is_finite(dq) and _is_finite_product(ds, q, dk)):
            return None
        np.multiply(dq, self._factor, dq)
        if not self._folds:  # else it is in q
            np.multiply(dk, self._factor, dk)
        return AttentionGrads(*map(np.ndarray.reshape, (dq, dk, dv), shapes))

    def _gradients_of_one_key(self, p, dp, dout, shapes):
        """P is 1 whatever the score, and dS is 0; None where dP is not finite."""
        if not is_finite(dp):
            return None
        dv = self._sum_over_rows(p, dout)
        if self._groups is not None:
            dv = self._as_given(_of_group(dv)[..., None, :, :], shapes[2])
        return AttentionGrads(*(np.zeros(x, self._dtype) for x in shapes[:2]), dv)

    def _sum_over_rows(self, x, y):
        """x^T y, which may be the sum over the heads of a group already."""
        if self._groups is None:
            return product_of_long_sums(x.mT, y)
        return _sum_over_rows(x, y)

    def _joined(self, x):
        """`x` with one axis for all heads, if they were in groups."""
        if self._groups is None:
            return x
        return x.reshape((*x.shape[:-4], -1, *x.shape[-2:]))

    def _as_given(self, x, shape):
        """A gradient of heads in groups in the layout and the shape of the call."""
        x = heads_first(self._joined(x), self._layout)  # its own inverse
        return np.ascontiguousarray(x).reshape(shape)


def _sum_to(x, shape, dtype):
    """The sum over axes that an array of `shape` lacks, or has once."""
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    ones = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(
        i for i, (n, m) in enumerate(zip(x.shape, ones, strict=True)) if n != m
    )
    if axes:
        x = np.add.reduce(x, axes, np.float64, None, True)
    return np.ascontiguousarray(x, dtype).reshape(shape)


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
        if self._side_by_side:
            multiply_transposed(v, dout, dp.mT)
        else:
            multiply_transposed(dout, v, dp)
        if exact:
            np.copyto(p, 0, where=~visible)
            np.copyto(dp, 0, where=~visible)
        of_sink = None
        if self._sinks is not None:
            of_sink = np.exp(self._sinks[here[-3:-1]] - lse)
        sum_p = row_sums(p)
        if of_sink is not None:
            sum_p += of_sink
        if self._hides:  # in a row without P it does not matter
            np.copyto(sum_p, 1, where=sum_p == 0)
        down = self._down(here, visible if exact else None)
        whole, of_all = is_whole(sum_p, lse), None
        if not whole.all():
            of_all = self._products_with_out(dout, here, scratch, exact)
            if down is not None:
                of_all = of_all - down
        delta = _subtract_delta(p, dp, sum_p, of_sink, down, whole, of_all)
        dsinks = None
        if self._vjp.need_dsinks:
            out = self._load(scratch, "out", self._out[here])
            down = 0 if down is None else down
            delta = delta_for_sinks(
                delta, of_sink, whole, dout, out, down, self.problem.dtype
            )
            dsinks = -(of_sink * delta).sum(axis=(-2, -1))
        ds = terms = np.multiply(dp, p, out=dp)
        if slope is not None:
            ds = ds * slope
        if exact:
            np.copyto(terms, 0, where=~visible)
            np.copyto(ds, 0, where=~visible)
            dq = _times_values(ds, visible, k)
            seen = np.broadcast_to(visible, ds.shape)
            dk, dv = (
                _times_values(x.mT, is_seen.mT, y)
                for x, is_seen, y in (
                    _rows_of_groups(ds, seen, q), _rows_of_groups(p, seen, dout)
                )
            )  # fmt: skip
        else:
            dq, dk = product_of_long_sums(ds, k), _sum_over_rows(ds, q)
            if not (is_finite(dq) and _is_finite_product(ds, q, dk)):
                return None
            dv = _sum_over_rows(p, dout)
        if factor != 1:
            np.multiply(dk, factor, out=dk)
        np.multiply(dq, self.dtype.type(self.problem.scale), out=dq)
        return Terms(
            keys=slice(first, last),
            dq=dq,
            dk=_of_group(dk),
            dv=_of_group(dv),
            dsinks=dsinks,
            ds=terms,
            reads=reads,
            visible=visible,
        )

    def _change(self, s, entries, rows, first, last, scratch):
        """(derivative of the score or None for 1, reads of arrays); s becomes final."""
        slope, reads = None, []
        self._cap(s)
        if self.problem.softcap:
            slope = _derivative_of_cap(s, self.dtype.type(self.problem.softcap))
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
        """The gradient of lse, or None.

        With `visible`, what is no number does not flow into a row that sees no key.
        """
        if self._dlse is None:
            return None
        down = self._dlse[here][..., None]
        if visible is None:
            return down
        is_blind = ~visible.any(axis=-1, keepdims=True)
        return np.where(is_blind & ~np.isfinite(down), 0, down)


def _subtract_delta(p, dp, sum_p, of_sink, down, whole=None, of_all=None):
    """Subtract from the rows of dP what makes dS add up to `down`.

    `down`, the gradient of lse, may be None for 0; `sum_p` is the sum of a row of P and
    its sink. What rounding has left, which dq multiplies by the keys, goes in a second
    step. Rows that are not whole, with lse over more keys than these, take `of_all`.
    Returns what it has subtracted where a sink has a gradient of it.
    """
    if of_sink is down is of_all is None:
        if p.shape[-1] == 1:  # P is 1 whatever the score; what is not finite is NaN
            np.subtract(dp, dp, dp)
            return None
        # The sum of P is 1 but for what the second step sees to.
        np.subtract(dp, _row_products(p, dp), dp)
        lack = _row_products(p, dp)
        np.subtract(dp, np.divide(lack, sum_p, lack), dp)
        return None
    delta = _lack(p, dp, sum_p, None, None, down)
    if of_all is not None:
        delta = np.where(whole, delta, of_all)
    np.subtract(dp, delta, out=dp)
    lack = _lack(p, dp, sum_p, of_sink, delta, down)
    if of_all is not None:
        lack = np.where(whole, lack, 0)
    np.subtract(dp, lack, out=dp)
    return np.add(delta, lack, out=delta)


def _subtract_delta_of_matrices(p, dp, sum_p):
    """The same of a matrix, without a sink or a gradient of lse."""
    if p.shape[0] == 1:
        p, dp = p[0], dp[0]
        np.subtract(dp, p.dot(dp), dp)
        np.subtract(dp, p.dot(dp) / sum_p[()], dp)
        return
    np.subtract(dp, _row_products(p, dp), dp)
    lack = _row_products(p, dp)
    np.subtract(dp, np.divide(lack, sum_p, lack), dp)


def _derivative_of_cap(s, cap):
    """The derivative of cap * tanh(score / cap), which is `s`."""
    slope = s / cap
    return np.subtract(1, np.multiply(slope, slope, out=slope), out=slope)


def _lack(p, dp, sum_p, of_sink, delta, down):
    """How far P * dP, and the sink's part of it, are from adding up to `down`."""
    sums = _row_products(p, dp)
    if down is not None:
        np.subtract(sums, down, out=sums)
    if of_sink is not None:
        np.subtract(sums, of_sink * delta, out=sums)
    return np.divide(sums, sum_p, out=sums)


def _row_products(p, dp):
    """The sums over keys of P * dP."""
    if p.strides[-1] == p.itemsize:
        return np.vecdot(p, dp, keepdims=True)
    return np.einsum("...ij,...ij->...i", p, dp)[..., None]  # keys side by side


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


def _sum_over_rows(x, y):
    """x^T y of each head of a group, or at once the sum over these heads."""
    x, y = _rows_of_groups(x, y)
    return product_of_long_sums(x.mT, y)


def _rows_of_groups(x, *others):
    """Matrices with the rows of all heads of a group, in place of these heads.

    Their products by rows are sums over the group, without terms of each head in
    memory. Where keys are side by side the rows of two heads are not: then as given.
    """
    if x.shape[-3] == 1 or not x.flags.c_contiguous:
        return x, *others
    return [
        y.reshape((*y.shape[:-3], 1, y.shape[-3] * y.shape[-2], y.shape[-1]))
        for y in (x, *others)
    ]


def _is_finite_product(a, b, product):
    """Whether a^T b, or what it is summed to, and its squares are all finite.

    No number of it is above the norms of both; they are quicker where rows are few.
    """
    if a.size + b.size < product.size:
        a, b = a.ravel("K"), b.ravel("K")
        bound = math.sqrt(a.dot(a)) * math.sqrt(b.dot(b))
        if bound < _WELL_BELOW_INFINITY[product.itemsize]:
            return True
    return is_finite(product)


def _of_group(x):
    """The sum over the query heads of a group."""
    return x[..., 0, :, :] if x.shape[-3] == 1 else np.add.reduce(x, -3)
