"""The softmax family against the oracle and SciPy, one body for NumPy and CuPy."""

import itertools

import numpy as np
import oracle
import pytest
import scipy.special
import unfused
from accuracy import (
    BOUNDS,
    FLOATS,
    assert_as_accurate,
    assert_same_specials,
    dtype_of,
    finfo,
    max_error,
    relative_error,
    to_host,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from placing import FORMS, empty, place

import cupyflash

METHODS = ("auto", "naive", "safe", "online", "tiled")
STABLE = ("auto", "safe", "online", "tiled")
SOFTMAXES = {"softmax": cupyflash.softmax, "log_softmax": cupyflash.log_softmax}
# Around a warp, a vector load, a block, and rows too long for one block's registers.
LENGTHS = (1, 2, 3, 31, 32, 33, 100, 127, 1000, 1024, 1025, 4099, 20_011)
# exp overflows just above this.
OVERFLOW = {"float16": 11.09, "bfloat16": 88.7, "float32": 88.72, "float64": 709.78}


def biting(rng, shape, dtype, spread=8.0):
    """Rows of normal scores, with some too large for exp and some nearly one-hot."""
    x = rng.normal(size=shape) * spread
    if x.ndim and x.size:
        rows = x.reshape(-1, x.shape[-1])
        rows[1::5] += 200.0
        rows[2::5, rng.integers(x.shape[-1])] += 40.0
        rows[3::5] = rows[3::5, :1]
    return x.astype(dtype_of(dtype))


def real_for(*dtypes):
    """The type of an oracle that judges results of these inputs in these dtypes."""
    return np.longdouble if "float64" in map(str, dtypes) else np.float64


def check(function, actual, x, dtype, exact=None, **options):
    """Compare with the oracle, by the measure of the function."""
    real = real_for(x.dtype, dtype)
    if exact is None:
        exact = getattr(oracle, function)(x, real=real, **options)
    assert actual.dtype == dtype_of(dtype)
    finite = assert_same_specials(actual, exact)
    actual = wide(actual, real)
    if not finite.all():
        actual, exact = actual[finite], exact[finite]
    if function == "softmax":
        assert relative_error(actual, exact, dtype) <= BOUNDS["softmax"][dtype]
    else:
        # Rounding of the scores, of the log and of the store: a few units of each.
        scores = np.abs(wide(x, real) * options.get("scale", 1.0))
        size = scores.max(initial=1.0, where=np.isfinite(scores))
        unit = float(finfo(dtype_of(dtype)).eps)
        work = min(unit, float(np.finfo(np.float32).eps))
        bound = unit * np.abs(exact) + 3 * work * size
        assert np.all(np.abs(actual - exact) <= bound)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", STABLE)
def test_softmax_at_every_length(xp, rng, method, dtype, n):
    x = biting(rng, (7, n), dtype)
    y = cupyflash.softmax(place(xp, x), -1, method=method)
    assert isinstance(y, xp.ndarray)
    check("softmax", y, x, dtype, axis=-1)


@pytest.mark.parametrize("n", [1, 33, 1000, 4099])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", STABLE)
def test_log_softmax(xp, rng, method, dtype, n):
    x = biting(rng, (7, n), dtype)
    y = cupyflash.log_softmax(place(xp, x), -1, method=method)
    check("log_softmax", y, x, dtype, axis=-1)
    plain = unfused.log_softmax(np, x, -1)
    assert_as_accurate(y, plain, oracle.log_softmax(x, -1))


@pytest.mark.parametrize("n", [8, 21, 55, 404, 2990, 3100])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", STABLE)
def test_log_softmax_of_almost_equal_scores(xp, rng, method, dtype, n):
    """Just above a log of 2, 4 and 8, where its last digit weighs most."""
    spread = 10.0 ** rng.uniform(-6, -1, size=(40, 1))
    shift = rng.choice([0.0, 0.3, 1.0, -2.0, 5.0], size=(40, 1))
    x = (shift + rng.standard_normal((40, n)) * spread).astype(dtype)
    for axis, scores in ((1, x), (0, np.ascontiguousarray(x.T))):
        y = cupyflash.log_softmax(place(xp, scores), axis, method=method)
        check("log_softmax", y, scores, dtype, axis=axis)


@pytest.mark.parametrize("n", [1, 33, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", STABLE)
def test_softmax_is_as_accurate_as_the_plain_one(xp, rng, method, dtype, n):
    x = biting(rng, (7, n), dtype)
    y = cupyflash.softmax(place(xp, x), -1, method=method)
    assert_as_accurate(y, unfused.softmax(np, x, -1), oracle.softmax(x, -1))


# --- naive ---------------------------------------------------------------------------


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_naive_follows_the_textbook(xp, rng, function, dtype):
    """Sums of n terms in the dtype of the input are wrong by up to n roundings."""
    n = 24
    x = rng.normal(size=(5, n)).astype(dtype_of(dtype))
    y = SOFTMAXES[function](place(xp, x), -1, method="naive")
    exact = getattr(oracle, function)(x, -1)
    assert y.dtype == dtype_of(dtype)
    bound = n * float(finfo(dtype_of(dtype)).eps) * max(1, np.abs(exact).max())
    assert max_error(y, exact) <= bound


@pytest.mark.parametrize("dtype", FLOATS)
def test_naive_overflows_where_its_dtype_does(xp, dtype):
    limit = OVERFLOW[dtype]
    for factor, overflows in ((0.95, False), (1.05, True)):
        x = np.array([0.0, limit * factor]).astype(dtype_of(dtype))
        y = wide(cupyflash.softmax(place(xp, x), method="naive"))
        assert bool(np.isnan(y).any()) == overflows
        for method in STABLE:
            y = wide(cupyflash.softmax(place(xp, x), method=method))
            assert np.isfinite(y).all()


def test_naive_sums_in_its_dtype(xp):
    """exp(8) fits in float16, the sum of 64 of them does not."""
    x = place(xp, np.full(64, 8.0, np.float16))
    np.testing.assert_array_equal(to_host(cupyflash.softmax(x)), 1 / 64)
    np.testing.assert_array_equal(to_host(cupyflash.softmax(x, method="naive")), 0)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int32, np.uint8])
def test_naive_of_integers_is_float64(xp, dtype):
    x = np.array([0, 1, 1, 0], dtype)
    y = cupyflash.softmax(place(xp, x), method="naive")
    assert y.dtype == np.float64
    assert relative_error(y, oracle.softmax(x), "float64") < 1e-15


def test_log_softmax_naive_is_log_of_sum_of_exp(xp):
    x = np.array([[1.0, 100.0]], np.float32)
    y = to_host(cupyflash.log_softmax(place(xp, x), -1, method="naive"))
    assert np.all(np.isneginf(y))


# --- axes, strides, out --------------------------------------------------------------

AXES = {
    0: [None, ()],
    1: [None, 0, -1, (0,), ()],
    2: [None, 0, 1, (0, 1), (-1, 0), ()],
    3: [None, 0, 1, -1, (0, 1), (0, 2), (1, 2), (2, 0, 1), ()],
    4: [None, 1, (1, 3), (0, 2), (0, -1), (1, 2), (0, 1, 3)],
}


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ndim", AXES)
def test_every_axis_of_every_layout(xp, rng, function, form, ndim):
    x = biting(rng, (3, 5, 4, 6)[:ndim], "float32", 3.0)
    for axis in AXES[ndim]:
        y = SOFTMAXES[function](place(xp, x, form), axis)
        assert y.shape == x.shape
        check(function, y, x, "float32", axis=axis)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axis", [0, 1, 2, (0, 2)])
def test_axes_of_every_method(xp, rng, method, axis):
    x = rng.normal(size=(6, 7, 40)).astype(np.float32)
    y = cupyflash.softmax(place(xp, x, "gaps"), axis, method=method)
    assert relative_error(y, oracle.softmax(x, axis), "float32") < 2e-6


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("axis", [(0, 2), [0, 2], np.int32(1), -2])
def test_axis_as_scipy_takes_it(xp, rng, function, axis):
    x = rng.normal(size=(3, 4, 5))
    expected = getattr(scipy.special, function)(
        x, tuple(axis) if isinstance(axis, list) else axis
    )
    y = SOFTMAXES[function](place(xp, x), axis)
    np.testing.assert_allclose(to_host(y), expected, rtol=2e-15, atol=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place(xp, rng, method, dtype):
    x = rng.normal(size=(5, 300)).astype(dtype_of(dtype))
    expected = to_host(cupyflash.softmax(place(xp, x), 1, method=method))
    for form in ("plain", "gaps"):
        buffer = place(xp, x, form)
        assert cupyflash.softmax(buffer, 1, out=buffer, method=method) is buffer
        np.testing.assert_array_equal(to_host(buffer), expected)


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("form", FORMS)
def test_out_of_any_strides(xp, rng, function, form):
    x = biting(rng, (4, 3, 9), "float32")
    out = empty(xp, x.shape, np.float32, form)
    assert SOFTMAXES[function](place(xp, x), 2, out=out) is out
    check(function, out, x, "float32", axis=2)


@pytest.mark.parametrize("form", ["rows", "gaps"])
def test_nothing_is_written_beside_out(xp, rng, form):
    x = rng.normal(size=(4, 6)).astype(np.float32)
    buffer = xp.full((10, 20), -7.0, np.float32)
    out = buffer[2:6, 3:9] if form == "rows" else buffer[1:9:2, 2:14:2]
    cupyflash.softmax(place(xp, x), 1, out=out)
    touched = np.zeros((10, 20), bool)
    (touched[2:6, 3:9] if form == "rows" else touched[1:9:2, 2:14:2])[...] = True
    assert np.all(to_host(buffer)[~touched] == -7)
    check("softmax", out, x, "float32", axis=1)


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("asked", FLOATS)
def test_dtype_and_out(xp, rng, given, asked):
    """One rounding, at the store: as good as the narrower of the two."""
    x = biting(rng, (5, 70), given)
    exact = oracle.softmax(x, 1)
    out = empty(xp, x.shape, dtype_of(asked))
    for y in (
        cupyflash.softmax(place(xp, x), 1, dtype=asked),
        cupyflash.softmax(place(xp, x), 1, dtype=dtype_of(asked)),
        cupyflash.softmax(place(xp, x), 1, out=out),
        cupyflash.softmax(place(xp, x), 1, out=out, dtype=asked),
    ):
        assert y.dtype == dtype_of(asked)
        assert relative_error(y, exact, asked) <= BOUNDS["softmax"][asked]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int64", "uint64"])
@pytest.mark.parametrize("method", STABLE)
def test_integers_do_not_wrap(xp, dtype, method):
    x = np.array([[0, 1, 1, 0, 1]], dtype)
    if dtype != "bool":
        x = np.array([[np.iinfo(dtype).min, np.iinfo(dtype).max, 3, 0, 3]], dtype)
    for name, function in SOFTMAXES.items():
        y = function(place(xp, x), -1, method=method)
        exact = getattr(oracle, name)(x.astype(np.float64), -1)
        assert y.dtype == np.float64
        # A GPU takes the log of the sum, in which the smallest terms are lost.
        lost = 0 if xp is np else 1e-15
        np.testing.assert_allclose(wide(y), exact, rtol=1e-15, atol=lost)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("method", METHODS)
def test_complex(xp, rng, dtype, method):
    x = (rng.normal(size=(3, 8)) + 1j * rng.normal(size=(3, 8))).astype(dtype)
    tolerance = 1e-5 if dtype == np.complex64 else 1e-13
    for name, function in SOFTMAXES.items():
        y = function(place(xp, x), -1, method=method)
        assert y.dtype == dtype
        expected = getattr(scipy.special, name)(x.astype(complex), -1)
        np.testing.assert_allclose(to_host(y), expected, rtol=tolerance, atol=tolerance)


# --- scale and where -----------------------------------------------------------------


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [0.0, -1.0, 0.125, 3, np.float32(-0.3)])
def test_scale(xp, rng, function, dtype, scale):
    x = biting(rng, (6, 50), dtype, 2.0)
    y = SOFTMAXES[function](place(xp, x), 1, scale=scale)
    exact = getattr(oracle, function)(x, 1, scale=float(scale))
    # The product scale * x is rounded before exp sees it, unless it is exact.
    unit = float(finfo(dtype_of(dtype)).eps)
    work = min(unit, 2.0**-23)
    size = float(np.abs(wide(x)).max() * abs(scale))
    bound = work * size if scale in (3, np.float32(-0.3)) else 0.0
    if function == "softmax":
        assert relative_error(y, exact, dtype) <= BOUNDS["softmax"][dtype] + bound
    else:
        bound = unit * np.abs(exact) + work * (2 * size + 4)
        assert np.all(np.abs(wide(y) - exact) <= bound)


@pytest.mark.parametrize("shape", [(6, 50), (2, 300_000), (600, 40)])
@pytest.mark.parametrize("method", STABLE)
def test_a_scale_costs_no_digits_on_numpy(rng, method, shape):
    """Scores of some hundreds, whose rounding alone would be 1e-14 of a weight."""
    x = 60 * rng.standard_normal(shape)
    for scale in (0.3, -1.7):
        y = cupyflash.softmax(x, 1, scale=scale, method=method)
        check("softmax", y, x, "float64", axis=1, scale=scale)
    huge = np.array([1e308, 1.0, -1e308])
    y = cupyflash.softmax(huge, scale=0.3, method=method)
    np.testing.assert_array_equal(y, [1, 0, 0])


def test_scale_is_applied_in_the_compute_dtype(xp):
    """40000 * 2 would overflow in float16."""
    x = np.array([40000.0, 39968.0], np.float16)
    for method in STABLE:
        y = to_host(cupyflash.softmax(place(xp, x), scale=2.0, method=method))
        np.testing.assert_array_equal(y, [1, 0])


@pytest.mark.parametrize("method", METHODS)
def test_scale_is_a_factor_of_x(xp, rng, method):
    x = rng.normal(size=(4, 30))
    y = to_host(cupyflash.softmax(place(xp, x), -1, scale=-0.5, method=method))
    z = to_host(cupyflash.softmax(place(xp, -0.5 * x), -1, method=method))
    np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", METHODS)
def test_where(xp, rng, function, dtype, method):
    """What is not selected never enters, whatever it holds; empty rows are not nan."""
    if method == "naive":
        x = rng.normal(size=(6, 40)).astype(dtype_of(dtype))
    else:
        x = biting(rng, (6, 40), dtype)
    where = rng.random((6, 40)) < 0.6
    where[4], where[5] = False, True
    poisoned = x.copy()
    poisoned[~where] = rng.choice([np.nan, np.inf, 3e4], (~where).sum())
    y = SOFTMAXES[function](
        place(xp, poisoned), 1, where=place(xp, where), method=method
    )
    host = wide(y)
    assert np.all(host[~where] == (0 if function == "softmax" else -np.inf))
    if method == "naive":
        exact = getattr(oracle, function)(x, 1, where=where)
        bound = 40 * float(finfo(dtype_of(dtype)).eps) * np.abs(exact[where]).max()
        assert max_error(host[where], exact[where]) <= bound
    else:
        check(function, y, x, dtype, axis=1, where=where)


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (1, 5), (4, 1), (3, 1, 1), (3, 4, 5), (1, 4, 5)]
)
@pytest.mark.parametrize("axis", [None, 1, (0, 2), ()])
def test_where_broadcasts(xp, rng, shape, axis):
    x = rng.normal(size=(3, 4, 5)).astype(np.float32)
    where = rng.random(shape) < 0.5
    for name, function in SOFTMAXES.items():
        y = function(place(xp, x), axis, where=place(xp, where))
        check(name, y, x, "float32", axis=axis, where=where)


