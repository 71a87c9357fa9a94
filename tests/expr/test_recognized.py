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
        (lambda i, j: (i - j <= -1) & (j - i <= 0), None),  # no key at all
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
        (lambda s, c=-2.0: c * np.tanh(s / c), None),
        (lambda s, c=np.inf: c * np.tanh(s / c), None),
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


ARRAYS = {
    "t": np.ones((1, 1), "float32"),
    "cube": np.ones((1, 1, 1), "float16"),
    "slopes": np.ones(1, "float32"),
    "whole": np.ones(1, "int32"),
    "seen": np.ones((1, 1), bool),
    "all_seen": np.ones((1, 1, 1, 1), bool),
}


def array_option_of(function, mask):
    needed = function.__code__.co_varnames[function.__code__.co_argcount :]
    arrays = {name: ARRAYS[name] for name in needed if name in ARRAYS}
    return lookup(function, arrays, mask=mask)[0].array_option


@pytest.mark.parametrize(
    "function",
    [
        scores.alibi,
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i - j),
        lambda s, h, i, j, *, slopes: s - abs(j - i) * slopes[h],
        lambda s, h, i, j, *, slopes: s + slopes[h] * -abs(i - j),
        lambda s, h, i, j, *, slopes: -slopes[h] * np.abs(i - j) + s,
        lambda s, h, i, j, *, slopes: s - -slopes[h] * -abs(i - j),
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i - j).astype(float),
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i + 1 - j - 1),
        lambda s, h, i, j, *, slopes: s - slopes[h] * np.maximum(i - j, j - i),
        lambda s, h, i, j, *, slopes: s + -1 * (slopes[h] * abs(i - j)),
    ],
)
def test_slopes_times_distances_are_alibi(function):
    assert array_option_of(function, mask=False) == ("alibi_slopes", "slopes", "h")


@pytest.mark.parametrize(
    "function",
    [
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i - j - 1),
        lambda s, b, i, j, *, slopes: s - slopes[b] * abs(i - j),
        lambda s, h, i, j, *, slopes: s + slopes[h] * abs(i - j),
        lambda s, h, i, j, *, slopes: s - slopes[h] * (abs(i - j) // 2),
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i // 2 - j // 2),
        lambda s, h, i, j, *, slopes: s - slopes[h] * (i - j),
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i + j),
        lambda s, h, i, j, *, slopes: s - slopes[h] * abs(i - 2 * j),
        lambda s, h, i, j, *, slopes: s - slopes[h] * np.maximum(i - j, i - j + 0 * i),
        lambda s, h, i, j, *, slopes: s - slopes[h] * np.minimum(i - j, j - i),
        lambda s, h, i, j, *, slopes: s - 2 * slopes[h] * abs(i - j),
        lambda s, h, i, j, *, slopes: 2 * s - slopes[h] * abs(i - j),
        lambda s, h, i, j, *, slopes: slopes[h] * abs(i - j) - s,
        lambda s, h, i, j, *, slopes: s - slopes[h + 1] * abs(i - j),
        lambda s, h, i, j, *, whole: s - whole[h] * abs(i - j),
        lambda s, i, j, slope=0.5: s - slope * abs(i - j),
    ],
)
def test_what_is_almost_alibi_stays_a_function(function):
    assert array_option_of(function, mask=False) is None


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda s, i, j, *, t: s + t[i, j], ("bias", "t", "ij")),
        (lambda s, h, i, j, *, cube: cube[h, i, j] + s, ("bias", "cube", "hij")),
        (lambda s, b, i, j, *, cube: s + cube[b, i, j], ("bias", "cube", "bij")),
        (lambda s, i, j, *, t: s - t[i, j], None),
        (lambda s, i, j, *, t: s + t[j, i], None),
        (lambda s, i, j, *, t: s + t[i, j + 1], None),
        (lambda s, i, j, *, t: s + 0.5 * t[i, j], None),
        (lambda s, h, j, *, t: s + t[h, j], None),  # tiles are the same for all rows
        (lambda s, i, j, *, cube: s + cube[0, i, j], None),
        (lambda s, i, j, *, seen: s + seen[i, j], None),
    ],
)
def test_an_array_that_is_added_is_a_bias(function, found):
    assert array_option_of(function, mask=False) == found


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda i, j, *, seen: seen[i, j], ("mask", "seen", "ij")),
        (
            lambda b, h, i, j, *, all_seen: all_seen[b, h, i, j],
            ("mask", "all_seen", "bhij"),
        ),
        (lambda i, j, *, seen: ~seen[i, j], None),
        (lambda i, j, *, seen: seen[j, i], None),
        (lambda b, j, *, seen: seen[b, j], None),  # whose hidden tiles are skipped
        (lambda i, j, *, seen: seen[i // 2, j], None),
        (lambda i, j, *, seen: seen[i, j] & (i >= j), None),
    ],
)
def test_an_array_that_is_read_is_a_mask(function, found):
    assert array_option_of(function, mask=True) == found


