"""Logsumexp on NumPy arrays, with weights and signs."""

import math

import numpy as np

from cupyflash._core import arrays
from cupyflash._core import threads as _threads
from cupyflash._softmax.cpu.blocks import (
    BLOCK,
    Block,
    Rows,
    boxes,
    row_max,
    row_sum,
    store,
    sum_of_parts,
)

# Below this size the logarithms that make up a result cancel, and it is redone: digits
# that it shows would be lost.
_NEAR_ZERO = {"float64": 1.0}
_NEAR_ZERO_IF_NARROW = 2.0**-20
# Sums of so few terms have small logarithms, in which each rounding of the sum shows.
_FEW_TERMS = 16
# Added to a number of at most 1 and taken away again, it leaves a multiple of 2^-40.
_TO_40_BITS = 1.5 * 2.0**12

# A factor on terms whose sum overflows: no number of terms makes up for it.
_LESS = 2.0**-64
_LOG_LESS = 64 * math.log(2)


def work_dtype(problem):
    """What sums are computed in: one step above float32, as in all of the family."""
    return np.complex128 if problem.is_complex else np.float64


def run(problem, operands, threads):
    """log |sum b exp(x)|, and with return_sign also its sign."""
    dtype = arrays.to_dtype(problem.dtypes["out"])
    result, sign = operands.out, None
    if problem.return_sign:
        sign = np.empty(problem.result_shape, dtype)
        dtype = sign.real.dtype
    if result is None:
        result = np.empty(problem.result_shape, dtype)
    if problem.row_length == 0:
        result[...] = -np.inf
        if sign is not None:
            sign[...] = -1  # as SciPy has it: the sign of -inf
    elif result.size:
        _fill(problem, operands, result, sign, threads)
    if operands.out is None:
        result = result[()]
    return result if sign is None else (result, sign[()])


def small(plan, x):
    """log sum exp(x) of a small array, by the plan of such calls."""
    problem, block = plan.problem, plan.block(x)
    states = [_state(problem, block, None, np.float64)]
    log, _ = _finish(problem, block, [None], states)
    kept = log.reshape([problem.shape[a] for a in plan.kept_axes])
    result = np.empty(problem.result_shape, plan.dtype)
    store(result, kept.transpose(np.argsort(plan.kept_axes)).reshape(result.shape))
    return result[()]


def _fill(problem, operands, result, sign, threads):
    """Compute all rows, in the order of memory of x, and put them in their places."""
    rows = Rows(problem, x=operands.x, b=operands.b, where=operands.where)
    work = work_dtype(problem)
    logs, totals = np.empty(rows.kept), np.empty(rows.kept, work)
    if rows.fits or rows.side_by_side:
        _by_blocks(rows, work, logs, totals, threads)
    else:
        _by_pieces(rows, work, logs, totals, threads)

    def in_place(x):
        """Kept axes in the order of the problem."""
        x = x.reshape([problem.shape[a] for a in rows.kept_axes])
        return x.transpose(np.argsort(rows.kept_axes)).reshape(result.shape)

    with np.errstate(all="ignore"):
        if problem.return_sign:
            store(sign, in_place(_sign(totals)))
        elif problem.is_complex:
            finite = np.isfinite(totals)
            logs = np.where(finite, logs + 1j * np.angle(totals), np.log(totals))
        else:
            logs[totals < 0] = np.nan
        store(result, in_place(logs))


def _by_blocks(rows, work, logs, totals, threads):
    """A thread takes whole rows."""

    def one_block(box, scratch):
        block = Block(rows, box, scratch)
        pieces = [block.whole()] if rows.fits else block.pieces()
        states = [_state(rows.problem, block, piece, work) for piece in pieces]
        log, total = _finish(rows.problem, block, pieces, states)
        logs[box] = log.reshape(logs[box].shape)
        totals[box] = total.reshape(logs[box].shape)

    _threads.for_each(one_block, rows.blocks(), threads)


def _by_pieces(rows, work, logs, totals, threads):
    """Rows too long to hold: all threads take pieces of them."""
    row_boxes, pieces = list(boxes(rows.kept, 1)), list(boxes(rows.reduced, BLOCK))
    states = {}

    def one_piece(task, scratch):
        r, p = task
        block = Block(rows, row_boxes[r], scratch)
        states[task] = _state(rows.problem, block, pieces[p], work)

    def one_row(r, scratch):
        block = Block(rows, row_boxes[r], scratch)
        parts = [states.pop((r, p)) for p in range(len(pieces))]
        log, total = _finish(rows.problem, block, pieces, parts)
        logs[row_boxes[r]], totals[row_boxes[r]] = log.item(), total.item()

    _threads.for_each(one_piece, np.ndindex(len(row_boxes), len(pieces)), threads)
    _threads.for_each(one_row, range(len(row_boxes)), threads)


def _scores_and_weights(block, piece, dtype):
    """(x, b) of a piece, x = -inf where b = 0; b may be None."""
    x = block.scores(piece, dtype)
    b = block.matrix("b", piece, dtype)
    if b is not None:
        np.copyto(x, -np.inf, where=b == 0)
    return x, b


def _weigh(e, b):
    """b * e in place; an element of weight 0 is absent, whatever it is."""
    if b is not None:
        if np.iscomplexobj(b) and not b.imag.any():
            # Part by part: inf * (b + 0j) would have a NaN.
            np.multiply(e.real, b.real, out=e.real)
            np.multiply(e.imag, b.real, out=e.imag)
        else:
            np.multiply(e, b, out=e)
        np.copyto(e, 0, where=b == 0)
    return e


