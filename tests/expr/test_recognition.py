"""Functions are found again by code and by what they close over: attempts to fool it.

Each function is looked up, what it closes over changes, and it is looked up again: its
expression has the value of a call of the function itself, or it is refused.
"""

import enum
import functools
import math
import operator
import sys
import types

import numpy as np
import pytest

from cupyflash._expr import lookup as lookup_module
from cupyflash._expr.emit_numpy import evaluate
from cupyflash._expr.lookup import lookup

S = np.array([[-1.5, 0.25, 2.0]])
GIVEN = {"s": S, "i": np.array([[3]]), "j": np.array([[0, 1, 2]])}


def names_of(function):
    while isinstance(function, functools.partial):
        function = function.func
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def check(function):
    """Compare the expression found with a call."""
    expression, values = lookup(function)
    (found,) = evaluate([expression.root], GIVEN, values, {}, np.float64)
    given = {n: x for n, x in GIVEN.items() if n in names_of(function)}
    np.testing.assert_allclose(*np.broadcast_arrays(found, function(**given)))


def holder(value):
    """A function of one closed-over value, and what changes that."""

    def f(s):
        return s * value

    def change(other):
        nonlocal value
        value = other

    return f, change


def test_another_value_in_the_same_cell():
    f, change = holder(1.0)
    for value in (1.0, 2.5, 3, True, False, np.float32(0.1), 0.1, np.int8(-2), np.e):
        change(value)
        check(f)
    for wrong in (1j, "a", None, [1.0], {"a": 1.0}, np.ones(2), np.longdouble(2)):
        change(wrong)
        with pytest.raises(TypeError):
            lookup(f)
    change(2.0)
    check(f)


@pytest.mark.parametrize("value", [2**70, -(2**64), np.uint64(2**63)])
def test_an_integer_of_more_than_64_bits_is_refused(value):
    f, _ = holder(1)
    lookup(f)
    f, _ = holder(value)
    with pytest.raises((TypeError, ValueError), match="64 bits"):
        check(f)


def test_lambdas_made_in_a_loop():
    for c in (1.0, 2.0, 3.0):
        check(lambda s, c=c: s * c)
    for f in [(lambda s: s - c) for c in (1.0, 2.0)]:  # noqa: B023
        check(f)  # the last c


FACTOR = 2.0


def scaled(x):
    return x * FACTOR


def of_other_code(x):
    return x - FACTOR


def made(c):
    return lambda x: x * c


def test_globals_and_helpers_that_change(monkeypatch):
    def f(s):
        return scaled(s) + FACTOR

    check(f)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    check(f)
    monkeypatch.setitem(globals(), "FACTOR", 5)
    check(f)
    for helper in (of_other_code, made(2.0), made(3.0), np.tanh, np.sin, abs):
        monkeypatch.setitem(globals(), "scaled", helper)
        check(f)


def test_helpers_of_one_code_that_trade_places():
    first, second = made(2.0), made(3.0)

    def f(s):
        return first(s) + 0.5 * second(s)

    check(f)
    first, second = second, first
    check(f)
    first = second = made(5.0)
    check(f)
    first = made(1.0)
    check(f)


def test_a_builtin_that_a_global_hides(monkeypatch):
    def f(s):
        return abs(s)

    check(f)
    monkeypatch.setitem(globals(), "abs", lambda x: x * 3.0)
    check(f)
    monkeypatch.delitem(globals(), "abs")
    check(f)


def test_defaults_that_are_replaced():
    def f(s, alpha=2.0, *, beta=3.0, gamma=0.5):
        return s * alpha + beta**2 - gamma

    check(f)
    f.__defaults__ = (4.0,)
    check(f)
    f.__kwdefaults__ = {"gamma": 3.0, "beta": 0.25}  # in another order
    check(f)
    f.__code__ = (lambda s, alpha=0, *, beta=0, gamma=0: s + alpha - gamma).__code__
    check(f)


