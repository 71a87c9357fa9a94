"""Score and mask functions as a language: traces, keys, derivatives, intervals."""

import functools
import itertools
import math
import random
import re
import threading
import types
import warnings

import expressions
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy.special import erf

from cupyflash._expr import lookup as lookup_module
from cupyflash._expr.emit_numpy import evaluate
from cupyflash._expr.intervals import decide, fits_int32, intervals
from cupyflash._expr.lookup import lookup

SCALE = 0.37
TABLE = np.arange(5.0)
THREE = [1.0, 2.0, 3.0]
HELD = (TABLE, 1)
CUPY = types.ModuleType("cupy")
CUPY.tanh = None
METHOD = types.SimpleNamespace().__repr__


def grown(draw, positions=False):
    return expressions.Grammar(lambda forms: draw(st.sampled_from(forms)), positions)


@st.composite
def scores(draw):
    return grown(draw).number(draw(st.integers(1, 4)))


@st.composite
def masks(draw):
    return grown(draw, positions=True).boolean(draw(st.integers(0, 3)))


@hypothesis.given(scores())
@hypothesis.settings(max_examples=200)
def test_random_scores(text):
    """Value, derivatives and the text shown are those of the function itself."""
    expressions.check_score(text)


@hypothesis.given(masks(), st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=100)
def test_random_masks_are_right_of_every_tile(text, r):
    expressions.check_mask(text, r.choice)


# --- what is shown -------------------------------------------------------------------


def test_repr_is_readable():
    expression, _ = lookup(
        lambda s, h, i, j, *, slope: s - slope[h] * abs(i - j), {"slope": np.ones(2)}
    )
    assert repr(expression) == (
        "def score(s, h, i, j, *, slope):\n    return s - slope[h] * abs(i - j)"
    )
    assert repr(expression.derivative).endswith("return 1.0")
    capped, _ = lookup(lambda s: SCALE * np.tanh(s / SCALE))
    assert repr(capped).endswith("return SCALE * np.tanh(s / SCALE)")
    assert repr(capped.derivative) == (
        "def score_derivative(s):\n"
        "    t0 = np.tanh(s / SCALE)\n"
        "    return SCALE * ((1.0 - t0 * t0) * (1.0 / SCALE))"
    )


# --- keys and the look-up ------------------------------------------------------------


def made(slope, steps=2, causal=True):
    def f(s, i, j):
        for _ in range(steps):
            s = s + slope * abs(i - j)
        return np.where(j <= i, s, -np.inf) if causal else s

    return f


def test_numbers_are_arguments_and_constants_are_not():
    key = {
        v: lookup(made(*v))[0].key
        for v in ((0.5,), (0.25,), (1,), (0.5, 3), (0.5, 2, False))
    }
    assert key[0.5,] == key[0.25,]  # another number
    assert len(set(key.values())) == 4  # an int, other steps, another branch


def test_a_number_is_read_at_each_call():
    position = {
        "i": np.arange(4)[:, None],
        "j": np.arange(4)[None],
        "s": np.zeros((4, 4)),
    }
    for slope in (0.5, 2.0):
        expression, values = lookup(made(slope))
        (s,) = evaluate([expression.root], position, values, {}, np.float64)
        assert s[3, 0] == 6 * slope


def test_names_do_not_matter_and_literals_do():
    one, _ = lookup(lambda s, h, *, u: s + u[h] * 2.0, {"u": np.ones(3)})
    two, _ = lookup(lambda s, h, *, w: s + w[h] * 2.0, {"w": np.zeros(9)})
    three, _ = lookup(lambda s, h, *, w: s + w[h] * 2.5, {"w": np.zeros(9)})
    assert one.key == two.key != three.key
    half, _ = lookup(lambda s, h, *, u: s + u[h] * 2.0, {"u": np.ones(3, np.float16)})
    assert half.key != one.key


def helper(x):
    return np.tanh(x / SCALE)


