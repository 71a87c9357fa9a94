"""Functions that an option says, found in their expressions."""

import numpy as np
import pytest

from cupyflash import scores
from cupyflash._attention import functions as attention_functions
from cupyflash._expr.lookup import lookup


def option_of(function, mask):
    expression, values = lookup(function, {}, mask=mask)
    return attention_functions.as_option(expression, values)


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda i, j: i >= j, (None, 0)),
        (lambda i, j: j <= i, (None, 0)),
        (lambda i, j: j < i + 1, (None, 0)),
        (lambda i, j: i - j < 7, (6, None)),
        (lambda i, j: abs(i - j) <= 5, (5, 5)),
        (lambda i, j, w=9: (abs(j - i) < w) & (j <= i + 2), (8, 2)),
        (lambda i, j, w=9, v=4: i - w <= j - v + 1, (6, None)),
        (lambda i, j: ~(i < j), None),
        (lambda i, j: (i - j <= 3) | (i >= j), None),
        (lambda i, j: i > j, None),  # no option has its own key hidden
        (lambda i, j: 2 * (i - j) <= 8, None),
        (lambda i, j: i <= 7, None),
        (lambda b, i, j: i - j <= b, None),
        (lambda i, j: (i - j <= 3) & (j % 2 == 0), None),
        (scores.sliding_window(1024), (1024, 0)),
        (scores.sliding_window(3, 5), (3, 5)),
        (scores.sliding_window(-1), None),
    ],
)
def test_a_band_of_keys_is_a_window(function, window):
    assert option_of(function, mask=True) == window
    if window is None:
        return
    i, j = np.ogrid[:40, :40]
    left, right = (99 if x is None else x for x in window)
    assert np.array_equal(function(i, j), (i - j <= left) & (j - i <= right))


@pytest.mark.parametrize(
    ("function", "cap"),
    [
        (scores.softcap(20.0), 20.0),
        (scores.softcap(20), 20.0),
        (lambda s: np.tanh(s / 3.0) * 3.0, 3.0),
        (lambda s: 3.0 * np.tanh(s / 2.0), None),
        (lambda s, h: 3.0 * np.tanh(s / 3.0) + h, None),
        (scores.softcap(-2.0), None),
        (scores.softcap(float("inf")), None),
    ],
)
def test_a_softcap(function, cap):
    assert option_of(function, mask=False) == cap


def test_options_join_those_of_the_call():
    def bound(function, mask):
        expression, values = lookup(function, {}, mask=mask)
        return attention_functions.BoundFunction(expression, values, {})

    near, cap = (
        bound(scores.sliding_window(7, 9), True),
        bound(scores.softcap(2), False),
    )
    other = bound(lambda s, h: s * h, False)
    functions = attention_functions.Functions
    join = attention_functions.with_options
    assert join(functions(None, near), None, 0, 0.0) == (None, 7, 0, 0.0)
    assert join(functions(None, near), 5, None, 0.0) == (None, 5, 9, 0.0)
    assert join(functions(cap, None), None, 0, 0.0) == (None, None, 0, 2.0)
    # A softcap of the call comes first: the function is called on what it leaves.
    both = functions(cap, None)
    assert join(both, None, None, 9.0) == (both, None, None, 9.0)
    assert join(functions(other, near), None, None, 0.0)[0] == functions(other, None)
