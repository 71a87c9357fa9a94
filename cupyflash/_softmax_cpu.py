"""Softmax, log_softmax and their vector-Jacobian products on NumPy arrays.

Each method below takes a block of rows, which stays in the cache; threads take blocks.
"""

import numpy as np

from cupyflash import _arrays, _logsumexp_cpu, _threads
from cupyflash._softmax_blocks import BLOCK, Block, Rows, boxes, row_max, row_sum

# Elements below which a thread costs more than it saves.
_WORTH_A_THREAD = 16 * 1024
# Columns that `online` takes at a time. Each step rounds the sum, hence few of them.
_ONLINE_COLUMNS = 1024, 16 * 1024
_ONLINE_STEPS = 16


def run(problem, operands):
    """Compute a problem of the softmax family on the host."""
    threads = _num_threads(problem)
    if problem.function == "logsumexp":
        return _logsumexp_cpu.run(problem, operands, threads)
    out = operands.out
    if out is None:  # in the order of memory of the input
        out = np.empty_like(operands.x, dtype=_arrays.to_dtype(problem.dtypes["out"]))
    if out.size:
        _run_rows(problem, operands._replace(out=out), threads)
    return out[()] if operands.out is None else out


def describe(problem, operands):
    """What would run; nothing does."""
    told = {
        "kernel": "tiled" if problem.method == "auto" else problem.method,
        "threads": _num_threads(problem),
        "computes_in": np.dtype(_work_dtype(problem)).name,
    }
    if problem.num_rows and problem.row_length:
        rows = Rows(problem, x=operands.x, dy=operands.dy, b=operands.b)
        told["rows_of_a_block"] = min(rows.per_block, problem.num_rows)
        told["rows_in_memory"] = "side by side" if rows.side_by_side else "one by one"
    return told


