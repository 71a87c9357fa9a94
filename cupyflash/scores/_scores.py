"""Score functions."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyflash.scores import _arguments


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
    cap = _arguments.positive("cap", cap)
    return lambda s: cap * np.tanh(s / cap)


def t5_bias(
    num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Callable[..., Any]:
    """Add a learned number for each head and bucket of distances to the score.

    As described in [1]_.

    Nearby keys each have their own bucket. Farther keys share buckets that grow with
    the distance, and all keys from `max_distance` on share one. The function takes
    ``table``, of shape (num_buckets, num_heads), in ``score_arrays=``.

    Parameters
    ----------
    num_buckets : int, default 32
        At least 4 if `bidirectional`, when half of them are for keys after the query;
        otherwise at least 2.
    max_distance : int, default 128
        Keys at this distance or farther share one bucket. At least as many as there
        are nearby distances with a bucket of their own: a quarter of `num_buckets` if
        `bidirectional`, otherwise half of it.
    bidirectional : bool, default True
        False if queries see no later keys.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the limits of transfer learning with a unified
       text-to-text transformer", arXiv:1910.10683, 2019, section 2.1.
    """
    num_buckets = _arguments.integer("num_buckets", num_buckets)
    max_distance = _arguments.integer("max_distance", max_distance)
    bidirectional = _arguments.flag("bidirectional", bidirectional)
    least = 4 if bidirectional else 2
    if num_buckets < least:
        raise ValueError(
            f"num_buckets must be at least {least} with bidirectional="
            f"{bidirectional}, got {num_buckets}"
        )
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    if max_distance < exact:
        raise ValueError(
            f"max_distance must be at least {exact}, the number of distances with a "
            f"bucket of their own (num_buckets={num_buckets}, bidirectional="
            f"{bidirectional}), got {max_distance}"
        )
    # Where no distance lies between, all from `exact` on share the last bucket.
    max_distance = min(max_distance, exact << 1000)  # so that a float holds the ratio
    span = math.log(max_distance / exact)
    growth = (count - exact) / span if span else 0.0
    first_far = exact if span else count - 1

    def score(s, h, i, j, *, table):
        distance = abs(i - j) if bidirectional else np.maximum(i - j, 0)
        far = np.log(np.maximum(distance, 1) / exact) * growth
        far = np.minimum(first_far + far.astype(int), count - 1)
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

    Parameters
    ----------
    temperature : float
        Finite and above 0; the larger, the more neighbours count.

    References
    ----------
    .. [1] N. Frosst et al., "Analyzing and improving representations with the soft
       nearest neighbor loss", arXiv:1902.01889, 2019, equation 1.
    """

    temperature = _arguments.positive("temperature", temperature)

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
