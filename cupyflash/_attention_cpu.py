"""Attention on NumPy arrays: naive and safe with all scores, online, and tiled.

A task is some rows of one query head. Its scores are a matrix (rows, keys) of float32,
or of float64 for float64 inputs. A row is stored the same whatever the other heads and
batch entries hold, since no task sees more than one.
"""

import math
from dataclasses import dataclass

import numpy as np

from cupyflash import _threads
from cupyflash._attention_problem import MergeProblem

# Rows of a task: many, since each packs the keys for BLAS anew, but every head shall
# have tasks for all cores.
_MIN_ROWS, _MAX_ROWS = 128, 1024
# Keys of a block. The scores (1024 x 256 in float32 is 1 MiB) stay near the core while
# they become probabilities; a row maximum is quicker over longer rows.
_BLOCK_KEYS = 512
_BLOCK_KEYS_BOUNDED = 256
# Rows that `online` updates at a time, one key after another, and keys of a run.
_ONLINE_ROWS = 1024
_ONLINE_RUN = 64
# Multiply-adds below which a thread costs more than it saves.
_WORTH_A_THREAD = 1_000_000
# Rows below which a look at all keys, for their largest norm, is not worth it.
_WORTH_A_BOUND = 128
# exp(s) needs no maximum while |s| is below this: its sums with values up to
# _LARGEST_SUM / seqlen_k stay far from the ends of the exponent range.
_SAFE_SCORE = {"float32": 40.0, "float64": 300.0}
_LARGEST_SUM = 1e20
_SMALLEST_VALUE = 1e-15


def run(problem, operands):
    """Compute attention on the host: (out, lse)."""
    out = operands.given_out
    if out is None:
        out = np.empty(problem.out_shape, operands.q.dtype)
    lse = np.empty(problem.lse_shape, problem.compute_dtype)
    if lse.size:
        heads_out = operands.out
        if heads_out is None:
            heads_out = _heads_first(problem, out)
        heads_lse = lse if problem.heads_axis else lse[None]
        _METHODS.get(problem.method, _tiled)(problem, operands, heads_out, heads_lse)
    return out, lse


def describe(problem, operands):
    """What would run; nothing does."""
    if isinstance(problem, MergeProblem):
        return {"kernel": "array operations of NumPy", "parts": problem.num_parts}
    name = "tiled" if problem.method == "auto" else problem.method
    rows = {"tiled": _tiled_rows(problem), "online": _ONLINE_ROWS}.get(name)
    told = {
        "kernel": name,
        "rows_of_a_task": min(problem.seqlen_q, rows or problem.seqlen_q),
        "threads": _threads.with_blas(_num_threads(problem)),
    }
    if name == "tiled":
        bounded = _may_be_bounded(problem)
        told["keys_of_a_block"] = _BLOCK_KEYS
        told["keys_of_a_block_if_scores_are_small"] = bounded and _BLOCK_KEYS_BOUNDED
    return told


def _heads_first(problem, out):
    """A view of `out` as (..., heads, seqlen, dim)."""
    if not problem.heads_axis:
        return out[None]
    return out if problem.layout == "bhsd" else out.swapaxes(-3, -2)


# --- tasks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """Rows [start, stop) of one query head."""

    batch: tuple[int, ...]
    head: int
    start: int
    stop: int


def _run_tasks(problem, operands, out, lse, rows, compute):
    """Cut the queries into tasks of `rows` rows; store what `compute(part)` returns.

    That is (values, log of the sums, rows that see no key).
    """
    tasks = [
        _Task(batch, head, start, min(start + rows, problem.seqlen_q))
        for batch in np.ndindex(problem.batch)
        for head in range(problem.num_heads)
        for start in range(0, problem.seqlen_q, rows)
    ]

    def one_task(task, scratch):
        part = _Part(problem, operands, task, scratch)
        result = compute(part) if part.num_rows else None
        _store(part, out[task.batch][task.head], lse[task.batch][task.head], result)

    _threads.for_each_with_blas(one_task, tasks, _num_threads(problem))