def test_where_as_a_scalar(xp):
    x = place(xp, np.ones((2, 3)))
    np.testing.assert_array_equal(to_host(cupyflash.softmax(x, where=False)), 0)
    expected = np.full((2, 3), 1 / 6)
    np.testing.assert_allclose(to_host(cupyflash.softmax(x, where=True)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_where_of_any_strides(xp, rng, form):
    x = rng.normal(size=(4, 3, 6)).astype(np.float32)
    where = rng.random(x.shape) < 0.5
    y = cupyflash.softmax(place(xp, x, form), (0, 2), where=place(xp, where, form))
    check("softmax", y, x, "float32", axis=(0, 2), where=where)


# --- special values ------------------------------------------------------------------

INF, NAN = np.inf, np.nan
# row: (softmax, log_softmax, logsumexp), as SciPy has them
SPECIAL_ROWS = {
    "all -inf": [-INF, -INF, -INF],
    "some -inf": [0.0, -INF, 1.0],
    "one +inf": [0.0, INF, 1.0],
    "two +inf": [INF, 0.0, INF],
    "+inf and -inf": [INF, -INF, 0.0],
    "one nan": [0.0, NAN, 1.0],
    "nan and +inf": [INF, NAN, 1.0],
    "nan and -inf": [-INF, NAN, -INF],
    "all nan": [NAN, NAN, NAN],
    "largest": [3e38, 3e38, -3e38],
    "single": [5.0],
    "single -inf": [-INF],
    "single +inf": [INF],
    "single nan": [NAN],
}


def special_rows(row, dtype):
    """Two equal rows, short and long: not the same kernels take them."""
    with np.errstate(over="ignore"):
        x = np.array([SPECIAL_ROWS[row]] * 2).astype(dtype_of(dtype))
    return x, np.concatenate([x, np.repeat(x[:, -1:], 3000, axis=1)], axis=1)


@pytest.mark.parametrize("row", SPECIAL_ROWS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", STABLE)
def test_special_values_as_scipy(xp, row, dtype, method):
    for x in special_rows(row, dtype):
        for name, function in SOFTMAXES.items():
            with np.errstate(all="ignore"):
                exact = getattr(scipy.special, name)(x.astype(np.float64), -1)
                exact = exact.astype(x.dtype)  # -6e38 is -inf in float32
            for y in (
                function(place(xp, x), -1, method=method),
                function(place(xp, np.ascontiguousarray(x.T)), 0, method=method).T,
            ):
                finite = assert_same_specials(y, exact)
                np.testing.assert_allclose(
                    wide(y)[finite],
                    wide(exact)[finite],
                    rtol=2 * BOUNDS["softmax"][dtype],
                    atol=float(finfo(dtype_of(dtype)).tiny),
                )


@pytest.mark.parametrize("row", SPECIAL_ROWS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_of_logsumexp_as_scipy(xp, row, dtype):
    for x in special_rows(row, dtype):
        with np.errstate(all="ignore"):
            exact = scipy.special.logsumexp(x.astype(np.float64), axis=-1)
        for y in (
            cupyflash.logsumexp(place(xp, x), -1),
            cupyflash.logsumexp(place(xp, np.ascontiguousarray(x.T)), 0),
        ):
            finite = assert_same_specials(y, exact)
            np.testing.assert_allclose(
                wide(y)[finite], exact[finite], rtol=BOUNDS["softmax"][dtype]
            )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_special_values_under_where(xp, method, dtype):
    """Selected entries follow the rules of the shorter row; the others never enter."""
    x = np.array([[-INF, -INF, 5.0], [NAN, 1.0, 1.0], [INF, 2.0, 2.0], [1.0, NAN, INF]])
    where = np.array(
        [[True, True, False], [False, True, True], [False, True, True], [False] * 3]
    )
    args = place(xp, x.astype(dtype_of(dtype))), 1
    y = cupyflash.softmax(*args, where=place(xp, where), method=method)
    expected = [[NAN, NAN, 0], [0, 0.5, 0.5], [0, 0.5, 0.5], [0, 0, 0]]
    np.testing.assert_array_equal(wide(y), expected)
    y = cupyflash.log_softmax(*args, where=place(xp, where), method=method)
    half = -np.log(2)
    expected = [[NAN, NAN, -INF], [-INF, half, half], [-INF, half, half], [-INF] * 3]
    np.testing.assert_allclose(wide(y).astype(float), expected, rtol=1e-2)
    if method == "auto":
        y = cupyflash.logsumexp(*args, where=place(xp, where))
        np.testing.assert_allclose(
            wide(y).astype(float), [-INF, 1 - half, 2 - half, -INF], rtol=1e-2
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", METHODS)
def test_nan_stays_in_its_row(xp, rng, dtype, method):
    x = rng.normal(size=(9, 65)).astype(dtype_of(dtype))
    clean = to_host(cupyflash.softmax(place(xp, x), 1, method=method))
    x[4, 60] = NAN
    y = to_host(cupyflash.softmax(place(xp, x), 1, method=method))
    others = np.arange(9) != 4
    assert np.all(np.isnan(wide(y[4])))
    np.testing.assert_array_equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", FLOATS)
def test_naive_of_special_values_is_the_formula(xp, dtype):
    x = np.array([[-INF, 0, 1], [-INF] * 3, [NAN, 0, 0], [INF, 0, 0], [INF, INF, 0]])
    y = cupyflash.softmax(place(xp, x.astype(dtype_of(dtype))), 1, method="naive")
    with np.errstate(all="ignore"):
        expected = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    assert_same_specials(y, expected)
    y = cupyflash.log_softmax(place(xp, x.astype(dtype_of(dtype))), 1, method="naive")
    with np.errstate(all="ignore"):
        expected = x - np.log(np.exp(x).sum(1, keepdims=True))
    assert_same_specials(y, expected)


# --- no elements, one element --------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((0,), 0),
        ((0,), None),
        ((3, 0), 1),
        ((3, 0), 0),
        ((0, 3), 1),
        ((2, 0, 3), (0, 2)),
        ((2, 0, 3), ()),
    ],
)
def test_empty(xp, function, shape, axis, method):
    for dtype in (np.float16, np.float32, np.int8, complex):
        x = xp.empty(shape, dtype)
        y = SOFTMAXES[function](x, axis, method=method)
        assert isinstance(y, xp.ndarray)
        assert y.shape == shape
        assert y.dtype == (np.float64 if dtype == np.int8 else dtype)
    out = xp.empty(shape, np.float32)
    where = xp.ones(shape, bool)
    x = xp.empty(shape, np.float32)
    assert SOFTMAXES[function](x, axis, where=where, out=out, method=method) is out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axis", [None, ()])
def test_zero_dimensions(xp, axis, method):
    for dtype in FLOATS:
        x = place(xp, np.array(3.0).astype(dtype_of(dtype)))
        y = cupyflash.softmax(x, axis, method=method)
        log = cupyflash.log_softmax(x, axis, method=method)
        assert y.shape == log.shape == ()
        assert y.dtype == dtype_of(dtype)
        assert float(wide(y)) == 1
        assert abs(float(wide(log))) < 1e-2
        if xp is np:  # a scalar, as SciPy returns
            assert isinstance(y, np.generic)
        out = empty(xp, (), x.dtype)
        assert cupyflash.softmax(x, axis, out=out, method=method) is out
        assert float(wide(out)) == 1


def test_python_numbers_and_lists():
    assert cupyflash.softmax(3) == 1.0
    assert isinstance(cupyflash.softmax(3.0), np.float64)
    y = cupyflash.softmax([[1, 1], [2.0, 2]], axis=1)
    np.testing.assert_array_equal(y, 0.5)
    assert cupyflash.logsumexp([0, 0]) == np.log(2)
    assert cupyflash.logsumexp(2) == 2.0


def test_no_axes_means_rows_of_one(xp, rng):
    x = place(xp, rng.normal(size=(2, 3)))
    np.testing.assert_array_equal(to_host(cupyflash.softmax(x, ())), 1)
    np.testing.assert_array_equal(to_host(cupyflash.log_softmax(x, ())), 0)
    np.testing.assert_array_equal(to_host(cupyflash.logsumexp(x, ())), to_host(x))


# --- logsumexp -----------------------------------------------------------------------


def assert_like_scipy(actual, a, dtype, **options):
    """logsumexp, and its sign where asked for, as SciPy in float64."""
    given = {n: v for n, v in options.items() if n != "where"}
    if given.get("b") is not None:
        b = given["b"]
        given["b"] = b.astype(complex if b.dtype.kind == "c" else np.float64)
    a = a.astype(complex if a.dtype.kind == "c" else np.float64)
    with np.errstate(all="ignore"):
        expected = scipy.special.logsumexp(a, **given)
    pairs = [(actual, expected)]
    if options.get("return_sign"):
        pairs = list(zip(actual, expected, strict=True))
    for result, exact in pairs:
        assert result.dtype == dtype_of(dtype)
        assert result.shape == np.shape(exact)
        exact = np.asarray(exact)
        kind = result.dtype
        real = np.empty(0, kind).real.dtype if kind.kind == "c" else kind
        tolerance = 8 * float(finfo(real).eps)
        np.testing.assert_allclose(
            wide(result).astype(exact.dtype), exact, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (1,), ()])
def test_logsumexp(xp, rng, dtype, axis, keepdims):
    a = (rng.normal(size=(3, 4, 50)) * 5 + 20).astype(dtype_of(dtype))
    y = cupyflash.logsumexp(place(xp, a), axis, keepdims=keepdims)
    assert_like_scipy(y, a, dtype, axis=axis, keepdims=keepdims)
    if xp is np and axis is None and not keepdims:
        assert isinstance(y, np.generic)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_logsumexp_at_every_length(xp, rng, dtype, n):
    a = biting(rng, (6, n), dtype)
    y = cupyflash.logsumexp(place(xp, a), axis=1)
    assert_like_scipy(y, a, dtype, axis=1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_logsumexp_of_one_element(xp, rng, dtype, form):
    """It is that element, along either axis, and a number of any size."""
    a = (rng.normal(size=(2500, 1)) * 50.0).astype(np.dtype(dtype_of(dtype)))
    if dtype != "int8":
        a[:5, 0] = INF, -INF, NAN, -0.0, 1e4
    for axis, x in (1, a), (0, a.T):
        y, sign = cupyflash.logsumexp(place(xp, x, form), axis, return_sign=True)
        expected = np.dtype(np.float64) if dtype == "int8" else a.dtype
        assert y.dtype == sign.dtype == expected
        exact = a[:, 0].astype(expected) + np.zeros(1, expected)  # -0 becomes 0
        np.testing.assert_array_equal(wide(y), wide(exact))
        assert dtype == "int8" or not np.signbit(wide(y)[3])
        signs = np.where(np.isnan(wide(a[:, 0])), NAN, wide(a[:, 0]) > -INF)
        np.testing.assert_array_equal(wide(sign), signs)


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("b_shape", [(3, 20), (20,), (3, 1), (), (2, 3, 20), (2, 1, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_logsumexp_with_weights(xp, rng, dtype, b_shape, sign):
    a = rng.normal(size=(3, 20)).astype(dtype_of(dtype))
    b = np.asarray(rng.normal(size=b_shape) + 0.3).astype(dtype_of(dtype))
    if b.ndim and b.shape[-1] == 20:
        b[..., 3] = 0  # drops the element, even this one
        a[:, 3] = NAN
    axis = -1
    y = cupyflash.logsumexp(place(xp, a), axis, place(xp, b), return_sign=sign)
    exact, exact_sign = oracle.logsumexp(a, axis, b)
    result, got_sign = y if sign else (y, None)
    assert result.dtype == dtype_of(dtype)
    assert result.shape == exact.shape
    if not sign:
        exact = np.where(exact_sign < 0, NAN, exact)
    else:
        assert got_sign.dtype == result.dtype
        np.testing.assert_array_equal(wide(got_sign), exact_sign)
    finite = assert_same_specials(result, exact)
    # Terms of both signs cancel: the error is that of the largest partial sum.
    total = oracle.logsumexp(a, axis, np.abs(b))[0]
    unit = float(finfo(dtype_of(dtype)).eps)
    lost = np.exp(total - exact) * 8 * min(unit, 2.0**-23)
    bound = lost + unit * np.maximum(np.abs(exact), 1)
    error = np.abs(wide(result) - exact)
    assert np.all(error[finite] <= bound[finite])


B_ROWS = {
    "zero sum": ([0.0, 0.0], [1.0, -1.0]),
    "negative": ([0.0, 1.0], [1.0, -1.0]),
    "all zero weights": ([1.0, 2.0], [0.0, 0.0]),
    "inf dropped": ([INF, 2.0], [0.0, 1.0]),
    "-inf counted": ([-INF, 2.0], [5.0, 1.0]),
    "inf counted": ([INF, 2.0], [2.0, 1.0]),
    "negative inf": ([INF, 2.0], [-2.0, 1.0]),
    "inf against inf": ([INF, INF], [-2.0, 1.0]),
    "nan weight": ([1.0, 2.0], [NAN, 1.0]),
    "nan entry": ([NAN, 2.0], [1.0, 1.0]),
    "infinite weight": ([1.0, 2.0], [INF, 1.0]),
    "all -inf": ([-INF, -INF], [1.0, 1.0]),
}


@pytest.mark.parametrize("row", B_ROWS)
@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_of_special_values_as_scipy(xp, row, sign, dtype):
    a, b = (np.array(x, dtype) for x in B_ROWS[row])
    y = cupyflash.logsumexp(place(xp, a), 0, place(xp, b), return_sign=sign)
    assert_like_scipy(y, a, np.dtype(dtype).name, axis=0, b=b, return_sign=sign)


LARGE_WEIGHTS = {
    "two": ([1.0, 2.0], [1.7e308, 1.7e308]),
    "four zeros": ([0.0] * 4, [1e308] * 4),
    "of both signs": ([0.0, 0.0, 0.0], [1.7e308, 1.6e308, -1.5e308]),
    "a negative sum": ([0.0, 1.0, -1.0], [-1.7e308, -1.7e308, 1e308]),
    "zeros between": ([5.0, 1.0, 900.0, 1.0], [1.7e308, 1.7e308, 0.0, 1.7e308]),
    "a result near 0": ([-709.8, -709.8, -711.0], [1.1e308, 1.2e308, 0.3e308]),
    "far below the largest": ([3.0, -700.0, 3.0], [1.7e308, 1e10, 1.7e308]),
}


@pytest.mark.parametrize("repeats", [1, 30, 200_000])
@pytest.mark.parametrize("case", LARGE_WEIGHTS)
def test_finite_weights_whose_sum_overflows(xp, case, repeats):
    """Beside an ordinary row, and one with an infinite weight."""
    a, b = (np.tile(np.array(x), repeats) for x in LARGE_WEIGHTS[case])
    terms = b.astype(np.longdouble) * np.exp(a.astype(np.longdouble))
    if np.finfo(np.longdouble).eps > 2.0**-60:
        pytest.skip("needs long doubles")
    total = terms.sum()
    a = np.stack([a, np.zeros_like(a), np.zeros_like(a)])
    b = np.stack([b, np.ones_like(b), np.full_like(b, np.inf)])
    log, sign = cupyflash.logsumexp(
        place(xp, a), axis=1, b=place(xp, b), return_sign=True
    )
    exact = np.array([np.log(np.abs(total)), np.log(a.shape[1]), np.inf])
    np.testing.assert_array_equal(to_host(sign), [np.sign(total), 1, 1])
    found, exact = to_host(log), exact.astype(float)
    np.testing.assert_allclose(found, exact, rtol=1e-15, atol=1e-15)


def test_complex_weights_whose_size_overflows(xp):
    a, b = np.zeros(2), np.array([0.85e308 + 0.8e308j] * 2)
    found = cupyflash.logsumexp(place(xp, a), b=place(xp, b), return_sign=True)
    log, phase = map(to_host, found)
    np.testing.assert_allclose(log, np.log(2) + np.log(np.abs(b[0])), rtol=1e-15)
    np.testing.assert_allclose(phase, b[0] / np.abs(b[0]), rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_logsumexp_of_complex(xp, rng, dtype, sign, weighted):
    a = (rng.normal(size=(4, 9)) + 1j * rng.normal(size=(4, 9))).astype(dtype)
    b = (rng.normal(size=9) * (1 + 1j)).astype(dtype) if weighted else None
    y = cupyflash.logsumexp(
        place(xp, a), 1, None if b is None else place(xp, b), return_sign=sign
    )
    with np.errstate(all="ignore"):
        expected = scipy.special.logsumexp(
            a.astype(complex), 1, None if b is None else b.astype(complex),
            return_sign=sign,
        )  # fmt: skip
    tolerance = 1e-5 if dtype == np.complex64 else 1e-13
    for got, exact in zip(*((y, expected) if sign else ([y], [expected])), strict=True):
        np.testing.assert_allclose(to_host(got), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.int64])
def test_logsumexp_of_integers(xp, dtype):
    a = np.array([[1, 0, 1]], dtype)
    y = cupyflash.logsumexp(place(xp, a), 1)
    assert_like_scipy(y, a.astype(np.float64), "float64", axis=1)
    b = place(xp, np.array([1, 0, 2], dtype))
    y = cupyflash.logsumexp(place(xp, a), 1, b)
    expected = np.log(np.exp(1.0) * (1 + int(to_host(b)[2])))
    np.testing.assert_allclose(to_host(y), [expected])


@pytest.mark.parametrize("return_sign", [False, True])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((0,), 0), ((0,), None), ((3, 0), 1), ((3, 0), 0), ((0, 3), 1)],
)
def test_logsumexp_of_nothing(xp, shape, axis, keepdims, return_sign):
    a = np.empty(shape, np.float32)
    y = cupyflash.logsumexp(
        xp.empty(shape, np.float32), axis, keepdims=keepdims, return_sign=return_sign
    )
    if return_sign:
        y, sign = y
        # The sign of -inf, as in SciPy; that of 1.14 still has 0.
        np.testing.assert_array_equal(to_host(sign), np.full(y.shape, -1))
        assert (sign.shape, sign.dtype) == (y.shape, y.dtype)
    assert_like_scipy(y, a, "float32", axis=axis, keepdims=keepdims)


def test_logsumexp_of_nothing_over_two_axes(xp):
    """SciPy fails here."""
    y = cupyflash.logsumexp(xp.empty((2, 0, 3)), (0, 1))
    np.testing.assert_array_equal(to_host(y), [-INF] * 3)


def test_logsumexp_where(xp, rng):
    a = rng.normal(size=(5, 30)).astype(np.float32)
    where = rng.random(a.shape) < 0.5
    where[2] = False
    exact, sign = oracle.logsumexp(a, 1, where=where)
    poisoned = np.where(where, a, NAN).astype(np.float32)
    y = cupyflash.logsumexp(place(xp, poisoned), 1, where=place(xp, where))
    np.testing.assert_allclose(wide(y).astype(float), exact.astype(float), rtol=1e-6)
    b = rng.random(30).astype(np.float32)
    exact, sign = oracle.logsumexp(a, 1, b, where=where)
    y, got = cupyflash.logsumexp(
        place(xp, poisoned), 1, place(xp, b), return_sign=True, where=place(xp, where)
    )
    np.testing.assert_allclose(wide(y).astype(float), exact.astype(float), rtol=1e-6)
    np.testing.assert_array_equal(to_host(got), sign.astype(float))


@pytest.mark.parametrize("form", ["plain", "gaps", "reversed"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_logsumexp_out(xp, rng, form, keepdims):
    a = rng.normal(size=(4, 6, 5))
    expected = scipy.special.logsumexp(a, (0, 2), keepdims=keepdims)
    out = empty(xp, expected.shape, np.float64, form)
    got = cupyflash.logsumexp(place(xp, a, form), (0, 2), keepdims=keepdims, out=out)
    assert got is out
    np.testing.assert_allclose(to_host(out), expected)
    result, sign = cupyflash.logsumexp(
        place(xp, a), (0, 2), keepdims=keepdims, return_sign=True, out=out
    )
    assert result is out
    np.testing.assert_array_equal(to_host(sign), 1)


@pytest.mark.parametrize("form", FORMS)
def test_logsumexp_of_any_strides(xp, rng, form):
    a = rng.normal(size=(3, 4, 5, 6)).astype(np.float32)
    b = rng.random((4, 1, 6)).astype(np.float32)
    for axis in AXES[4]:
        y = cupyflash.logsumexp(place(xp, a, form), axis, place(xp, b, form))
        assert_like_scipy(y, a, "float32", axis=axis, b=b)


def test_small_sums_are_not_lost(xp):
    """log(exp(0) + exp(-20)) is 2e-9, not 0."""
    for dtype, x in ((np.float64, -30.0), (np.float32, -12.0)):
        y = cupyflash.logsumexp(place(xp, np.array([0.0, x], dtype)))
        assert abs(float(y) / np.log1p(np.exp(x)) - 1) < 1e-6


# --- vector-Jacobian products --------------------------------------------------------

VJPS = {
    "softmax_vjp": (cupyflash.softmax_vjp, cupyflash.softmax),
    "log_softmax_vjp": (cupyflash.log_softmax_vjp, cupyflash.log_softmax),
}


def vjp_error_is_small(dx, y, dy, exact, dtype, scale):
    """Rounding of the terms and of their sum, then of the store."""
    unit = float(finfo(dtype_of(dtype)).eps)
    work = min(unit, 2.0**-23)
    size = np.abs(wide(dy, exact.dtype.type)).max(initial=0) * max(1.0, abs(scale))
    # No wider type than double is there for exp(y), sum(dy) and their product, which
    # can be far larger than any dy.
    steps = 3 if dtype == "float64" else 1
    bound = steps * unit * np.abs(exact) + 8 * work * size * max(
        1, np.log2(max(y.size, 2))
    )
    tiny = float(finfo(dtype_of(dtype)).tiny)
    assert np.all(np.abs(wide(dx, exact.dtype.type) - exact) <= bound + tiny)


@pytest.mark.parametrize("name", VJPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 3, 33, 1000, 4099])
def test_vjp(xp, rng, name, dtype, n):
    vjp, forward = VJPS[name]
    x = rng.normal(size=(5, n)).astype(dtype_of(dtype))
    y = to_host(forward(place(xp, x), 1))
    dy = rng.normal(size=(5, n)).astype(dtype_of(dtype))
    dx = vjp(place(xp, y), place(xp, dy), 1)
    assert dx.dtype == dtype_of(dtype)
    exact = getattr(oracle, name)(y, dy, 1)
    vjp_error_is_small(dx, y, dy, exact, dtype, 1.0)


@pytest.mark.parametrize("name", VJPS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), ()])
def test_vjp_of_any_strides(xp, rng, name, form, axis):
    vjp, forward = VJPS[name]
    x, dy = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)[:, :, :, :]
    y = to_host(forward(place(xp, x), axis))
    dx = vjp(place(xp, y, form), place(xp, dy, form), axis, scale=-0.5)
    exact = getattr(oracle, name)(y, dy, axis, -0.5)
    vjp_error_is_small(dx, y, dy, exact, "float32", 0.5)
    out = empty(xp, x.shape, np.float32, form)
    assert vjp(place(xp, y), place(xp, dy), axis, scale=-0.5, out=out) is out
    np.testing.assert_allclose(to_host(out), to_host(dx), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VJPS)
@pytest.mark.parametrize("shape", [(), (5,), (4, 1), (1, 5)])
def test_dy_broadcasts(xp, rng, name, shape):
    vjp, forward = VJPS[name]
    y = to_host(forward(place(xp, rng.normal(size=(4, 5))), 1))
    dy = np.asarray(rng.normal(size=shape))
    dx = vjp(place(xp, y), place(xp, dy), 1)
    exact = getattr(oracle, name)(y, np.broadcast_to(dy, y.shape), 1)
    vjp_error_is_small(dx, y, dy, exact, "float64", 1.0)


@pytest.mark.parametrize("name", VJPS)
@pytest.mark.parametrize("axis", [1, None, (0, 1)])
def test_vjp_is_the_derivative(xp, rng, name, axis):
    """Central differences in float64."""
    vjp, forward = VJPS[name]
    x, dy, direction = rng.normal(size=(3, 4, 6))
    scale, h = 0.7, 1e-6

    def value(x):
        y = forward(place(xp, x), axis, scale=scale)
        return float((to_host(y) * dy).sum())

    slope = (value(x + h * direction) - value(x - h * direction)) / (2 * h)
    y = forward(place(xp, x), axis, scale=scale)
    dx = to_host(vjp(y, place(xp, dy), axis, scale=scale))
    assert abs((dx * direction).sum() - slope) < 1e-7 * max(1, abs(slope))


@pytest.mark.parametrize("dtype", FLOATS)
def test_vjp_of_masked_entries_is_zero(xp, rng, dtype):
    x = rng.normal(size=(3, 20)).astype(dtype_of(dtype))
    where = rng.random((3, 20)) < 0.6
    where[1] = False
    dy = place(xp, rng.normal(size=(3, 20)).astype(dtype_of(dtype)))
    for vjp, forward in VJPS.values():
        y = forward(place(xp, x), 1, where=place(xp, where))
        dx = wide(vjp(y, dy, 1))
        assert np.all(dx[~where] == 0)
        assert np.all(np.isfinite(dx))


@pytest.mark.parametrize("name", VJPS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3)])
def test_vjp_of_little(xp, name, shape):
    y = xp.ones(shape, np.float32)
    dx = VJPS[name][0](y, y)
    assert dx.shape == shape
    assert dx.dtype == np.float32