def test_helpers_and_globals_are_followed(monkeypatch):
    def f(s):
        return s + helper(s)

    expression, values = lookup(f)
    assert expression.number_values(values) == [0.37]
    monkeypatch.setitem(globals(), "SCALE", 0.9)
    again, values = lookup(f)
    assert again is expression
    assert again.number_values(values) == [0.9]


def test_partial_functions_and_arguments_by_place():
    def f(s, i, j, /, alpha, *, beta=2.0):
        return s - alpha * abs(i - j) * beta

    first, values = lookup(functools.partial(f, alpha=0.5))
    assert first.number_values(values) == [0.5, 2.0]
    again, values = lookup(functools.partial(f, alpha=0.25, beta=1.0))
    assert again is first
    assert again.number_values(values) == [0.25, 1.0]
    assert repr(first).endswith("return s - alpha * abs(i - j) * beta")
    scaled, values = lookup(functools.partial(lambda a, s: a * s, 3.0))
    assert scaled.number_values(values) == [3.0]


def test_an_exponent_closed_over_is_a_number_unless_it_is_whole():
    def power(n):
        return lambda s: abs(s) ** n

    first, values = lookup(power(1.5))
    assert first.number_values(values) == [1.5]
    assert lookup(power(2.5))[0] is first
    whole, _ = lookup((lambda n: lambda s: abs(s) ** n)(2.0))
    assert not whole.numbers
    assert repr(whole).endswith("t0 = abs(s)\n    return t0 * t0")


def test_what_is_printed_while_tracing_is_the_expression(capsys):
    lookup(lambda s, i, *, w: s + (print(w[i] + 2.0 * s) or 0), {"w": np.ones(3)})
    assert capsys.readouterr().out.splitlines()[0] == "w[i] + s * 2.0"


def test_a_warm_lookup_does_not_trace(monkeypatch):
    fn = made(0.125)
    first, _ = lookup(fn)
    monkeypatch.setattr(lookup_module, "trace", None)
    assert lookup(fn)[0] is first
    assert lookup(made(0.25))[0] is first  # made anew by its factory


def test_many_functions_do_not_pile_up():
    for k in range(300):
        lookup(expressions.function(f"s + {k}", "s"))
    assert len(lookup_module._plans) <= 256
    for steps in range(1, 40):
        lookup(made(0.5, steps))
    assert max(map(len, lookup_module._plans.values())) <= 16