def _finite_or_zero(m):
    return np.where(np.isfinite(m), m, 0)


def _state(problem, block, piece, dtype):
    """(m, sum b exp(x - m)) of each row of a piece; m is finite."""
    x, b = _scores_and_weights(block, piece, dtype)
    m = _finite_or_zero(row_max(x.real))
    absent = block.absent(piece)
    np.subtract(x, m, out=x)
    e = _weigh(np.exp(x, out=x), b)
    if absent is not None:
        np.copyto(e, 0, where=absent)
    few = problem.row_length <= _FEW_TERMS and problem.dtypes["out"] == "float64"
    return m, _rounded_sum(e) if few and b is None else row_sum(e)


def _rounded_sum(e):
    """Sum of each row of numbers up to 1, as a column; rounded once.

    Numbers of 40 bits add up exactly, and what they lack is too small to matter.
    """
    long = e + _TO_40_BITS
    long -= _TO_40_BITS
    e -= long
    return (np.einsum("rc->r", long) + np.einsum("rc->r", e))[:, None]


def _finish(problem, block, pieces, states):
    """(log |sum|, sum in units of the largest exponential) of each row."""
    top = np.max([m for m, _ in states], axis=0)
    total = sum_of_parts(
        [np.where(part == 0, 0, part * np.exp(m - top)) for m, part in states]
    )
    size, unit = np.abs(total), None
    infinite = ~np.isfinite(size)
    if infinite.any():
        dtype = total.dtype.type
        if block.has_weights:  # whose sum may be too large, each of them being finite
            fine = _sum_of_terms(block, pieces, dtype, top, _LESS)
            fits = infinite & np.isfinite(np.abs(fine))
            total, unit = np.where(fits, fine, total), np.where(fits, _LOG_LESS, 0.0)
            infinite &= ~fits
        if infinite.any():
            # What is subtracted has no part in a sum that is infinite, or none.
            plain = _sum_of_terms(block, pieces, dtype, 0, 1.0)
            total, top = np.where(infinite, plain, total), np.where(infinite, 0, top)
        size = np.abs(total)
    log_of_sum = np.log(size)
    if unit is not None:
        log_of_sum += unit
    log = log_of_sum + top
    if not np.iscomplexobj(total):
        if problem.dtypes["out"] == "float64":
            # Where the result is smaller, the logarithm's own rounding shows in it.
            shows = np.abs(log) < np.abs(log_of_sum)
            if shows.any():
                wide = np.log(size[shows].astype(np.longdouble))
                log[shows] = wide + (top if unit is None else top + unit)[shows]
        near_zero = _NEAR_ZERO.get(problem.dtypes["out"], _NEAR_ZERO_IF_NARROW)
        redo = (np.abs(log) < near_zero) & (total > 0)
        if block.has_weights:  # which may leave nothing of the largest terms
            redo |= np.abs(log) < np.abs(log_of_sum)
        redo &= np.isfinite(log)
        if redo.any():
            rows = redo[:, 0]
            log[rows] = _wide_log(block, pieces, rows, log[rows])
    return log, total


def _sum_of_terms(block, pieces, dtype, top, less):
    """less * sum b exp(x - top), as floating point has it."""
    total = 0
    for piece in pieces:
        x, b = _scores_and_weights(block, piece, dtype)
        e = np.exp(np.subtract(x, top, out=x), out=x)
        if less != 1:  # not on b, of which the smallest would become absent
            np.multiply(e, less, out=e)
        _weigh(e, b)
        if (absent := block.absent(piece)) is not None:
            np.copyto(e, 0, where=absent)
        total = total + row_sum(e)
    return total


def _wide_log(block, pieces, rows, log):
    """Log of the sum of some rows, where its parts may cancel.

    The largest terms are set apart, so that log1p sees the small ones (as in SciPy);
    long doubles give the digits that the cancellation takes.
    """
    wide = np.longdouble
    m = -np.inf
    for piece in pieces:
        x, _ = _scores_and_weights(block, piece, np.float64)
        m = np.maximum(m, row_max(x[rows]))
    m = _finite_or_zero(m)
    largest, rest = wide(0), wide(0)
    for piece in pieces:
        x, b = _scores_and_weights(block, piece, np.float64)
        x, b = x[rows], None if b is None else b[rows]
        top = x == m
        e = _weigh(np.exp(x.astype(wide) - m), b)
        if (absent := block.absent(piece)) is not None:
            np.copyto(e, 0, where=absent[rows])
        largest = largest + row_sum(np.where(top, e, 0))
        rest = rest + row_sum(np.where(top, 0, e))
    beside = (largest > 0) & (largest + rest > 0)
    unit = np.where(beside, largest, 1)
    exact = np.where(
        beside,
        np.log(unit) + np.log1p(rest / unit),
        np.log(np.abs(largest + rest)),
    )
    exact = (m + exact).astype(np.float64)
    return np.where(np.isfinite(exact), exact, log)


def _sign(total):
    """Sign or phase of each sum; an infinite one has a sign too."""
    infinite = np.isinf(total.real) & (total.imag == 0)
    return np.where(infinite, np.sign(total.real), np.sign(total))
