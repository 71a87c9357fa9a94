"""Mask functions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyflash.scores import _arguments


def sliding_window(left: int, right: int = 0) -> Callable[..., Any]:
    """Mask that shows `left` keys before a query, its own, and `right` after it.

    Does the same as ``window=(left, right)``.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, scores
    >>> q = k = v = np.eye(3)
    >>> out = attention(q, k, v, mask=scores.sliding_window(1))
    >>> bool(np.allclose(out, attention(q, k, v, window=(1, 0))))
    True
    """
    left = _arguments.distance("left", left, 0)
    right = _arguments.distance("right", right, 0)
    return lambda i, j: (i - j <= left) & (j - i <= right)


def prefix_lm(b: Any, i: Any, j: Any, *, prefix: Any) -> Any:
    """Mask that shows the keys of a prefix, and those up to the query.

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
    """Mask that shows the keys of the same document, if several share a sequence.

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
    """Mask that shows a query's own key, and `count` before it, `dilation` apart.

    As described in [1]_.

    References
    ----------
    .. [1] I. Beltagy et al., "Longformer: the long-document transformer",
       arXiv:2004.05150, 2020, section 3.1.
    """
    count = _arguments.integer("count", count, 0)
    dilation = _arguments.distance("dilation", dilation, 1)
    reach = min(count * dilation, _arguments.FARTHEST)

    def mask(i, j):
        back = i - j
        return (back >= 0) & (back <= reach) & (back % dilation == 0)

    return mask


def neighborhood_2d(height: int, width: int, kernel: int) -> Callable[..., Any]:
    """Mask that shows the square around a pixel, for an image stored row by row.

    As described in [1]_.

    At the border the square is moved, so that every pixel sees ``kernel**2`` pixels.

    Parameters
    ----------
    height, width : int
        Of the image; sequences have ``height * width`` positions.
    kernel : int
        Side of the square, odd, at most `height` and `width`.

    References
    ----------
    .. [1] A. Hassani et al., "Neighborhood attention transformer", arXiv:2204.07143,
       2022.
    """
    height = _arguments.distance("height", height, 1)
    width = _arguments.distance("width", width, 1)
    kernel = _arguments.distance("kernel", kernel, 1)
    if kernel % 2 == 0 or kernel > min(height, width):
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