def test_threads_find_one_expression():
    fn, found = made(0.75, 5), []
    threads = [
        threading.Thread(target=lambda: found.append(lookup(fn)[0].key))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


# --- operations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "np.square(s) + np.reciprocal(s + 5) - np.positive(s)",
        "s ** 0.5 + i ** 2 + s ** 0 + (i + 1) ** 2.0",
        "np.power(s, 3) / np.fabs(s)",
        "s + (i << 2) + (j >> 1) + np.left_shift(i, 1)",
        "np.where(np.logical_xor(i, j) | np.isnan(s), s, 0)",
        "s + np.ceil(j / 2) + np.log2(i + 1) + np.expm1(s)",
        "s + (i > 2) * 1.5 + (i % 2 == 0).astype(float)",
        "s + 7 // -2 + 7 % -2 + i // 0 + i % 0",
        "s + np.inf * (i > 100)",
        "s + 2 ** -1 + np.clip(3, 0, 2) + (i >= j) * 1",
        "abs(s)**1.5 + (i + 1)**-0.5 + 2.0**(-8 * (j + 1) / 4) + 1.1**(i - j)",
        "s**20 + np.float_power(i + 1, -2) + (i + 1.0)**j + np.power(s, 3.0)",
        "s % 0.7 + s // 0.7 + i % 1.5 + s // 1.0 + -0.3 % (i - 2.5) + s % 0.0",
        "sum(divmod(j, 4)) + sum(np.divmod(s, 0.3)) + sum(divmod(7, i + 1))",
        "np.round(s) + np.rint(3 * s) + np.round(s, 2) + np.around(j, -1) + s.round(1)",
        "np.trunc(4 * s) + np.fmin(s, np.nan) + np.fmax(s / 0, s) + np.fmin(i, j)",
        "np.logaddexp(s, i - j) + np.logaddexp(i, j) + np.logaddexp(-np.inf, s)",
        "np.hypot(s, i) + np.arctan2(s, i - 3) + np.cbrt(s) + np.log10(j + 1)",
        "np.tan(s) + np.reciprocal(i + 1.0)",
        "np.arcsinh(s) + np.arccosh(i) + np.arctanh(s / 9) + np.arcsin(s / 9)",
        "np.arccos(s / 9) + np.sinc((i - j) / 4) + np.heaviside(i - 4, 0.5)",
        "np.deg2rad(i) + np.radians(s) - np.rad2deg(s) + np.degrees(j)",
        "np.clip(s, None, 0) + np.clip(s, a_min=-1, a_max=None) + s.clip(0, 1)",
        "np.clip(s, min=-1, max=1) + np.where(np.isinf(s / (i - 3)), 1, 0)",
        "np.select([j < 3, j < 6], [s, -s]) + np.select([i > 3], [i], default=-1)",
        "np.where(np.isin(i - j, (0, 2, 5)), s, 0)",
        "np.where(True, 1.5, 0.0)",
        "s + ~i + ~(i - j) * 2 + (~j & 3) + np.invert(i) + ~(i > j)",
        "s + i.astype(np.int32) + s.astype(np.float16) * 0 + (i > j).astype(np.int64)",
        "np.select([np.bool_(True)], [2.5], 1.0)",
    ],
)
def test_operations_are_those_of_numpy(text):
    fn, given, named = expressions.function(text), expressions.variables(), {}
    fn = expressions.function(text, "s, i, j")
    expression, values = lookup(fn)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        direct = fn(**{n: given[n] for n in "sij"})
    (ours,) = evaluate([expression.root], given, values, named, np.float64)
    np.testing.assert_allclose(*np.broadcast_arrays(ours, direct), rtol=1e-14)


def test_floats_are_those_of_the_accumulator():
    expression, values = lookup(lambda s, i: s + SCALE * np.sqrt(i))
    given = {"s": np.float32([[1.0]]), "i": np.array([[2]])}
    (s,) = evaluate([expression.root], given, values, {}, np.float32)
    assert s.dtype == np.float32


def test_the_branch_not_taken_adds_no_nan():
    expression, values = lookup(
        lambda s: np.sqrt(np.where(s > 0, s, 0.0)) + np.where(s == 0, 1, np.sin(s) / s)
    )
    given = {"s": np.array([[0.0, -1.0, 4.0]])}
    slope = evaluate([expression.derivative.root], given, values, {}, np.float64)[0]
    assert np.isfinite(slope).all()


# --- tiles ---------------------------------------------------------------------------

WINDOW = 3


def share(fn, named=None, size=4, length=32, b=1):
    """(decided, uniform) tiles of a mask; each decision is right."""
    expression, values = lookup(fn, named, mask=True)
    decided = uniform = 0
    parameters = fn.__code__.co_varnames
    for i0, j0 in itertools.product(range(0, length, size), repeat=2):
        given = {"b": b, "i": i0 + np.arange(size)[:, None], "j": j0 + np.arange(size)}
        given = {n: x for n, x in given.items() if n in parameters}
        seen = np.broadcast_to(fn(**given, **(named or {})), (size, size))
        truth = True if seen.all() else None if seen.any() else False
        ranges = {"b": (b, b), "i": (i0, i0 + size - 1), "j": (j0, j0 + size - 1)}
        said = decide(expression, ranges, values, named)
        assert said is None or said is truth
        decided += said is not None
        uniform += truth is not None
    return decided, uniform


