"""Attention on NumPy arrays by tiles: FlashAttention-2 on BLAS.

Rows outside, blocks of keys inside; a block of scores a thread is all there ever is.
"""

import numpy as np

from cupyflash._attention.cpu.block import (
    BLOCKS_OF_A_RUN,
    LONGEST_SUM,
    WORTH_A_THREAD,
    cost_of_an_entry,
    finite_base,
    first_state,
    product,
    product_of_long_sums,
    row_maxima,
    run_tasks,
    times_values,
)
from cupyflash._attention.cpu.pieces import multiply_transposed
from cupyflash._core import threads

# Rows of a task: many, since each packs the keys for BLAS anew, but every head shall
# have tasks for all cores, and two for each core if those have rows enough.
_MIN_ROWS, _FULL_ROWS, _MAX_ROWS = 32, 64, 1024
# Keys of a block. The scores (1024 x 256 in float32 is 1 MiB) stay near the core while
# they become probabilities; a row maximum is quicker over longer rows.
_BLOCK_KEYS = 512
_BLOCK_KEYS_BOUNDED = 256
# Scores that a block of few rows has, so that its work is more than that of Python.
_FEWEST_SCORES = 1 << 17
# Numbers of k and v that such a block converts at most, which stay near the core.
_MOST_CONVERTED = 1 << 20
# Keys whose norms are looked at at a time.
_LOOK_KEYS = 512
# Rows below which a look at all keys, for their largest norm, is not worth it.
_WORTH_A_BOUND = 128
# exp(s) needs no maximum while |s| is below this: its sums with values up to
# _LARGEST_SUM / seqlen_k stay far from the ends of the exponent range.
_SAFE_SCORE = {"float32": 40.0, "float64": 300.0}
_LARGEST_SUM = 1e20
_SMALLEST_VALUE = 1e-15


def run(problem, operands, out, lse):
    """Rows outside, blocks of keys inside; a block of scores is all there ever is."""
    limits = _score_limits(problem, operands)

    def compute(part):
        bounded = limits is not None and _is_bounded(part, *limits)
        result = _walk(part, _bounded_run if bounded else _run)
        if np.isfinite(result[0]).all():
            return result
        # Either a row is NaN by right, or 0 * NaN came from a key that it does not see.
        result = _walk(part, _exact_run)
        repair(part, result[0])
        return result

    run_tasks(problem, operands, out, lse, rows_of_a_task(problem), compute)


