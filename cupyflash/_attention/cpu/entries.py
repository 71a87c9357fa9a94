"""Attention on NumPy arrays where an entry has few scores: many entries in one product.

An entry is one query head of one batch entry. A box is some entries, and some rows of
each, whose scores stay near the core, all keys at once. NumPy multiplies the matrices
of a box one by one, so that no entry depends on the others.
"""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np

from cupyflash._attention.cpu import pieces, tiled
from cupyflash._attention.cpu.block import (
    BLOCKS_OF_A_RUN,
    LONGEST_SUM,
    LONGEST_SUM_OF_A_VECTOR,
    LOWEST,
    MINUS_INFINITY,
    ONE,
    WORTH_A_THREAD,
    ZERO,
    Part,
    Task,
    as_blas_reads,
    blas_reads,
    cost_of_an_entry,
    num_threads,
    offset_of,
    on_two_threads,
    product,
    product_of_short_sums,
    scale_of,
    split_scale,
    times_values,
)
from cupyflash._attention.cpu.functions import TileFunctions, positions
from cupyflash._attention.cpu.pieces import (
    columns_of_a_piece,
    is_cut_alike,
    multiply_transposed,
)
from cupyflash._attention.problem import heads_first
from cupyflash._core import threads as _threads

# Bytes of the scores of a box, and numbers of q, k and v that it reads, or converts.
_BOX_BYTES = 1 << 20
_BOX_OPERANDS, _BOX_CONVERTED = 1 << 22, 1 << 20
# With more keys a box has too few rows for BLAS, and an entry goes by tiles.
_MOST_KEYS = 2048
# Rows that a part of an entry has at least.
_FEWEST_ROWS = 24
# Keys up to which scores lie side by side also where a bias or a mask, whose keys lie
# so, is read across.
_FEW_KEYS = 16
# Numbers of k and v beyond which a single row does so, too: Ctrl-C waits for each step.
_MOST_OF_A_ROW = 1 << 25
# The same where they are converted: more of them leave the cache before they count.
_MOST_CONVERTED = 1 << 22
# Boxes that a thread takes, if each is worth one, so that all end at one time.
_BOXES_OF_A_THREAD = 4
# Multiply-adds of an entry that BLAS does in the calling thread, whatever its setting:
# matrix times vector, and matrix times matrix; and those of a product of vectors, of
# float64 (the thresholds of OpenBLAS, which has none for float32 there).
_SMALL_FOR_BLAS = 4 * 115_200 - 1, 1 << 18
_SMALL_DOT = 10_000
# Scores of an entry up to which the time is that of beginning each step; they come from
# a product of one piece.
_FEW_SCORES = 1_200
# Cost of a single entry whose rows two threads share, and of some entries that they do.
WORTH_HALVES = 16_000_000, 28_000_000
# The cut is a multiple of the rows that tiles of BLAS have (4, 8, 12, 24), so that it
# rounds as without one.
_ROWS_OF_TILES = 24


def takes(problem):
    """Whether the entries of a problem are small, or few scores a row.

    One row, however long, is no longer than its keys.
    """
    rows, keys = problem.seqlen_q, problem.seqlen_k
    # Of more keys, tiles that a mask function hides are skipped.
    if problem.mask_function and keys > tiled.keys_of_a_block(problem, bounded=True):
        return False
    numbers = keys * (problem.head_dim + problem.head_dim_v)
    if numbers > _MOST_OF_A_ROW:
        return False
    if keys > _MOST_KEYS and numbers > _MOST_CONVERTED and tiled.converts(problem):
        return False
    few = rows * keys <= _scores_of_a_box(problem)
    return few or keys <= _MOST_KEYS or rows == 1


def _scores_of_a_box(problem):
    return _BOX_BYTES // np.dtype(problem.compute_dtype).itemsize


