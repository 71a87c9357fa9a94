"""Gradients of attention on NumPy arrays: blocks of scores on BLAS, made anew.

With (out, lse) of the forward call a block of P = exp(S - lse) needs no other block, so
that S and P are never whole. For rows i and keys j, with dO the gradient of out,

    delta_i = sum(dO_i * out_i) - dlse_i,  dP = dO v^T,  dS = P * (dP - delta),
    dbias = dS,  dS *= derivative of the score function,  dS *= 1 - tanh^2 (softcap),
    dq = scale * dS k,  dk = scale * dS^T q,  dv = P^T dO,
    dsink = -sum_i exp(sink - lse_i) delta_i.

`out` and lse are rounded, hence delta and the sum of P, too; dq is wrong by what dS
lacks of its sum times the weighted mean of the keys, which may be far larger than dq.
But that sum is known, unless lse is over more keys than the call has: where the lack
matters, dS gets it in proportion to P (`_Rows.balance`). Over some of the keys alone
the rows say what they add up to, and whoever has all keys adds it (`RowSums`).

Small heads go many at a time (`backward_entries`). A task owns what it sums, and adds
in one order: results are the same in every run.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

from cupyflash._attention import vjp_problem
from cupyflash._attention.cpu import (
    backward_entries,
    checked,
    entries,
    functions,
    grouped,
)
from cupyflash._attention.cpu.block import (
    Part,
    Task,
    finite_base,
    num_threads,
    offset_of,
    product_of_long_sums,
    row_sums,
    times_values,
)
from cupyflash._attention.cpu.pieces import multiply_transposed
from cupyflash._attention.cpu.tiled import keys_of_a_block, rows_of_a_task
from cupyflash._attention.problem import heads_first
from cupyflash._attention.row_sums import RowSums, delta_for_sinks, is_whole
from cupyflash._attention.vjp_problem import AttentionGrads, aligned, aligned_bias
from cupyflash._core import arrays
from cupyflash._core import threads as _threads

# Numbers that are added up at a time; Ctrl-C waits for each step.
_ADDED = 1 << 20


_checked: dict = {}


def attention_vjp(*arguments):
    """attention_vjp() of NumPy arrays; one like a call before needs no checks."""
    (
        dout, q, k, v, out, lse, bias, mask, scale, causal, query_offset, window,
        softcap, sinks, slopes, query_lengths, key_lengths, layout, precision, method,
        dlse, need_dbias, need_dsinks, deterministic, *of_functions,
    ) = arguments  # fmt: skip
    if (  # what most calls are takes no loop over all options
        type(dout) is type(q) is type(k) is type(v) is type(out) is type(lse)
        and type(q) is np.ndarray
        and bias is mask is query_offset is window is sinks is slopes is dlse is None
        and query_lengths is key_lengths is None
        and (causal is False or causal is True)
        and (scale is None or type(scale) is float)
        and type(softcap) is float
        and need_dbias is need_dsinks is deterministic is False
        and not of_functions
    ):
        key = (
            dout.shape, q.shape, k.shape, v.shape, out.shape, lse.shape, dout.dtype,
            q.dtype, k.dtype, v.dtype, out.dtype, lse.dtype, scale, causal, softcap,
            layout, precision, method,
        )  # fmt: skip
    else:
        key = checked.key_of((q, dout, k, v, out, lse), arguments[6:])
    problem, direct, joined = _checked.get(key, (None, None, None))
    operands = None
    if problem is None:
        problem, operands = vjp_problem.attention_vjp(*arguments)
        joined = grouped.vjp_as_rows(problem)
        if key is not None:
            direct = _short_way(problem)
            checked.remember(_checked, key, (problem, direct, joined))
    else:
        checked.check_lengths_of(problem.forward, query_lengths, key_lengths)
    if direct is not None:  # in the first call, too: it rounds otherwise than `run`
        grads = direct.gradients(
            out, dout, q, k, v, lse, dlse, bias, mask, sinks, slopes, query_lengths,
            key_lengths,
        )  # fmt: skip
        if grads is not None:
            return grads
    if operands is None:
        inputs = checked.operands_of(
            problem.forward, q, k, v, bias, mask, sinks, slopes, query_offset,
            query_lengths, key_lengths,
        )  # fmt: skip
        operands = vjp_problem.views(problem.forward, inputs, dout, out, lse, dlse)
    if joined is not None:
        return _run_joined(problem, joined, operands)
    return run(problem, operands)


def _short_way(problem):
    """What makes the gradients of calls like this one at once, or None."""
    joined = grouped.vjp_as_rows(problem, in_layout=False)
    if not backward_entries.Direct.takes_vjp(joined or problem):
        return None
    if joined is None:
        return backward_entries.Direct(problem)
    direct = backward_entries.Direct(joined)
    return grouped.Direct(problem.forward, joined.forward, direct)


def run(problem, operands, row_sums=None):
    """Compute the gradients on the host.

    With `row_sums` the keys are some of all: it is filled, and dq not balanced.
    """
    forward = problem.forward
    if operands.forward.functions is not None:
        forward, inputs = functions.as_options(forward, operands.forward)
        problem = replace(problem, forward=forward)
        operands = operands._replace(forward=inputs)
    joined = grouped.vjp_as_rows(problem) if row_sums is None else None
    if joined is not None:
        return _run_joined(problem, joined, operands)
    dtype = arrays.to_dtype(forward.dtype)
    # Boxes store all, if they see all keys; else there are keys that get nothing.
    every = 0, forward.seqlen_k
    is_stored = in_boxes(problem, row_sums) and every == entries.visible_keys(
        forward, forward.query_offset, 0, forward.seqlen_q
    )
    new = np.empty if is_stored else np.zeros
    grads = AttentionGrads(
        dq=np.empty(problem.q_shape, dtype),
        dk=new(problem.k_shape, dtype),
        dv=new(problem.v_shape, dtype),
    )
    if problem.need_dbias:
        dbias = np.zeros(problem.bias_shape, arrays.to_dtype(forward.bias))
        grads = grads._replace(dbias=dbias)
    if problem.need_dsinks:
        dsinks = np.empty(problem.sinks_shape, arrays.to_dtype(forward.sinks))
        grads = grads._replace(dsinks=dsinks)
    dscore = _main(problem, operands, grads, row_sums)
    if problem.need_dbias and not in_boxes(problem, row_sums):
        _bias(problem, operands, aligned_bias(grads.dbias, forward))
    return grads._replace(dscore=dscore)


def _run_joined(problem, joined, operands):
    """`run` of a call whose groups go as rows."""
    forward = problem.forward
    grads = run(joined, grouped.join_vjp_operands(forward, joined.forward, operands))
    dq = heads_first(grads.dq, forward.layout)
    return grads._replace(dq=grouped.split(dq, forward))


def _block_shape(forward):
    """(rows, keys) of a block of scores: cut as the forward call cuts.

    BLAS rounds a product otherwise when it is cut otherwise, and the errors of S and of
    lse in exp(S - lse) cancel only where both come from the same S.
    """
    if entries.takes(forward):
        _, rows = entries.shape_of_a_box(forward)
        return max(1, rows), max(1, forward.seqlen_k)
    # Two blocks, P and dS, stay near the core.
    return rows_of_a_task(forward), keys_of_a_block(forward, bounded=True)


def describe(problem, operands):
    """What would run; nothing does."""
    asked, offset = problem.forward, offset_of(problem.forward, operands.forward)
    forward, _ = functions.as_options(asked, operands.forward)
    joined = grouped.vjp_as_rows(replace(problem, forward=forward))
    of_groups = {}
    if joined is not None:
        of_groups["heads_of_a_product"] = forward.num_heads // joined.forward.num_heads
        problem, forward = joined, joined.forward
    rows, keys = _block_shape(forward)
    boxes, num_parts = in_boxes(problem), _num_parts(forward)
    again = problem.need_dbias and not boxes
    threads = _threads.with_blas(num_threads(forward))
    heads = backward_entries.heads_of_a_box(problem) if boxes else 1
    if halves := backward_entries.vjp_halves_of(problem):
        threads, boxes = 2, True
        if halves[0] == -2:
            heads, boxes, num_parts = 1, False, 2
            rows = halves[1][0].stop
        else:
            heads = -(-backward_entries.num_heads(forward) // 2)
    return {
        "kernel": "tiled",
        "heads_of_a_task": heads,
        "rows_of_a_task": min(forward.seqlen_q, rows),
        "keys_of_a_block": keys,
        "parts_of_the_queries": 1 if boxes else num_parts,
        "threads": threads,
        "blocks_made_twice": "for dbias" if again else "none",
        **of_groups,
        **functions.describe(asked, operands.forward, offset, rows, keys),
    }


# --- a block of scores and its gradient ----------------------------------------------


class _Rows(Part):
    """Rows of one query head, and what flows into them."""

    def __init__(self, problem, operands, task, scratch, has_all_keys=True):
        super().__init__(problem.forward, operands.forward, task, scratch)
        self.has_all_keys = has_all_keys
        head, rows = (*self.batch, self.head), slice(self.start, self.stop)
        self.dout = self._load("dout", operands.dout[head][rows])
        self.lse = finite_base(operands.lse[head][rows, None])
        self.out = out = self._load("out", operands.forward.out[head][rows])
        terms = self.scratch.array("terms", out.shape, self.dtype)
        np.multiply(self.dout, out, out=terms)
        # A row that sees no key has out = 0, whatever flows into it.
        np.copyto(terms, 0, where=out == 0)
        self.delta = np.sum(terms, axis=1, keepdims=True)
        self.down = down = self.dtype.type(0)
        if operands.dlse is not None:
            down = operands.dlse[head][rows, None]
            # A row that sees no key has the sink for its lse: what flows there is the
            # sink's, but for what is no number.
            is_sink = operands.lse[head][rows, None] == self.sink
            is_sink &= (out == 0).all(axis=1, keepdims=True)
            down = np.where(is_sink & ~np.isfinite(down), 0, down)
            self.delta -= down
            self.down = down
        self.of_sink = np.exp(self.sink - self.lse)
        # Sums over the sink, then the keys: of dS, of P, of keys weighted by P.
        self.sum_ds = -(self.of_sink * self.delta)
        self.sum_p, self.mean = self.of_sink, 0.0
        self._sums_p, self._sum_of_all = problem.need_dsinks, self.of_sink
        self.scaled_q, self.factor = self.queries()
        self.nonfinite = not np.isfinite(self.scaled_q).all()
        self._names = problem.need_dscore
        self._reads = []

    def block(self, start, stop, exact):
        """(P, dS, derivative of the score, visible) of keys [start, stop).

        The derivative, that of the score function and the softcap, is None for 1;
        `visible` is None unless it is needed, as for `exact`, which sets what is not
        seen to 0 though an operand be infinite or NaN.
        """
        shape = self.num_rows, stop - start
        p, ds = (self.scratch.array(name, shape, self.dtype) for name in ("p", "ds"))
        slope = visible = None
        multiply_transposed(self.scaled_q, self.keys(start, stop), p)
        if self.factor != 1:
            np.multiply(p, self.factor, out=p)
        if self.problem.softcap:
            self.cap(p)
            slope = self.scratch.array("slope", shape, self.dtype)
            np.divide(p, self.dtype.type(self.problem.softcap), out=slope)
            np.multiply(slope, slope, out=slope)
            np.subtract(1, slope, out=slope)
        if self.functions is not None and self.functions.has_score:
            of_function, self._reads = self.functions.differentiate(
                p, start, stop, self._names
            )
            if of_function is not None:
                slope = of_function if slope is None else slope * of_function
        self.add_and_hide(p, start, stop)
        if exact or self._reads:
            visible = p != -np.inf
        np.subtract(p, self.lse, out=p)
        if exact:  # of huge scores the rounding alone may be beyond the exponent range
            np.minimum(p, 0, out=p)
        np.exp(p, out=p)
        multiply_transposed(self.dout, self.values(start, stop), ds)
        np.multiply(np.subtract(ds, self.delta, out=ds), p, out=ds)
        if exact:
            hidden = ~visible
            np.copyto(p, 0, where=hidden)
            np.copyto(ds, 0, where=hidden)
        return p, ds, slope, visible

    def gradients(self, start, stop, dscore):
        """What keys [start, stop) add to dq, and what the rows add to dk and dv.

        What they add to arrays of the score function goes to `dscore`.
        """
        p, ds, slope, visible = self.block(start, stop, exact=False)
        of_rows = row_sums(ds)
        for reads in self._reads:
            functions.add_reads(dscore[reads.name], reads, ds, visible)
        if slope is not None:
            np.multiply(ds, slope, out=ds)
        dq = product_of_long_sums(ds, self.keys(start, stop))
        if not self.nonfinite and np.isfinite(dq).all():
            self._add_sums(p, of_rows)
            found = (
                dq,
                product_of_long_sums(ds.T, self.scaled_q),
                product_of_long_sums(p.T, self.dout),
            )
            if not self.has_all_keys:
                self._weigh(start, stop, p, slope)
            return found
        # Either by right, or 0 * NaN came from a row or key that is not seen.
        p, ds, slope, visible = self.block(start, stop, exact=True)
        self._add_sums(p, row_sums(ds))
        if slope is not None:
            np.copyto(ds, ds * slope, where=visible)
        found = (
            times_values(ds, visible, self.keys(start, stop)),
            times_values(ds.T, visible.T, self.scaled_q),
            times_values(p.T, visible.T, self.dout),
        )
        if not self.has_all_keys:
            self._weigh(start, stop, p, slope, visible)
        return found

    def _add_sums(self, p, sum_ds):
        """Add the sums of dS of some keys, and of P where the sink asks for them."""
        self.sum_ds += sum_ds
        if self._sums_p:
            self._sum_of_all = self._sum_of_all + row_sums(p)

    def sink_gradient(self):
        """What the rows add to the gradient of the sink."""
        whole = is_whole(self._sum_of_all, self.lse)
        # The sum of dS, with the sink's, is what delta lacks of being that of P and dP.
        own = self.delta + self.sum_ds - self.down
        delta = delta_for_sinks(
            own, self.of_sink, whole, self.dout, self.out, self.down,
            self.problem.dtype,
        )  # fmt: skip
        return -(self.of_sink * delta).sum()

    def _weigh(self, start, stop, p, slope, visible=True):
        """Add P of keys [start, stop), and these keys so weighted; P is lost."""
        self.sum_p = np.add(self.sum_p, row_sums(p), dtype=np.float64)
        if slope is not None:
            np.copyto(p, p * slope, where=visible)
        self.mean += times_values(p, visible, self.keys(start, stop))

    def sums(self):
        """What the rows add up to."""
        return RowSums(self.sum_ds[:, 0], self.sum_p[:, 0], self.mean)

    def balance(self, dq, size):
        """Add to dq, in place, what dS lacks of its sums, where that matters."""
        start, stop = self.visible_keys()
        lost = _largest(self.down - self.sum_ds) * _largest(self.k[start:stop])
        if lost <= backward_entries.MAY_BE_LOST[self.problem.dtype] * _largest(dq):
            return
        for start, stop in self.key_blocks(size):
            p, _, slope, visible = self.block(start, stop, exact=True)
            self._weigh(start, stop, p, slope, visible)
        due = np.broadcast_to(self.down, self.lse.shape)
        lack = self.sums().lack(due[:, 0], self.lse[:, 0])
        np.add(dq, lack, out=dq, casting="same_kind")

    def bias_gradient(self, start, stop):
        """DS of keys [start, stop), before the derivative of the softcap."""
        _, ds, _, _ = self.block(start, stop, exact=False)
        if not np.isfinite(ds).all():
            _, ds, _, _ = self.block(start, stop, exact=True)
        return ds


def _largest(x):
    """The largest finite size of a number, as a float64."""
    if not x.size:
        return 0.0
    size = max(float(x.max()), -float(x.min()))
    if not math.isfinite(size):
        finite = np.isfinite(x)
        size = max(float(np.max(np.abs(x), where=finite, initial=0)), 0.0)
    return size


# --- dq, dk, dv, dsinks --------------------------------------------------------------


def _num_parts(forward):
    """Parts of the queries, each with a dk and dv of its own, to use all cores."""
    heads = math.prod(forward.batch) * forward.num_kv_heads
    blocks = -(-forward.seqlen_q // _block_shape(forward)[0])
    return max(1, min(-(-_threads.num_cores() // max(heads, 1)), blocks))


class _Sum:
    """A gradient and what adds to it: many entries and parts, or one to each element.

    Where there are many, each group of tasks has a sum of its own, in float64, to which
    its terms go as they come; `finish` adds those up.
    """

    def __init__(self, gradient, shape, num_groups, num_parts=1):
        self._gradient, self._sums = gradient, None
        self.is_shared = num_parts > 1 or gradient.shape != shape
        if self.is_shared:
            self._sums = np.zeros((num_groups, *gradient.shape))

    def add(self, group, where, term):
        """Add a term of the scores at `where`, slices of the first axes."""
        target = self._gradient if self._sums is None else self._sums[group]
        sizes = zip(where, target.shape, strict=False)
        target = target[tuple(_of_axis(part, n) for part, n in sizes)]
        if self._sums is None:
            np.copyto(target, term, casting="unsafe")
            return
        shape = (1,) * (target.ndim - term.ndim) + term.shape
        axes = tuple(
            axis
            for axis, (n, m) in enumerate(zip(target.shape, shape, strict=True))
            if n != m
        )
        if axes:
            term = np.add.reduce(term, axes, np.float64, None, True)
        np.add(target, term, out=target)

    def finish(self):
        """Store the sum of all groups."""
        if self._sums is not None:
            for box in entries.boxes_of(self._gradient.shape, _ADDED):
                total = self._sums[(slice(None), *box)].sum(axis=0)
                np.copyto(self._gradient[box], total, casting="unsafe")


def _of_axis(part, size):
    """Of an axis that may be shared, and then has one element, what a part adds to."""
    is_empty = part.start is not None and part.start == part.stop
    return slice(1) if size == 1 and not is_empty else part


def _groups(tasks, num_groups):
    """Tasks in `num_groups` runs of neighbours, numbered."""
    size = -(-len(tasks) // num_groups)
    return [(i, tasks[i * size : (i + 1) * size]) for i in range(num_groups)]


def _main(problem, operands, grads, row_sums):
    """Compute all gradients but that of the bias, which boxes of heads add to, too."""
    forward, dtype = problem.forward, np.dtype(problem.forward.compute_dtype)
    size, size_k = forward.seqlen_q, forward.seqlen_k
    kv_heads = (*forward.batch, forward.num_kv_heads)
    heads = (*kv_heads, forward.group_size)
    boxes, num_parts = None, 1
    if in_boxes(problem, row_sums):
        boxes = backward_entries.EntryGradients(problem, operands)
        a_box = backward_entries.heads_of_a_box(problem)
        tasks = list(entries.boxes_of(kv_heads, a_box))
    else:
        (size, size_k), num_parts = _block_shape(forward), _num_parts(forward)
        tasks = list(np.ndindex(*kv_heads, num_parts))
    starts = range(0, forward.seqlen_q, size)
    threads = min(num_threads(forward), len(tasks)) if len(tasks) > 1 else 1
    of_q, of_k, of_v = (aligned(x, forward) for x in (grads.dq, grads.dk, grads.dv))
    of_q = entries.split_heads(of_q, forward)
    sum_dq = _Sum(of_q, (*heads, *of_q.shape[-2:]), threads)
    sum_dk, sum_dv = (
        _Sum(x, (*kv_heads, *x.shape[-2:]), threads, num_parts) for x in (of_k, of_v)
    )
    sums = [sum_dq, sum_dk, sum_dv]
    if boxes and problem.need_dbias:
        of_bias = entries.split_heads(aligned_bias(grads.dbias, forward), forward)
        sum_dbias = _Sum(of_bias, (*heads, forward.seqlen_q, forward.seqlen_k), threads)
        sums.append(sum_dbias)
    # Which task adds to which sum, and when, must not be left to chance.
    shared = bool(problem.need_dscore) or any(x.is_shared for x in sums)
    groups = _groups(tasks, threads if shared else max(1, len(tasks)))
    named = {
        name: operands.forward.functions.score.arrays[name]
        for name in problem.need_dscore
    }
    dscores = [
        {name: np.zeros(array.shape) for name, array in named.items()} for _ in groups
    ]
    sink_terms = np.zeros((len(starts), *heads))

    def one_group(group, scratch):
        number, tasks = group
        for task in tasks:
            (one_box if boxes else one_head)(number, task, scratch)

    def one_box(group, box, scratch):
        """Some heads of k and v, and their query heads."""
        every = slice(None)
        for here, terms in boxes.terms(box, scratch):
            sum_dq.add(group, (*here, every, every), terms.dq)
            sum_dk.add(group, (*here, terms.keys), terms.dk)
            sum_dv.add(group, (*here, terms.keys), terms.dv)
            if problem.need_dbias:
                sum_dbias.add(group, (*here, every, every, terms.keys), terms.ds)
            if terms.dsinks is not None:
                sink_terms[(0, *here)] = terms.dsinks
            for reads in terms.reads:
                total = dscores[group][reads.name]
                functions.add_reads(total, reads, terms.ds, terms.visible)

    def one_head(group, task, scratch):
        """One head of k and v, and a part of the rows of its query heads."""
        *batch, kv_head, part = task
        here = tuple(slice(i, i + 1) for i in (*batch, kv_head))
        dk = np.zeros((forward.seqlen_k, forward.head_dim), dtype)
        dv = np.zeros((forward.seqlen_k, forward.head_dim_v), dtype)
        factor = dtype.type(0)
        for of_group in range(forward.group_size):
            head = kv_head * forward.group_size + of_group
            of_head = (*here, slice(of_group, of_group + 1))
            # Every so many blocks of rows: causal ones grow with their number.
            for number in range(part, len(starts), num_parts):
                start = starts[number]
                stop = min(start + size, forward.seqlen_q)
                rows = _Rows(
                    problem,
                    operands,
                    Task(tuple(batch), head, start, stop),
                    scratch,
                    has_all_keys=row_sums is None,
                )
                factor = rows.factor
                dq = np.zeros((stop - start, forward.head_dim), dtype)
                _one_block_of_rows(rows, size_k, dq, dk, dv, dscores[group])
                if row_sums is not None:
                    which = *batch, head, slice(rows.start, rows.stop)
                    row_sums.add(which, rows.sums())
                sum_dq.add(group, (*of_head, slice(start, stop)), dq)
                if problem.need_dsinks:
                    sink_terms[(number, *of_head)] = rows.sink_gradient()
        np.multiply(dk, factor, out=dk)
        sum_dk.add(group, here, dk)
        sum_dv.add(group, here, dv)

    if len(groups) == 1:
        _threads.run_with_blas(one_group, groups[0], _threads.Scratch())
    else:
        _threads.for_each_with_blas(one_group, groups, threads)
    with np.errstate(all="ignore"):
        for x in sums:
            x.finish()
        if problem.need_dsinks:
            total = sink_terms.sum(axis=tuple(range(sink_terms.ndim - 2))).ravel()
            if grads.dsinks.size != total.size:  # one sink for all heads
                total = total.sum()
            total = total.reshape(grads.dsinks.shape)
            np.copyto(grads.dsinks, total, casting="unsafe")
        if not named:
            return None
        return {
            name: np.asarray(sum(x[name] for x in dscores), dtype=array.dtype)
            for name, array in named.items()
        }


def in_boxes(problem, row_sums=None):
    """Whether heads go many at a time."""
    return row_sums is None and backward_entries.takes(problem)


def _one_block_of_rows(rows, size_k, dq, dk, dv, dscore):
    """Add to dq, dk and dv; to dk without the factor of the scores."""
    if not rows.num_rows:
        return
    dq = dq[: rows.num_rows]
    for start, stop in rows.key_blocks(size_k):
        to_dq, to_dk, to_dv = rows.gradients(start, stop, dscore)
        np.add(dq, to_dq, out=dq)
        np.add(dk[start:stop], to_dk, out=dk[start:stop])
        np.add(dv[start:stop], to_dv, out=dv[start:stop])
    if rows.has_all_keys:
        rows.balance(dq, size_k)
    np.multiply(dq, rows.dtype.type(rows.problem.scale), out=dq)


# --- dbias ---------------------------------------------------------------------------


def _bias(problem, operands, dbias):
    """A task owns a region of dbias and goes through all blocks that add to it.

    Regions are blocks of rows; of keys where the bias is the same for all rows.
    """
    forward, dtype = problem.forward, np.dtype(problem.forward.compute_dtype)
    leading = (*forward.batch, forward.num_heads)
    seqlen_q, seqlen_k = forward.seqlen_q, forward.seqlen_k
    row_of_each, key_of_each = (
        n == m for n, m in zip(dbias.shape[-2:], (seqlen_q, seqlen_k), strict=True)
    )
    size, size_k = _block_shape(forward)
    row_blocks = [(a, min(a + size, seqlen_q)) for a in range(0, seqlen_q, size)]
    all_keys = [(0, seqlen_k)]
    key_blocks = [(a, min(a + size_k, seqlen_k)) for a in range(0, seqlen_k, size_k)]
    row_regions = [[block] for block in row_blocks] if row_of_each else [row_blocks]
    key_regions = key_blocks if key_of_each and not row_of_each else all_keys
    axes = tuple(
        axis for axis, of_each in enumerate((row_of_each, key_of_each)) if not of_each
    )

    def one_region(task, scratch):
        entry, blocks, (first_key, last_key) = task
        first_row = blocks[0][0] if blocks else 0
        shape = (
            blocks[0][1] - first_row if row_of_each else 1,
            last_key - first_key if key_of_each else 1,
        )
        total = np.zeros(shape, dtype)
        # The entries of batch and heads that share this one of the bias.
        shared = itertools.product(
            *(
                range(n) if m == 1 else (i,)
                for i, n, m in zip(entry, leading, dbias.shape, strict=False)
            )
        )
        for (*batch, head), (start, stop) in itertools.product(shared, blocks):
            rows = _Rows(
                problem, operands, Task(tuple(batch), head, start, stop), scratch
            )
            if not rows.num_rows:
                continue
            first, last = rows.visible_keys()
            first, last = max(first, first_key), min(last, last_key)
            for a in range(first, last, size_k):
                b = min(a + size_k, last)
                term = np.sum(rows.bias_gradient(a, b), axis=axes, keepdims=True)
                where = total
                if row_of_each:
                    where = where[: rows.num_rows]
                if key_of_each:
                    where = where[:, a - first_key : b - first_key]
                np.add(where, term, out=where)
        region = dbias[entry]
        if row_of_each and blocks:
            region = region[slice(*blocks[0])]
        if key_of_each:
            region = region[:, first_key:last_key]
        np.copyto(region, total, casting="unsafe")

    tasks = itertools.product(np.ndindex(dbias.shape[:-2]), row_regions, key_regions)
    _threads.for_each_with_blas(one_region, tasks, num_threads(forward))