def _num_threads(problem):
    work = problem.seqlen_q * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    work *= problem.num_heads * math.prod(problem.batch)
    return max(1, min(_threads.num_cores(), work // _WORTH_A_THREAD))


def _store(part, out, lse, result):
    """Write the rows of a task; a row that sees no key gives 0 and the sink."""
    if result is not None:
        values, log_sums, blind = result
        if blind.any():
            np.copyto(values, 0, where=blind)
            log_sums = np.where(blind, part.sink, log_sums)
        rows = slice(part.start, part.stop)
        np.copyto(out[rows], values, casting="unsafe")
        lse[rows] = log_sums[:, 0]
    padding = slice(part.stop, part.padded_stop)
    out[padding] = 0
    lse[padding] = -np.inf


class _Part:
    """The operands as one task sees them, and how its scores become final."""

    def __init__(self, problem, operands, task, scratch):
        self.problem, self.scratch = problem, scratch
        self.dtype = np.dtype(problem.compute_dtype)
        batch, head = task.batch, task.head
        self.kv_head = head // problem.group_size
        self.offset = _offset(problem, operands, batch)
        self.length_k = _length(operands.key_lengths, batch, problem.seqlen_k)
        length_q = _length(operands.query_lengths, batch, problem.seqlen_q)
        self.start, self.padded_stop = task.start, task.stop
        self.stop = max(task.start, min(task.stop, length_q))
        rows = slice(self.start, self.stop)
        self.batch, self.head = batch, head
        self.q = operands.q[batch][head][rows]
        self.k = operands.k[batch][self.kv_head]
        self.v = operands.v[batch][self.kv_head]
        self._bias = None if operands.bias is None else operands.bias[batch][head][rows]
        self._mask = None if operands.mask is None else operands.mask[batch][head][rows]
        self._slope = None
        if operands.alibi_slopes is not None:
            self._slope = operands.alibi_slopes[batch][head].astype(self.dtype)
        self.sink = self.dtype.type(-np.inf)
        if operands.sinks is not None:
            self.sink = operands.sinks[head].astype(self.dtype)

    @property
    def num_rows(self):
        """Rows that are no padding."""
        return self.stop - self.start

    def queries(self):
        """(q, factor of the scores).

        A power of two goes into q, where it costs nothing and rounds nothing; another
        scale would round every entry of q once more.
        """
        q = self.scratch.array("q", self.q.shape, self.dtype)
        np.copyto(q, self.q, casting="unsafe")
        factor = self.dtype.type(self.problem.scale)
        if abs(np.frexp(factor)[0]) == 0.5:
            np.multiply(q, factor, out=q)
            factor = self.dtype.type(1)
        return q, factor

    def keys(self, start, stop):
        """Rows of k in the compute dtype."""
        return self._load("k", self.k[start:stop])

    def values(self, start, stop):
        """Rows of v in the compute dtype."""
        return self._load("v", self.v[start:stop])

    def _load(self, name, part):
        if part.dtype == self.dtype and _blas_reads(part):
            return part
        buffer = self.scratch.array(name, part.shape, self.dtype)
        np.copyto(buffer, part, casting="unsafe")
        return buffer

    def visible_keys(self):
        """Keys that at least one row may see, as (start, stop)."""
        left, right = self.problem.left, self.problem.right
        first, last = self.start + self.offset, self.stop - 1 + self.offset
        start = 0 if left is None else max(0, first - left)
        stop = self.length_k if right is None else min(self.length_k, last + right + 1)
        return start, max(start, stop)

    def key_blocks(self, size):
        """The visible keys in blocks, as (start, stop)."""
        first, last = self.visible_keys()
        for start in range(first, last, size):
            yield start, min(start + size, last)

    # The way from s = scale * q.k of keys [start, stop) to final scores, in place.
    # `rounded` is called after every step.

    def finish(self, s, start, stop, rounded=lambda s: None):
        """Softcap, bias, alibi, masks."""
        if cap := self.dtype.type(self.problem.softcap):
            np.divide(s, cap, out=s)
            rounded(s)
            np.tanh(s, out=s)
            rounded(s)
            np.multiply(s, cap, out=s)
            rounded(s)
        if self._bias is not None:
            np.add(s, self._bias[:, start:stop], out=s, casting="unsafe")
            rounded(s)
        if self._slope is not None:
            distance = np.abs(self._diagonals(start, stop)).astype(self.dtype)
            np.subtract(s, self._spread(self._slope * distance, stop - start), out=s)
            rounded(s)
        self._hide(s, start, stop)

    def _hide(self, s, start, stop):
        """Put -inf where a row does not see a key."""
        left, right = self.problem.left, self.problem.right
        first, last = self.start + self.offset, self.stop - 1 + self.offset
        too_early = left is not None and start < last - left
        too_late = right is not None and stop - 1 > first + right
        if too_early or too_late:
            distance = self._diagonals(start, stop)
            hidden = np.zeros(distance.shape, bool)
            if too_early:
                hidden |= distance > left
            if too_late:
                hidden |= distance < -right
            np.copyto(s, -np.inf, where=self._spread(hidden, stop - start))
        if stop > self.length_k:
            s[:, max(0, self.length_k - start) :] = -np.inf
        if self._mask is not None:
            mask = self._mask[:, start:stop]
            hidden = self.scratch.array("hidden", mask.shape, np.bool_)
            np.copyto(s, -np.inf, where=np.logical_not(mask, out=hidden))

    def _diagonals(self, start, stop):
        """i + offset - j for each diagonal of a block, from its upper right corner."""
        lowest = self.start + self.offset - (stop - 1)
        return np.arange(lowest, lowest + self.num_rows + stop - start - 1)

    def _spread(self, values, num_keys):
        """One value a diagonal as a view (rows, keys)."""
        step = values.strides[0]
        return np.lib.stride_tricks.as_strided(
            values[num_keys - 1 :], (self.num_rows, num_keys), (step, -step)
        )


def _blas_reads(x):
    """Whether BLAS takes the matrix `x` as it lies in memory."""
    return x.strides[1] == x.itemsize and x.strides[0] >= x.itemsize * x.shape[1]


def _length(lengths, batch, size):
    """One entry of `lengths` as an int in [0, size]."""
    return size if lengths is None else max(0, min(int(lengths[batch]), size))


def _offset(problem, operands, batch):
    if problem.query_offset == "array":
        return int(operands.query_offsets[batch])
    if problem.query_offset == "lengths":
        return _length(operands.key_lengths, batch, problem.seqlen_k) - _length(
            operands.query_lengths, batch, problem.seqlen_q
        )
    return problem.query_offset


def _times_values(p, seen, v):
    """p @ v, where a key that a row does not see adds nothing, not even 0 * NaN."""
    finite = np.isfinite(v)
    odd_keys = np.flatnonzero(~finite.all(axis=1))
    if odd_keys.size == 0:
        return p @ v
    out = p @ np.where(finite, v, v.dtype.type(0))
    for j in odd_keys:
        odd = ~finite[j]
        out[:, odd] += np.where(seen[:, j, None], p[:, j, None] * v[j, odd], 0)
    return out


# --- naive and safe: S and P in memory -----------------------------------------------


def _naive(problem, operands, out, lse):
    """exp(s) / sum exp(s), every step rounded to the dtype of the inputs."""
    _materialized(problem, operands, out, lse, _naive_softmax, operands.q.dtype)


def _safe(problem, operands, out, lse):
    """exp(s - max s) / sum exp(s - max s)."""
    dtype = np.dtype(problem.compute_dtype)
    _materialized(problem, operands, out, lse, _safe_softmax, dtype)


def _materialized(problem, operands, out, lse, softmax, dtype):
    """Scores S of all heads, their softmax P, and P @ v, each kept whole."""
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    all_s, all_p = np.empty(shape, dtype), np.empty(shape, dtype)

    def rounded(x):
        if x.dtype != dtype:
            np.copyto(x, x.astype(dtype))

    def compute(part):
        q, k, v = (x.astype(part.dtype) for x in (part.q, part.k, part.v))
        s = q @ k.T
        rounded(s)
        np.multiply(s, part.dtype.type(problem.scale), out=s)
        rounded(s)
        part.finish(s, 0, problem.seqlen_k, rounded)
        seen = s != -np.inf
        p, log_sums = softmax(s, part.sink, rounded)
        rows = slice(part.start, part.stop)
        all_s[part.batch][part.head][rows] = s
        all_p[part.batch][part.head][rows] = p
        blind = ~seen.any(axis=1, keepdims=True)
        return _times_values(p, seen, v), log_sums, blind

    _run_tasks(problem, operands, out, lse, problem.seqlen_q, compute)


def _naive_softmax(s, sink, rounded):
    """(P, log of the sums) with no maximum subtracted: overflows, on purpose."""
    p = np.exp(s)
    rounded(p)
    total = np.sum(p, axis=1, keepdims=True) + np.exp(sink)
    rounded(total)
    np.divide(p, total, out=p)
    rounded(p)
    np.copyto(p, 0, where=s == -np.inf)
    return p, np.log(total)


def _safe_softmax(s, sink, rounded):
    """(P, log of the sums), shifted by the maximum of each row."""
    m = _finite_base(
        np.maximum(np.max(s, axis=1, keepdims=True, initial=-np.inf), sink)
    )
    p = np.exp(s - m)
    total = np.sum(p, axis=1, keepdims=True) + np.exp(sink - m)
    np.divide(p, total, out=p)
    np.copyto(p, 0, where=s == -np.inf)
    return p, m + np.log(total)


def _finite_base(m):
    """The maximum to subtract: 0 as long as all scores are -inf."""
    return np.where(m == -np.inf, m.dtype.type(0), m)


# --- online: one pass over the keys, one at a time -----------------------------------


def _online(problem, operands, out, lse):
    """The one-pass recurrence, for all rows of a task together; see `_absorb`.

    Every key rounds o, so that the error grows with the root of their number. Runs of
    keys with a state of their own, absorbed like a key each, keep the root small.
    """

    def compute(part):
        q, factor = part.queries()
        shape = (part.num_rows, problem.head_dim_v)
        m, d, blind = _first_state(part)
        o, term = np.zeros(shape, d.dtype), np.empty(shape, d.dtype)
        first, last = part.visible_keys()
        for start in range(first, last, _ONLINE_RUN):
            m_run, d_run, o_run = (
                np.full_like(m, -np.inf),
                np.zeros_like(d),
                np.zeros_like(o),
            )
            for j in range(start, min(start + _ONLINE_RUN, last)):
                k_j, v_j = part.keys(j, j + 1), part.values(j, j + 1)
                s = (q @ k_j.T) * factor
                part.finish(s, j, j + 1)
                seen = s != -np.inf
                if not np.isfinite(v_j).all():
                    v_j = np.where(seen, v_j, v_j.dtype.type(0))
                m_run, d_run = _absorb(m_run, d_run, o_run, s, 1, v_j, term)
                blind &= ~seen
            m, d = _absorb(m, d, o, m_run, d_run, o_run, term)
        return o, m + np.log(d), blind

    _run_tasks(problem, operands, out, lse, _ONLINE_ROWS, compute)


def _absorb(m, d, o, m_j, d_j, v_j, term):
    """Take a key of score m_j and value v_j (d_j = 1) into the state (m, d, o).

    m' = max(m, m_j),  d' = d e^(m - m') + d_j e^(m_j - m'),
    o' = o d e^(m - m') / d' + v_j d_j e^(m_j - m') / d'

    Returns m' and d'; o changes in place.
    """
    m_new = np.maximum(m, m_j)
    base = _finite_base(m_new)
    kept, added = d * np.exp(m - base), d_j * np.exp(m_j - base)
    d_new = kept + added
    unit = np.where(d_new == 0, d_new.dtype.type(1), d_new)
    np.multiply(o, kept / unit, out=o)
    np.add(o, np.multiply(v_j, added / unit, out=term), out=o)
    return m_new, d_new


def _first_state(part):
    """Running maximum, sum, and "no key seen yet"; a sink counts as a first key."""
    shape = (part.num_rows, 1)
    m = np.full(shape, part.sink, part.dtype)
    d = np.full(shape, part.sink != -np.inf, part.dtype)
    return m, d, np.ones(shape, bool)


# --- tiled: FlashAttention-2 ---------------------------------------------------------


def _tiled(problem, operands, out, lse):
    """Rows outside, blocks of keys inside; a block of scores is all there ever is."""
    limits = _score_limits(problem, operands)

    def compute(part):
        bounded = limits is not None and _is_bounded(part, *limits)
        walk = _walk_bounded if bounded else _walk
        result = walk(part)
        if np.isfinite(result[0]).all():
            return result
        # Either a row is NaN by right, or 0 * NaN came from a key that it does not see.
        return _walk(part, exact=True)

    _run_tasks(problem, operands, out, lse, _tiled_rows(problem), compute)


def _tiled_rows(problem):
    """Rows of a task, whatever the number of heads."""
    rows = -(-problem.seqlen_q // (2 * _threads.num_cores()))
    return min(max(rows, _MIN_ROWS), _MAX_ROWS)


def _walk(part, exact=False):
    """(values, log of the sums, rows that saw no key), by the running maximum."""
    q, factor = part.queries()
    m, d, blind = _first_state(part)
    acc, term, ones = _accumulators(part)
    for start, stop in part.key_blocks(_BLOCK_KEYS):
        s = _scores(part, q, factor, start, stop)
        seen = s != -np.inf if exact else None
        top = np.max(s, axis=1, keepdims=True)
        blind &= top == -np.inf
        m_new = np.maximum(m, top)
        base = _finite_base(m_new)
        p = np.exp(np.subtract(s, base, out=s), out=s)
        rescale = np.exp(m - base)
        d = d * rescale + p @ ones[: stop - start]
        v = part.values(start, stop)
        if exact:
            term = _times_values(p, seen, v)
        else:
            np.matmul(p, v, out=term)
        np.multiply(acc, rescale, out=acc)
        np.add(acc, term, out=acc)
        m = m_new
    np.divide(acc, np.where(d == 0, d.dtype.type(1), d), out=acc)
    return acc, m + np.log(d), blind


def _walk_bounded(part):
    """The same where all scores are small: softmax needs no shift, so none is made.

    That saves the maximum, the difference and the rescaling, a tenth of the time.
    """
    q, factor = part.queries()
    acc, term, ones = _accumulators(part)
    d = np.zeros((part.num_rows, 1), part.dtype)
    sums = np.empty_like(d)
    for start, stop in part.key_blocks(_BLOCK_KEYS_BOUNDED):
        s = _scores(part, q, factor, start, stop)
        p = np.exp(s, out=s)
        np.add(d, np.matmul(p, ones[: stop - start], out=sums), out=d)
        np.add(acc, np.matmul(p, part.values(start, stop), out=term), out=acc)
    blind = d == 0
    np.add(d, np.exp(part.sink), out=d)
    np.divide(acc, np.where(d == 0, d.dtype.type(1), d), out=acc)
    return acc, np.log(d), blind


def _scores(part, q, factor, start, stop):
    """Final scores of a block of keys."""
    s = part.scratch.array("s", (part.num_rows, stop - start), part.dtype)
    np.matmul(q, part.keys(start, stop).T, out=s)
    if factor != 1:
        np.multiply(s, factor, out=s)
    part.finish(s, start, stop)
    return s


def _accumulators(part):
    """The sum of p @ v so far, a term of it, and ones that sum a row by BLAS."""
    shape = (part.num_rows, part.problem.head_dim_v)
    acc = part.scratch.array("acc", shape, part.dtype)
    acc[...] = 0
    term = part.scratch.array("term", shape, part.dtype)
    # A matrix product with ones is the fastest sum over rows: a third of np.sum.
    return acc, term, np.ones((_BLOCK_KEYS, 1), part.dtype)


# --- how large a score can be --------------------------------------------------------


def _score_limits(problem, operands):
    """Largest norm of a key and largest value of each head of k and v, or None.

    None where scores have no bound, or where the look costs more than it saves.
    """
    if not _may_be_bounded(problem):
        return None
    shape = (*problem.batch, problem.num_kv_heads)
    norms, sizes = np.zeros(shape), np.zeros(shape)

    def look(index, scratch):
        k, v = operands.k[index], operands.v[index]
        for start in range(0, problem.seqlen_k, _BLOCK_KEYS):
            rows = slice(start, start + _BLOCK_KEYS)
            norm, size = _largest_norm(k[rows], scratch), np.max(np.abs(v[rows]))
            norms[index] = np.maximum(norms[index], norm)  # NaN wins
            sizes[index] = np.maximum(sizes[index], size.astype(np.float64))

    _threads.for_each(look, np.ndindex(shape), _threads.num_cores())
    return norms, sizes


def _may_be_bounded(problem):
    """Whether it is worth while to ask how large the scores can be."""
    unbounded = problem.bias or problem.alibi_slopes
    return not unbounded and problem.seqlen_q >= _WORTH_A_BOUND


def _largest_norm(rows, scratch):
    """Largest Euclidean norm of the rows, as float64."""
    squares = scratch.array("squares", rows.shape, np.float64)
    np.copyto(squares, rows, casting="unsafe")
    np.multiply(squares, squares, out=squares)
    return np.sqrt(np.max(np.sum(squares, axis=1)))


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


_METHODS = {"naive": _naive, "safe": _safe, "online": _online}


# --- merge ---------------------------------------------------------------------------


def merge(problem, operands):
    """Combine partial results by their log-sums, one part after another."""
    double = "float64" in (problem.dtype, problem.lse_dtype)
    dtype = np.dtype("float64" if double else "float32")
    outs, lses = operands.outs, operands.lses
    out = operands.out
    if out is None:
        out = np.empty((*problem.shape, problem.head_dim_v), outs.dtype)
    with np.errstate(all="ignore"):
        m = np.max(lses.astype(dtype), axis=0, initial=-np.inf)
        base = np.where(m == -np.inf, dtype.type(0), m)
        total = np.zeros(problem.shape, dtype)
        for lse in lses:
            total += np.exp(lse - base)
        merged = np.zeros(out.shape, dtype)
        unit = np.where(total == 0, dtype.type(1), total)
        for part, lse in zip(outs, lses, strict=True):
            share = np.exp(lse - base) / unit
            empty = (lse == -np.inf)[..., None]
            merged += np.where(empty, 0, share[..., None] * part.astype(dtype))
        np.copyto(out, merged, casting="unsafe")
        lse = (base + np.log(total)).astype(problem.lse_dtype)
    return out, lse