def test_partials_that_bind_other_names():
    def f(s, alpha=1.0, beta=2.0, *, gamma=4.0):
        return s * alpha + beta**2 - gamma

    for bound in (
        {"alpha": 5.0}, {"beta": 5.0}, {"gamma": 5.0},
        {"alpha": 5.0, "beta": 3.0}, {"beta": 5.0, "alpha": 3.0},
        {"gamma": 5.0, "beta": 3.0},
    ):  # fmt: skip
        check(functools.partial(f, **bound))
        check(functools.partial(functools.partial(f, **bound), alpha=0.5))

    def needs(s, *, alpha, beta):
        return s * alpha + beta

    check(functools.partial(needs, alpha=5.0, beta=1.0))
    check(functools.partial(needs, beta=5.0, alpha=1.0))
    changed = functools.partial(needs, alpha=1.0, beta=2.0)
    check(changed)
    changed.keywords["alpha"] = 7.0
    check(changed)


def test_constants_that_the_trace_has_used():
    def repeated(n):
        def f(s):
            for _ in range(n):
                s = s * 1.5
            return s

        return f

    for n in (2, 3, 2, 0, 5, np.int64(3)):
        check(repeated(n))

    def signed(zero):
        return lambda s: s * math.copysign(2.0, zero)

    for zero in (0.0, -0.0, 0.0, math.nan, -1.0):
        check(signed(zero))

    def of_tuple(t):
        return lambda s: s * t[0] + t[1]

    for t in ((1.0, 2.0), (2.0, 2.0), (2, 2), (-0.0, 1.0), (True, 0.5)):
        check(of_tuple(t))


def test_a_number_that_is_nan_is_not_traced_anew(monkeypatch):
    def f(nan):
        return lambda s: s * math.copysign(2.0, nan)

    check(f(math.nan))
    monkeypatch.setattr(lookup_module, "trace", None)
    check(f(math.nan))


class Config:
    slope = 0.5

    def score(s, i, j):
        return s - abs(i - j)


class Mode(enum.Enum):
    FAR = 0.5


CONFIG, BOUND = Config(), functools.partial(made(2.0), 1.0)
POLYNOMIAL = np.polynomial.Polynomial([1.0, 2.0])
VECTORIZED = np.vectorize(made(2.0))


def imports(s):
    import settings_of_a_test

    return s * settings_of_a_test.slope


def imports_a_name(s):
    from settings_of_a_test import slope

    return s * slope


REFUSED = [
    (lambda s: s * Config.slope, "Config, a class, is closed over: bind the number"),
    (lambda s: s * CONFIG.slope, "CONFIG, a Config, is closed over"),
    (lambda s: s * Mode.FAR.value, "Mode, a class, is closed over"),
    (lambda s: s * BOUND(), "BOUND, a partial, is closed over: .* plain function"),
    (lambda s: POLYNOMIAL(s), "POLYNOMIAL, a Polynomial, is closed over"),
    (lambda s: VECTORIZED(s), "VECTORIZED, a vectorize, is closed over"),
    (lambda s, a=[0.5]: s * a[0], "a, a list, is closed over"),
    (lambda s, *, a={"x": 0.5}: s * a["x"], "a, a dict, is closed over"),
    (imports, "settings_of_a_test is imported in a traced function"),
    (imports_a_name, "settings_of_a_test is imported in a traced function"),
    (lambda s: s * __import__("math").pi, r"__import__\(\) in a traced function"),
    (lambda s: s * eval("FACTOR"), r"eval\(\) in a traced function"),
    (lambda s: s * globals()["FACTOR"], r"globals\(\) in a traced function"),
    (lambda s: s * float(open("/dev/null").read() or 1), r"open\(\) in a traced"),
    (lambda s, j=2: s * j, "j has a default, but is the key: call it something else"),
    (lambda s, *, b=2.0: s * b, "b has a default, but is the batch entry"),
    (CONFIG.score, "plain function"),  # of which the class has a plain one
    (functools.partial(lambda s, b: s * b, b=2.0), "b bound, which is the batch entry"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_could_change_unseen_is_refused(function, message, monkeypatch):
    settings = types.ModuleType("settings_of_a_test")
    settings.slope = 0.5
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    check(Config.score)
    with pytest.raises(TypeError, match=message):
        lookup(function)


def test_what_never_changes_is_not_refused():
    def f(s):
        from math import pi

        import numpy

        return numpy.where(s > pi / 9, reduce((s, s, pi)), add(s, 1.0))

    def reduce(terms):
        return functools.reduce(operator.mul, terms)

    add = operator.add
    check(f)


def test_the_argument_of_a_kernel_of_points_has_no_default():
    def kernel(d2=1.0):
        return -d2

    with pytest.raises(TypeError, match="d2 has a default, but is the argument"):
        lookup(kernel, names=("d2",))