def test_tiles_of_masks_of_positions_are_all_decided():
    decided, uniform = share(lambda i, j: (i - j < WINDOW) & (j <= i))
    assert decided == uniform > 40
    prefix = {"prefix": np.array([2, 14, 5])}
    decided, uniform = share(
        lambda b, i, j, *, prefix: (j <= i) | (j < prefix[b]), prefix
    )
    assert decided == uniform > 40
    doc = {"doc": np.sort(np.random.default_rng(0).integers(0, 3, (2, 32)), axis=1)}
    decided, uniform = share(lambda b, i, j, *, doc: doc[b, i] == doc[b, j], doc)
    assert decided == uniform > 20


def test_a_tile_that_may_read_out_of_range_is_not_decided():
    short = {"doc": np.zeros(8, int)}
    expression, values = lookup(lambda i, j, *, doc: doc[i] == doc[j], short, mask=True)
    inside = {"i": (0, 7), "j": (0, 7)}
    assert decide(expression, inside, values, short) is True
    assert decide(expression, {"i": (8, 15), "j": (0, 7)}, values, short) is None


@pytest.mark.parametrize("op", ["//", "%"])
def test_whole_divisions_lie_in_their_intervals(op):
    fn = expressions.function(f"i {op} j == 0", "i, j")
    expression, values = lookup(fn, {}, mask=True)
    ends = [(a, b) for a in range(-6, 7, 2) for b in range(a, 7, 3)]
    for i, j in itertools.product(ends, ends):
        known = intervals(expression, {"i": i, "j": j}, values)
        (low, high), *_ = (
            found for n, found in known.items() if n.op in ("floordiv", "mod")
        )
        for x, y in itertools.product(range(i[0], i[1] + 1), range(j[0], j[1] + 1)):
            result = 0 if y == 0 else x // y if op == "//" else x % y
            assert low <= result <= high


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("i * 1000 - j > 0", True),
        ("i * j > 0", False),
        ("kind[i] + j > 0", True),
        ("kind[i] * 2 > 0", False),
    ],
)
def test_32_bits_are_proved(text, fits):
    fn = expressions.function(text, "i, j, *, kind=None")
    kind = np.ones(9, np.int16 if fits else np.int32)
    expression, values = lookup(fn, {"kind": kind}, mask=True)
    far = {"i": (0, 2**20), "j": (0, 2**20)}
    assert fits_int32(expression, far, values) == fits


# --- errors --------------------------------------------------------------------------