def rows_of_a_task(problem):
    """Rows of a task, whatever the number of heads."""
    worth = max(1, cost_of_an_entry(problem) // WORTH_A_THREAD)
    once, twice = (
        -(-problem.seqlen_q // min(worth, n * threads.num_cores())) for n in (1, 2)
    )
    return min(max(twice, min(once, _FULL_ROWS), _MIN_ROWS), _MAX_ROWS)


def keys_of_a_block(problem, bounded=False):
    """Keys of a block, more where a task has few rows."""
    rows = max(1, min(rows_of_a_task(problem), problem.seqlen_q))
    wide = _FEWEST_SCORES // rows
    if converts(problem):
        dims = problem.head_dim + problem.head_dim_v
        wide = min(wide, _MOST_CONVERTED // max(dims, 1))
    wide = wide // LONGEST_SUM * LONGEST_SUM
    return max(_BLOCK_KEYS_BOUNDED if bounded else _BLOCK_KEYS, wide)


def converts(problem):
    """Whether k and v are not in the dtype of the scores."""
    return problem.dtype != problem.compute_dtype


def _walk(part, run):
    """(values, log of the sums, rows that saw no key), by runs of blocks of keys.

    A run gives (m, d, acc) in the dtype of the scores, like one key of score m, weight
    d and value acc / d. Between runs sums are float64: in float32 the error of the
    result would grow with the number of keys.
    """
    q, factor = part.queries()
    size = keys_of_a_block(part.problem, bounded=run is _bounded_run)
    blocks = list(part.key_blocks(size))
    m, d, blind = first_state(part)
    acc = None
    for first in range(0, max(1, len(blocks)), BLOCKS_OF_A_RUN):
        of_run = blocks[first : first + BLOCKS_OF_A_RUN]
        m_run, d_run, acc_run = run(part, q, factor, of_run)
        blind &= m_run == -np.inf
        m_new = np.maximum(m, m_run)
        base = finite_base(m_new)
        kept, added = np.exp(m - base), np.exp(m_run - base)
        m, d = m_new, d * kept + d_run * added
        if len(blocks) > BLOCKS_OF_A_RUN:
            acc = 0 if acc is None else np.multiply(acc, kept, out=acc)
            acc = acc + acc_run * added
    if acc is None:  # the only run weighs exp(m_run - m), 0 far below the sink
        acc = acc_run
        with np.errstate(divide="ignore", over="ignore"):
            np.divide(acc, (_divisor(d) / added).astype(acc.dtype), out=acc)
    else:
        np.divide(acc, _divisor(d), out=acc)
    return acc, m + np.log(d), blind


def _divisor(d):
    """The sums, but for rows that saw nothing."""
    return np.where(d == 0, d.dtype.type(1), d)


def repair(part, values):
    """Compute rows of `values` that are not finite once more, in two passes.

    They may have overflowed as sums, before they were divided; here P is.
    """
    nonfinite = ~np.isfinite(values).all(axis=1)
    if not nonfinite.any():
        return
    q, factor = part.queries()
    blocks = list(part.key_blocks(keys_of_a_block(part.problem)))
    m, d, _ = first_state(part)
    for start, stop in blocks:
        s = scores(part, q, factor, start, stop)
        m_new = np.maximum(m, row_maxima(s))
        base = finite_base(m_new)
        d = d * np.exp(m - base) + np.exp(s - base).sum(axis=1, keepdims=True)
        m = m_new
    base, divisor = finite_base(m), _divisor(d)
    half = np.zeros((part.num_rows, part.problem.head_dim_v))
    for start, stop in blocks:
        s = scores(part, q, factor, start, stop)
        seen = s != -np.inf
        p = np.exp(s - base) / divisor
        half += times_values(p, seen, part.values(start, stop) * 0.5)
    # Probabilities may add up to a little more than 1.
    largest = float(np.finfo(part.dtype).max) / 2
    np.clip(half, -largest, largest, out=half, where=np.isfinite(half))
    values[nonfinite] = 2 * half[nonfinite]


def _run(part, q, factor, blocks, exact=False):
    """(m, d, acc) by the running maximum."""
    m = np.full((part.num_rows, 1), -np.inf, part.dtype)
    d = np.zeros_like(m)
    acc, term, ones = _accumulators(part, blocks)
    for start, stop in blocks:
        s = scores(part, q, factor, start, stop)
        seen = s != -np.inf if exact else None
        m_new = np.maximum(m, row_maxima(s))
        base = finite_base(m_new)
        p = np.exp(np.subtract(s, base, out=s), out=s)
        rescale = np.exp(m - base)
        d = d * rescale + product(p, ones[: stop - start])
        v = part.values(start, stop)
        if exact:
            term = times_values(p, seen, v)
        else:
            product_of_long_sums(p, v, term)
        np.multiply(acc, rescale, out=acc)
        np.add(acc, term, out=acc)
        m = m_new
    return m, d, acc


def _exact_run(part, q, factor, blocks):
    """The same with nothing from keys that a row does not see, not even 0 * NaN."""
    return _run(part, q, factor, blocks, exact=True)


def _bounded_run(part, q, factor, blocks):
    """The same where all scores are small: softmax needs no shift, so none is made.

    That saves the maximum, the difference and the rescaling, a tenth of the time.
    """
    acc, term, ones = _accumulators(part, blocks)
    d = np.zeros((part.num_rows, 1), part.dtype)
    sums = np.empty_like(d)
    for start, stop in blocks:
        s = scores(part, q, factor, start, stop)
        p = np.exp(s, out=s)
        np.add(d, product(p, ones[: stop - start], sums), out=d)
        product_of_long_sums(p, part.values(start, stop), term)
        np.add(acc, term, out=acc)
    return np.where(d == 0, part.dtype.type(-np.inf), part.dtype.type(0)), d, acc


def scores(part, q, factor, start, stop):
    """Final scores of a block of keys."""
    s = part.scratch.array("s", (part.num_rows, stop - start), part.dtype)
    multiply_transposed(q, part.keys(start, stop), s)
    if factor != 1:
        np.multiply(s, factor, out=s)
    part.finish(s, start, stop)
    return s


def _accumulators(part, blocks):
    """The sum of p @ v so far, a term of it, and ones that sum a row by BLAS."""
    shape = (part.num_rows, part.problem.head_dim_v)
    acc = part.scratch.array("acc", shape, part.dtype)
    acc[...] = 0
    term = part.scratch.array("term", shape, part.dtype)
    most = max((stop - start for start, stop in blocks), default=0)
    # A matrix product with ones is the fastest sum over rows: a third of np.sum.
    return acc, term, np.ones((most, 1), part.dtype)


# --- how large a score can be --------------------------------------------------------


def _score_limits(problem, operands):
    """Largest norm of a key and largest value of each head of k and v, or None.

    None where scores have no bound, or where the look costs more than it saves.
    """
    if not may_be_bounded(problem):
        return None
    shape = (*problem.batch, problem.num_kv_heads)
    norms, sizes = np.zeros(shape), np.zeros(shape)

    def look(index, scratch):
        k, v = operands.k[index], operands.v[index]
        for start in range(0, problem.seqlen_k, _LOOK_KEYS):
            rows = slice(start, start + _LOOK_KEYS)
            norm = _largest_norm(k[rows], scratch)
            size = np.maximum(np.max(v[rows]), -np.min(v[rows])).astype(np.float64)
            norms[index] = np.maximum(norms[index], norm)  # NaN wins
            sizes[index] = np.maximum(sizes[index], size)

    threads.for_each(look, np.ndindex(shape), threads.num_cores())
    return norms, sizes


def may_be_bounded(problem):
    """Whether it is worth while to ask how large the scores can be."""
    unbounded = problem.bias or problem.alibi_slopes or problem.score
    return not unbounded and problem.seqlen_q >= _WORTH_A_BOUND


def _largest_norm(rows, scratch):
    """Largest Euclidean norm of the rows; inf where a square overflows."""
    dtype = np.result_type(rows.dtype, np.float32)
    squares = scratch.array("squares", rows.shape, dtype)
    np.multiply(rows, rows, out=squares, dtype=dtype)
    return np.sqrt(np.max(np.add.reduce(squares, axis=1)), dtype=np.float64)


def _is_bounded(part, key_norms, value_sizes):
    """Whether exp of all scores of a task can be summed as they are."""
    head = (*part.batch, part.kv_head)
    # Cauchy-Schwarz; the softcap is a bound of its own.
    norm = _largest_norm(part.q, part.scratch)
    score = abs(part.problem.scale) * norm * key_norms[head]
    if part.problem.softcap:
        score = np.minimum(score, part.problem.softcap)
    size = value_sizes[head]
    limit = _SAFE_SCORE[part.dtype.name]
    return (
        score <= limit
        and (part.sink <= limit)
        and (
            size == 0 or _SMALLEST_VALUE <= size <= _LARGEST_SUM / part.problem.seqlen_k
        )
    )
