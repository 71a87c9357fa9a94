"""Softmax of small and of long rows on NumPy: plans, pieces, threads."""

import numpy as np
import pytest
import scipy.special

import cupyflash
from cupyflash._core import threads
from cupyflash._softmax.cpu import blocks
from cupyflash._softmax.cpu import softmax as softmax_cpu

FAMILY = ("softmax", "log_softmax", "logsumexp")
PIECE = softmax_cpu._PIECE
# Rows of more elements than are held as a whole.
LONG = 9 * PIECE


def random(size, seed=0, spread=10):
    return spread * np.random.default_rng(seed).normal(size=size)


def exact_softmax(x, scale=1):
    d = np.longdouble(scale) * x.astype(np.longdouble)
    e = np.exp(d - d.max())
    return e / e.sum()


@pytest.mark.parametrize("function", FAMILY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(LONG,), (2, LONG + 1), (300, 1000)])
def test_threads_do_not_change_bits(function, dtype, shape, monkeypatch):
    x = random(shape).astype(dtype)
    found = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(threads, "num_cores", lambda n=cores: n)
        found.append(getattr(cupyflash, function)(x, axis=-1))
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.5, 7.0])
@pytest.mark.parametrize("length", [LONG - 1, LONG, LONG + 1])
def test_edges_of_pieces(length, scale):
    x = random(length, spread=30)
    x[[0, PIECE - 1, PIECE, -1]] = 130, 131, 131.5, 132
    y = cupyflash.softmax(x, scale=scale)
    exact = exact_softmax(x, scale)
    seen = exact > 1e-300
    assert np.abs(y / exact - 1)[seen].max() <= 1e-15
    assert (y[~seen] <= 1.1e-300).all()


@pytest.mark.parametrize("far", [1e6, 1e12, 2.0**42, 1e15, 1e300])
@pytest.mark.parametrize("sign", [-1, 1])
def test_long_rows_far_from_zero(far, sign):
    x = random(LONG, spread=1) + sign * far
    y = cupyflash.softmax(x)
    assert np.abs(y / exact_softmax(x) - 1).max() <= 1e-15


def alike(length, below):
    """Rows of one number and 0, and the exact sums of their exponentials."""
    x = np.full((len(below), length), -np.array(below)[:, None])
    x[:, 0] = 0
    return x, 1 + (length - 1) * np.exp(x[:, 1].astype(np.longdouble))


@pytest.mark.parametrize("length", [12, 15, 16, 17, 23, 31, 63, 100, 103, 127, 128])
def test_short_rows_of_terms_that_are_all_alike(length):
    """Their roundings all have one sign: 1.4e-15 where sums had 16 terms in a row."""
    x, total = alike(length, np.random.default_rng(length).uniform(0, 4, 3000))
    score, log = x[:, 1], np.log(total)
    y = cupyflash.softmax(x, axis=1)[:, 1]
    exact = np.exp(score.astype(np.longdouble)) / total
    assert np.abs(y / exact - 1).max() <= 1e-15
    error = np.abs(cupyflash.logsumexp(x, axis=1) - log)
    assert (error / np.maximum(1, log)).max() <= 1e-15
    error = np.abs(cupyflash.log_softmax(x, axis=1)[:, 1] - (score - log))
    assert (error / np.maximum(1, log - score)).max() <= 1e-15


@pytest.mark.parametrize("method", ["auto", "safe", "online"])
def test_long_rows_of_terms_that_are_all_alike(method):
    """Hundreds of pieces: `online` was wrong by 1.6e-15."""
    for below in (0.55, 1.3, 2.1):
        x, total = alike(3_000_000, [below])
        y = cupyflash.softmax(x, axis=1, method=method)[0, 1]
        exact = np.exp(x[0, 1].astype(np.longdouble)) / total[0]
        assert abs(y / exact - 1) <= 1e-15


def test_logsumexp_of_narrow_numbers_near_zero():
    """Its digits do not cancel, however near."""
    rng = np.random.default_rng(0)
    sums = 1 + rng.choice([-1, 1], 20_000) * 10 ** -rng.uniform(0.5, 9, 20_000)
    first = rng.uniform(-3, -0.5, sums.size)
    x = np.stack([first, np.log(sums - np.exp(first))], axis=1).astype(np.float32)
    wide = x.astype(np.longdouble)
    exact = np.log1p(np.exp(wide[:, 1]) + np.expm1(wide[:, 0]))
    error = np.abs(cupyflash.logsumexp(x, axis=1) - exact)
    assert (error / np.spacing(np.abs(exact).astype(np.float32))).max() <= 1.5


