"""Scores that are far from 0, sums that are nearly all one term, or infinite."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.special
from accuracy import dtype_of, to_host
from placing import place

import cupyflash

STABLE = ("auto", "safe", "online", "tiled")
INF, NAN = np.inf, np.nan


def exact(x, scale):
    """softmax and log_softmax of one row, from exact differences."""
    scores = [Fraction(scale) * Fraction(float(v)) for v in x]
    top = max(scores)
    d = np.array([long_double(max(s - top, Fraction(-12_000))) for s in scores])
    e = np.exp(d)
    rest = e.sum() - 1 if np.sum(e == 1) > 1 else e[e != 1].sum()
    far = np.array([float(s - top) if s - top > -(10**300) else -INF for s in scores])
    return e / (1 + rest), np.where(d > -11_000, d, far) - np.log1p(rest)


def long_double(fraction):
    high = float(fraction)
    return np.longdouble(high) + np.longdouble(float(fraction - Fraction(high)))


SIZES = [1.0, 1e4, 1e8, 1e9, 1e10, 1e12, 1e15, 1e17, 1e50, 1e200, 1e300]
SCALES = [0.3, -0.7, 1 / 3, 3.7, 0.125, 1e-3]


def far_row(rng, size, dtype):
    """Some numbers about `size`, neighbours of each other or further apart."""
    step = float(np.spacing(np.array(size, dtype)))
    return (size + step * rng.integers(-40, 40, 12)).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", STABLE)
def test_a_scale_of_far_doubles(xp, rng, method, size):
    """Of scale * x itself nothing but rounding errors would be left."""
    for scale in (*SCALES, 3.3 / size):
        x = far_row(rng, size, np.float64)
        x *= rng.choice([-1, 1])
        p, log_p = exact(x, scale)
        y = to_host(cupyflash.softmax(place(xp, x), scale=scale, method=method))
        seen = p > 1e-300
        np.testing.assert_allclose(y[seen], p[seen].astype(float), rtol=1e-15)
        y = to_host(cupyflash.log_softmax(place(xp, x), scale=scale, method=method))
        lost = 0 if xp is np else 1e-15
        np.testing.assert_allclose(y, log_p.astype(float), rtol=1e-15, atol=lost)


@pytest.mark.parametrize("shape", [(3, 300_000), (2000, 40), (40, 5000)])
def test_a_scale_of_far_rows_and_columns(xp, rng, shape):
    """Whatever holds them: rows, columns, long rows."""
    x = 1e15 + rng.integers(-200, 200, shape) / 8
    for axis in (0, 1):
        y = to_host(cupyflash.softmax(place(xp, x), axis, scale=0.3))
        z = cupyflash.softmax(x - 1e15, axis, scale=0.3)
        np.testing.assert_allclose(y, z, rtol=2e-15)


@pytest.mark.parametrize(
    ("dtype", "size", "bound"),
    [("float32", 3e8, 4e-7), ("float16", 6e4, 5e-4), ("bfloat16", 1e9, 3.95e-3)],
)
@pytest.mark.parametrize("method", STABLE)
def test_a_scale_of_far_narrow_numbers(xp, rng, method, dtype, size, bound):
    kind = dtype_of(dtype)
    step = float(np.spacing(np.float32(size))) if dtype == "float32" else None
    step = step or {"float16": 32.0, "bfloat16": 2.0**22}[dtype]
    for scale in (0.3, -0.7):
        x = (size + step * rng.integers(-9, 2, 12)).astype(kind)
        scale *= 8 / step
        p, _ = exact(x.astype(np.float64), scale)
        y = to_host(cupyflash.softmax(place(xp, x), scale=scale, method=method))
        seen = p > 1e-4
        error = np.abs(y.astype(np.float64) / p.astype(float) - 1)[seen]
        assert error.max() <= bound


@pytest.mark.parametrize("n", [1, 5, 33, 1000, 4099, 40_001])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_infinities_and_a_scale_of_any_size(xp, rng, dtype, n):
    """What fills the places beyond a row has no part in it, whatever the scale."""
    rows = rng.integers(-8, 9, (4, n)).astype(dtype)
    for scale in (0.3, -0.7, -1e-3, 1e-40, -1e40, 2.0**-100, 1e200, 0.0, -0.0):
        x = rows.copy()
        if scale:
            x[1, n // 2 + 1 :] = -np.copysign(INF, scale)
            d = x.astype(float) * np.sign(scale)
            e = np.exp(abs(scale) * (d - d.max(1, keepdims=True)))
        else:
            e = np.ones(x.shape)
        x[2, n // 3], x[3, n // 3] = NAN, np.copysign(INF, scale)
        y = to_host(cupyflash.softmax(place(xp, x), 1, scale=scale)).astype(float)
        expected = (e / e.sum(1, keepdims=True))[:2]
        rtol = {"float64": 2e-15, "float32": 6e-7, "float16": 1e-3}[dtype]
        np.testing.assert_allclose(y[:2], expected, rtol=rtol, atol=1e-7)
        assert np.isnan(y[2]).all()
        assert np.isnan(y[3, n // 3])


def test_a_scale_beyond_float32():
    """It is no infinity for narrow numbers, which times 0 would be NaN."""
    x = np.array([0, -1, 2.0], np.float16)
    for scale, expected in ((1e300, [0, 0, 1]), (1e-300, [1 / 3] * 3)):
        y = cupyflash.softmax(x, scale=scale)
        np.testing.assert_allclose(y.astype(float), expected, rtol=1e-3)


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_log_of_nearly_one(dtype, method):
    """On NumPy it keeps its digits, also in rows of many pieces."""
    for n in (2, 300_000):
        x = np.full((1, n), -1e9).astype(dtype_of(dtype))
        x[0, 0], x[0, -1] = 0, -40
        y = cupyflash.log_softmax(x, 1, method=method).astype(np.float64)
        bound = 4e-3 if dtype == "bfloat16" else 1e-6 if dtype == "float32" else 1e-15
        assert y[0, 0] == pytest.approx(-np.exp(-40.0), rel=bound)
        assert y[0, -1] == -40


def test_bfloat16_is_rounded_once(xp):
    """A number just above the middle of two goes up, also from float64."""
    wide = 0.5 + 2.0**-9 + 2.0**-40
    x = np.array([np.log(wide), np.log1p(-wide)])
    assert cupyflash.softmax(x)[0] > 0.5 + 2.0**-9
    y = to_host(cupyflash.softmax(place(xp, x), dtype="bfloat16"))
    assert float(y[0]) == 0.5 + 2.0**-8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", ["auto", "online", "safe"])
def test_the_log_of_nearly_one_on_a_gpu(cupy, dtype, method):
    """Right to a unit of 1, as the guide says: what is nearer to 0 may be 0."""
    for other in (-40.0, -17.0, -10.0):
        x = cupy.asarray([0.0, other], dtype=dtype)
        y = float(cupyflash.log_softmax(x, method=method)[0])
        exact = -np.log1p(np.exp(other))
        assert abs(y - exact) <= np.finfo(dtype).eps
        assert y <= 0


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_axes_of_scalars_as_scipy(xp, name):
    """0 and -1 are axes of a scalar to NumPy's reductions."""
    function, scipys = getattr(cupyflash, name), getattr(scipy.special, name)
    for axis in (None, 0, -1, ()):
        if name == "logsumexp" and axis == ():
            continue  # SciPy's is of one axis
        y = to_host(function(place(xp, np.asarray(3.0)), axis))
        assert y.shape == ()
        assert y == scipys(3.0, axis=axis)
    with pytest.raises(np.exceptions.AxisError, match="out of bounds"):
        function(place(xp, np.asarray(3.0)), 1)


