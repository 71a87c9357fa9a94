"""Score and mask functions for `attention`, to use as they are or as a start.

Each one is a plain function, or returns one, to pass to `attention` as ``score=`` or
``mask=``. Functions that take numbers close over them, and another number does not
compile anything anew. Arrays go into ``score_arrays=`` or ``mask_arrays=`` under the
names after ``*``. Positions count along the keys: `query_offset` has been added to i.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "alibi",
    "debye",
    "dilated_window",
    "document",
    "neighborhood_2d",
    "prefix_lm",
    "sliding_window",
    "soft_nearest_neighbor",
    "softcap",
    "t5_bias",
]


def alibi(s: Any, h: Any, i: Any, j: Any, *, slopes: Any) -> Any:
    """Lower the score with the distance, by a slope for each head.

    Does the same as ``alibi_slopes=`` [1]_, but the slopes get a gradient.

    Parameters
    ----------
    s, h, i, j
        Given by `attention`.
    slopes : array of float, shape (num_heads,)
        In ``score_arrays=``.

    References
    ----------
    .. [1] O. Press et al., "Train short, test long: attention with linear biases
       enables input length extrapolation", arXiv:2108.12409, 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, scores
    >>> q = k = v = np.eye(3)[None]
    >>> slopes = np.array([0.5])
    >>> out = attention(q, k, v, score=scores.alibi, score_arrays={"slopes": slopes})
    >>> bool(np.allclose(out, attention(q, k, v, alibi_slopes=slopes)))
    True
    """
    return s - slopes[h] * abs(i - j)


def softcap(cap: float) -> Callable[..., Any]:
    """Score ``cap * tanh(s / cap)``, which stays between -cap and cap.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, scores
    >>> q = k = v = np.eye(3)
    >>> out = attention(q, k, v, score=scores.softcap(2.0))
    >>> bool(np.allclose(out, attention(q, k, v, softcap=2.0)))
    True
    """
    return lambda s: cap * np.tanh(s / cap)


def sliding_window(left: int, right: int = 0) -> Callable[..., Any]:
    """Mask of `left` keys before a query, its own, and `right` after, as ``window=``.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, scores
    >>> q = k = v = np.eye(3)
    >>> out = attention(q, k, v, mask=scores.sliding_window(1))
    >>> bool(np.allclose(out, attention(q, k, v, window=(1, 0))))
    True
    """
    return lambda i, j: (i - j <= left) & (j - i <= right)


def prefix_lm(b: Any, i: Any, j: Any, *, prefix: Any) -> Any:
    """Mask of the keys of a prefix, which all queries see, and of those before.

    Parameters
    ----------
    b, i, j
        Given by `attention`.
    prefix : array of int, shape (batch,)
        Length of the prefix of each batch entry [1]_, in ``mask_arrays=``.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the limits of transfer learning with a unified
       text-to-text transformer", arXiv:1910.10683, 2019, figure 4.
    """
    return (j <= i) | (j < prefix[b])


def document(b: Any, i: Any, j: Any, *, documents: Any) -> Any:
    """Mask of the keys of the same document, where several share a sequence.

    Parameters
    ----------
    b, i, j
        Given by `attention`.
    documents : array of int, shape (batch, seqlen)
        The document at each position, in ``mask_arrays=``. If documents are contiguous,
        tiles that belong to two of them are skipped.
    """
    return documents[b, i] == documents[b, j]


def dilated_window(count: int, dilation: int) -> Callable[..., Any]:
    """Mask of each `dilation`-th key before a query, `count` of them, and its own.

    As described in [1]_.

    References
    ----------
    .. [1] I. Beltagy et al., "Longformer: the long-document transformer",
       arXiv:2004.05150, 2020, section 3.1.
    """

    def mask(i, j):
        back = i - j
        return (back >= 0) & (back <= count * dilation) & (back % dilation == 0)

    return mask


def neighborhood_2d(height: int, width: int, kernel: int) -> Callable[..., Any]:
    """Mask of a square of pixels around a pixel, for an image stored row by row.

    As described in [1]_.

    At the border the square is moved, so that every pixel sees ``kernel**2`` of them.

    Parameters
    ----------
    height, width : int
        Of the image; sequences have ``height * width`` positions.
    kernel : int
        Side of the square, odd.

    References
    ----------
    .. [1] A. Hassani et al., "Neighborhood attention transformer", arXiv:2204.07143,
       2022.
    """
    if kernel % 2 == 0 or not 0 < kernel <= min(height, width):
        raise ValueError(
            f"kernel must be odd and at most the height and the width, got {kernel} "
            f"for {height} x {width}"
        )
    half = kernel // 2

    def near(x, y, size):
        return abs(np.clip(x, half, size - 1 - half) - y) <= half

    def mask(i, j):
        rows = near(i // width, j // width, height)
        return rows & near(i % width, j % width, width)

    return mask


def t5_bias(
    num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Callable[..., Any]:
    """Add a learned number for each head and bucket of distances to the score.

    As described in [1]_.

    Near keys have a bucket each. Farther keys share buckets that grow with the
    distance, and all from `max_distance` on share one. The function takes ``table``, of
    shape (num_buckets, num_heads), in ``score_arrays=``.

    Parameters
    ----------
    num_buckets : int, default 32
        Half of them are for keys after the query if `bidirectional`.
    max_distance : int, default 128
        Keys at this distance or farther share one bucket.
    bidirectional : bool, default True
        False where queries see no keys after them.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the limits of transfer learning with a unified
       text-to-text transformer", arXiv:1910.10683, 2019, section 2.1.
    """
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    growth = (count - exact) / math.log(max_distance / exact)

    def score(s, h, i, j, *, table):
        distance = abs(i - j) if bidirectional else np.maximum(i - j, 0)
        far = np.log(np.maximum(distance, 1) / exact) * growth
        far = np.minimum(exact + far.astype(int), count - 1)
        bucket = np.where(distance < exact, distance, far)
        after = np.where(j > i, count, 0) if bidirectional else 0
        return s + table[bucket + after, h]

    return score


def soft_nearest_neighbor(temperature: float) -> Callable[..., Any]:
    """Score ``-|q - k|**2 / temperature``, without a point's score with itself.

    Pass ``scale=1`` and the points as q and k. The lse over all points minus the lse
    over those with the same label (use `document` as the mask) is the soft nearest
    neighbour loss of each point [1]_. The function takes ``squares``, the squared norms
    of the points, of shape (batch, points), in ``score_arrays=``.

    References
    ----------
    .. [1] N. Frosst et al., "Analyzing and improving representations with the soft
       nearest neighbor loss", arXiv:1902.01889, 2019, equation 1.
    """

    def score(s, b, i, j, *, squares):
        squared_distance = squares[b, i] + squares[b, j] - 2 * s
        return np.where(i == j, -np.inf, -squared_distance / temperature)

    return score


def debye(s: Any, b: Any, h: Any, i: Any, j: Any, *, squares: Any, q: Any) -> Any:
    """Score ``log(1 + sin(x) / x)``, x being a wave number times a distance.

    Pass ``scale=1``, the positions of the atoms as q and k, and their form factors f as
    values. Then ``exp(lse) * out`` is the sum over j of ``f_j + f_j * sin(x) / x``.
    Subtract the sum of f, multiply by f_i and add up: this is Debye's formula for
    scattering, averaged over all orientations [1]_. Each head has its own wave number.

    Parameters
    ----------
    s, b, h, i, j
        Given by `attention`.
    squares : array of float, shape (batch, atoms)
        Squared distances from the origin, in ``score_arrays=``.
    q : array of float, shape (num_heads,)
        Wave numbers.

    References
    ----------
    .. [1] Peter Debye, "Zerstreuung von Röntgenstrahlen", Annalen der Physik 351, 1915.
    """
    squared = q[h] * q[h] * np.maximum(squares[b, i] + squares[b, j] - 2 * s, 0.0)
    x = np.sqrt(squared)
    series = 1 - squared / 6 * (1 - squared / 20)  # to the last digit for small x
    return np.log1p(np.where(squared < 1e-4, series, np.sin(x) / x))
