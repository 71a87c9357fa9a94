"""Checks of calls on NumPy arrays, which calls like an earlier one do not need."""

import numpy as np

from cupyflash._attention.problem import (
    AttentionOperands,
    check_lengths,
    heads_first,
)

_MOST = 1024
_ARRAY = frozenset((np.ndarray,))
_UNSIGNED = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (4, 8)}
_PLAIN = frozenset((type(None), bool, int, float, str))  # of equal ones the type counts


def remember(table, key, found):
    """Put what was found into a table, which stays small: it is cheap to find again."""
    if len(table) >= _MOST:
        table.clear()
    table[key] = found


def is_narrow(x, q):
    """Whether scores have all numbers of an array, so that no value is checked."""
    return x.dtype.itemsize <= max(4, q.dtype.itemsize)


def key_of(arrays, options):
    """All that the checks of a call depend on, or None if they look at more.

    Of arrays that is the shape and the dtype; `check_lengths_of` looks at lengths. The
    numbers of a float64 option may be too large for float32 scores.
    """
    if not _ARRAY.issuperset(map(type, arrays)):
        return None
    key = [x.shape for x in arrays] + [x.dtype for x in arrays]
    kinds = tuple(map(type, options))
    if not _PLAIN.issuperset(kinds):
        options = tuple(_option(x, arrays[0]) for x in options)
        if NotImplemented in options:
            return None
    return (*key, kinds, options)


def _option(x, q):
    """What the checks depend on of an option; NotImplemented if on more."""
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is tuple and _PLAIN.issuperset(map(type, x)):
        return *map(type, x), x
    if kind is not np.ndarray or x.dtype.kind == "O":
        return NotImplemented
    if x.dtype.kind == "f" and not is_narrow(x, q):
        return NotImplemented
    return x.shape, x.dtype


def is_free(out, arguments):
    """Whether results can go into `out`, with no look at single elements."""
    if type(out) is not np.ndarray:
        return False
    arrays = [x for x in arguments if type(x) is np.ndarray]
    overlaps = sum(np.may_share_memory(x, out) for x in arrays)  # one is `out` itself
    return out.flags.c_contiguous and out.flags.writeable and overlaps <= 1


def check_lengths_of(problem, query_lengths, key_lengths):
    """Refuse lengths beyond their axes; a number is in the key."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    if isinstance(query_lengths, np.ndarray) and _may_be_beyond(query_lengths, rows):
        check_lengths("query_lengths", query_lengths, "seqlen_q", rows)
    if isinstance(key_lengths, np.ndarray) and _may_be_beyond(key_lengths, keys):
        check_lengths("key_lengths", key_lengths, "seqlen_k", keys)


def _may_be_beyond(lengths, size):
    """Whether some may be above `size`, or below 0: that is large without a sign."""
    unsigned = _UNSIGNED.get(lengths.dtype)
    if unsigned is None or size >= 1 << 31:
        return True
    return np.count_nonzero(lengths.view(unsigned) > size) > 0


def operands_of(
    problem, q, k, v, bias=None, mask=None, sinks=None, alibi_slopes=None,
    query_offset=None, query_lengths=None, key_lengths=None,
):  # fmt: skip
    """Operands of a problem as the checks make them; lengths have been checked."""
    q, k, v = (heads_first(x, problem.layout) for x in (q, k, v))
    batch, heads = problem.batch, (problem.num_heads,)
    scores = (*batch, *heads, problem.seqlen_q, problem.seqlen_k)
    if problem.query_offset != "array":
        query_offset = None
    return AttentionOperands(
        *(_view(x, batch + x.shape[-3:]) for x in (q, k, v)),
        _view(bias, scores),
        _view(mask, scores),
        _view(sinks, heads),
        _view(alibi_slopes, batch + heads),
        _view(query_offset, batch),
        _view(query_lengths, batch),
        _view(key_lengths, batch),
    )


def _view(x, shape):
    """`x` over `shape`: an array, a number, or None."""
    if x is None:
        return None
    x = np.asarray(x)
    return x if x.shape == shape else np.broadcast_to(x, shape)
