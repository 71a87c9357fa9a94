"""The promised accuracy, for every method and dtype; and the measure itself."""

import accuracy
import mpmath
import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    FLOATS,
    LOGSUMEXP_RELATIVE,
    LOGSUMEXP_ULPS,
    TF32_ATTENTION,
    assert_as_accurate,
    assert_same_specials,
    dtype_of,
    max_error,
    relative_error,
    ulps,
    wide,
)
from placing import place

import cupyflash

STABLE = ("auto", "safe", "online", "tiled")
SPREADS = {"float64": (4, 20, 60, 87, 700)}
LENGTHS = (1, 3, 1000, 65536)


def rows(rng, kind, n, dtype):
    """Rows of one kind, in float64: `kind` is a spread or a name."""
    count = 64 if n <= 3 else 8 if n <= 1000 else 2
    if isinstance(kind, (int, float)):
        x = rng.uniform(-kind, 0, size=(count, n))
        x[:, 0] = 0
    elif kind == "offset":
        x = rng.normal(size=(count, n)) + 1e4
    elif kind == "one-hot":
        x = rng.normal(size=(count, n)) - 40
        x[np.arange(count), rng.integers(n, size=count)] = 0
    else:
        x = np.broadcast_to(rng.normal(size=(count, 1)) * 5, (count, n))
    return x.astype(dtype_of(dtype))


CASES = [
    (dtype, kind, n)
    for dtype in FLOATS
    for kind in (*SPREADS.get(dtype, (4, 20, 60, 87)), "offset", "one-hot", "equal")
    for n in LENGTHS
]


@pytest.mark.parametrize(("dtype", "kind", "n"), CASES)
def test_softmax(xp, rng, dtype, kind, n):
    x = rows(rng, kind, n, dtype)
    exact = oracle.softmax(x, 1)
    for method in STABLE:
        y = cupyflash.softmax(place(xp, x), 1, method=method)
        assert relative_error(y, exact, dtype) <= BOUNDS["softmax"][dtype], method


@pytest.mark.parametrize(("dtype", "kind", "n"), CASES)
def test_logsumexp(xp, rng, dtype, kind, n):
    x = rows(rng, kind, n, dtype)
    exact, _ = oracle.logsumexp(x, 1)
    y = cupyflash.logsumexp(place(xp, x), 1)
    if dtype in LOGSUMEXP_ULPS:
        assert ulps(y, exact, x.max(1), dtype) <= LOGSUMEXP_ULPS[dtype]
    else:
        size = np.maximum(np.abs(exact), np.abs(wide(x.max(1))))
        size = np.maximum(size, float(accuracy.finfo(x.dtype).tiny))
        error = np.abs(wide(y) - exact)
        assert np.all(error <= LOGSUMEXP_RELATIVE[dtype] * size)
    if n == 1:
        np.testing.assert_array_equal(wide(y), wide(x[:, 0]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 2, (0, 2)])
def test_softmax_over_other_axes(xp, rng, dtype, axis):
    x = (rng.uniform(-60, 0, size=(90, 5, 70))).astype(dtype_of(dtype))
    exact = oracle.softmax(x, axis)
    for method in STABLE:
        y = cupyflash.softmax(place(xp, x), axis, method=method)
        assert relative_error(y, exact, dtype) <= BOUNDS["softmax"][dtype], method


def exact_in_digits(x):
    """Softmax and logsumexp of float64 rows in exact digits, as long doubles."""

    def rounded(value):
        head = float(value)
        return np.longdouble(head) + np.longdouble(float(value - head))

    soft, log = np.empty(x.shape, np.longdouble), np.empty(len(x), np.longdouble)
    # log(1 + 1e-300) needs as many digits as that has zeros.
    with mpmath.workdps(340):
        for i, row in enumerate(x):
            terms = [mpmath.exp(mpmath.mpf(float(v))) for v in row]
            total = mpmath.fsum(terms)
            soft[i] = [rounded(t / total) for t in terms]
            log[i] = rounded(mpmath.log(total))
    return soft, log


@pytest.mark.parametrize("kind", [4, 87, 700, "offset", "one-hot", "equal"])
@pytest.mark.parametrize("n", [1, 3, 1000])
def test_against_mpmath(xp, rng, kind, n):
    """The oracle, and through it every other test, stands on this one."""
    x = rows(rng, kind, n, "float64")[:4]
    soft, log = exact_in_digits(x)
    np.testing.assert_allclose(oracle.softmax(x, 1), soft, rtol=1e-17)
    np.testing.assert_allclose(oracle.logsumexp(x, 1)[0], log, rtol=1e-17, atol=1e-17)
    for method in STABLE:
        y = cupyflash.softmax(place(xp, x), 1, method=method)
        assert relative_error(y, soft, "float64") <= BOUNDS["softmax"]["float64"]
    y = cupyflash.logsumexp(place(xp, x), 1)
    assert ulps(y, log, x.max(1), "float64") <= LOGSUMEXP_ULPS["float64"]