def _num_threads(problem):
    size = problem.num_rows * problem.row_length
    return max(1, min(_threads.num_cores(), size // _WORTH_A_THREAD))


def _work_dtype(problem):
    """The dtype that sums and exponentials are computed in.

    One step above float32: x - m is then exact enough at any spread of a row, which
    costs no more time here than its correction in float32 would.
    """
    if problem.is_complex:
        return np.complex128
    used = {
        problem.dtypes[name] for name in ("x", "dy", "out") if name in problem.dtypes
    }
    return np.float32 if used <= {"float16", "bfloat16"} else np.float64


def _run_rows(problem, operands, threads):
    """All functions whose result has the shape of the input."""
    rows = Rows(problem, **operands._asdict())
    method = _method(problem, rows)
    if method is _tiled_long_rows:
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
    if rows.fits:
        return _tiled
    # Many long rows side by side, or one after another by all threads.
    return _online if rows.side_by_side else _tiled_long_rows


# --- the steps that methods share ----------------------------------------------------


def _finite_or_zero(m):
    return np.where(np.isfinite(m), m, 0)


def _shift(problem, m):
    """What is subtracted from a row: SciPy's rule, which its special values follow."""
    return m if problem.function == "softmax" else _finite_or_zero(m)


def _exp_difference(problem, x, m, block, rest=None):
    """exp(x + rest - m), exact to the last digits however far apart x and m are.

    It lies in place of x, or in a buffer of the block.
    """
    if problem.compute_dtype != "float64":
        d = np.subtract(x, m, out=x)
        return np.exp(d, out=d)
    d = np.subtract(x, m, out=block.buffer("d", x.shape, x.dtype))
    # TwoDiff (Knuth): low is the rounding error of d, and exp(d + low) is
    # exp(d) (1 + low). Without it the error grows with the spread of the row.
    low, big = (block.buffer(name, d.shape, d.dtype) for name in ("low", "big"))
    np.subtract(d, x, out=big)
    np.subtract(d, big, out=low)
    np.subtract(x, low, out=low)
    np.add(big, m, out=big)
    np.subtract(low, big, out=low)
    if rest is not None:
        np.add(low, rest, out=low)
    np.exp(d, out=d)
    np.multiply(low, d, out=low)
    np.copyto(low, 0, where=~np.isfinite(low))  # x or m was not finite
    return np.add(d, low, out=d)


def _finish(problem, x, m, total, block):
    """The result for the scores x, in place of them."""
    if problem.function == "log_softmax":
        np.subtract(x, m, out=x)
        return np.subtract(x, np.log(total), out=x)
    return _share(problem, _exp_difference(problem, x, m, block, block.rest), total)


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
    dtype = (
        _arrays.to_dtype(name)
        if name in _arrays.FLOATS
        else np.dtype(_work_dtype(problem))
    )
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


def _safe(problem, block):
    """Three sweeps: the maximum, the sum, the result."""
    work = _work_dtype(problem)
    m = -np.inf
    for piece in block.pieces():
        m = np.maximum(m, row_max(block.scores(piece, work)))
    m = _shift(problem, m)
    total = 0
    for piece in block.pieces():
        x = block.scores(piece, work)
        total = total + row_sum(_exp_difference(problem, x, m, block, block.rest))
    for piece in block.pieces():
        x = block.scores(piece, work)
        block.write(piece, _finish(problem, x, m, total, block))


def _online(problem, block):
    """Two sweeps: maximum and sum in one by the recurrence, then the result.

    With a new maximum m' the sum so far is rescaled (Milakov and Gimelshein 2018):
    d' = d exp(m - m') + sum exp(x - m').
    """
    work = _work_dtype(problem)
    fewest, most = _ONLINE_COLUMNS
    columns = min(max(fewest, -(-problem.row_length // _ONLINE_STEPS)), most)
    m = np.full((block.num_rows, 1), -np.inf)
    d = np.zeros((block.num_rows, 1), work)
    for piece in block.pieces(columns):
        x = block.scores(piece, work)
        m_new = np.maximum(m, row_max(x))
        base = _finite_or_zero(m_new)
        total = row_sum(_exp_difference(problem, x, base, block, block.rest))
        d = d * _exp_difference(problem, m, base, block) + total
        m = m_new
    d = np.where(m == np.inf, np.nan, d) if problem.function == "softmax" else d
    m = _shift(problem, m)
    for piece in block.pieces(columns):
        x = block.scores(piece, work)
        block.write(piece, _finish(problem, x, m, d, block))


def _tiled(problem, block):
    """One read, one write: the rows stay in the cache in between."""
    piece = block.whole()
    x = block.scores(piece, _work_dtype(problem))
    m = _shift(problem, row_max(x))
    if problem.function == "softmax":
        e = _exp_difference(problem, x, m, block, block.rest)
        block.write(piece, _share(problem, e, row_sum(e)))
    else:
        np.subtract(x, m, out=x)
        e = np.exp(x, out=block.buffer("e", x.shape, x.dtype))
        block.write(piece, np.subtract(x, np.log(row_sum(e)), out=x))


def _tiled_long_rows(problem, rows, threads):
    """Rows too long to hold: (m, d) of every piece, their merge, the result."""
    work = _work_dtype(problem)
    row_boxes, pieces = list(boxes(rows.kept, 1)), list(boxes(rows.reduced, BLOCK))
    shape = len(row_boxes), len(pieces)
    tasks = list(np.ndindex(shape))
    m, d = np.empty(shape), np.empty(shape)

    def summarize(task, scratch):
        r, p = task
        block = Block(rows, row_boxes[r], scratch)
        x = block.scores(pieces[p], work)
        m[task] = row_max(x).item()
        base = _finite_or_zero(m[task])
        e = _exp_difference(problem, x, base, block, block.rest)
        d[task] = row_sum(e).item()

    _threads.for_each(summarize, tasks, threads)
    with np.errstate(all="ignore"):
        top = row_max(m)
        weight = np.exp(_finite_or_zero(m) - _finite_or_zero(top))
        total = row_sum(np.where(d == 0, 0, d * weight))
        if problem.function == "softmax":
            total = np.where(np.isinf(top), np.nan, total)
        base = _shift(problem, top)

    def write(task, scratch):
        r, p = task
        block = Block(rows, row_boxes[r], scratch)
        x = block.scores(pieces[p], work)
        block.write(pieces[p], _finish(problem, x, base[r], total[r], block))

    _threads.for_each(write, tasks, threads)


# --- gradients -----------------------------------------------------------------------


def _softmax_vjp(problem, block):
    """scale * y * (dy - sum(y * dy))."""
    work = _work_dtype(problem)
    dot = 0
    pieces = block.pieces()
    for piece in pieces:
        y, dy = block.matrix("x", piece, work), block.matrix("dy", piece, work)
        dot = dot + row_sum(np.multiply(y, dy, out=block.buffer("e", y.shape, y.dtype)))
    for piece in pieces:
        if len(pieces) > 1:  # a single one is still there
            y, dy = block.matrix("x", piece, work), block.matrix("dy", piece, work)
        np.subtract(dy, dot, out=dy)
        np.multiply(dy, y, out=dy)
        block.write(piece, np.multiply(dy, work(problem.scale), out=dy))


def _log_softmax_vjp(problem, block):
    """scale * (dy - exp(y) * sum(dy)), and 0 where y is -inf."""
    work = _work_dtype(problem)
    total = 0
    pieces = block.pieces()
    for piece in pieces:
        total = total + row_sum(block.matrix("dy", piece, work))
    for piece in pieces:
        y, dy = block.matrix("x", piece, work), block.matrix("dy", piece, work)
        absent = y == -np.inf
        np.exp(y, out=y)
        np.multiply(y, total, out=y)
        np.subtract(dy, y, out=dy)
        np.multiply(dy, work(problem.scale), out=dy)
        np.copyto(dy, 0, where=absent)
        block.write(piece, dy)