@pytest.mark.parametrize("name", VJPS)
def test_vjp_of_mixed_dtypes(xp, rng, name):
    vjp, forward = VJPS[name]
    y = to_host(forward(place(xp, rng.normal(size=(3, 8)).astype(np.float16)), 1))
    dy = rng.normal(size=(3, 8)).astype(np.float32)
    dx = vjp(place(xp, y), place(xp, dy), 1)
    assert dx.dtype == np.float32
    vjp_error_is_small(dx, y, dy, getattr(oracle, name)(y, dy, 1), "float32", 1.0)


# --- laws ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_sum_to_one(xp, rng, method, dtype):
    x = biting(rng, (20, 257), dtype)
    total = wide(cupyflash.softmax(place(xp, x), 1, method=method)).sum(1)
    assert np.abs(total - 1).max() <= BOUNDS["softmax"][dtype]


@pytest.mark.parametrize("method", STABLE)
def test_a_constant_changes_nothing(xp, rng, method):
    """Multiples of 1/8 and a shift of 4096 are exact, so the results are the same."""
    x = np.round(rng.normal(size=(8, 300)) * 8).astype(np.float32) / 8
    y = to_host(cupyflash.softmax(place(xp, x), 1, method=method))
    z = to_host(cupyflash.softmax(place(xp, x + np.float32(4096)), 1, method=method))
    np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("method", STABLE)
