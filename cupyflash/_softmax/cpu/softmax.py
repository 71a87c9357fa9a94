"""Softmax, log_softmax and their vector-Jacobian products on NumPy arrays.

Each method below takes a block of rows, which stays in the cache; threads take blocks.
"""

import itertools

import numpy as np

from cupyflash._core import arrays
from cupyflash._core import threads as _threads
from cupyflash._softmax.cpu import logsumexp as logsumexp_cpu
from cupyflash._softmax.cpu.blocks import (
    BLOCK,
    Block,
    Rows,
    SmallBlock,
    boxes,
    row_max,
    row_sum,
    store,
    sum_of_parts,
)
from cupyflash._softmax.problem import split_scale

# Elements below which a thread costs more than it saves.
_WORTH_A_THREAD = 64 * 1024
# Columns that `online` takes at a time. Each step rounds the sum, hence few of them.
_ONLINE_COLUMNS = 1024, 16 * 1024
_ONLINE_STEPS = 16

# Scales that are normal numbers in float32.
_LEAST, _LARGEST = (float(getattr(np.finfo(np.float32), n)) for n in ("tiny", "max"))


def run(problem, operands):
    """Compute a problem of the softmax family on the host."""
    threads = _num_threads(problem)
    if problem.function == "logsumexp":
        return logsumexp_cpu.run(problem, operands, threads)
    out = operands.out
    if out is None:  # in the order of memory of the input
        out = np.empty_like(operands.x, dtype=arrays.to_dtype(problem.dtypes["out"]))
    if out.size:
        _run_rows(problem, operands._replace(out=out), threads, operands.out is None)
    return out[()] if operands.out is None else out


# Plans of calls on small arrays that are kept.
_MOST_PLANS = 256
_plans: dict = {}


class _Plan:
    """What calls on small arrays of one shape, dtype and layout have in common."""

    def __init__(self, problem, operands):
        out = None
        if problem.function != "logsumexp":
            out = np.empty_like(operands.x, dtype=problem_dtype(problem))
        rows = Rows(problem, x=operands.x, dy=operands.dy, out=out)
        if problem.function == "logsumexp":
            self.compute = logsumexp_cpu.small if rows.fits else None
        elif operands.dy is not None:
            self.compute = _small_rows
        else:
            self.compute = _small_rows if _method(problem, rows) is _tiled else None
        if problem.is_complex:
            self.compute = None
        self.method = _method(problem, rows)
        self.problem, self.dtype = problem, problem_dtype(problem)
        self.kept_axes = tuple(rows.kept_axes)
        self.axes = self.kept_axes + tuple(rows.reduced_axes)
        self.merged, self.side_by_side = rows.kept + rows.reduced, rows.side_by_side
        self.matrix = problem.num_rows, problem.row_length
        self.key_factor = split_scale(problem.scale)[0]
        self.near_dtype = rows.near_dtype
        # The matrix of rows is the array itself, and that of the results the result.
        self.in_order = (
            all(
                x.flags.c_contiguous for x in (operands.x, operands.dy) if x is not None
            )
            and self.axes == tuple(range(operands.x.ndim))
            and not self.side_by_side
        )
        work = self.near_dtype or _work_dtype(problem)
        self.is_result = self.in_order and self.dtype == work

    def block(self, x, dy=None):
        """The rows of an array, and those of a second one."""
        if not self.in_order:
            x = x.transpose(self.axes)
            dy = None if dy is None else dy.transpose(self.axes)
        x = x.reshape(self.matrix)
        dy = None if dy is None else dy.reshape(self.matrix)
        return SmallBlock(x, self.side_by_side, self.key_factor, self.near_dtype, dy)


def problem_dtype(problem):
    """The dtype of a result."""
    return arrays.to_dtype(problem.dtypes["out"])


def _plan_of(key, check, *arguments):
    plan = _plans.get(key)
    if plan is None:
        plan = _Plan(*check(*arguments))
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def run_small(check, x, *rest):
    """`run` of a call on a small NumPy array with options that compare by value.

    The arguments are checked, and the rows found, by the first call of their kind.
    """
    plan = _plan_of((check, x.shape, x.strides, x.dtype, rest), check, x, *rest)
    if plan.compute is None:
        return run(*check(x, *rest))
    with np.errstate(all="ignore"):
        return plan.compute(plan, x)