INFINITE = {
    "a weight": ([0, 1e308], [INF, 1]),
    "a negative weight": ([0, 1e308], [-INF, 1]),
    "a score": ([INF, 800.0], [1, 2]),
    "a score of negative weight": ([INF], [-1.0]),
    "both signs": ([1.0, 2.0], [INF, -INF]),
    "no number": ([5.0, NAN], [1, INF]),
    "a weight of nothing": ([-INF, 0], [INF, 1]),
    "without weight": ([INF, 0], [0, 1]),
}


@pytest.mark.parametrize("case", INFINITE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, 5000])
def test_infinite_sums(xp, case, dtype, length):
    """What floating point makes of sum b exp(a), as in SciPy."""
    with np.errstate(all="ignore"):
        a, b = (np.array(v, dtype) for v in INFINITE[case])
        used = b != 0
        total = np.sum(b[used].astype(float) * np.exp(a[used].astype(float)))
    a = np.concatenate([a, np.full(length, -50, dtype)])
    b = np.concatenate([b, np.full(length, 1e-30, dtype)])
    log, sign = cupyflash.logsumexp(place(xp, a), b=place(xp, b), return_sign=True)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(to_host(log), np.log(abs(total)), 1e-6, 1e-40)
        np.testing.assert_array_equal(to_host(sign), np.sign(total))
        log = cupyflash.logsumexp(place(xp, a), b=place(xp, b))
        np.testing.assert_allclose(to_host(log), np.log(total), 1e-6, 1e-40)


def test_infinite_sums_of_complex(xp):
    """A real weight or scale is one of both parts."""
    a = place(xp, np.array([0, complex(INF, 0)]))
    assert to_host(cupyflash.logsumexp(a)) == complex(INF, 0)
    log, sign = cupyflash.logsumexp(a, return_sign=True)
    assert (to_host(log), to_host(sign)) == (INF, 1)
    a, b = np.array([1, complex(INF, 0.75)]), np.array([1.0, 2.0])
    y = to_host(cupyflash.logsumexp(place(xp, a), b=place(xp, b)))
    np.testing.assert_array_equal(y, complex(INF, np.pi / 4))


def test_weights_that_cancel_the_largest(rng):
    """What is left of the sum keeps its digits, on NumPy."""
    for m in (1.0, 10.0, 300.0, 700.0):
        rest = rng.uniform(-3, 3)
        y = cupyflash.logsumexp(np.array([m, m, rest]), b=np.array([1.0, -1.0, 1.0]))
        assert abs(y - rest) <= 2 * np.spacing(abs(rest))


@pytest.mark.parametrize("method", ["auto", "naive", "safe", "online", "tiled"])
def test_explain_says_what_runs_on_numpy(method):
    wide = np.zeros((40_000, 64))
    told = cupyflash.explain("softmax", wide, 0, method=method)
    assert told.kernel == ("tiled" if method == "auto" else method)
    told = cupyflash.explain("softmax", np.zeros(3, complex), method=method)
    assert told.kernel == ("naive" if method == "naive" else "tiled")
    for dtype in ("float16", "float32", "float64"):
        told = cupyflash.explain("softmax", np.zeros(3, dtype), method=method)
        computes_in = "float32" if dtype == "float16" else "float64"
        assert told.details["computes_in"] == (
            dtype if method == "naive" else computes_in
        )


def test_explain_says_what_logsumexp_computes_in():
    for dtype, computes_in in (("float16", "float64"), ("complex64", "complex128")):
        told = cupyflash.explain("logsumexp", np.zeros(3, dtype))
        assert told.details["computes_in"] == computes_in