def test_order_goes_through(xp, rng, method):
    x = rng.normal(size=(4, 100))
    order = rng.permutation(100)
    y = to_host(cupyflash.softmax(place(xp, x), 1, method=method))[:, order]
    z = to_host(cupyflash.softmax(place(xp, x[:, order]), 1, method=method))
    np.testing.assert_allclose(y, z, rtol=2e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [5, 300, 5000])
def test_the_same_bits_in_every_run(xp, rng, method, n):
    x = place(xp, rng.normal(size=(20, n)).astype(np.float32))
    first = to_host(cupyflash.softmax(x, 1, method=method))
    for _ in range(5):
        again = to_host(cupyflash.softmax(x, 1, method=method))
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("n", [5, 300, 5000])
def test_rows_do_not_depend_on_each_other(xp, rng, function, n):
    x = rng.normal(size=(40, n)).astype(np.float32)
    other = rng.normal(size=(40, n)).astype(np.float32) * 100
    other[7] = x[7]
    function = getattr(cupyflash, function)
    y, z = (to_host(function(place(xp, given), 1)) for given in (x, other))
    np.testing.assert_array_equal(y[7], z[7])


def test_logsumexp_normalises(xp, rng):
    x = rng.normal(size=(5, 60))
    lse = to_host(cupyflash.logsumexp(place(xp, x), 1, keepdims=True))
    y = to_host(cupyflash.log_softmax(place(xp, x), 1))
    np.testing.assert_allclose(x - lse, y, rtol=1e-13)