W = {"w": np.ones(4), "t": np.ones((3, 17)), "c": np.array(2.0)}
ERRORS = [
    (lambda s, i, j: s if i > j else -s, TypeError, r"np.where\(c, x, y\)"),
    (lambda s, i, j: s + (0 < i < j), TypeError, r"\(a < b\) & \(b < c\)"),
    (lambda s: np.spacing(s), TypeError, "np.spacing is not known here.* arccos, "),
    (lambda s: np.interp(s, [0, 1], [0, 1]), TypeError, "np.interp is not known"),
    (lambda s: np.where(s > 0), TypeError, r"write np.where\(c, x, y\)"),
    (lambda s: np.clip(s, 0, 1, out=s), TypeError, "np.clip: .*'out'"),
    (lambda s, j: s + np.float64(j), TypeError, "nor a NumPy scalar"),
    (lambda s, i: s if i in (1, 2) else 0, TypeError, r"np.isin\(x, \(1, 2\)\)"),
    (lambda s: s.max(), TypeError, "one number, which has no .max"),
    (lambda s, i, j: s[i, j], TypeError, "has no elements"),
    (lambda s: s / len(s), TypeError, "no length"),
    (lambda s: round(s), TypeError, r"write np.round\(x\)"),
    (lambda s: s @ s, TypeError, r"write a \* b"),
    (lambda s, i: s * 1j, TypeError, "complex in a traced expression, .*real"),
    (lambda s, i: s * i**-1, TypeError, r"write x\*\*-1.0, a float"),
    (lambda s, i, *, w: s + w[i % len(w)], TypeError, r"len\(w\): w can only be"),
    (lambda s, i, *, w: s + w.shape[0], TypeError, "w.shape: w can only be indexed"),
    (lambda s, i, *, w: s + np.take(w, i), TypeError, "w is an array: index it"),
    (lambda s, i, *, w: s + w @ w, TypeError, "w is an array: index it"),
    (lambda *x: x[0], TypeError, r"takes \* or \*\* arguments"),
    (lambda **x: x["s"], TypeError, r"takes \* or \*\* arguments"),
    (lambda s: random.random() * s, TypeError, "random, a module, .* NumPy, and math"),
    (lambda s: METHOD() * s, TypeError, "METHOD, a method, .*as a plain function"),
    (lambda s: np.linalg.norm(s), TypeError, "norm"),
    (lambda s: np.sum(s), TypeError, "sum"),
    (lambda s: math.exp(s), TypeError, r"np.f\(x\)"),
    (lambda s, i: s + TABLE[i], TypeError, "TABLE, a ndarray, .*by name"),
    (lambda s, i: s + THREE[i], TypeError, "THREE, a list"),
    (lambda s, i: s + (1.0, 2.0)[i], TypeError, "by name"),
    (lambda s, i, *, w: s + w[s], TypeError, r"not by a float: write x.astype\(int\)"),
    (lambda s, i, *, w: s + w[i, i], ValueError, r"takes 1 index, as in w\[b\], got 2"),
    (lambda s, i, *, w: s + w, TypeError, r"index it, as in w\[b\]"),
    (lambda s, i, *, w: w * 2 + s, TypeError, r"index it, as in w\[b\]"),
    (lambda s, i, *, w: np.exp(w), TypeError, "w is an array"),
    (lambda s, i, *, c: s + c[i], TypeError, "has no elements: leave the index out"),
    (lambda s, i, *, w: s + w[-1], ValueError, "count from the front"),
    (lambda s, i, *, w: s + w[i:], TypeError, "not by slice"),
    (lambda s, i, *, w: s + w.sum(), TypeError, "w.sum: w can only be indexed"),
    (lambda s, i, *, w: w, TypeError, "the result is an array"),
    (lambda s: None, TypeError, "return one expression"),
    (lambda s: (s, s), TypeError, "the result is a tuple"),
    (lambda s, i: i > 2, TypeError, r"np.where\(seen, s, -np.inf\)"),
    (lambda s, x: s, TypeError, r"asks for x: .* s \(score\), b \(batch entry\)"),
    (lambda s: s.sum(), TypeError, "sum"),
    (lambda s: ~s, TypeError, "booleans"),
    (lambda s: pow(s, 2, 5), TypeError, r"pow\(x, n, m\): write x\*\*n % m"),
    (lambda s: s.astype(np.uint8), TypeError, r"write x.astype\(int\), or x % 256"),
    (lambda s: s.astype(np.int16), TypeError, r"write x.astype\(int\)"),
    (lambda s: s.astype(str), TypeError, "astype takes int, float or bool, got <U0"),
    (lambda s: s.astype("some"), TypeError, "int, float or bool, got 'some'"),
    (lambda s: erf(s), TypeError, "^[^ ]* erf is not known here. "),
    (lambda s, *, w: s + (2**w)[0], TypeError, r"index it, as in w\[b\]"),
    (lambda s, *, w: s + (2 // w)[0], TypeError, r"index it, as in w\[b\]"),
    (lambda s, *, w: s + (w ^ 1)[0], TypeError, r"index it, as in w\[b\]"),
    (lambda s, *, w: s if 1 in w else 0, TypeError, r"index it, as in w\[b\]"),
    (lambda s, *, w: s + {w: 1}[w], TypeError, r"index it, as in w\[b\]"),
    (lambda s, *, w: s + w[w], TypeError, "by integers, not by the array w"),
    (lambda s, *, w: w.update(s) or s, TypeError, "w.update: w can only be indexed"),
    (lambda s, *, w: w.__setitem__(0, s), TypeError, r"be read, as in w\[b\]"),
    (lambda s, i: np.add(s, i, where=True), TypeError, "without other arguments"),
    (lambda s, i: np.add.reduce(s), TypeError, "only np.f"),
    (lambda s: np.asarray(s), TypeError, "cannot become an array"),
    (lambda s: min(s, 3), TypeError, "would need a value, .* np.minimum"),
    (lambda s, i: sum(s for _ in range(i)), TypeError, r"range\(\)"),
    (lambda s, i: s + {i: 1}[i], TypeError, "cannot be a key of a dict or set"),
    (lambda s, i: s + np.array([1.0, 2.0]), TypeError, "ndarray in a traced"),
    (lambda s: CUPY.tanh(s), TypeError, r"use np.f\(x\), for CuPy"),
    (lambda s: s + np.random.rand(), TypeError, "not the same in every call"),  # noqa: NPY002
    (lambda s: s + undefined, TypeError, "undefined"),  # noqa: F821
    (lambda s: [x for x in s], TypeError, "one number"),
    (lambda s: s + HELD[0][1], TypeError, "HELD, a tuple, is closed over"),
    (lambda s, i: s + TABLE[i], TypeError, "TABLE, an array, is closed over"),
    (lambda s: s + 2**70, TypeError, "64 bits"),
]


@pytest.mark.parametrize(("fn", "kind", "message"), ERRORS)
def test_errors_name_the_line(fn, kind, message):
    named = {n: x for n, x in W.items() if n in fn.__code__.co_varnames}
    with pytest.raises(kind, match=message) as raised:
        lookup(fn, named)
    place = f"{__file__}:{fn.__code__.co_firstlineno}: "
    assert str(raised.value).startswith(place)
    assert re.search(r"\n    \(lambda ", str(raised.value)), "the line itself"


@functools.wraps(len)
def decorated(s):
    return None


def test_errors_name_the_line_below_decorators():
    line = decorated.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match="return one expression") as raised:
        lookup(decorated)
    assert str(raised.value).startswith(f"{__file__}:{line}: ")
    assert "def decorated(s):" in str(raised.value)


def test_an_error_that_the_function_catches_is_raised():
    def f(s, i, j):
        try:
            return s if i > j else -s
        except TypeError:
            return s

    with pytest.raises(TypeError, match=r"write np.where\(c, x, y\)"):
        lookup(f)


def test_errors_of_masks():
    with pytest.raises(TypeError, match="a mask returns a boolean, got int"):
        lookup(lambda i, j: i - j, mask=True)
    with pytest.raises(TypeError, match="asks for s"):
        lookup(lambda s: s > 0, mask=True)
    with pytest.raises(TypeError, match="does not take the array doc"):
        lookup(lambda i, j: i > j, {"doc": np.ones(3)}, mask=True)


@pytest.mark.parametrize(
    "wrong",
    [
        np.tanh,
        "s",
        types.SimpleNamespace(),
        print,
        functools.partial(np.tanh),
    ],
)
def test_only_plain_functions(wrong):
    with pytest.raises(TypeError, match=r"plain function \(def or lambda\)"):
        lookup(wrong)


def test_an_array_is_not_called_as_a_position():
    with pytest.raises(TypeError, match="cannot be called i"):
        lookup(lambda s, *, i: s + i[0], {"i": np.ones(3)})


def test_an_index_out_of_range_is_an_error():
    expression, values = lookup(lambda s, i, *, w: s + w[i], {"w": np.ones(4)})
    given = {"s": np.zeros((6, 1)), "b": 0, "h": 1, "i": np.arange(6)[:, None], "j": 3}
    arguments = [expression.root], given, values, W, np.float64
    with pytest.raises(IndexError, match=r"w, of shape \(4,\), is read at 4 of axis 0"):
        evaluate(*arguments)
    hidden = np.arange(6)[:, None] < 4
    (s,) = evaluate(*arguments, lambda: hidden)
    assert s.shape == (6, 1)