NO_OPTIONS = {"bias": None, "mask": None, "alibi_slopes": None}


def with_arrays(first=0, given=NO_OPTIONS, accum="float32", batch=(2,), **functions):
    def bound(name):
        function, arrays = functions.get(name, (None, {}))
        if function is None:
            return None
        expression, values = lookup(function, arrays, mask=name == "mask")
        return attention_functions.BoundFunction(expression, values, arrays)

    return attention_functions.with_arrays(
        attention_functions.Functions(bound("score"), bound("mask")),
        given,
        (*batch, 3, 4, 5),
        first,
        accum,
    )


def add(s, i, j, *, t):
    return s + t[i, j]


def read(b, h, i, j, *, t):
    return t[b, h, i, j]


def test_arrays_of_functions_become_views_over_the_scores():
    bias = np.arange(80.0).reshape(8, 10)[:, ::2].astype("float32")
    seen = np.arange(6 * 3 * 9 * 5).reshape(6, 3, 9, 5) % 3 == 0
    options, taken = with_arrays(
        score=(add, {"t": bias}), mask=(read, {"t": seen}), first=3, batch=(2, 3)
    )
    assert options.keys() == {"bias", "mask"}
    assert np.shares_memory(options["bias"], bias)
    wanted = np.broadcast_to(bias[3:7], (2, 3, 3, 4, 5))
    assert np.array_equal(options["bias"], wanted)
    wanted = seen[:, :, 3:7].reshape(2, 3, 3, 4, 5)
    assert np.array_equal(options["mask"], wanted)
    assert [(x.of, x.option, x.array) for x in taken] == [
        ("score", "bias", "t"),
        ("mask", "mask", "t"),
    ]
    slopes = {"slopes": np.arange(4, dtype="float32")}
    options, _ = with_arrays(score=(scores.alibi, slopes), first=None)
    assert np.array_equal(options["alibi_slopes"], [[0, 1, 2]] * 2)


def test_a_function_stays_where_its_option_would_not_do_the_same():
    t = np.zeros((8, 5), "float32")
    assert with_arrays(score=(add, {"t": t}), first=4)[0]
    assert not with_arrays(score=(add, {"t": t}), first=5)[0]  # beyond the array
    assert not with_arrays(score=(add, {"t": t}), first=-1)[0]
    assert not with_arrays(score=(add, {"t": t[:, :4]}))[0]
    assert not with_arrays(score=(add, {"t": t}), first="lengths")[0]
    assert not with_arrays(score=(add, {"t": t.astype("f8")}))[0]
    assert with_arrays(score=(add, {"t": t.astype("f8")}), accum="float64")[0]
    assert not with_arrays(score=(add, {"t": t}), given={**NO_OPTIONS, "bias": t})[0]
    document = np.zeros((2, 5), "int32")
    mask = scores.document, {"documents": document}
    assert not with_arrays(score=(add, {"t": t}), mask=mask)[0]
    few = {"slopes": np.zeros(2, "float32")}  # three heads
    assert not with_arrays(score=(scores.alibi, few))[0]