def test_pieces_far_apart():
    """Each piece has a maximum of its own, up to thousands below that of the row."""
    x = random(LONG, spread=1) - np.repeat(1000.0 * np.arange(9), PIECE)
    y = cupyflash.softmax(x)
    exact = exact_softmax(x)
    assert np.abs(y[:PIECE] / exact[:PIECE] - 1).max() <= 1e-15
    assert (y[PIECE:] == 0).all()


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(
    ("dtype", "low", "top"), [("float32", 63, 128), ("float64", 511, 1024)]
)
def test_pieces_whose_factor_is_below_all_numbers(dtype, low, top, scale):
    """exp(low - top) is a normal number; exp(0 - top), which scales a piece, is not."""
    x = np.full(LONG, -np.inf, dtype)
    x[:10], x[-1] = low, top
    y = cupyflash.softmax(x / x.dtype.type(scale), scale=scale)
    exact = exact_softmax(x)
    bound = {"float32": 4e-7, "float64": 1e-15}[dtype]
    assert np.abs(y[:10] / exact[:10] - 1).max() <= bound


def test_long_rows_in_place():
    x = random((2, LONG))
    expected = cupyflash.softmax(x, axis=1)
    assert cupyflash.softmax(x, axis=1, out=x) is x
    np.testing.assert_array_equal(x, expected)