@pytest.mark.parametrize("kind", [4, 20, 60, 87, "offset", "one-hot", "equal"])
@pytest.mark.parametrize("n", LENGTHS)
def test_float64_is_exact_enough_for_narrower_types(rng, kind, n):
    """The oracle in float64 is 2^10 times as exact as what it judges of float32."""
    x, far = rows(rng, kind, n, "float32"), 2.0**-10
    dy = rng.normal(size=x.shape).astype(np.float32)

    def both(function, *given):
        reals = (np.float64, np.longdouble)
        found = [getattr(oracle, function)(*given, 1, real=real) for real in reals]
        return [y[0] if function == "logsumexp" else y for y in found]

    fast, exact = both("softmax", x)
    assert fast.dtype == np.float64
    assert relative_error(fast, exact, "float32") <= far * BOUNDS["softmax"]["float32"]
    y = exact.astype(np.float32)
    fast, exact = both("logsumexp", x)
    bound = far * LOGSUMEXP_ULPS["float32"]
    assert ulps(fast, exact, x.max(1), "float32") <= bound
    unit = far * 2.0**-24
    fast, exact = both("log_softmax", x)
    assert max_error(fast, exact) <= unit * max(1, float(np.abs(x).max()))
    for function in ("softmax_vjp", "log_softmax_vjp"):
        fast, exact = both(function, y, dy)
        assert max_error(fast, exact) <= unit * float(np.abs(dy).max())


SHAPES = {
    "square": ((2, 4, 300, 64), (2, 4, 300, 64), {}),
    "causal": ((2, 4, 300, 64), (2, 2, 300, 64), {"causal": True}),
    "long": ((1, 1, 40, 128), (1, 1, 3000, 128), {}),
    "narrow": ((1, 3, 200, 16), (1, 1, 500, 16), {"window": (100, 20)}),
    "one query": ((4, 8, 1, 64), (4, 2, 1000, 64), {}),
    "softcap": ((1, 2, 130, 32), (1, 2, 130, 32), {"softcap": 20.0}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_attention(xp, rng, shape, dtype):
    q_shape, k_shape, options = SHAPES[shape]
    q, k, v = (
        rng.normal(size=s).astype(dtype_of(dtype)) for s in (q_shape, k_shape, k_shape)
    )
    real = np.longdouble if dtype == "float64" else np.float64
    exact, exact_lse, _ = oracle.attention(q, k, v, real=real, **options)
    size = float(np.abs(exact).max())
    placed = [place(xp, x) for x in (q, k, v)]
    for method in STABLE:
        out, lse = cupyflash.attention(
            *placed, method=method, return_lse=True, **options
        )
        assert max_error(out, exact) <= BOUNDS["attention"][dtype] * size, method
        bound = 1e-14 if dtype == "float64" else 4e-6
        assert max_error(lse, exact_lse) <= bound, method
    if dtype == "float32":
        out = cupyflash.attention(*placed, precision="tf32", **options)
        assert max_error(out, exact) <= TF32_ATTENTION * size


# --- the measure ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_part_in_a_thousand_is_refused(rng, dtype):
    exact = rng.normal(size=1000)
    standard = exact.astype(dtype)
    assert_as_accurate(standard, standard, exact)
    wrong = (exact * 1.001).astype(dtype)
    with pytest.raises(AssertionError, match="is above"):
        assert_as_accurate(wrong, standard, exact)
    one = standard.copy()
    one[np.abs(one).argmax()] *= 1.001
    with pytest.raises(AssertionError, match="is above"):
        assert_as_accurate(one, standard, exact)


def test_nan_is_refused(rng):
    exact = rng.normal(size=10)
    actual = exact.copy()
    actual[3] = np.nan
    with pytest.raises(AssertionError):
        assert_as_accurate(actual, exact, exact)
    with pytest.raises(AssertionError):
        assert_same_specials(actual, exact)


def test_infinities_must_agree_in_sign():
    with pytest.raises(AssertionError):
        assert_same_specials(np.array([np.inf]), np.array([-np.inf]))
    finite = assert_same_specials(np.array([np.inf, 1]), np.array([np.inf, 2]))
    np.testing.assert_array_equal(finite, [False, True])


def test_relative_errors_of_small_entries_count():
    """A softmax may be right to 1e-7 in all and wrong in its tail."""
    exact = np.array([1.0, 1e-30])
    assert relative_error(exact * [1, 1.01], exact, "float32") == pytest.approx(0.01)
    # Below the normal numbers nothing but smallness is asked.
    assert relative_error(np.array([1.0, 0]), np.array([1, 1e-39]), "float32") == 0
    with pytest.raises(AssertionError):
        relative_error(np.array([1.0, 1e-30]), np.array([1, 1e-39]), "float32")


def test_ulps():
    one = np.ones(1)
    assert ulps(one + 2**-52, one, one, "float64") == 1
    assert ulps(np.float32([1 + 2**-22]), one, one, "float32") == 2
    # Where the result cancels, the unit is that of the largest entry.
    assert ulps(np.array([2.0**-52]), np.zeros(1), one, "float64") == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_wide_keeps_every_value(dtype):
    x = np.array([1, -0.5, np.inf, 3.140625]).astype(dtype_of(dtype))
    np.testing.assert_array_equal(wide(x).astype(dtype_of(dtype)), x)
    assert wide(x).dtype == np.longdouble
    assert accuracy.finfo(dtype_of(dtype)).eps > 0
