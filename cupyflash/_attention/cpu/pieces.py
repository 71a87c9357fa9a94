"""Products of matrices in pieces that OpenBLAS multiplies as they lie in memory.

OpenBLAS copies both matrices into tiles before it multiplies them, which takes longer
than the product where one has few rows. For CPUs with AVX-512 it also has kernels that
copy nothing, for products of up to 10^6 multiply-adds, and of a b^T for up to 1200
results. There a larger product goes in pieces. A row has the bits of its piece, so
pieces depend on the sizes of an entry alone.
"""

import functools
from typing import NamedTuple

import numpy as np

from cupyflash._core import threads

_ARCHITECTURES = {"SkylakeX", "Cooperlake", "SapphireRapids"}
# Multiply-adds, and of a b^T results and terms, of a product without copies.
MOST, _MOST_RESULTS, _FEWEST_TERMS = 1_000_000, 1_200, 32
# These kernels add up one term after another, others half of them or fewer: in float64
# sums of more terms, up to so many, are of two or three parts. Longer ones have parts.
SHORT_SUM, _LONG_SUM = 256, 3 * 256
# Rows up to which a b^T, and a sum over many terms, goes in pieces.
FEW_ROWS = 32
# Rows of a piece of a @ b; an entry is cut at a multiple of them.
ROWS = 24
# Terms of a piece, and its columns, are a multiple of these.
_FEWEST_OF_A_SUM, _COLUMNS = 64, 16
# From where on pieces are worth the time to make them: multiply-adds in pieces of rows,
# and numbers of b in pieces of a b^T.
_WORTH_ROWS, _WORTH_COLUMNS = 3_000_000, 16_000


class Cut(NamedTuple):
    """An entry that two threads share if it is alone."""

    rows: int  # all
    fewest: int  # of one thread


@functools.cache
def has_small_kernels() -> bool:
    """Whether BLAS has kernels that copy nothing."""
    found = threads.blas_architectures()
    return bool(found) and found <= _ARCHITECTURES


def terms_of_a_sum(rows, columns, longest):
    """Terms up to which the products of `rows` rows are added up by BLAS."""
    terms = longest
    if 1 < rows <= FEW_ROWS:
        while terms > _FEWEST_OF_A_SUM and min(rows, ROWS) * terms * columns > MOST:
            terms //= 2
    return terms if terms == longest or has_small_kernels() else longest


def needs_short_sums(rows, terms, columns, itemsize, cut=None):
    """Whether `rows` rows of a @ b are to be sums of up to SHORT_SUM terms."""
    if not SHORT_SUM < terms < _LONG_SUM or itemsize == 4 or min(rows, columns) == 1:
        return False
    terms = min(terms, 2 * SHORT_SUM)  # of blocks
    is_small = cut is None and rows * terms * columns <= MOST
    return (
        is_small or _has_pieces_of_rows(rows, terms, columns, cut)
    ) and has_small_kernels()


def columns_of_a_piece(rows, terms, columns):
    """Rows of b that a piece of a b^T has; 0 where all are one product."""
    if (
        not 1 < rows <= FEW_ROWS
        or rows * columns <= _MOST_RESULTS
        or columns * terms < _WORTH_COLUMNS
        or terms < _FEWEST_TERMS
        or not has_small_kernels()
    ):
        return 0
    size = min(_MOST_RESULTS, MOST // terms) // rows // _COLUMNS * _COLUMNS
    return size if size < columns else 0


def multiply_transposed(a, b, out=None, cut=None):
    """a b^T; with a `cut`, `a` has all rows or those of one thread."""
    own_rows, terms = a.shape[-2:]
    columns = b.shape[-2]
    size = columns_of_a_piece(cut.rows if cut else own_rows, terms, columns)
    if not size:
        return np.matmul(a, b.mT, out)
    if out is None:
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = np.empty((*shape, own_rows, columns), a.dtype)
    count, rest = divmod(columns, size)
    end = columns - rest
    pieces = out[..., :end].reshape((*out.shape[:-1], count, size), copy=False)
    of_b = b[..., :end, :].reshape((*b.shape[:-2], count, size, terms))
    np.matmul(a[..., None, :, :], of_b.mT, pieces.swapaxes(-2, -3))
    if rest:
        np.matmul(a, b[..., end:, :].mT, out[..., end:])
    return out


def multiply(a, b, out=None, cut=None):
    """a @ b; with a `cut`, `a` has all rows or those of one thread."""
    rows, terms = a.shape[-2:]
    columns = b.shape[-1]
    if not _has_pieces_of_rows(rows, terms, columns, cut):
        return np.matmul(a, b, out)
    if out is None:
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = np.empty((*shape, rows, columns), a.dtype)
    count, rest = divmod(rows, ROWS)
    count -= rest == 1  # one row would go another way
    end = count * ROWS
    pieces = out[..., :end, :]
    pieces = pieces.reshape((*out.shape[:-2], count, ROWS, columns), copy=False)
    of_a = a[..., :end, :].reshape((*a.shape[:-2], count, ROWS, terms))
    np.matmul(of_a, b[..., None, :, :], pieces)
    if end < rows:
        np.matmul(a[..., end:, :], b, out[..., end:, :])
    return out


def _has_pieces_of_rows(rows, terms, columns, cut):
    """Whether `rows` rows of a @ b go in pieces."""
    if cut is None:
        is_whole = rows * terms * columns <= _WORTH_ROWS
    else:  # BLAS might copy the operands for some of the rows alone
        is_whole = cut.fewest * terms * columns > MOST
    return not (
        is_whole
        or rows <= ROWS + 1
        or ROWS * terms * columns > MOST
        or min(terms, columns) == 1
        or not has_small_kernels()
    )


def is_cut_alike(problem, cut):
    """Whether BLAS takes rows before and behind `cut` as it takes all of them."""
    if not has_small_kernels():
        return True
    if problem.seqlen_q <= FEW_ROWS:
        return False
    fewest = min(cut, problem.seqlen_q - cut)
    return fewest >= ROWS and fewest * problem.seqlen_k > _MOST_RESULTS