def run_small_pair(check, y, dy, *rest):
    """`run_small` of a function of two arrays of one shape."""
    key = check, y.shape, y.strides, y.dtype, dy.strides, dy.dtype, rest
    plan = _plan_of(key, check, y, dy, *rest)
    with np.errstate(all="ignore"):
        return plan.compute(plan, y, dy)


def _small_rows(plan, *operands):
    """What has the shape of its input, of small arrays."""
    x, block = operands[0], plan.block(*operands)
    plan.method(plan.problem, block)
    if plan.is_result:
        return block.result.reshape(plan.problem.shape)[()]
    out = np.empty_like(x, dtype=plan.dtype)
    # The merged axes are views of the result, as in `Rows`.
    view = out.transpose(plan.axes).reshape(plan.merged, copy=False)
    store(view, block.result.reshape(plan.merged))
    return out[()]


def describe(problem, operands):
    """What would run; nothing does."""
    details = {
        "kernel": "tiled" if problem.method == "auto" else problem.method,
        "threads": _num_threads(problem),
        "computes_in": np.dtype(_computes_in(problem)).name,
    }
    if problem.num_rows and problem.row_length:
        rows = Rows(problem, x=operands.x, dy=operands.dy, b=operands.b)
        if problem.function in ("softmax", "log_softmax"):
            details["kernel"] = _KERNELS[_method(problem, rows)]
        details["rows_of_a_block"] = min(rows.per_block, problem.num_rows)
        details["rows_in_memory"] = (
            "side by side" if rows.side_by_side else "one by one"
        )
    return details