def test_long_row_of_special_values():
    x = random((5, LONG))
    x[0] = -np.inf
    x[1, 5] = np.inf
    x[2, PIECE] = np.nan
    x[3, : 2 * PIECE] = -np.inf
    x[4, PIECE // 2 :] = -np.inf
    y = cupyflash.softmax(x, axis=1)
    assert np.isnan(y[:3]).all()
    for row in (3, 4):
        there = x[row] > -np.inf
        assert (y[row][~there] == 0).all()
        np.testing.assert_allclose(
            y[row][there], exact_softmax(x[row][there]).astype(float), rtol=1e-15
        )


def test_long_row_with_where():
    x = random((2, LONG))
    where = np.random.default_rng(1).random(x.shape) < 0.5
    where[0, :PIECE] = False
    where[1] = False
    x[0, :10] = np.nan
    y = cupyflash.softmax(x, axis=1, where=where)
    assert (y[~where] == 0).all()
    np.testing.assert_allclose(
        y[0][where[0]], exact_softmax(x[0][where[0]]).astype(float), rtol=1e-15
    )


# --- rows across memory --------------------------------------------------------------

# (elements of a row, rows): few rows, a piece of all rows, groups of rows; the last one
# in one read.
ACROSS = [(40_000, 32), (1000, 300), (70, 9000), (30, 5000)]


def exact_columns(x):
    return np.stack([exact_softmax(column) for column in x.T], axis=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", ACROSS)
@pytest.mark.parametrize("spread", [1, 60])
def test_rows_across_memory(shape, dtype, spread):
    x = random(shape, spread=spread).astype(dtype)
    x[:, 3] += 1000
    y = cupyflash.softmax(x, axis=0)
    exact = exact_columns(x)
    bound = {"float32": 4e-7, "float64": 1e-15}[dtype]
    seen = exact > 2 * np.finfo(dtype).tiny
    assert np.abs(y / exact - 1)[seen].max() <= bound
    assert (y[~seen] <= 4 * np.finfo(dtype).tiny).all()
    again = x.copy()
    assert cupyflash.softmax(again, axis=0, out=again) is again
    np.testing.assert_array_equal(again, y)


@pytest.mark.parametrize("shape", ACROSS)
def test_rows_across_memory_keep_to_themselves(shape):
    """What one row holds changes no bit of the others, but for its own kind of sum."""
    x = random(shape, spread=1).astype(np.float32)
    odd = x.copy()
    odd[0, :4] = np.inf, -np.inf, np.nan, 1e30
    odd[:, 4] = -np.inf
    y = cupyflash.softmax(odd, axis=0)
    assert np.isnan(y[:, [0, 2, 4]]).all()
    assert y[0, 1] == 0
    assert y[0, 3] == 1
    assert (y[1:, 3] == 0).all()
    exact = exact_columns(x[:, 5:])
    assert np.abs(y[:, 5:] / exact - 1).max() <= 4e-7


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", ACROSS)
def test_functions_across_memory(function, dtype, shape):
    x = random(shape).astype(dtype)
    where = np.random.default_rng(1).random(shape) < 0.9
    bound = {"float16": 1e-3, "float32": 1e-6}[dtype]
    for options in ({}, {"where": where}, {"scale": 0.3}):
        y = getattr(cupyflash, function)(x, axis=0, **options)
        rows = np.ascontiguousarray(x.T)
        turned = {k: v.T if k == "where" else v for k, v in options.items()}
        expected = getattr(cupyflash, function)(rows, axis=1, **turned).T
        np.testing.assert_allclose(
            y.astype(float), expected.astype(float), rtol=bound, atol=bound * 1e-4
        )


def arrays():
    """Small arrays of many layouts."""
    for dtype in ("float16", "float32", "float64", "int32", ">f8"):
        x = random((3, 4, 30)).astype(dtype)
        yield from (
            x,
            x.T,
            x[::-1, ::2],
            x[..., :5],
            x.transpose(1, 0, 2),
            x[0, 0, 0:1],
        )
        yield from (np.broadcast_to(x[:1], x.shape), np.asfortranarray(x))


@pytest.mark.parametrize("function", FAMILY)
def test_small_arrays_have_the_same_bits(function):
    """As with `out`, which no plan is for."""
    call = getattr(cupyflash, function)
    for x in arrays():
        for axis in (None, *range(-x.ndim, x.ndim)):
            first, second = call(x, axis), call(x, axis)
            out = np.empty(np.shape(first), first.dtype)
            call(x, axis, out=out)
            np.testing.assert_array_equal(first, out)
            np.testing.assert_array_equal(second, out)


@pytest.mark.parametrize("function", FAMILY)
def test_plans_of_small_arrays_keep_no_values(function):
    call = getattr(cupyflash, function)
    x, other = random(20), random(20, seed=1)
    first = call(x)
    kept = np.array(first)
    second = call(other)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(first, second)


def test_equal_options_of_other_types_are_still_refused():
    x = random((3, 4))
    cupyflash.softmax(x, 1)
    cupyflash.logsumexp(x, 1, keepdims=True)
    for axis in (True, 1.0):
        with pytest.raises(TypeError, match="axis"):
            cupyflash.softmax(x, axis)
    with pytest.raises(TypeError, match="scale"):
        cupyflash.softmax(x, 1, scale=True)
    with pytest.raises(TypeError, match="keepdims"):
        cupyflash.logsumexp(x, 1, keepdims=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="scale"):
            cupyflash.softmax(x, 1, scale=np.nan)
        with pytest.raises(ValueError, match="method"):
            cupyflash.softmax(x, 1, method="fast")


def test_number_of_plans_is_bounded():
    for n in range(1, softmax_cpu._MOST_PLANS + 10):
        cupyflash.softmax(np.ones(n))
    assert len(softmax_cpu._plans) <= softmax_cpu._MOST_PLANS


def test_small_arrays_warn_of_nothing():
    with np.errstate(all="raise"):
        for x in (np.full(5, np.nan), np.full(5, -np.inf), np.array([0, np.inf])):
            for function in FAMILY:
                getattr(cupyflash, function)(x)


# --- a base that rounds nothing ------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 4e-7), ("float64", 1e-15)])
@pytest.mark.parametrize("shape", [(40, 3), (40, 30), (7, 5000), (1, LONG)])
@pytest.mark.parametrize("spread", [0.1, 3, 40])
@pytest.mark.parametrize("far", [0, 63.9, -0.1, -3000.0, 511.0, 70_000.0])
def test_rows_wherever_they_lie(shape, dtype, bound, spread, far):
    x = (random(shape, spread=spread) + far).astype(dtype)
    y = cupyflash.softmax(x, axis=-1)
    exact = np.stack([exact_softmax(row) for row in x])
    seen = exact > np.finfo(dtype).tiny
    assert y.dtype == dtype
    assert (np.abs(y - exact)[seen] <= bound * exact[seen]).all()
    assert (np.abs(y - exact)[~seen] <= 8 * np.finfo(dtype).smallest_subnormal).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("length", [5, 300, 3000])
def test_odd_rows_leave_the_others_their_bits(dtype, odd, length):
    x = random((6, length), spread=3).astype(dtype)
    expected = cupyflash.softmax(x, axis=-1)
    x[2, 1] = odd
    x[4] = odd
    with np.errstate(all="ignore"):
        theirs = scipy.special.softmax(x, axis=-1)
    y = cupyflash.softmax(x, axis=-1)
    for row in (0, 1, 3, 5):
        assert y[row].tobytes() == expected[row].tobytes()
    np.testing.assert_allclose(y, theirs, rtol=2e-5 if dtype == "float32" else 1e-13)


def test_rows_near_zero_make_no_difference(monkeypatch):
    """The quick way: no row has a base to subtract."""
    made = []
    original = softmax_cpu._exp_near

    def watched(x, m, block, is_zero):
        made.append(is_zero)
        return original(x, m, block, is_zero)

    monkeypatch.setattr(softmax_cpu, "_exp_near", watched)
    x = np.abs(random((50, 400), spread=3)).astype(np.float32)
    cupyflash.softmax(x, axis=-1)
    cupyflash.softmax(x - 1000, axis=-1)
    assert made == [True, False]


def test_a_row_has_one_result_beside_rows_with_a_base():
    x = np.abs(random((50, 400), spread=3)).astype(np.float32)
    alone = cupyflash.softmax(x, axis=-1)
    x[7] -= 1000
    beside = cupyflash.softmax(x, axis=-1)
    rows = np.arange(50) != 7
    assert alone[rows].tobytes() == beside[rows].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_in_place_with_a_base(dtype):
    x = random((30, 200)).astype(dtype) - 500
    expected = cupyflash.softmax(x, axis=-1)
    assert cupyflash.softmax(x, axis=-1, out=x) is x
    np.testing.assert_array_equal(x, expected)


# --- logsumexp of short rows in float64 ----------------------------------------------


_HAS_LONG_DOUBLES = np.finfo(np.longdouble).eps < 2.0**-60


@pytest.mark.skipif(not _HAS_LONG_DOUBLES, reason="nothing to compare with")
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("n", range(2, 17))
def test_logsumexp_of_short_rows(n, copies):
    """Right to 2 units in the last place, whether or not the maximum cancels."""
    rng = np.random.default_rng(n)
    spreads = ((1, 0), (3, 0), (0.3, 0), (1, -2), (1, -1.5), (0.5, -1.8), (10, -20))
    x = np.concatenate([rng.normal(at, by, (4000, n)) for by, at in spreads])
    terms = np.sort(x.astype(np.longdouble), -1)
    top = terms[:, -1]
    rest = np.exp(terms[:, :-1] - top[:, None]).sum(-1)
    exact = top + np.log1p(rest)
    unit = np.spacing(np.abs(exact).astype(float))
    y = cupyflash.logsumexp(np.tile(x, (copies, 1)), -1)[: len(x)]
    error = np.abs(y - exact) / unit
    assert error[np.abs(exact) > 2**-10].max() <= 2
    alone = [cupyflash.logsumexp(row) for row in x[::1000]]
    np.testing.assert_array_equal(alone, y[::1000])


def test_logsumexp_near_0():
    """There long doubles are the limit, if the platform has them."""
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(0)
    x = np.log(rng.dirichlet(np.ones(7), 200))
    y = cupyflash.logsumexp(x, -1)
    bound = 8 * float(np.finfo(np.longdouble).eps)
    with mpmath.workprec(200):
        for row, found in zip(x, y, strict=True):
            exact = mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(v)) for v in row))
            assert abs(mpmath.mpf(float(found)) - exact) <= bound, row


