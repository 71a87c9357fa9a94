"""Attention on NumPy arrays: naive and safe with scores in memory, online, merge."""

import math

import numpy as np

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.cpu import checked, entries, functions, grouped, tiled
from cupyflash._attention.cpu.block import (
    finite_base,
    first_state,
    num_threads,
    offset_of,
    run_tasks,
    times_values,
)
from cupyflash._attention.functions import bind
from cupyflash._attention.problem import MergeProblem, heads_first
from cupyflash._core import arrays
from cupyflash._core import threads as _threads

# Rows and scores of a task of naive and safe; Ctrl-C waits for each step of NumPy.
_UNFUSED_ROWS, _UNFUSED_SCORES = 256, 1 << 22
# Numbers of each part that are merged at a time, which stay near the core.
_MERGED = 1 << 16
# Rows that `online` updates at a time, one key after another, and keys of a run.
_ONLINE_ROWS = 1024
_ONLINE_RUN = 64


# What has been checked, by the shapes and options of the arguments: the problem, how to
# make the call at once if one thread makes it, what computes it, if that is known, and
# the problem with groups as rows, if there is one.
_checked: dict = {}
_UNKNOWN = None, None, None, None


def attention(*arguments):
    """attention() of NumPy arrays; one like a call before needs no checks.

    `arguments` are those of `problem.attention`; the last three may be left out.
    """
    (
        q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
        alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
        method, *of_functions,
    ) = arguments  # fmt: skip
    given, key = None, None
    if of_functions:
        score, score_arrays, mask_arrays = of_functions
        given, mask = bind(q, score, score_arrays, mask, mask_arrays)
    if (  # what most calls are takes no loop over all options
        type(q) is type(k) is type(v) is np.ndarray
        and (bias is None or (type(bias) is np.ndarray and checked.is_narrow(bias, q)))
        and (mask is None or type(mask) is np.ndarray)
        and (key_lengths is None or type(key_lengths) is np.ndarray)
        and query_offset is window is sinks is alibi_slopes is out is None
        and query_lengths is None
        and return_lse is False
        and (causal is False or causal is True)
        and (scale is None or type(scale) is float)
        and type(softcap) is float
    ):
        key = (
            q.shape, q.dtype, k.shape, k.dtype, v.shape, v.dtype,
            bias if bias is None else (bias.shape, bias.dtype),
            scale, causal, softcap, layout, precision, method,
        )  # fmt: skip
        if not (mask is key_lengths is None):
            hiding = (
                x if x is None else (x.shape, x.dtype) for x in (mask, key_lengths)
            )
            key += (tuple(hiding),)
        if given is not None:
            given, more = functions.without_options(given, softcap)
            key += more
    elif given is None and (out is None or checked.is_free(out, arguments)):
        key = checked.key_of((q, k, v), arguments[3:19])
    problem, direct, compute, joined = _checked.get(key, _UNKNOWN)
    if problem is not None:
        if not (query_lengths is key_lengths is None):
            checked.check_lengths_of(problem, query_lengths, key_lengths)
        if direct is not None:
            result = direct(
                q, k, v, out, bias, given, mask, sinks, alibi_slopes, query_lengths,
                key_lengths,
            )  # fmt: skip
            if result is not None:
                return result
        operands = checked.operands_of(
            problem, q, k, v, bias, mask, sinks, alibi_slopes, query_offset,
            query_lengths, key_lengths,
        )._replace(functions=given)  # fmt: skip
        if out is not None:
            operands = operands._replace(out=heads_first(out, layout), given_out=out)
        if joined is not None:
            return _run_joined(problem, joined, operands, compute)
        return run(problem, operands, compute, may_join=False)
    problem, operands = attention_problem.attention(*arguments)
    problem, operands = functions.as_options(problem, operands)
    if key is not None:
        joined = grouped.as_rows(problem)
        if joined is None:
            direct, compute = _short_ways(problem, q, k)
        else:
            shapes = grouped.join(q, joined, layout), heads_first(k, layout)
            direct, compute = _short_ways(joined, *shapes)
            direct = direct and grouped.Direct(problem, joined, direct)
        checked.remember(_checked, key, (problem, direct, compute, joined))
        if direct is not None:  # in the first call, too: it may round otherwise
            result = direct(
                q, k, v, out, bias, given, mask, sinks, alibi_slopes, query_lengths,
                key_lengths,
            )  # fmt: skip
            if result is not None:
                return result
    return run(problem, operands)


def _short_ways(problem, q, k):
    """(what makes a call like this one at once, what computes it), or None for each."""
    compute = entries.run_one_box if entries.is_one_box(problem) else None
    if (compute or entries.halves_of(problem)) and entries.Direct.takes(
        problem, q.shape, k.shape
    ):
        return entries.Direct(problem), compute
    return None, compute