# --- any shape, stride, axis and option ----------------------------------------------


@st.composite
def calls(draw):
    """(shape, axis, form, shape of where or None, seed)."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    ndim = len(shape)
    axis = draw(
        st.one_of(
            st.none(),
            st.lists(st.integers(0, max(ndim - 1, 0)), unique=True, max_size=ndim).map(
                tuple
            ),
            *([st.integers(-ndim, ndim - 1)] if ndim else []),
        )
    )
    where = draw(st.one_of(st.none(), st.lists(st.booleans(), max_size=ndim)))
    if where is not None:
        where = tuple(
            n if keep else 1
            for n, keep in zip(shape[ndim - len(where) :], where, strict=True)
        )
    return shape, axis, draw(st.sampled_from(FORMS)), where, draw(st.integers(0, 2**16))


@given(
    call=calls(),
    function=st.sampled_from(sorted(SOFTMAXES)),
    dtype=st.sampled_from(FLOATS),
    method=st.sampled_from(STABLE),
    scale=st.sampled_from((1.0, -0.5, 0.0)),
)
def test_any_call(xp, call, function, dtype, method, scale):
    shape, axis, form, where_shape, seed = call
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * 4).astype(dtype_of(dtype))
    where = None if where_shape is None else rng.random(where_shape) < 0.7
    y = SOFTMAXES[function](
        place(xp, x, form),
        axis,
        where=None if where is None else place(xp, where, form),
        scale=scale,
        method=method,
    )
    check(function, y, x, dtype, axis=axis, where=where, scale=scale)


@given(call=calls(), keepdims=st.booleans(), dtype=st.sampled_from(FLOATS))
def test_any_call_of_logsumexp(xp, call, keepdims, dtype):
    shape, axis, form, where_shape, seed = call
    rng = np.random.default_rng(seed)
    a = (rng.normal(size=shape) * 4).astype(dtype_of(dtype))
    where = None if where_shape is None else rng.random(where_shape) < 0.7
    y = cupyflash.logsumexp(
        place(xp, a, form),
        axis,
        keepdims=keepdims,
        where=None if where is None else place(xp, where, form),
    )
    exact, _ = oracle.logsumexp(a, axis, keepdims=keepdims, where=where)
    finite = assert_same_specials(y, exact)
    unit = float(finfo(dtype_of(dtype)).eps)
    actual, exact = wide(y)[finite], exact[finite]
    assert np.all(np.abs(actual - exact) <= 2 * unit * (4 + np.abs(exact)))


@pytest.mark.parametrize("number", [2, 2.5, True, 2j])
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "bool", "complex64", "complex128"])
@pytest.mark.parametrize("return_sign", [False, True])
def test_logsumexp_a_number_does_not_widen(xp, dtype, number, return_sign):
    host = (np.arange(6.0).reshape(2, 3) / 4).astype(dtype_of(dtype))
    x = place(xp, host, "plain")
    result = cupyflash.logsumexp(x, 1, number, return_sign=return_sign)
    log, sign = result if return_sign else (result, result)
    own = "float64" if dtype in ("int32", "bool") else dtype
    if isinstance(number, complex) and not own.startswith("complex"):
        own = "complex128" if own == "float64" else "complex64"
    real = {"complex64": "float32", "complex128": "float64"}.get(own, own)
    assert sign.dtype == dtype_of(own)
    assert log.dtype == dtype_of(real if return_sign else own)
    exact = np.log((number * np.exp(wide(host, np.float64))).sum(1))
    exact = exact.real if return_sign else exact
    np.testing.assert_allclose(to_host(log).astype(exact.dtype), exact, rtol=1e-2)


GRID = ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.skipif(
    tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 17), reason="older rules"
)
@pytest.mark.parametrize("dtype", GRID)
def test_logsumexp_has_the_dtypes_and_shapes_of_scipy(dtype):
    rng = np.random.default_rng(0)
    weights = [None, 2, 2.5, True, 2j, np.float32(2), np.float64(2)]
    weights += [np.ones((2, 3), other) for other in (*GRID, "int64")]
    for shape, axis, keepdims, return_sign, b in itertools.product(
        [(2, 3), (3,)], [None, 0, -1, (0,)], [False, True], [False, True], weights
    ):
        a = rng.normal(size=shape).astype(dtype)
        ours, theirs = (
            f(a, axis, b, keepdims, return_sign)
            for f in (cupyflash.logsumexp, scipy.special.logsumexp)
        )
        pairs = zip(ours, theirs, strict=True) if return_sign else [(ours, theirs)]
        for x, y in pairs:
            assert (x.dtype, x.shape) == (y.dtype, y.shape), (shape, axis, b)
            np.testing.assert_allclose(x, y, rtol=2e-2 if dtype == "float16" else 1e-4)
    # Where SciPy has its own way, and NumPy ours.
    one = np.ones((), dtype)
    assert cupyflash.logsumexp(one, keepdims=True).shape == one.sum(keepdims=True).shape