def test_the_smallest_weight_of_an_infinite_score():
    assert cupyflash.logsumexp([np.inf, 0.0], b=[5e-324, 1.0]) == np.inf


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("length", [1, 7, 8, 16, 17, 64])
def test_row_max(dtype, length):
    """As NumPy has it without a number to begin from, in rows and side by side."""
    x = np.random.default_rng(0).normal(size=(9, length)).astype(dtype)
    x[1], x[2, 0], x[3, -1], x[4, 0] = -np.inf, np.nan, np.inf, -np.inf
    for a in x, np.asfortranarray(x), x[::2]:
        expected = a.max(axis=1, keepdims=True)
        found = blocks.row_max(a)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("function", [cupyflash.softmax_vjp, cupyflash.log_softmax_vjp])
@pytest.mark.parametrize("dtypes", ["ff", "dd", "fd", "ee", "ed", "if"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 25), (300, 64), (70, 1500)])
def test_gradients_have_the_same_bits_on_every_way(rng, function, dtypes, shape):
    """Planned or not, into new memory or given one, one of the operands among it."""
    for axis in (0, 1, None):
        for order in "CF":
            y, dy = (
                np.asarray(3 * rng.normal(size=shape), d, order=order) for d in dtypes
            )
            first, later = (function(y, dy, axis=axis, scale=-0.5) for _ in range(2))
            out = np.empty_like(first)
            assert function(y, dy, axis=axis, scale=-0.5, out=out) is out
            twice = np.empty((2 * shape[0], shape[1]), first.dtype)[::2]
            function(y, dy, axis=axis, scale=-0.5, out=twice)
            results = [later, out, twice]
            for operand in (y, dy):
                if operand.dtype == first.dtype:
                    given = y.copy(order), dy.copy(order)
                    own = given[operand is dy]
                    function(*given, axis=axis, scale=-0.5, out=own)
                    results.append(own)
            for result in results:
                np.testing.assert_array_equal(result, first)