def _num_threads(problem):
    size = problem.num_rows * problem.row_length
    return max(1, min(_threads.num_cores(), size // _WORTH_A_THREAD))


def _work_dtype(problem):
    """The dtype of sums and exponentials, where `Rows.near_dtype` is no other.

    One step above float32: x - m is then exact enough at any spread of a row.
    """
    if problem.is_complex:
        return np.complex128
    if problem.compute_dtype == "float64":
        return np.float64
    used = {
        problem.dtypes[name] for name in ("x", "dy", "out") if name in problem.dtypes
    }
    if not used <= {"float16", "bfloat16"}:
        return np.float64
    # A scale that is no normal float32 would become 0 or inf.
    fits = problem.scale == 0 or _LEAST <= abs(problem.scale) <= _LARGEST
    return np.float32 if fits else np.float64


def _factor(problem):
    """What differences of keys are multiplied by."""
    return 1.0 if problem.is_complex else split_scale(problem.scale)[1]


def _run_rows(problem, operands, threads, out_is_new):
    """All functions whose result has the shape of the input."""
    rows = Rows(problem, out_is_new=out_is_new, **operands._asdict())
    method = _method(problem, rows)
    if method is _tiled_in_pieces:
        method(problem, rows, threads)
        return

    def one_block(box, scratch):
        method(problem, Block(rows, box, scratch))

    _threads.for_each(one_block, rows.blocks(), threads)


def _method(problem, rows):
    """The function for a problem."""
    if problem.function.endswith("_vjp"):
        return _softmax_vjp if problem.function == "softmax_vjp" else _log_softmax_vjp
    if problem.method == "naive":
        return _naive
    if problem.is_complex:
        return _tiled  # complex maxima do not merge as real ones do
    if problem.method in ("safe", "online"):
        return _safe if problem.method == "safe" else _online
    return _tiled if rows.fits else _tiled_in_pieces


def _computes_in(problem):
    """The dtype of exponentials, for explain."""
    if problem.function == "logsumexp":
        return logsumexp_cpu.work_dtype(problem)
    return _naive_dtype(problem) if problem.method == "naive" else _work_dtype(problem)


# --- the steps that methods share ----------------------------------------------------


def _finite_or_zero(m):
    return np.where(np.isfinite(m), m, 0)


def _shift(problem, m):
    """What is subtracted from a row: SciPy's rule, which its special values follow."""
    return m if problem.function == "softmax" else _finite_or_zero(m)


def _scaled_difference(problem, x, m, block):
    """scale * (x - m), of keys, as d + low, where low is None if d alone will do.

    d lies in place of x, or in a buffer of the block. With low the sum is exact to the
    last digits however far apart x and m are and however large: its rounding error
    would be the relative error of the exponential.
    """
    factor = _factor(problem)
    if problem.compute_dtype != "float64":
        d = np.subtract(x, m, out=x)
        return _times(d, factor), None
    d = np.subtract(x, m, out=block.buffer("d", x.shape, x.dtype))
    # TwoDiff (Knuth): low is the rounding error of d.
    low = block.buffer("low", x.shape, x.dtype)
    big = block.buffer("big", x.shape, x.dtype)
    np.subtract(d, x, out=big)
    np.subtract(d, big, out=low)
    np.subtract(x, low, out=low)
    np.add(big, m, out=big)
    np.subtract(low, big, out=low)
    if factor != 1:
        _multiply_pair(d, low, factor, block)
    return d, low


def _times(x, factor):
    """x * factor, in place."""
    return x if factor == 1 else np.multiply(x, x.dtype.type(factor), out=x)


# Of a float64 the sign, the exponent and the first 26 digits.
_UPPER = np.int64(-1 << 27)


def _multiply_pair(d, low, factor, block):
    """(d + low) * factor as such a pair again, in place, for a factor from 1 on."""
    upper, lower, part = (
        block.buffer(name, d.shape, d.dtype) for name in ("upper", "lower", "big")
    )
    # Products of halves are exact (Dekker).
    np.bitwise_and(_bits(d), _UPPER, out=_bits(upper))
    np.subtract(d, upper, out=lower)
    factor_upper = (np.float64(factor).view(np.int64) & _UPPER).view(np.float64)
    factor_lower = factor - factor_upper
    np.multiply(d, factor, out=d)
    np.multiply(low, factor, out=low)
    np.multiply(upper, factor_upper, out=part)
    np.subtract(part, d, out=part)
    np.add(part, np.multiply(upper, factor_lower, out=upper), out=part)
    np.add(part, np.multiply(lower, factor_upper, out=upper), out=part)
    np.add(part, np.multiply(lower, factor_lower, out=lower), out=part)
    np.add(low, part, out=low)


def _bits(x):
    """A matrix of float64 in any order as its bits."""
    return x.T.view(np.int64).T if x.flags.f_contiguous else x.view(np.int64)


def _exp_difference(problem, x, m, block):
    """exp(scale * (x - m)), in place of x or in a buffer of the block."""
    d, low = _scaled_difference(problem, x, m, block)
    np.exp(d, out=d)
    if low is None:
        return d
    np.multiply(low, d, out=low)  # exp(d + low) is exp(d) (1 + low)
    # No number unless x and m are finite.
    return np.add(d, low, out=d, where=np.isfinite(low))


def _log_of_sum(problem, total, m, block, pieces):
    """log(total) to the last digits, which are lost where one term is nearly all."""
    log = np.log(total)
    if problem.is_complex:
        return log
    alone = (total > 1 - _SMALL) & (total < 1 + _SMALL)  # the largest term is 1
    if alone.any():
        rest = sum_of_parts([_rest(problem, m, block, piece) for piece in pieces])
        log = np.where(alone, np.log1p(rest), log)
    return log


# What the other terms of a sum come to where its log is found from them.
_SMALL = 0.5


def _last(problem, total, m, block, pieces):
    """What `_finish` takes: the sum of each row, or for logs the log of it."""
    if problem.function == "softmax":
        return total
    return _log_of_sum(problem, total, m, block, pieces)


def _rest(problem, m, block, piece):
    """Sums over the terms of a piece that are not the largest."""
    x = block.keys(piece, _work_dtype(problem))
    is_top = x == m
    e = _exp_difference(problem, x, m, block)
    np.copyto(e, 0, where=is_top)
    return row_sum(e)


def _finish(problem, x, m, last, block):
    """The result for the keys x, from the sum of a row or, for logs, the log of it."""
    if problem.function == "softmax":
        return _share(problem, _exp_difference(problem, x, m, block), last)
    # A difference is not above 0, and the log not below: no digits are lost.
    np.subtract(x, m, out=x)
    return np.subtract(_times(x, _factor(problem)), last, out=x)


def _share(problem, e, total):
    """e / total, in place."""
    if problem.compute_dtype == "float32":
        # The reciprocal has digits to spare, and a product takes a third of the time.
        return np.multiply(e, 1 / total, out=e)
    return np.divide(e, total, out=e)


# --- exponentials relative to a base that rounds nothing ------------------------------

# By dtype: the unit of a base; below what size of maxima that is a multiple of the last
# digit of every x; how far below a base an exponential is 0.
_NEAR = {
    np.dtype(np.float32): (64.0, 2.0**28, 110.0),
    np.dtype(np.float64): (512.0, 2.0**60, 800.0),
}


def _is_near(m):
    """Which maxima `_exp_near` takes: no huge ones, and numbers alone."""
    return np.abs(m) < _NEAR[m.dtype][1]


def _all_near_zero(m):
    """Whether the base of every row is 0."""
    unit = _NEAR[m.dtype][0]
    if m.size == 1:
        return 0 <= m.item() < unit
    return np.minimum.reduce(m, None) >= 0 and np.maximum.reduce(m, None) < unit


def _exp_near(x, m, block, is_zero, out=None):
    """(base, exp(x - base)) for rows x with maxima m, to the last digits.

    The base is the next multiple of a unit below the maximum, so that no sum overflows
    and no share underflows. A base of 0, if `is_zero` that of all rows, has no
    difference to make. Others are multiples of the last digit of every x: then the
    error of the difference takes two operations, by Fast2Sum (Dekker), and not five.
    """
    d = block.buffer("d", x.shape, x.dtype) if out is None else out
    if is_zero:
        return np.zeros(m.shape, m.dtype), np.exp(x, out=d)
    unit, _, depth = _NEAR[x.dtype]
    base = np.floor(m / unit) * unit
    low = block.buffer("low", x.shape, x.dtype)
    # What is far below the base, -inf too, has no digits to lose.
    x = np.maximum(x, base - depth, out=block.buffer("x", x.shape, x.dtype))
    np.subtract(x, base, out=d)
    np.add(d, base, out=low)
    np.subtract(x, low, out=low)
    np.exp(d, out=d)
    return base, np.add(d, np.multiply(low, d, out=low), out=d)


def _near_softmax(problem, block, piece):
    """Softmax of whole rows by `_exp_near`; of the others in float64 and slowly."""
    x = block.keys_to_read(piece, block.near_dtype)
    m = row_max(x)
    others = None
    if not (is_zero := _all_near_zero(m)) and not (near := _is_near(m)).all():
        rows = ~near[:, 0]
        others = SmallBlock(x[rows], side_by_side=False, key_factor=1.0)
        _tiled(problem, others)
        m = np.where(near, m, m.dtype.type(0))
    _, e = _exp_near(x, m, block, is_zero)
    # In float64 also for float32, whose exponentials have used up what may be lost.
    total = row_sum(e, np.float64)
    if total.dtype != e.dtype:
        total = total.astype(e.dtype)
    target = block.target(piece, e.dtype)
    result = np.divide(e, total, out=e if target is None else target)
    if others is not None:
        result[rows] = others.result
    if target is None:
        block.write(piece, result)


# --- the four methods ----------------------------------------------------------------


def _naive(problem, block):
    """exp(x) / sum exp(x), every operation in the dtype of the input."""
    dtype = _naive_dtype(problem)
    wide = np.float32 if dtype.itemsize == 2 else dtype.type
    total = 0
    for piece in block.pieces():
        total = total + row_sum(np.exp(block.scores(piece, dtype)), dtype=wide)
    total = total.astype(dtype)
    for piece in block.pieces():
        x = block.scores(piece, dtype)
        if problem.function == "softmax":
            block.write(piece, np.exp(x) / total)
        else:
            block.write(piece, x - np.log(total))


def _naive_dtype(problem):
    name = problem.dtypes["x"]
    if name in arrays.FLOATS:
        return arrays.to_dtype(name)
    return np.dtype(_work_dtype(problem))


def _safe(problem, block):
    """Three sweeps: the maximum, the sum, the result."""
    work = _work_dtype(problem)
    m = -np.inf
    for piece in block.pieces():
        m = np.maximum(m, row_max(block.keys(piece, work)))
    m = _shift(problem, m)
    parts = []
    for piece in block.pieces():
        x = block.keys(piece, work)
        parts.append(row_sum(_exp_difference(problem, x, m, block)))
    total = sum_of_parts(parts)
    last = _last(problem, total, m, block, block.pieces())
    for piece in block.pieces():
        x = block.keys(piece, work)
        block.write(piece, _finish(problem, x, m, last, block))


def _online(problem, block):
    """Two sweeps: maximum and sum in one by the recurrence, then the result.

    With a new maximum m' the sum so far is rescaled (Milakov and Gimelshein 2018):
    d' = d exp(m - m') + sum exp(x - m'). What each addition rounds away is kept.
    """
    work = _work_dtype(problem)
    fewest, most = _ONLINE_COLUMNS
    columns = min(max(fewest, -(-problem.row_length // _ONLINE_STEPS)), most)
    m = np.full((block.num_rows, 1), -np.inf)
    d, lost = np.zeros((2, block.num_rows, 1), work)
    for piece in block.pieces(columns):
        x = block.keys(piece, work)
        m_new = np.maximum(m, row_max(x))
        base = _finite_or_zero(m_new)
        part = row_sum(_exp_difference(problem, x, base, block))
        kept = _exp_difference(problem, m, base, block)
        d, rounded_away = _exact_sum(d * kept, part)
        lost = lost * kept + rounded_away
        m = m_new
    d = np.where(np.isfinite(d), d + lost, d)
    d = np.where(m == np.inf, np.nan, d) if problem.function == "softmax" else d
    m = _shift(problem, m)
    last = _last(problem, d, m, block, block.pieces(columns))
    for piece in block.pieces(columns):
        x = block.keys(piece, work)
        block.write(piece, _finish(problem, x, m, last, block))


def _exact_sum(a, b):
    """(a + b, what its rounding took), by TwoSum (Knuth)."""
    total = a + b
    b_of_total = total - a
    return total, (a - (total - b_of_total)) + (b - b_of_total)


def _tiled(problem, block):
    """One read, one write: the rows stay in the cache in between."""
    piece = block.whole()
    if block.near_dtype is not None:
        _near_softmax(problem, block, piece)
        return
    x = block.keys(piece, _work_dtype(problem))
    m = _shift(problem, row_max(x))
    if problem.function == "softmax":
        e = _exp_difference(problem, x, m, block)
        block.write(piece, _share(problem, e, row_sum(e)))
    else:
        d = np.subtract(x, m, out=block.buffer("e", x.shape, x.dtype))
        total = row_sum(np.exp(_times(d, _factor(problem)), out=x))
        last = _log_of_sum(problem, total, m, block, [piece])
        block.write(piece, np.subtract(d, last, out=d))


# Elements of a piece of rows too long to hold: x and two buffers stay near the core,
# and the interpreter is not what threads wait for.
_PIECE = 2 * BLOCK
# Rows of a piece that lie side by side, so that memory is read at a stretch.
_ROWS_SIDE_BY_SIDE = 4096


def _tiled_in_pieces(problem, rows, threads):
    """Rows too long to hold: (m, d) of every piece, their merge, the result.

    A result of the dtype that is computed in holds the exponentials of a softmax in
    between, each relative to the maximum of its own piece.
    """
    work, near = _work_dtype(problem), rows.near_dtype
    kept = rows.views["out"].dtype
    keeps = problem.function == "softmax" and kept in (work, near)
    together = _ROWS_SIDE_BY_SIDE if rows.side_by_side else 1
    groups = list(boxes(rows.kept, together))
    pieces = list(boxes(rows.reduced, _PIECE // min(together, problem.num_rows)))
    tasks = list(np.ndindex(len(groups), len(pieces)))
    # The rows of a group are neighbours in the flat order of all.
    starts = np.cumsum([0] + [Block(rows, box, None).num_rows for box in groups])
    here = [slice(*pair) for pair in itertools.pairwise(starts.tolist())]
    # Of rows side by side, what a piece has is side by side, too.
    order = "F" if rows.side_by_side else "C"
    m, d = (np.empty((problem.num_rows, len(pieces)), order=order) for _ in range(2))

    def summarize(task, scratch):
        g, p = task
        block = Block(rows, groups[g], scratch)
        if keeps:
            base, total = _write_exp(problem, block, pieces[p])
        else:
            x = block.keys(pieces[p], work)
            base = row_max(x)
            # What the difference loses is an absolute error of its exponential.
            np.subtract(x, _finite_or_zero(base), out=x)
            total = row_sum(np.exp(_times(x, _factor(problem)), out=x))
        m[here[g], p], d[here[g], p] = base[:, 0], total[:, 0]

    _threads.for_each(summarize, tasks, threads)
    with np.errstate(all="ignore"):
        top = row_max(m)
        base = _shift(problem, top)
        below = (_finite_or_zero(m) - _finite_or_zero(top)) * _factor(problem)
        total = row_sum(np.where(d == 0, 0, d * np.exp(below)))
        if problem.function == "softmax":
            total = np.where(np.isinf(top), np.nan, total)
    last = total
    if problem.function == "log_softmax":
        last = np.empty_like(total)

        def take_log(g, scratch):
            block, at = Block(rows, groups[g], scratch), here[g]
            with np.errstate(all="ignore"):
                last[at] = _log_of_sum(problem, total[at], base[at], block, pieces)

        _threads.for_each(take_log, range(len(groups)), threads)
    elif keeps:
        with np.errstate(all="ignore"):
            block = SmallBlock(m, rows.side_by_side, key_factor=1.0)
            factors = _exp_difference(problem, m, top, block) / total
            # A factor may underflow where its product with large exponentials does not:
            # then the piece is multiplied by its root, twice.
            far = factors < np.finfo(kept).tiny
            roots = np.exp(below / 2) / np.sqrt(total) if far.any() else factors
            factors, roots = (f.astype(kept, copy=False) for f in (factors, roots))

    def write(task, scratch):
        g, p = task
        block, at = Block(rows, groups[g], scratch), here[g]
        if keeps:
            is_far = far[at, p].any()
            for part in (roots, roots) if is_far else (factors,):
                block.rescale(pieces[p], part[at, p])
            return
        x = block.keys(pieces[p], work)
        block.write(pieces[p], _finish(problem, x, base[at], last[at], block))

    _threads.for_each(write, tasks, threads)


def _write_exp(problem, block, piece):
    """Store exp(scale * (x - base)) of a piece of some rows: (base, their sums)."""
    x = m = None
    if block.near_dtype is not None:
        x = block.keys_to_read(piece, block.near_dtype)
        m = row_max(x)
    if m is not None and _is_near(m).all():
        target = block.target(piece, x.dtype)
        base, e = _exp_near(x, m, block, _all_near_zero(m), target)
    else:
        x, target = block.keys(piece, _work_dtype(problem)), None
        base = row_max(x)
        e = _exp_difference(problem, x, _finite_or_zero(base), block)
    total = row_sum(e, np.float64)
    if target is None:
        block.write(piece, e)
    return base, total


_KERNELS = {
    _naive: "naive",
    _safe: "safe",
    _online: "online",
    _tiled: "tiled",
    _tiled_in_pieces: "tiled",
}

# --- gradients -----------------------------------------------------------------------


def _softmax_vjp(problem, block):
    """scale * y * (dy - sum(y * dy))."""
    work, pieces = _work_dtype(problem), block.pieces()
    target = block.new_target(pieces[0], work) if len(pieces) == 1 else None

    def read(piece):
        y, dy = block.to_read("x", piece, work), block.to_read("dy", piece, work)
        e = block.buffer("e", y.shape, work) if target is None else target
        return y, dy, e

    parts = []
    for piece in pieces:
        y, dy, e = read(piece)
        parts.append(row_sum(np.multiply(y, dy, out=e, dtype=work)))
    dot = sum_of_parts(parts)
    for piece in pieces:
        if len(pieces) > 1:  # a single one is still there
            y, dy, e = read(piece)
        np.subtract(dy, dot, out=e)
        _times(np.multiply(e, y, out=e), problem.scale)
        if target is None:
            block.write(piece, e)


def _log_softmax_vjp(problem, block):
    """scale * (dy - exp(y) * sum(dy)), and 0 where y is -inf."""
    work, pieces = _work_dtype(problem), block.pieces()
    total = sum_of_parts([row_sum(block.matrix("dy", piece, work)) for piece in pieces])
    for piece in pieces:
        dy = block.to_read("dy", piece, work)
        y = block.matrix("x", piece, work)
        absent = y == -np.inf
        np.exp(y, out=y)
        np.multiply(y, total, out=y)
        _times(np.subtract(dy, y, out=y), problem.scale)
        if absent.any():
            np.copyto(y, 0, where=absent)
        block.write(piece, y)
