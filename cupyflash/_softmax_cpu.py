"""Softmax family on NumPy arrays, in blocks of rows that stay in the cache.

A block is a group of whole rows, a piece a part of its reduced axes. `_Block` brings a
piece into a contiguous matrix (rows, columns) of the dtype that is computed in, from
any strides, and writes one back; the four methods below work on such matrices.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from cupyflash import _arrays, _layout, _threads

# Elements of a block: 512 KiB in float64, which stays in a core's second-level cache.
_BLOCK = 64 * 1024
# Rows up to here are held whole by `tiled`; one read is worth leaving that cache.
_LONGEST_ROW = 256 * 1024
# Elements below which a thread costs more than it saves.
_WORTH_A_THREAD = 16 * 1024
# Columns that `online` takes at a time, at least, and the most steps in a row: each
# rescales the sum, and rounds it.
_ONLINE_COLUMNS = 1024
_ONLINE_STEPS = 64


def run(problem, operands):
    """Compute a problem of the softmax family on the host."""
    if problem.function == "logsumexp":
        return _run_logsumexp(problem, operands)
    out = operands.out
    if out is None:
        dtype = _dtype(problem.dtypes["out"])
        out = _empty_like(operands.x, dtype)
    if out.size:
        _run_rows(problem, operands._replace(out=out))
    return out[()] if operands.out is None else out


def _dtype(name):
    return _arrays.to_dtype(name)


def _empty_like(x, dtype):
    """A new array in the order of memory of `x`."""
    return np.empty_like(x, dtype=dtype, subok=False)


def _work_dtype(problem):
    """The dtype that sums and exponentials are computed in.

    One step above float32: x - m is then exact enough at any spread of a row, which
    costs no more time here than its correction in float32 would.
    """
    if problem.is_complex:
        return np.complex128
    used = (problem.dtypes[n] for n in ("x", "dy", "b", "out") if problem.dtypes.get(n))
    return np.float32 if set(used) <= {"float16", "bfloat16"} else np.float64


# --- blocks and pieces ---------------------------------------------------------------


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut an index space into boxes of at most `limit` elements, last axes whole."""
    inner, axis = 1, len(shape)
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    whole = (slice(None),) * (len(shape) - axis)
    if axis == 0:
        yield whole
        return
    n = shape[axis - 1]
    parts = -(-n // max(1, limit // inner))
    step = -(-n // parts)
    for outer in np.ndindex(shape[: axis - 1]):
        fixed = tuple(slice(i, i + 1) for i in outer)
        for start in range(0, n, step):
            yield (*fixed, slice(start, start + step), *whole)


class _Views:
    """The operands as (kept axes..., reduced axes...), neighbours merged."""

    def __init__(self, problem, operands):
        ndim = len(problem.shape)
        strides = _layout.element_strides(operands.x)

        def by_stride(axes):
            return sorted(axes, key=lambda a: -abs(strides[a]))

        kept = by_stride(a for a in range(ndim) if a not in problem.axes)
        reduced = by_stride(problem.axes)
        given = {
            name: x
            for name, x in operands._asdict().items()
            if x is not None and not (name == "out" and problem.function == "logsumexp")
        }
        steps = [_layout.element_strides(x) for x in given.values()]

        def merged(axes):
            shape = [problem.shape[a] for a in axes]
            return _layout.collapse(shape, [[s[a] for a in axes] for s in steps])[0]

        self.kept_order = kept
        self.kept_full = tuple(problem.shape[a] for a in kept)
        self.kept = merged(kept) or (1,)
        self.reduced = merged(reduced) or (1,)
        for name, x in given.items():
            x = x.transpose(*kept, *reduced)
            # Merged axes are one axis in every operand: never a copy.
            setattr(self, name, x.reshape(self.kept + self.reduced, copy=False))

    x = dy = b = where = out = None


class _Block:
    """Some whole rows of a problem: a box of the kept axes."""

    def __init__(self, problem, views, box, scratch):
        self._views, self._box, self._scratch = views, box, scratch
        self._scale = problem.scale
        self._absent = 0 if problem.function == "softmax" else -np.inf
        self.num_rows = prod(len(range(*s.indices(n)))
                             for s, n in zip(box, views.kept, strict=True))  # fmt: skip

    def pieces(self, columns):
        """Boxes of the reduced axes of at most `columns` elements, in order."""
        return _boxes(self._views.reduced, max(1, columns))

    def _part(self, name, piece):
        view = getattr(self._views, name)
        return None if view is None else view[self._box + piece]

    def matrix(self, name, piece, dtype):
        """A copy of one operand as (rows, columns)."""
        part = self._part(name, piece)
        buffer = self._scratch.array(name, part.shape, dtype)
        np.copyto(buffer, part, casting="unsafe")
        return buffer.reshape(self.num_rows, -1)

    def scores(self, piece, dtype):
        """scale * x, with -inf where an element is absent."""
        x = self.matrix("x", piece, dtype)
        if self._scale != 1:
            np.multiply(x, dtype(self._scale), out=x)
        if (where := self.selected(piece)) is not None:
            np.copyto(x, -np.inf, where=~where)
        return x

    def selected(self, piece):
        """`where` as (rows, columns), or None."""
        where = self._part("where", piece)
        return None if where is None else where.reshape(self.num_rows, -1)

    def write(self, piece, values):
        """Store (rows, columns); an absent element gets the value for such."""
        out = self._part("out", piece)
        if (where := self.selected(piece)) is not None:
            np.copyto(values, self._absent, where=~where)
        np.copyto(out, values.reshape(out.shape), casting="unsafe")

    def buffer(self, name, like):
        return self._scratch.array(name, like.shape, like.dtype)


def _run_rows(problem, operands):
    """All functions whose result has the shape of the input."""
    views = _Views(problem, operands)
    n = prod(views.reduced)
    threads = min(_threads.num_cores(), -(-operands.x.size // _WORTH_A_THREAD))
    if problem.function.endswith("_vjp"):
        method = _softmax_vjp if problem.function == "softmax_vjp" else _log_softmax_vjp
    else:
        method = {"naive": _naive, "safe": _safe, "online": _online}.get(
            problem.method, _tiled
        )
        if problem.is_complex and method is not _naive:
            method = _tiled  # complex maxima do not merge as real ones do
        elif method is _tiled and n > _LONGEST_ROW:
            _tiled_long_rows(problem, views, threads)
            return

    def rows(box, scratch):
        method(problem, _Block(problem, views, box, scratch))

    _threads.for_each(rows, _boxes(views.kept, max(1, _BLOCK // n)), threads)


# --- the steps that methods share ----------------------------------------------------


def _row_max(x):
    """Largest element of each row, as a column; NaN wins."""
    return np.max(x, axis=1, keepdims=True)


def _row_sum(x):
    return np.sum(x, axis=1, keepdims=True)


def _finite_or_zero(m):
    return np.where(np.isfinite(m), m, 0)


def _shift(problem, m):
    """What is subtracted from a row: SciPy's rule, which its special values follow."""
    return m if problem.function == "softmax" else _finite_or_zero(m)


def _exp_difference(problem, x, m, block):
    """exp(x - m), exact to the last digits however far apart x and m are.

    It lies in place of x, or in a buffer of the block.
    """
    if problem.compute_dtype != "float64":
        d = np.subtract(x, m, out=x)
        return np.exp(d, out=d)
    d = np.subtract(x, m, out=block.buffer("d", x))
    # TwoDiff (Knuth): low is the rounding error of d, and exp(d + low) is
    # exp(d) (1 + low). Without it the error grows with the spread of the row.
    low, big = block.buffer("low", d), block.buffer("big", d)
    np.subtract(d, x, out=big)
    np.subtract(d, big, out=low)
    np.subtract(x, low, out=low)
    np.add(big, m, out=big)
    np.subtract(low, big, out=low)
    np.exp(d, out=d)
    np.multiply(low, d, out=low)
    np.copyto(low, 0, where=~np.isfinite(low))  # x or m was not finite
    return np.add(d, low, out=d)


def _finish(problem, x, m, total, block):
    """The result for the scores x, in place of them."""
    if problem.function == "log_softmax":
        np.subtract(x, m, out=x)
        return np.subtract(x, np.log(total), out=x)
    return _share(problem, _exp_difference(problem, x, m, block), total)


def _share(problem, e, total):
    """e / total, in place."""
    if problem.compute_dtype == "float32":
        # The reciprocal has digits to spare, and a product takes a third of the time.
        return np.multiply(e, 1 / total, out=e)
    return np.divide(e, total, out=e)


# --- the four methods ----------------------------------------------------------------


def _naive(problem, block):
    """exp(x) / sum exp(x), every operation in the dtype of the input."""
    name = problem.dtypes["x"]
    dtype = _dtype(name) if name in _arrays.FLOATS else np.dtype(_work_dtype(problem))
    wide = np.float32 if dtype.itemsize == 2 else dtype.type
    total = 0
    for piece in block.pieces(_BLOCK):
        total = total + np.sum(
            np.exp(block.scores(piece, dtype.type)), axis=1, keepdims=True, dtype=wide
        )
    total = total.astype(dtype)
    for piece in block.pieces(_BLOCK):
        x = block.scores(piece, dtype.type)
        if problem.function == "softmax":
            block.write(piece, np.exp(x) / total)
        else:
            block.write(piece, x - np.log(total))


def _safe(problem, block):
    """Three sweeps: the maximum, the sum, the result."""
    work = _work_dtype(problem)
    m = -np.inf
    for piece in block.pieces(_BLOCK):
        m = np.maximum(m, _row_max(block.scores(piece, work)))
    m = _shift(problem, m)
    total = 0
    for piece in block.pieces(_BLOCK):
        x = block.scores(piece, work)
        total = total + _row_sum(_exp_difference(problem, x, m, block))
    for piece in block.pieces(_BLOCK):
        x = block.scores(piece, work)
        block.write(piece, _finish(problem, x, m, total, block))


def _online(problem, block):
    """Two sweeps: maximum and sum in one by the recurrence, then the result.

    With a new maximum m' the sum so far is rescaled (Milakov and Gimelshein 2018):
    d' = d exp(m - m') + sum exp(x - m').
    """
    work = _work_dtype(problem)
    columns = max(_ONLINE_COLUMNS, -(-problem.row_length // _ONLINE_STEPS))
    m = np.full((block.num_rows, 1), -np.inf)
    d = np.zeros((block.num_rows, 1), work)
    for piece in block.pieces(columns):
        x = block.scores(piece, work)
        m_new = np.maximum(m, _row_max(x))
        base = _finite_or_zero(m_new)
        total = _row_sum(_exp_difference(problem, x, base, block))
        d = d * _exp_difference(problem, m, base, block) + total
        m = m_new
    d = np.where(m == np.inf, np.nan, d) if problem.function == "softmax" else d
    m = _shift(problem, m)
    for piece in block.pieces(columns):
        x = block.scores(piece, work)
        block.write(piece, _finish(problem, x, m, d, block))


def _tiled(problem, block):
    """One read, one write: the rows stay in the cache in between."""
    (piece,) = block.pieces(prod(block._views.reduced))
    x = block.scores(piece, _work_dtype(problem))
    m = _shift(problem, _row_max(x))
    if problem.function == "softmax":
        e = _exp_difference(problem, x, m, block)
        block.write(piece, _share(problem, e, _row_sum(e)))
    else:
        np.subtract(x, m, out=x)
        e = np.exp(x, out=block.buffer("e", x))
        block.write(piece, np.subtract(x, np.log(_row_sum(e)), out=x))


def _tiled_long_rows(problem, views, threads):
    """Rows too long to hold: (m, d) of every piece, their merge, the result."""
    work = _work_dtype(problem)
    rows = list(_boxes(views.kept, 1))
    pieces = list(_boxes(views.reduced, _BLOCK))
    tasks = [(r, p) for r in range(len(rows)) for p in range(len(pieces))]
    m = np.empty((len(rows), len(pieces)))
    d = np.empty((len(rows), len(pieces)))

    def summarize(task, scratch):
        r, p = task
        block = _Block(problem, views, rows[r], scratch)
        x = block.scores(pieces[p], work)
        m[task] = _row_max(x).item()
        base = _finite_or_zero(m[task])
        d[task] = _row_sum(_exp_difference(problem, x, base, block)).item()

    _threads.for_each(summarize, tasks, threads)
    with np.errstate(all="ignore"):
        top = _row_max(m)
        weight = np.exp(_finite_or_zero(m) - _finite_or_zero(top))
        total = _row_sum(np.where(d == 0, 0, d * weight))
        if problem.function == "softmax":
            total = np.where(np.isinf(top), np.nan, total)
        base = _shift(problem, top)

    def write(task, scratch):
        r, p = task
        block = _Block(problem, views, rows[r], scratch)
        x = block.scores(pieces[p], work)
        block.write(pieces[p], _finish(problem, x, base[r], total[r], block))

    _threads.for_each(write, tasks, threads)


# --- gradients -----------------------------------------------------------------------


def _softmax_vjp(problem, block):
    """scale * y * (dy - sum(y * dy))."""
    work = _work_dtype(problem)
    dot = 0
    pieces = list(block.pieces(max(_BLOCK, _LONGEST_ROW)))
    for piece in pieces:
        y, dy = block.matrix("x", piece, work), block.matrix("dy", piece, work)
        dot = dot + _row_sum(np.multiply(y, dy, out=block.buffer("e", y)))
    for piece in pieces:
        if len(pieces) > 1:
            y, dy = block.matrix("x", piece, work), block.matrix("dy", piece, work)
        np.subtract(dy, dot, out=dy)
        np.multiply(dy, y, out=dy)
        block.write(piece, np.multiply(dy, work(problem.scale), out=dy))


def _log_softmax_vjp(problem, block):
    """scale * (dy - exp(y) * sum(dy)), and 0 where y is -inf."""
    work = _work_dtype(problem)
    total = 0
    pieces = list(block.pieces(max(_BLOCK, _LONGEST_ROW)))
    for piece in pieces:
        total = total + _row_sum(block.matrix("dy", piece, work))
    for piece in pieces:
        y, dy = block.matrix("x", piece, work), block.matrix("dy", piece, work)
        absent = y == -np.inf
        np.exp(y, out=y)
        np.multiply(y, total, out=y)
        np.subtract(dy, y, out=dy)
        np.multiply(dy, work(problem.scale), out=dy)
        np.copyto(dy, 0, where=absent)
        block.write(piece, dy)


# --- logsumexp -----------------------------------------------------------------------


def _run_logsumexp(problem, operands):
    """log |sum b exp(x)|, and with return_sign also its sign."""
    dtype = _dtype(problem.dtypes["out"])
    views_shape = problem.result_shape
    result = operands.out
    if result is None:
        real = dtype.type(0).real.dtype if problem.return_sign else dtype
        result = np.empty(views_shape, real)
    sign = np.empty(views_shape, dtype) if problem.return_sign else None
    if problem.row_length == 0:
        result[...] = -np.inf
        if sign is not None:
            sign[...] = -1  # as SciPy has it: the sign of -inf
    elif result.size:
        _fill_logsumexp(problem, operands, result, sign)
    if operands.out is None:
        result = result[()]
    return (result, sign[()]) if problem.return_sign else result


def _fill_logsumexp(problem, operands, result, sign):
    """Blocks of rows; what they sum to is gathered in one array of totals."""
    views = _Views(problem, operands)
    n = prod(views.reduced)
    threads = min(_threads.num_cores(), -(-prod(problem.shape) // _WORTH_A_THREAD))
    work = np.complex128 if problem.is_complex else np.float64
    logs = np.empty(views.kept, work)
    signs = np.empty(views.kept, work)
    long_rows = n > _LONGEST_ROW
    pieces = list(_boxes(views.reduced, _BLOCK if long_rows else n))
    boxes = list(_boxes(views.kept, max(1, _BLOCK // n)))
    states = {}

    def summarize(task, scratch):
        b, p = task
        block = _Block(problem, views, boxes[b], scratch)
        states[task] = _log_state(block, pieces[p], work)

    tasks = [(b, p) for b in range(len(boxes)) for p in range(len(pieces))]

    def finish(b, scratch):
        if not long_rows:
            summarize((b, 0), scratch)
        parts = [states.pop((b, p)) for p in range(len(pieces))]
        log, total = _merge_log_states(parts)
        if work is np.float64:
            close = np.isfinite(log) & (abs(log) < 1)
            if close.any():
                block = _Block(problem, views, boxes[b], scratch)
                exact = _log_near_zero(block, pieces, log, total)
                np.copyto(log, exact, where=close & (total > 0))
        shape = logs[boxes[b]].shape
        signs[boxes[b]] = _sign(total).reshape(shape)
        if problem.return_sign:
            logs[boxes[b]] = log.reshape(shape)
        elif problem.is_complex:
            logs[boxes[b]] = (log + 1j * np.angle(total)).reshape(shape)
        else:
            logs[boxes[b]] = np.where(total < 0, np.nan, log).reshape(shape)

    if long_rows:
        _threads.for_each(summarize, tasks, threads)
    _threads.for_each(finish, range(len(boxes)), threads)

    def in_order(a):
        """Kept axes back in the caller's order."""
        back = np.argsort(views.kept_order)
        return a.reshape(views.kept_full).transpose(back).reshape(result.shape)

    with np.errstate(all="ignore"):
        logs = logs if np.iscomplexobj(result) else logs.real
        np.copyto(result, in_order(logs), casting="unsafe")
        if sign is not None:
            np.copyto(sign, in_order(signs), casting="unsafe")


def _sign(total):
    """Sign or phase of each sum; an infinite one has a sign too."""
    size = np.abs(total)
    return np.where(np.isinf(size) & (total.imag == 0), np.sign(total.real),
                    np.sign(total))  # fmt: skip


def _weighted(block, piece, work):
    """Scores and weights of a piece; an element of weight 0 is absent."""
    x = block.scores(piece, work)
    if block._part("b", piece) is None:
        return x, None
    b = block.matrix("b", piece, work)
    if (where := block.selected(piece)) is not None:
        np.copyto(b, 0, where=~where)
    np.copyto(x, -np.inf, where=b == 0)
    return x, b


def _log_state(block, piece, work):
    """(m, sum b exp(x - m)) of each row of a piece."""
    x, b = _weighted(block, piece, work)
    m = _finite_or_zero(_row_max(x.real))
    np.subtract(x, m, out=x)
    e = np.exp(x, out=x)
    if b is not None:
        absent = b == 0
        np.multiply(e, b, out=e)
        np.copyto(e, 0, where=absent)
    return m, _row_sum(e)


def _merge_log_states(parts):
    """(log |sum|, sum in units of the largest exponential) over all pieces."""
    top = np.max([m for m, _ in parts], axis=0)
    total = 0
    for m, part in parts:
        total = total + np.where(part == 0, 0, part * np.exp(m - top))
    return np.log(np.abs(total)) + top, total


def _log_near_zero(block, pieces, log, total):
    """Log of the sum where m and log(sum / exp(m)) nearly cancel.

    The largest terms are set apart, so that log1p sees the small ones (as in SciPy);
    long doubles give the digits that the cancellation takes.
    """
    wide = np.longdouble
    m = -np.inf
    for piece in pieces:
        m = np.maximum(m, _row_max(_weighted(block, piece, np.float64)[0]))
    m = _finite_or_zero(m)
    count, rest = wide(0), wide(0)
    for piece in pieces:
        x, b = _weighted(block, piece, np.float64)
        top = x == m
        e = np.exp(x.astype(wide) - m)
        if b is not None:
            e = np.where(b == 0, 0, e * b)
        count = count + _row_sum(np.where(top, e, 0))
        rest = rest + _row_sum(np.where(top, 0, e))
    usable = (count > 0) & (count + rest > 0)
    unit = np.where(usable, count, 1)
    return np.where(usable, m + (np.log(unit) + np.log1p(rest / unit)), log).astype(
        float
    )