def shape_of_a_box(problem):
    """(entries, rows of each); the rows do not depend on how many entries there are."""
    keys, rows = max(problem.seqlen_k, 1), _rows_of_a_box(problem)
    read = (rows + keys) * (problem.head_dim + problem.head_dim_v)
    scores = _scores_of_a_box(problem)
    operands = _BOX_CONVERTED if tiled.converts(problem) else _BOX_OPERANDS
    most = max(1, min(scores // max(rows * keys, 1), operands // read))
    total = math.prod(problem.batch) * problem.num_heads
    threads = num_threads(problem)
    if threads > 1:
        work = total * cost_of_an_entry(problem) // threads
        boxes = max(1, min(work // WORTH_A_THREAD, _BOXES_OF_A_THREAD))
        most = min(most, -(-total // (boxes * threads)))
    return max(1, min(most, total)), rows


def has_whole_entries(problem):
    """Whether a box has all rows of an entry, and the heads of a group fit into one."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    return (
        takes(problem)
        and 0 < rows * keys * problem.group_size <= _scores_of_a_box(problem)
        and _rows_of_a_box(problem) == rows
    )


def _rows_of_a_box(problem):
    """As many as fit, in parts of one size."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    parts = -(-rows * keys // _scores_of_a_box(problem))
    threads = cost_of_an_entry(problem) // WORTH_A_THREAD
    if parts > 1 or threads > 1:  # an entry alone keeps all cores at work
        cores = min(_threads.num_cores(), max(threads, 1))
        parts = -(-max(parts, 1) // cores) * cores
        # BLAS packs all keys again for each part, which few rows are not worth.
        parts = min(parts, max(1, rows // _FEWEST_ROWS))
    return -(-rows // max(1, min(parts, rows)))


def _is_small_for_blas(problem):
    rows, keys = problem.seqlen_q, problem.seqlen_k
    narrow = min(rows, keys, problem.head_dim, problem.head_dim_v) == 1
    work = rows * keys * max(problem.head_dim, problem.head_dim_v)
    results = math.prod(problem.out_shape)
    return work <= _SMALL_FOR_BLAS[not narrow] and is_small_dot(problem, results)


def is_small_dot(problem, size):
    """Whether `is_finite` of `size` results needs no thread of BLAS."""
    return problem.compute_dtype == "float32" or size <= _SMALL_DOT


def is_one_box(problem):
    """Whether a problem is one box, which the calling thread computes."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    entries = math.prod(problem.batch) * problem.num_heads
    return (
        takes(problem)
        and problem.method in ("auto", "tiled")
        and 0 < entries * rows * keys <= _scores_of_a_box(problem)
        and _rows_of_a_box(problem) == rows
        and (entries == 1 or num_threads(problem) == 1)
    )


def run_one_box(problem, operands, out, lse):
    """Compute the only box."""
    entries = Entries(problem, operands, out, lse)
    box = tuple(slice(0, n) for n in (*entries.shape, problem.seqlen_q))
    run = _threads.silently if _is_small_for_blas(problem) else _threads.run_with_blas
    run(entries.compute, box, _threads.Scratch())


def run(problem, operands, out, lse):
    """Compute all boxes."""
    if is_one_box(problem):
        run_one_box(problem, operands, out, lse)
        return
    entries = Entries(problem, operands, out, lse)
    size, rows = shape_of_a_box(problem)
    boxes = [
        (*index, slice(start, min(start + rows, problem.seqlen_q)))
        for index in boxes_of(entries.shape, size)
        for start in range(0, problem.seqlen_q, rows)
    ]
    _threads.for_each_with_blas(entries.compute, boxes, num_threads(problem))


def cut_of(problem):
    """The row where an entry is cut for two threads if it is alone; 0 if it is not.

    A batch has one thread for each entry, and the bits of each are those of it alone.
    So the cut is between two tiles of BLAS. Where scores lie side by side, BLAS has
    other tiles of rows: then the product is made in two parts in a batch, too.
    """
    rows, size = problem.seqlen_q, _rows_of_a_box(problem)
    if size < rows:
        return size if rows <= 2 * size else 0
    if cost_of_an_entry(problem) < WORTH_HALVES[0]:
        return 0
    size = -(-rows // (2 * _ROWS_OF_TILES)) * _ROWS_OF_TILES
    if rows - size < _ROWS_OF_TILES and size > _ROWS_OF_TILES:
        size -= _ROWS_OF_TILES
    # A single row would go another way.
    return size if size < rows - 1 and is_cut_alike(problem, size) else 0


def _cut_if_alone(problem):
    """Where an entry alone is cut and one of many is not, or None."""
    cut, rows = cut_of(problem), problem.seqlen_q
    # A smaller box is cut already.
    if cut == 0 or cut == _rows_of_a_box(problem):
        return None
    return pieces.Cut(rows, min(cut, rows - cut))


def halves_of(problem):
    """(axis, two slices of it) of what two threads share; None where one takes all.

    The axis is one of q as heads first, counted from the last: the first of some
    entries, or that of the rows of a single one.
    """
    total = math.prod(problem.batch) * problem.num_heads
    scores = total * problem.seqlen_q * problem.seqlen_k
    if (
        total * cost_of_an_entry(problem) < WORTH_HALVES[total > 1]
        or scores > 2 * _scores_of_a_box(problem)
        or (total > 1 and _goes_by_boxes(problem, total))
    ):
        return None
    return cut_in_two(problem)


def _goes_by_boxes(problem, total):
    """Whether some entries are more than two boxes, or have no equal halves.

    Two boxes are as many entries as halves, but the call of a half begins sooner.
    """
    size, _ = shape_of_a_box(problem)
    first = next(n for n in (*problem.batch, problem.num_heads) if n > 1)
    return 2 * size < total or (num_threads(problem) > 1 and first % 2 == 1)


def cut_in_two(problem):
    """`halves_of` a problem that is worth two threads."""
    sizes, rows = (*problem.batch, problem.num_heads), problem.seqlen_q
    if not (
        takes(problem)
        and problem.method in ("auto", "tiled")
        and _threads.with_blas(_threads.num_cores()) > 1
    ):
        return None
    if math.prod(sizes) > 1:
        axis = next(axis for axis, size in enumerate(sizes) if size > 1)
        of_heads = axis == len(problem.batch)
        if (
            _rows_of_a_box(problem) != rows
            or problem.has_functions
            or (of_heads and (problem.group_size > 1 or problem.layout != "bhsd"))
        ):
            return None
        size, cut, axis = sizes[axis], sizes[axis] // 2, axis - len(sizes) - 2
    else:
        size, cut, axis = rows, cut_of(problem), -2
        has_bounds = problem.left is not None or problem.right is not None
        if (
            cut == 0
            or problem.layout != "bhsd"
            or problem.query_lengths
            or hides_by_lengths(problem)
            # Boxes of some rows skip the keys that these do not see.
            or (has_bounds and _rows_of_a_box(problem) != rows)
        ):
            return None
    return axis, (slice(0, cut), slice(cut, size))


def half_problem(problem, axis, part):
    """The problem of a part of an axis."""
    size = part.stop - part.start
    if axis == -2:
        offset = problem.query_offset
        if isinstance(offset, int):
            offset += part.start
        return replace(problem, seqlen_q=size, query_offset=offset)
    if axis == -3:
        return replace(problem, num_heads=size, num_kv_heads=size)
    at = len(problem.batch) + 3 + axis
    batch = (*problem.batch[:at], size, *problem.batch[at + 1 :])
    return replace(problem, batch=batch)


def half_of(x, axis, part):
    """A part of an axis of `x`, which may lack it, or have one element for all."""
    if axis >= 0 or np.ndim(x) < -axis or x.shape[axis] == 1:
        return x
    return x[(..., part, *(slice(None),) * (-axis - 1))]


def _lies_side_by_side(problem):
    """Whether a key has its scores of all rows in a line of memory.

    NumPy begins and ends a maximum or a sum for each row (some 50 ns), but takes those
    of many rows side by side as quickly as it adds: that pays off with more rows than
    keys. BLAS does not mind.
    """
    keys = problem.seqlen_k
    across = problem.bias or problem.mask
    return keys < _rows_of_a_box(problem) and (keys <= _FEW_KEYS or not across)


def _ones_of(problem):
    """What sums rows as a product, in a third of NumPy's time; None where NumPy does.

    It is as quick with one row, or with keys side by side, where BLAS would round
    halves otherwise.
    """
    if _rows_of_a_box(problem) <= 1 or _lies_side_by_side(problem):
        return None
    return np.ones((problem.seqlen_k, 1), problem.compute_dtype)


def _is_power_of_two(factor):
    return abs(math.frexp(factor)[0]) == 0.5


def _is_square(q, k):
    """Whether BLAS would take q k^T as a matrix times its own transpose.

    That has other roundings than the product of two.
    """
    return q.shape[-2] == k.shape[-2] and np.may_share_memory(q, k)


def _weigh(s, v, o, sink, hides, ones, by_two, cut):
    """(P v, maxima, sums, divisors) of the rows of s, which becomes exp(s - maximum).

    P v is in `o`, or new without it. `hides`: there can be rows that see no key. The
    divisors are None where s has become P itself. With a `cut`, these are all rows of
    an entry or those of one thread.
    """
    if s.shape[-1] == 1 and sink is None and not hides:  # 1, or NaN
        base = s.copy()
        d = np.exp(np.subtract(s, base, s), s)
        return product(d, v, o), base, d, None
    base = np.maximum.reduce(s, -1, None, None, True, *_first_of_maxima(s, hides))
    if sink is not None:
        base = np.maximum(base, sink)
    p = np.exp(np.subtract(s, base, s), s)
    d = np.add.reduce(p, -1, None, None, True) if ones is None else product(p, ones)
    if sink is not None:
        np.add(d, np.exp(sink - base), out=d)
    # A row that sees a key has a weight of 1.
    divisor = np.maximum(d, ONE[d.itemsize]) if hides else d
    few = p.shape[-1] < v.shape[-1]
    if few:
        np.divide(p, divisor, p)
    o = product(p, v, o, by_two, cut)
    if hides and p.shape[-1] == 1:  # 0 times a negative number, and nothing to add
        np.add(o, 0, out=o, where=p == 0)
    if few:
        return o, base, d, None
    return np.divide(o, divisor, o), base, d, divisor


def _times_values_of_matrices(problem, in_short_sums):
    """What multiplies P and v of a single entry with the bits of `product`."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    if rows == 1 and keys % LONGEST_SUM == 0:
        num_blocks = keys // LONGEST_SUM
        if LONGEST_SUM_OF_A_VECTOR < keys and num_blocks <= BLOCKS_OF_A_RUN:
            return functools.partial(_row_times_blocks, num_blocks)
    if in_short_sums and _needs_short_sums(problem):
        return product_of_short_sums
    longest = LONGEST_SUM if rows > 1 else LONGEST_SUM_OF_A_VECTOR
    return np.ndarray.dot if keys <= longest else product


def _needs_short_sums(problem):
    """Whether P v has sums of some keys alone, where it is no cut entry's."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    itemsize = np.dtype(problem.compute_dtype).itemsize
    return pieces.needs_short_sums(rows, keys, problem.head_dim_v, itemsize)


def _row_times_blocks(num_blocks, p, v):
    """One row times v, in sums over blocks of keys, which add up to a run."""
    p = p.reshape(num_blocks, 1, LONGEST_SUM)
    v = v.reshape(num_blocks, LONGEST_SUM, v.shape[-1])
    return np.add.reduce(np.matmul(p, v), 0)


def _first_of_maxima(s, hides):
    """What the maximum of a row begins with, as an argument or none.

    Of a row that sees no key it is the lowest number: its weights are 0 then, like
    those of any hidden key. Elsewhere it is what makes `row_maxima` quick, but where
    scores lie side by side, or are one.
    """
    if hides:
        return (LOWEST[s.itemsize],)
    if s.shape[-1] == 1 or s.strides[-1] != s.itemsize:
        return ()
    return (MINUS_INFINITY[s.itemsize],)


def _add_side_by_side(s, bias):
    """Add a bias to scores, in place, along the scores' order of memory.

    NumPy goes along that of the bias where the two differ, which takes four times as
    long: scores 4 KiB apart push each other out of the cache.
    """
    if bias.ndim > 1:
        s, bias = s.mT, bias.mT
    np.add(s, bias, out=s, casting="unsafe")


def uses_offset(problem):
    """Whether it matters where the queries are among the keys."""
    bounds = problem.left, problem.right, problem.alibi_slopes
    return problem.has_functions or bounds != (None, None, None)


def hides_by_lengths(problem):
    """Whether the lengths decide which keys are hidden, and nothing else."""
    others = problem.has_functions or problem.alibi_slopes
    return problem.query_offset == "lengths" and uses_offset(problem) and not others


def visible_keys(problem, offset, start, stop):
    """(first, last) of the keys that rows [start, stop) may see by their bounds."""
    first, last = 0, problem.seqlen_k
    if isinstance(offset, int):
        if problem.left is not None:
            first = min(max(0, start + offset - problem.left), last)
        if problem.right is not None:
            last = max(first, min(last, stop + offset + problem.right))
    return first, last


def is_finite(x):
    """Whether all of x is finite, and its squares are: they do not cancel."""
    flat = x.ravel()
    return math.isfinite(flat.dot(flat))


class Direct:
    """A call of one box, or of two halves, which needs no checks: one had them.

    One box is the calling thread's, the other half that of a second one. It does what
    `Entries.compute` does, for most options.
    """

    # How many of the last axes of q each argument of `_compute` lacks. Both halves take
    # all of those that have None, and halves of rows of those at the places `_KEYS`.
    _LACKS: tuple[int | None, ...] = (0, 0, 0, 0, 0, None, 0, 2, 2, 3, 3)
    _KEYS = 1, 2
    # Whether products by v, or by k, are those of `product` as it is by default.
    _IN_SHORT_SUMS = True

    @staticmethod
    def takes(problem, q_shape, k_shape):
        """Whether a call of one box, or of two halves, can be made this way."""
        return (
            problem.dtype == problem.compute_dtype
            # Else products may overflow though their scores are small.
            and (problem.scale == 0 or abs(problem.scale) >= 2.0**-16)
            and (
                isinstance(problem.query_offset, int)
                or not uses_offset(problem)
                or hides_by_lengths(problem)
            )
            # Entries.compute reads the keys alone that some row may see.
            and visible_keys(problem, problem.query_offset, 0, problem.seqlen_q)
            == (0, problem.seqlen_k)
            and (problem.heads_axis or not (problem.sinks or problem.alibi_slopes))
            # No batch axis of v alone.
            and np.broadcast_shapes(q_shape[:-3], k_shape[:-3]) == problem.batch
        )

    def __init__(self, problem, whole=None):
        self._cut_in_halves(
            None if whole else halves_of(problem),
            lambda *half: Direct(half_problem(problem, *half), problem),
        )
        self._by_two = whole is None and shares_products(problem)
        whole = whole or problem
        self._halves_keys = halves_keys(whole)
        self._cut = _cut_if_alone(whole)
        self._has_few_scores = problem.seqlen_q * problem.seqlen_k <= _FEW_SCORES
        self._ones = _ones_of(whole)
        self._factor = np.asarray(scale_of(problem))
        self._folds = (
            _is_power_of_two(self._factor) and problem.seqlen_k > problem.head_dim
        )
        self._may_be_square = problem.seqlen_q == problem.seqlen_k
        self._copies_q = problem.seqlen_k == 1 and problem.layout != "bhsd"
        self._side_by_side = _lies_side_by_side(whole)
        self._cuts = [slice(None)]
        if whole is problem:
            self._cuts = _cuts_of(problem, self._cut)
        self._layout = problem.layout
        self._out_shape, self._lse_shape = problem.out_shape, problem.lse_shape
        # The axes of the heads of k and v, and of the heads of a group; or one for all.
        self._groups = None
        heads = (problem.num_heads,)
        if problem.heads_axis and (problem.group_size > 1 or problem.layout != "bhsd"):
            self._groups = heads = problem.num_kv_heads, problem.group_size
        rows, keys = problem.seqlen_q, problem.seqlen_k
        self._bounds = problem.left, problem.right
        self._hides_by_lengths = hides_by_lengths(problem)
        is_known = uses_offset(problem) and not self._hides_by_lengths
        offset = problem.query_offset if is_known else 0
        self._rows, self._keys = np.arange(rows)[:, None], np.arange(keys)
        diagonal = self._rows + offset
        hidden = np.zeros((rows, keys), bool)
        if not self._hides_by_lengths:
            hidden |= self._is_outside(diagonal)
        self._may_hide = bool(
            problem.mask_function
            or problem.mask
            or problem.key_lengths
            or self._hides_by_lengths
        )
        blind = hidden.all(axis=1)
        self._blind_rows = None
        if blind.any() and (problem.return_lse or problem.sinks):
            self._may_hide = True
        elif blind.any():  # see all keys here, and become 0
            self._blind_rows = blind
            hidden[blind] = False
        self._hidden = None
        if hidden.any():
            order = "F" if self._side_by_side else "C"
            self._hidden = np.where(hidden, -np.inf, 0).astype(problem.dtype, order)
        self._is_small_for_blas = _is_small_for_blas(problem)
        self._dtype = np.dtype(problem.dtype)
        self._cap = self._dtype.type(problem.softcap)
        self._return_lse = problem.return_lse
        self._distance = None
        if problem.alibi_slopes:
            self._distance = np.abs(diagonal - self._keys).astype(self._dtype)
        # What makes lengths of batch entries stand beside their scores.
        of_scores = (None,) * (len(heads) + 2) if problem.heads_axis else ()
        self._of_batch = (..., *of_scores)
        self._places = None
        if problem.has_functions:
            b = _numbers(problem.batch)[(..., *(None,) * (len(heads) + 2))]
            h = _numbers(heads)[..., None, None]
            b, h = (x.item() if x.size == 1 else x for x in (b, h))
            self._places = positions(b, h, offset, rows, 0, keys)
        self._has_one_row = rows == 1
        self._matrices = None
        if whole is problem and self._goes_as_matrices(problem):
            dim, dim_v = problem.head_dim, problem.head_dim_v
            self._matrices = (rows, dim), (keys, dim), (keys, dim_v), (rows, dim_v)
        self._times_values = _times_values_of_matrices(problem, self._IN_SHORT_SUMS)
        self._first = _first_of_maxima(
            np.empty((rows, keys), problem.dtype, "F" if self._side_by_side else "C"),
            self._may_hide,
        )
        self._is_plain = whole is problem and self._goes_in_plain_steps(problem)
        self._times = product_of_short_sums if _needs_short_sums(problem) else np.matmul
        self._divides_weights = keys < problem.head_dim_v

    def _goes_as_matrices(self, problem):
        """Whether `_compute_matrices` takes the call."""
        rows, keys = problem.seqlen_q, problem.seqlen_k
        work = rows * keys * max(problem.head_dim, problem.head_dim_v)
        few = self._has_few_scores and work <= pieces.MOST and keys <= LONGEST_SUM
        return (
            math.prod(problem.batch) * problem.num_heads == 1
            and (rows == 1 or few)
            and not self._may_hide
            and self._has_usual_options(problem)
        )

    def _goes_in_plain_steps(self, problem):
        """Whether `_compute_plain` takes the call."""
        rows, keys = problem.seqlen_q, problem.seqlen_k
        return (
            (self._groups is None or problem.layout == "bhsd")
            and self._cut is None
            and rows * keys * problem.head_dim_v <= pieces.MOST
            and keys <= LONGEST_SUM
            and self._has_usual_options(problem)
        )

    def _has_usual_options(self, problem):
        """Whether no option but a bias, bounds, a mask and lengths of keys counts."""
        return (
            problem.seqlen_k > 1
            and not (self._halves or self._hides_by_lengths or problem.has_functions)
            and not (problem.softcap or problem.sinks or problem.alibi_slopes)
            and not problem.query_lengths
            and self._blind_rows is None
        )

    def _cut_in_halves(self, halves, direct_of):
        """Make what computes each half, if there are some."""
        self._axis, parts = halves or (0, ())
        self._halves = [(part, direct_of(self._axis, part)) for part in parts]
        self._axes = [0 if n is None else self._axis + n for n in self._LACKS]
        if self._axis == -2:  # halves of rows have all keys
            for number in self._KEYS:
                self._axes[number] = 0

    def __call__(self, q, k, v, out, *options):
        """(out, lse or None), or None where it takes the long way."""
        if not (q.flags.c_contiguous and k.flags.c_contiguous and v.flags.c_contiguous):
            q = np.ascontiguousarray(q)
            k, v = (as_blas_reads(x, self._layout) for x in (k, v))
        return self.of_views(q, k, v, out, *options)

    def of_views(self, q, k, v, out, *options):
        """The same of arrays whose matrices are known to lie as BLAS reads them."""
        if not self._halves:
            small = self._is_small_for_blas
            run = _threads.silently if small else _threads.run_with_blas
            if out is None and not self._return_lse:
                if self._matrices is not None:
                    return run(self._compute_matrices, q, k, v, options[0])
                if self._is_plain:
                    bias, _, mask, *_, key_lengths = options
                    return run(self._compute_plain, q, k, v, bias, mask, key_lengths)
            return run(self._compute, q, k, v, out, *options)
        if out is None:
            out = np.empty(self._out_shape, self._dtype)
        results = self._in_halves(Direct._compute, q, k, v, out, *options)
        if None in results or not self._return_lse:
            return None if None in results else (out, None)
        return out, np.concatenate([lse for _, lse in results], self._axis + 1)

    def _in_halves(self, compute, *arguments):
        """What a method gives of each half, by two threads."""
        results = [None, None]

        def one_half(number, scratch):
            part, direct = self._halves[number]
            of_half = map(half_of, arguments, self._axes, (part,) * len(arguments))
            results[number] = compute(direct, *of_half)

        _threads.for_each_with_blas(one_half, (0, 1), 2)
        return results

    def _compute(
        self, q, k, v, out, bias, functions, mask, sinks, slopes, query_lengths,
        key_lengths,
    ):  # fmt: skip
        values = out
        if self._groups is not None:
            if out is None:
                values = out = np.empty(self._out_shape, self._dtype)
            q, k, v, values = (self._heads(x) for x in (q, k, v, values))
            bias, mask = (self._split(x, -3) for x in (bias, mask))
            slopes, sinks = (self._split(x, -1) for x in (slopes, sinks))
        q, s = self._products(q, k)
        if self._cap:
            np.multiply(np.tanh(np.divide(s, self._cap, s), s), self._cap, s)
        if functions is not None:
            functions = TileFunctions(functions, self._places, self._dtype, _all_pairs)
            try:
                functions.change(s)
                functions.hide(s)
            except IndexError:  # perhaps of a pair that an option hides
                return None
        self._add_and_hide(s, bias, mask, slopes, query_lengths, key_lengths)
        if sinks is not None:
            sinks = self._sinks(sinks)
        o, base, d, _ = _weigh(
            s, v, values, sinks, self._may_hide, self._ones, self._by_two,
            self._cut,
        )  # fmt: skip
        if out is None:
            out = o
        if self._blind_rows is not None:
            o[..., self._blind_rows, :] = 0
        # What overflows takes the long way, too, as do rows that see no key by their
        # bias: they are NaN.
        if not is_finite(out):
            return None
        padding = None
        if query_lengths is not None:
            padding = self._padding(query_lengths)
            np.copyto(o, 0, where=padding)
        if not self._return_lse:
            return out, None
        np.add(base, np.log(d, dtype=np.float64), out=d, casting="unsafe")
        if padding is not None:
            np.copyto(d, -np.inf, where=padding)
        return out, d.reshape(self._lse_shape)

    def _compute_plain(self, q, k, v, bias, mask, key_lengths):
        """`_compute` of the usual options, in products that `product` leaves whole.

        What is between the steps takes a tenth of a call of some microseconds.
        """
        if self._groups is not None:
            q, k, v = (self._split(x, -3) for x in (q, k, v))
            bias, mask = (self._split(x, -3) for x in (bias, mask))
        _, s = self._products(q, k)
        self._add_and_hide(s, bias, mask, None, None, key_lengths)
        base = np.maximum.reduce(s, -1, None, None, True, *self._first)
        p = np.exp(np.subtract(s, base, s), s)
        if self._ones is None:
            d = np.add.reduce(p, -1, None, None, True)
        else:
            d = np.matmul(p, self._ones)
        if self._may_hide:
            np.maximum(d, ONE[d.itemsize], out=d)
        if self._divides_weights:
            out = self._times(np.divide(p, d, p), v)
        else:
            out = self._times(p, v)
            np.divide(out, d, out)
        if not is_finite(out):
            return None
        return out if self._groups is None else out.reshape(self._out_shape), None

    def _compute_matrices(self, q, k, v, bias):
        """`_compute` of a single entry with few scores, in steps that begin sooner.

        ndarray.dot has the bits of np.matmul. What NumPy spreads over a single row is
        an array without axes.
        """
        of_q, of_k, of_v, _ = self._matrices
        _, s = self._scores_of_matrices(q.reshape(of_q), k.reshape(of_k), bias)
        base = np.maximum.reduce(s, -1, None, None, True, *self._first)
        if self._has_one_row:
            base = base.reshape(())
        p = np.exp(np.subtract(s, base, s), s)
        d = self._sums_of_matrices(p)
        v = v.reshape(of_v)
        if of_v[0] < of_v[1]:
            out = self._times_values(np.divide(p, d, p), v)
        else:
            out = self._times_values(p, v)
            np.divide(out, d, out)
        return (out.reshape(self._out_shape), None) if is_finite(out) else None

    def _scores_of_matrices(self, q, k, bias):
        """(q as it is multiplied, scores)."""
        if self._folds:
            q = np.multiply(q, self._factor)
        elif self._may_be_square and np.may_share_memory(q, k):
            q = q.copy()
        s = self._product_of_matrices(q, k)
        if not self._folds:
            np.multiply(s, self._factor, s)
        if self._side_by_side and bias is not None:
            _add_side_by_side(s, _matrix(bias))
        elif bias is not None:
            np.add(s, _matrix(bias), s)
        if self._hidden is not None:
            np.add(s, self._hidden, s)
        return q, s

    def _product_of_matrices(self, a, b):
        """a b^T, one number a score."""
        return b.dot(a.T).T if self._side_by_side else a.dot(b.T)

    def _sums_of_matrices(self, p):
        """The sums of rows."""
        if self._ones is not None:
            return p.dot(self._ones)
        sums = np.add.reduce(p, -1, None, None, True)
        return sums.reshape(()) if self._has_one_row else sums

    def _products(self, q, k):
        """(q as it is multiplied, scale * q k^T)."""
        if self._folds:
            q = np.multiply(q, self._factor)
        elif self._copies_q or (self._may_be_square and np.may_share_memory(q, k)):
            q = q.copy()
        s = self._product(q, k)
        if not self._folds:
            np.multiply(s, self._factor, s)
        return q, s

    def _product(self, a, b):
        """a b^T, one number a score."""
        if self._halves_keys:
            shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            s = np.empty((*shape, self._rows.size, self._keys.size), self._dtype)
            multiply_by_halves(a, b, s, self._cut, self._by_two)
            return s
        if self._has_few_scores:  # one piece
            return np.matmul(b, a.mT).mT if self._side_by_side else np.matmul(a, b.mT)
        if not self._side_by_side:
            return multiply_transposed(a, b, None, self._cut)
        if len(self._cuts) == 1:
            return multiply_transposed(b, a).mT
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), self._keys.size)
        s = np.empty((*shape, self._rows.size), self._dtype)
        for rows in self._cuts:
            multiply_transposed(b, a[..., rows, :], s[..., rows])
        return s.mT

    def _padding(self, query_lengths):
        """Which rows are beyond their lengths, beside the scores."""
        return self._rows >= np.asarray(query_lengths)[self._of_batch]

    def _is_outside(self, diagonal):
        """Which keys are beyond the bounds around the diagonal of each row."""
        left, right = self._bounds
        outside = np.zeros((1, 1), bool)
        if left is not None:
            outside = self._keys < diagonal - left
        if right is not None:
            outside = outside | (self._keys > diagonal + right)
        return outside

    def _add_and_hide(self, s, bias, mask, slopes, query_lengths, key_lengths):
        """Bias, alibi and masks, in place."""
        if bias is not None:
            self._add_bias(s, bias)
        if slopes is not None:
            slopes = np.asarray(slopes, self._dtype)[..., None, None]
            np.subtract(s, slopes * self._distance, s)
        if self._hidden is not None:
            np.add(s, self._hidden, s)
        if mask is not None:
            if s.ndim == 2:
                mask = _matrix(mask)
            self._keep(s, mask)
        if key_lengths is not None:
            self._keep(s, self._keys < np.asarray(key_lengths)[self._of_batch])
        if self._hides_by_lengths:
            offset = self._length(key_lengths, self._keys.size)
            offset = offset - self._length(query_lengths, self._rows.size)
            np.copyto(s, -np.inf, where=self._is_outside(self._rows + offset))

    def _keep(self, s, seen):
        """Put -inf where a mask is False, in place.

        NumPy adds quickly, but copies to some places alone slowly. A hidden score that
        is not finite takes the long way.
        """
        if s.size <= _FEW_SCORES:
            np.copyto(s, MINUS_INFINITY[s.itemsize], where=np.logical_not(seen))
            return
        hidden = np.where(seen, ZERO[s.itemsize], MINUS_INFINITY[s.itemsize])
        self._add_bias(s, hidden)

    def _add_bias(self, s, bias):
        """A bias, in place."""
        if s.ndim == 2:  # of q, k and v without an axis of heads
            bias = _matrix(bias)
        if self._side_by_side:
            _add_side_by_side(s, bias)
        else:
            np.add(s, bias, s)

    def _length(self, lengths, size):
        """Lengths beside the scores of their batch entries, or the size of the axis."""
        if lengths is None:
            return size
        return np.asarray(lengths, np.int64)[self._of_batch]

    def _sinks(self, sinks):
        """Sinks beside the scores of their heads; far below float32 there is none."""
        return np.asarray(sinks, self._dtype)[..., None, None]

    # Axes where heads come in groups.

    def _heads(self, x):
        """`x` as (*batch, heads of k and v, heads of a group, rows, columns)."""
        return None if x is None else self._split(heads_first(x, self._layout), -3)

    def _split(self, x, axis):
        """`x` with two axes in place of that of heads, if it has one."""
        if x is None or np.ndim(x) < -axis:
            return x
        shape = x.shape
        at = len(shape) + axis
        num_kv_heads, group_size = self._groups
        heads = shape[at], 1
        if shape[at] == num_kv_heads * group_size:
            heads = self._groups
        return x.reshape(shape[:at] + heads + shape[at + 1 :])


def _cuts_of(problem, cut):
    """Rows whose products BLAS makes at a time."""
    if cut is not None and _lies_side_by_side(problem):
        place = cut_of(problem)
        return slice(0, place), slice(place, None)
    return [slice(None)]


def halves_keys(problem):
    """Whether the scores of an entry come from two products, of half of the keys each.

    Of a single entry two threads share these, and the blocks of P v. Few rows cannot
    be cut, and a cut between keys changes bits, so that each entry of many has it, too.
    """
    return (
        1 < problem.seqlen_q < 2 * _ROWS_OF_TILES
        and problem.seqlen_k > LONGEST_SUM
        and takes(problem)
        and cost_of_an_entry(problem) >= 2 * WORTH_A_THREAD
    )


def shares_products(problem):
    """Whether two threads share the products of a call."""
    return (
        halves_keys(problem)
        and math.prod(problem.batch) * problem.num_heads == 1
        and _threads.with_blas(_threads.num_cores()) > 1
    )


def multiply_by_halves(q, k, s, entry_cut, by_two):
    """Store q k^T in `s`, half of the keys at a time, or on each of two threads.

    With an `entry_cut`, `q` has all rows of an entry or those of one thread.
    """
    cut, terms = k.shape[-2] // 2, k.shape[-1]
    rows = entry_cut.rows if entry_cut else q.shape[-2]
    cut -= cut % (columns_of_a_piece(rows, terms, cut) or 1)
    parts = [
        (q, k[..., keys, :], s[..., keys], entry_cut)
        for keys in (slice(0, cut), slice(cut, None))
    ]
    if by_two:
        on_two_threads(multiply_transposed, *parts)
    else:
        for part in parts:
            multiply_transposed(*part)


def _matrix(x):
    """`x` without leading axes, which have one element each."""
    if x is None or np.ndim(x) <= 2:
        return x
    return x.reshape(x.shape[-2:])


def _all_pairs():
    return True


def _numbers(shape):
    """The number of each entry, in C order."""
    return np.arange(math.prod(shape)).reshape(shape)


def boxes_of(shape, size):
    """Cut `shape` into boxes of at most `size` elements, as tuples of slices."""
    sides = []
    for n in reversed(shape):
        side = max(1, min(n, size))
        sides.append(side)
        size //= side
    ranges = [
        [slice(start, min(start + side, n)) for start in range(0, n, side)]
        for n, side in zip(shape, reversed(sides), strict=True)
    ]
    return itertools.product(*ranges)


def split_heads(x, problem):
    """`x` with the axis of query heads, behind those of the batch, as two.

    These are the heads of k and v, and the query heads of each; one head that stands
    for all becomes one and one.
    """
    at, heads = len(problem.batch), (problem.num_kv_heads, problem.group_size)
    if x.shape[at] != problem.num_heads:
        heads = 1, 1
    return x.reshape(x.shape[:at] + heads + x.shape[at + 1 :])


class Entries:
    """The operands with axes (*batch, kv_heads, heads of a group), then a matrix."""

    def __init__(self, problem, operands, out, lse):
        self.problem = problem
        self._operands = operands
        self.dtype = np.dtype(problem.compute_dtype)
        heads = (problem.num_kv_heads, problem.group_size)
        self.shape = (*problem.batch, *heads)
        self._num_batch = len(problem.batch)
        self._unit, self._factor = split_scale(problem)
        self._lengths = problem.query_lengths or problem.key_lengths
        self._side_by_side = _lies_side_by_side(problem)
        self._cut = _cut_if_alone(problem)
        self._cuts = _cuts_of(problem, self._cut)
        self._halves_keys = halves_keys(problem)
        self._by_two = shares_products(problem)
        self._ones = _ones_of(problem)
        # Rows can be without a key, so that the maximum is -inf.
        self._hides = (
            problem.left is not None
            or problem.right is not None
            or self._lengths is not None
            or problem.mask is not None
            or problem.bias is not None
            or problem.has_functions
        )

        self._q, self._out = (split_heads(x, problem) for x in (operands.q, out))
        self._k, self._v = (
            x[(slice(None),) * (self._num_batch + 1) + (None,)]
            for x in (operands.k, operands.v)
        )
        self._lse = split_heads(lse, problem) if problem.return_lse else None
        self._bias, self._mask, self._slopes = (
            None if x is None else split_heads(x, problem)
            for x in (operands.bias, operands.mask, operands.alibi_slopes)
        )
        self._sinks = None
        if operands.sinks is not None:
            with np.errstate(all="ignore"):  # far below float32 there is no sink
                sinks = operands.sinks.astype(self.dtype)
            self._sinks = sinks.reshape(heads)[..., None, None]
        self._numbers_of_batch = _numbers(problem.batch)[..., None, None, None, None]
        self._numbers_of_heads = _numbers(heads)[..., None, None]
        self._length_k, self._length_q, self._offset = (
            x if x is None or isinstance(x, int) else x[..., None, None, None, None]
            for x in (
                operands.key_lengths,
                operands.query_lengths,
                offset_of(problem, operands),
            )
        )

    def compute(self, box, scratch):
        """Store the rows of a box."""
        *entries, rows = box
        entries = tuple(entries)
        first, last = self._visible_keys(rows)
        k, v = self._keys_and_values(entries, first, last, scratch)
        s, _, _ = self._products(entries, rows, k, scratch)
        self._finish(s, entries, rows, first, last, scratch)
        o = out = self._out[box]
        if out.dtype != self.dtype or not out.flags.c_contiguous:
            o = scratch.array("o", out.shape, self.dtype)
        sink = None if self._sinks is None else self._sinks[entries[-2:]]
        ones = None if self._ones is None else self._ones[: last - first]
        _, base, d, divisor = _weigh(
            s, v, o, sink, self._hides or last == first, ones, self._by_two,
            self._cut,
        )  # fmt: skip
        if not is_finite(o):
            self._repair(box, o, s, v, divisor)
            # The sum of a row whose scores all overflow to -inf, which is NaN here.
            np.copyto(d, 0, where=base == -np.inf)
        if o is not out:
            np.copyto(out, o, casting="unsafe")
        self._store_rest(box, out, base, d)

    def _matrices(self, scratch, name, shape, dtype):
        """A buffer for one value a score, in the order of memory of the scores."""
        if not self._side_by_side:
            return scratch.array(name, shape, dtype)
        *entries, rows, keys = shape
        return scratch.array(name, (*entries, keys, rows), dtype).swapaxes(-1, -2)

    def _keys_and_values(self, entries, first, last, scratch):
        """Keys [first, last) and their values; they have one head for a group."""
        where = (*entries[:-1], slice(None), slice(first, last))
        return self._load(scratch, "k", self._k[where]), self._load(
            scratch, "v", self._v[where]
        )

    def _products(self, entries, rows, k, scratch):
        """(scores, queries, factor): q k^T, times the factor that is not in q."""
        q, factor = self._queries(scratch, self._q[(*entries, rows)], k)
        shape = (*q.shape[:-1], k.shape[-2])
        s = self._matrices(scratch, "s", shape, self.dtype)
        if self._halves_keys:
            multiply_by_halves(q, k, s, self._cut, self._by_two)
        for cut in [] if self._halves_keys else self._cuts:
            if self._side_by_side:
                multiply_transposed(k, q[..., cut, :], s[..., cut, :].mT)
            else:
                multiply_transposed(q, k, s)
        if factor != 1:
            np.multiply(s, factor, out=s)
        return s, q, factor

    def _queries(self, scratch, q, k):
        """(q, factor of the scores); a power of two goes into q."""
        if self._unit != 1:
            scaled = scratch.array("q", q.shape, self.dtype)
            np.multiply(q, self._unit, out=scaled, dtype=self.dtype, casting="unsafe")
            return scaled, self._factor
        # BLAS multiplies matrices that lie apart by a vector with other roundings.
        if _is_square(q, k) or k.shape[-2] == 1:
            return q.copy(), self._factor
        return self._load(scratch, "q", q), self._factor

    def _load(self, scratch, name, x):
        """`x` in the compute dtype, and as BLAS reads it."""
        if x.dtype == self.dtype and blas_reads(x):
            return x
        buffer = scratch.array(name, x.shape, self.dtype)
        np.copyto(buffer, x, casting="unsafe")
        return buffer

    def _visible_keys(self, rows):
        """Keys that a row may see; of rows alone, not of lengths, which differ."""
        return visible_keys(self.problem, self._offset, rows.start, rows.stop)

    def _finish(self, s, entries, rows, first, last, scratch):
        """Softcap, score function, bias, alibi and masks, in place."""
        self._cap(s)
        functions = self._functions(s, entries, rows, first, last)
        if functions is not None:
            functions.change(s)
        self._add_and_hide(s, entries, rows, first, last, scratch, functions)

    def _cap(self, s):
        """Softcap, in place."""
        if self.problem.softcap:
            cap = self.dtype.type(self.problem.softcap)
            np.tanh(np.divide(s, cap, out=s), out=s)
            np.multiply(s, cap, out=s)

    def _add_and_hide(self, s, entries, rows, first, last, scratch, functions):
        """Bias, alibi and masks, in place."""
        if self._bias is not None:
            bias = self._bias[(*entries, rows, slice(first, last))]
            if self._side_by_side:
                _add_side_by_side(s, bias)
            else:
                np.add(s, bias, out=s, casting="unsafe")
        if self._slopes is not None:
            slopes = self._slopes[entries].astype(self.dtype)[..., None, None]
            i, j = self._positions(entries, rows, first, last)
            np.subtract(s, slopes * np.abs(i - j).astype(self.dtype), out=s)
        self._hide(s, entries, rows, first, last, scratch)
        if functions is not None:
            functions.hide(s)

    def _offset_of(self, entries):
        """The query offset of some entries: an int, or (batch, 1, 1, 1, 1)."""
        if isinstance(self._offset, int):
            return self._offset
        return self._offset[entries[: self._num_batch]]

    def _positions(self, entries, rows, first, last):
        """(i, j) of scores."""
        i = np.arange(rows.start, rows.stop)[:, None] + self._offset_of(entries)
        return i, np.arange(first, last)

    def _functions(self, s, entries, rows, first, last):
        """Score and mask functions on the scores of a box; None if there are none."""
        if self._operands.functions is None or not s.size:
            return None
        batch = entries[: self._num_batch]

        def visible_by_options():
            probe = np.zeros(s.shape, self.dtype)
            self._hide(probe, entries, rows, first, last, _threads.Scratch())
            seen = probe == 0
            if self._length_q is not None:
                seen &= ~self._padding(entries, rows)
            return seen

        places = positions(
            self._numbers_of_batch[batch],
            self._numbers_of_heads[entries[self._num_batch :]],
            rows.start + self._offset_of(entries),
            rows.stop - rows.start,
            first,
            last - first,
        )
        functions = self._operands.functions
        return TileFunctions(functions, places, self.dtype, visible_by_options)

    def _hide(self, s, entries, rows, first, last, scratch):
        """Put -inf where an option hides a key."""
        problem = self.problem
        here, keys = (*entries, rows), slice(first, last)
        batch = entries[: self._num_batch]
        left, right = problem.left, problem.right
        if left is not None or right is not None:
            i, j = self._positions(entries, rows, first, last)
            shape = (*i.shape[:-1], last - first)
            hidden = self._matrices(scratch, "hidden", shape, np.bool_)
        if left is not None:
            np.copyto(s, -np.inf, where=np.less(j, i - left, out=hidden))
        if right is not None:
            np.copyto(s, -np.inf, where=np.greater(j, i + right, out=hidden))
        if self._length_k is not None:
            beyond = np.arange(first, last) >= self._length_k[batch]
            np.copyto(s, -np.inf, where=beyond)
        if self._mask is not None:
            mask = self._mask[(*here, keys)]
            hidden = self._matrices(scratch, "hidden", mask.shape, np.bool_)
            np.copyto(s, -np.inf, where=np.logical_not(mask, out=hidden))

    def _padding(self, entries, rows):
        """Which rows are beyond the query lengths, (batch, 1, 1, rows, 1)."""
        lengths = self._length_q[tuple(entries[: self._num_batch])]
        return np.arange(rows.start, rows.stop)[:, None] >= lengths

    def _store_rest(self, box, out, base, d):
        """Padding, and the logarithms; a row that sees no key has that of the sink."""
        *entries, rows = box
        padding = None
        if self._length_q is not None:
            padding = self._padding(entries, rows)
            np.copyto(out, 0, where=padding)
        if self._lse is not None:
            lse = self._lse[box]
            # Of float32 numbers, in float64: rounded once.
            np.add(base, np.log(d, dtype=np.float64), out=d, casting="unsafe")
            np.copyto(lse, d[..., 0])
            if padding is not None:
                np.copyto(lse, -np.inf, where=padding[..., 0])

    def _repair(self, box, o, p, v, divisor):
        """Compute once more the entries of `o` that are not finite.

        Either by right, or 0 * NaN came from a key that is not seen, or a sum of large
        values overflowed before it was divided.
        """
        *entries, rows = box
        first, last = self._visible_keys(rows)
        starts = [axis.start for axis in entries]
        scratch = _threads.Scratch()  # p and o are in that of the box
        for index in np.argwhere(~np.isfinite(o).all(axis=(-2, -1))):
            at = tuple(int(i) for i in index)
            *batch, kv_head, of_group = (
                start + i for start, i in zip(starts, at, strict=True)
            )
            head = kv_head * self.problem.group_size + of_group
            task = Task(tuple(batch), head, rows.start, rows.stop)
            part = Part(self.problem, self._operands, task, scratch)
            used = slice(0, part.num_rows)  # the others are padding
            seen = np.zeros(p[at].shape, bool)
            seen[used] = tiled.scores(part, *part.queries(), first, last) != -np.inf
            # All rows, as before: the product of fewer may round otherwise.
            values = times_values(p[at], seen, v[(*at[:-1], 0)])
            if divisor is not None:
                np.divide(values, divisor[at], out=values)
            tiled.repair(part, values[used])
            o[at][used] = values[used]