def _run_joined(problem, joined, operands, compute=None):
    """`run` of a call whose groups go as rows."""
    rows, lse = run(
        joined, grouped.join_operands(problem, joined, operands), compute, False
    )
    rows = grouped.split(rows, problem, operands.given_out)
    return rows, lse.reshape(problem.lse_shape)


def run(problem, operands, compute=None, may_join=True):
    """Compute attention on the host: (out, lse); groups go as rows where they may."""
    problem, operands = functions.as_options(problem, operands)
    joined = grouped.as_rows(problem) if may_join else None
    if joined is not None:
        return _run_joined(problem, joined, operands, compute)
    out = operands.given_out
    if out is None:
        out = np.empty(problem.out_shape, arrays.to_dtype(problem.dtype))
    lse = np.empty(problem.lse_shape, problem.compute_dtype)
    if lse.size:
        heads_out = operands.out
        if heads_out is None:
            heads_out = heads_first(out, problem.layout)
        heads_lse = lse if problem.heads_axis else lse[None]
        (compute or _method(problem))(problem, operands, heads_out, heads_lse)
    return out, lse


def describe(problem, operands):
    """What would run; nothing does."""
    if isinstance(problem, MergeProblem):
        return {"kernel": "array operations of NumPy", "parts": problem.num_parts}
    asked = problem, operands
    problem, operands = functions.as_options(problem, operands)
    name = "tiled" if problem.method == "auto" else problem.method
    offset = offset_of(problem, operands)
    joined = grouped.as_rows(problem)
    of_groups = {}
    if joined is not None:
        heads = problem.num_heads // joined.num_heads
        problem, of_groups = joined, {"heads_of_a_product": heads}
    threads = _threads.with_blas(num_threads(problem))
    if _method(problem) is entries.run:
        size, rows = entries.shape_of_a_box(problem)
        if halves := entries.halves_of(problem):
            threads = 2
            if halves[0] == -2:
                rows = entries.cut_of(problem)
            else:
                size = -(-math.prod((*problem.batch, problem.num_heads)) // 2)
        return {
            "kernel": name,
            "entries_of_a_task": size,
            "rows_of_a_task": rows,
            "threads": threads,
            **of_groups,
            **functions.describe(*asked, offset, rows, problem.seqlen_k),
        }
    rows = {"tiled": tiled.rows_of_a_task(problem), "online": _ONLINE_ROWS}
    details = {
        "kernel": name,
        "rows_of_a_task": min(problem.seqlen_q, rows.get(name, _unfused_rows(problem))),
        "threads": threads,
        **of_groups,
    }
    details |= functions.describe(
        *asked, offset, details["rows_of_a_task"], tiled.keys_of_a_block(problem)
    )
    if name == "tiled":
        details["keys_of_a_block"] = tiled.keys_of_a_block(problem)
        if tiled.may_be_bounded(problem):
            keys = tiled.keys_of_a_block(problem, bounded=True)
            details["keys_of_a_block_if_scores_are_small"] = keys
    return details


# --- naive and safe: S and P in memory -----------------------------------------------


def _naive(problem, operands, out, lse):
    """exp(s) / sum exp(s), every step rounded to the dtype of the inputs."""
    _materialized(problem, operands, out, lse, _naive_softmax, operands.q.dtype)


def _safe(problem, operands, out, lse):
    """exp(s - max s) / sum exp(s - max s)."""
    dtype = np.dtype(problem.compute_dtype)
    _materialized(problem, operands, out, lse, _safe_softmax, dtype)


def _unfused_rows(problem):
    return max(1, min(_UNFUSED_ROWS, _UNFUSED_SCORES // max(problem.seqlen_k, 1)))


def _materialized(problem, operands, out, lse, softmax, dtype):
    """Scores S of all heads, their softmax P, and P @ v, each kept whole."""
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    all_s, all_p = np.empty(shape, dtype), np.empty(shape, dtype)

    def rounded(x):
        if x.dtype != dtype:
            np.copyto(x, x.astype(dtype))

    def compute(part):
        every = 0, problem.seqlen_k
        s = part.q.astype(part.dtype) @ part.keys(*every).T
        rounded(s)
        np.multiply(s, part.dtype.type(problem.scale), out=s)
        rounded(s)
        part.finish(s, *every, rounded)
        seen = s != -np.inf
        p, log_sums = softmax(s, part.sink, rounded)
        rows = slice(part.start, part.stop)
        all_s[part.batch][part.head][rows] = s
        all_p[part.batch][part.head][rows] = p
        blind = ~seen.any(axis=1, keepdims=True)
        return times_values(p, seen, part.values(*every)), log_sums, blind

    run_tasks(problem, operands, out, lse, _unfused_rows(problem), compute)


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
    m = finite_base(np.maximum(np.max(s, axis=1, keepdims=True, initial=-np.inf), sink))
    p = np.exp(s - m)
    total = np.sum(p, axis=1, keepdims=True) + np.exp(sink - m)
    np.divide(p, total, out=p)
    np.copyto(p, 0, where=s == -np.inf)
    return p, m + np.log(total)


# --- online: one pass over the keys, one at a time -----------------------------------


def _online(problem, operands, out, lse):
    """The one-pass recurrence, for all rows of a task together; see `_absorb`.

    Every key rounds o, so that the error grows with the root of their number. Runs of
    keys with a state of their own, absorbed like a key each, keep the root small; the
    state that absorbs them is float64.
    """

    def compute(part):
        q, factor = part.queries()
        shape = (part.num_rows, problem.head_dim_v)
        m, d, blind = first_state(part)
        o, term = np.zeros(shape), np.empty(shape)
        for start, stop in part.key_blocks(_ONLINE_RUN):
            # Who asks for a buffer hears of Ctrl-C.
            run_term = part.scratch.array("term", shape, part.dtype)
            m_run, d_run, o_run = (
                np.full(m.shape, -np.inf, part.dtype),
                np.zeros(d.shape, part.dtype),
                np.zeros(shape, part.dtype),
            )
            for j in range(start, stop):
                k_j, v_j = part.keys(j, j + 1), part.values(j, j + 1)
                s = (q @ k_j.T) * factor
                part.finish(s, j, j + 1)
                seen = s != -np.inf
                if not np.isfinite(v_j).all():
                    v_j = np.where(seen, v_j, v_j.dtype.type(0))
                m_run, d_run = _absorb(m_run, d_run, o_run, s, 1, v_j, run_term)
                blind &= ~seen
            m, d = _absorb(m, d, o, m_run, d_run, o_run, term)
        return o, m + np.log(d), blind

    run_tasks(problem, operands, out, lse, _ONLINE_ROWS, compute)


def _absorb(m, d, o, m_j, d_j, v_j, term):
    """Take a key of score m_j and value v_j (d_j = 1) into the state (m, d, o).

    m' = max(m, m_j),  d' = d e^(m - m') + d_j e^(m_j - m'),
    o' = o d e^(m - m') / d' + v_j d_j e^(m_j - m') / d'

    Returns m' and d'; o changes in place.
    """
    m_new = np.maximum(m, m_j)
    base = finite_base(m_new)
    kept, added = d * np.exp(m - base), d_j * np.exp(m_j - base)
    d_new = kept + added
    unit = np.where(d_new == 0, d_new.dtype.type(1), d_new)
    np.multiply(o, kept / unit, out=o)
    np.add(o, np.multiply(v_j, added / unit, out=term), out=o)
    return m_new, d_new


_METHODS = {"naive": _naive, "safe": _safe, "online": _online}


def _method(problem):
    """What computes a problem."""
    default = entries.run if entries.takes(problem) else tiled.run
    return _METHODS.get(problem.method, default)


# --- merge ---------------------------------------------------------------------------


def merge(problem, operands):
    """Combine partial results by their log-sums, one part after another."""
    out, lse = operands.out, np.empty(problem.shape, problem.lse_dtype)
    if out is None:
        shape = (*problem.shape, problem.head_dim_v)
        out = np.empty(shape, arrays.to_dtype(problem.dtype))

    def merge_rows(box, scratch):
        of_parts, here = (slice(None), *box), (*box, ...)  # an array, if 0-d, too
        _merge(operands.outs[of_parts], operands.lses[of_parts], out[here], lse[here])

    rows = max(1, _MERGED // max(problem.head_dim_v, 1))
    boxes = list(entries.boxes_of(problem.shape, rows))
    _threads.for_each(merge_rows, boxes, _threads.num_cores())
    return out, lse[()]


def _merge(outs, lses, out, lse):
    """Merge some rows, in float64 and with what each sum rounds away.

    Parts may be many, and all alike.
    """
    base = finite_base(np.max(lses, axis=0, initial=-np.inf).astype(np.float64))
    totals, sums = _ExactSum(lse.shape), _ExactSum(out.shape)
    # Parts of the size of the largest number are not to overflow their sum.
    scale = 0.5 ** len(lses).bit_length()
    for part, part_lse in zip(outs, lses, strict=True):
        weight = np.exp(part_lse - base)
        empty = (part_lse == -np.inf)[..., None]
        totals.add(weight)
        term = part.astype(np.float64) * (scale * weight)[..., None]
        sums.add(np.where(empty, 0, term))
    total = totals.rounded()
    unit = np.where(total == 0, 1, scale * total)
    np.copyto(out, sums.rounded() / unit[..., None], casting="unsafe")
    np.copyto(lse, base + np.log(total), casting="unsafe")


class _ExactSum:
    """Sums of many arrays, and what their roundings left over."""

    def __init__(self, shape):
        self._sum, self._rest = np.zeros(shape), np.zeros(shape)

    def add(self, x):
        total = self._sum + x
        shown = total - self._sum
        self._rest += (self._sum - (total - shown)) + (x - shown)
        self._sum = total

    def rounded(self):
        """The sums; of those that are not finite the rest says nothing."""
        rest = np.where(np.isfinite(self._sum), self._rest, 0)
        return self._sum + rest
