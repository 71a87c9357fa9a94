"""Every tier of every softmax function, about each length where the table changes.

The thresholds are asked for (tests/support/tiers.py), so these tests follow the table.
The tables of other cards are tried on the one that is there: kernels without an
architecture of their own run on any.
"""

import dataclasses

import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    FLOATS,
    LOGSUMEXP_RELATIVE,
    LOGSUMEXP_ULPS,
    dtype_of,
    finfo,
    of_one_type,
    relative_error,
    to_host,
    ulps,
    wide,
)
from placing import empty, place
from test_softmax import check, real_for, vjp_error_is_small
from tiers import (
    FUNCTIONS,
    KINDS,
    inputs,
    kernel_of,
    launch_of,
    lengths_around,
    one_length_of_each_tier,
    thresholds,
)

import cupyflash

pytest.importorskip("cupy")

from cupyflash._cuda import device, plan_cache, runtime
from cupyflash._softmax.gpu import dispatch as softmax_gpu
from cupyflash._softmax.gpu import registry as softmax_registry

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _give_back(cupy):
    """Other processes test on the same device."""
    yield
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(params=["this card", "sm_80", "sm_75"])
def card(request, cupy, monkeypatch):
    """The table as it is, and as an older card would see it."""
    if request.param == "this card":
        return
    older, here = device.device_of_arch(request.param), runtime.device(0)
    if here.cc < older.cc:
        pytest.skip("kernels for a newer card do not run here")
    older = dataclasses.replace(older, num_sms=here.num_sms, nvrtc=here.nvrtc)
    monkeypatch.setattr(runtime, "device", lambda device_id: older)
    monkeypatch.setattr(softmax_gpu, "_plans", plan_cache.PlanCache())


def call(function, given, **options):
    """The function over the middle axis of its inputs."""
    return getattr(cupyflash, function)(*given, axis=1, **options)


def exact_results(function, given, dtype, **options):
    """What the oracle says of inputs whose results are in `dtype`."""
    real = real_for(given[0].dtype, dtype)
    exact = getattr(oracle, function)(*given, 1, real=real, **options)
    return exact[0] if function == "logsumexp" else exact


def assert_accurate(function, actual, given, dtype, exact=None, **options):
    """By the bounds of the tests that each function has elsewhere."""
    x = given[0]
    if exact is None:
        exact = exact_results(function, given, dtype, **options)
    if function in ("softmax", "log_softmax"):
        check(function, actual, x, dtype, exact, **options)
    elif function.endswith("_vjp"):
        vjp_error_is_small(actual, *given, exact, dtype, 1.0)
    elif dtype in LOGSUMEXP_ULPS:
        assert ulps(actual, exact, x.max(1), dtype) <= LOGSUMEXP_ULPS[dtype]
    else:
        actual, exact = of_one_type(actual, exact)
        size = np.maximum(np.abs(exact), np.abs(wide(x.max(1), exact.dtype.type)))
        size = np.maximum(size, float(finfo(x.dtype).tiny))
        assert np.all(np.abs(actual - exact) <= LOGSUMEXP_RELATIVE[dtype] * size)


class Judge:
    """Whether results of the same inputs are accurate; the same bits need one look."""

    def __init__(self, function, given, dtype):
        self.function, self.given, self.dtype = function, given, dtype
        self.exact = exact_results(function, given, dtype)
        self.accepted = set()

    def __call__(self, actual):
        host = to_host(actual)
        bits = host.tobytes()
        if bits not in self.accepted:
            assert_accurate(
                self.function, host, self.given, self.dtype, exact=self.exact
            )
            self.accepted.add(bits)


def same_bits(a, b):
    """Whether two arrays of the device are the same, NaN by NaN."""
    assert to_host(a).tobytes() == to_host(b).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_about_each_threshold(cupy, rng, function, dtype, kind):
    """Accurate; the same from run to run, at any start, and in place."""
    turn = FUNCTIONS.index(function) + FLOATS.index(dtype)
    for n in lengths_around(thresholds(cupy, function, dtype, kind), turn):
        shape = KINDS[kind].shape(n)
        given = inputs(rng, function, shape, dtype)
        assert_is_accurate = Judge(function, given, dtype)
        placed = [place(cupy, x) for x in given]
        result = call(function, placed)
        assert_is_accurate(result)
        same_bits(call(function, placed), result)
        shifted = [place(cupy, x, "shifted") for x in given]
        if function == "logsumexp":
            assert_is_accurate(call(function, shifted))
            continue
        out = empty(cupy, shape, dtype_of(dtype), "shifted")
        assert_is_accurate(call(function, shifted, out=out))
        assert call(function, shifted, out=shifted[0]) is shifted[0]
        same_bits(shifted[0], out)
        assert call(function, placed, out=placed[0]) is placed[0]
        same_bits(placed[0], result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_tier_as_other_cards_choose_it(cupy, rng, card, function, dtype, kind):
    """A length of each tier, by the table of that card."""
    for n in some_lengths(cupy, function, dtype, kind):
        given = inputs(rng, function, KINDS[kind].shape(n), dtype)
        result = call(function, [place(cupy, x) for x in given])
        assert_accurate(function, result, given, dtype)


def some_lengths(cupy, function, dtype, kind):
    """A length for each tier."""
    found = thresholds(cupy, function, dtype, kind)
    return one_length_of_each_tier(found).values()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_a_scale_in_each_tier(cupy, rng, function, dtype, kind):
    for n in some_lengths(cupy, function, dtype, kind):
        (x,) = inputs(rng, function, KINDS[kind].shape(n), dtype)
        for scale in (0.3, -1.7):
            y = call(function, [place(cupy, x)], scale=scale)
            check(function, y, x, dtype, axis=1, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_where_and_scale_in_each_tier(cupy, rng, function, dtype, kind):
    for n in some_lengths(cupy, function, dtype, kind):
        shape = KINDS[kind].shape(n)
        (x,) = inputs(rng, function, shape, dtype)
        where = rng.random(shape) < 0.7
        where[-1, :, -1] = False
        poisoned = x.copy()
        poisoned[~where] = np.nan
        options = {"where": place(cupy, where), "scale": -0.5}
        y = call(function, [place(cupy, poisoned)], **options)
        check(function, y, x, dtype, axis=1, where=where, scale=-0.5)
        # A mask that broadcasts along the row, and one that does along the rows.
        for part in (where[:, :1], where[:1, :, :1]):
            y = call(function, [place(cupy, x)], where=place(cupy, part))
            full = np.broadcast_to(part, shape)
            check(function, y, x, dtype, axis=1, where=full)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_and_where_in_each_tier_of_logsumexp(cupy, rng, dtype, kind):
    for n in some_lengths(cupy, "logsumexp", dtype, kind):
        shape = KINDS[kind].shape(n)
        (x,) = inputs(rng, "logsumexp", shape, dtype)
        where, b = rng.random(shape) < 0.7, rng.uniform(0.5, 2, shape).astype(x.dtype)
        y = call(
            "logsumexp", [place(cupy, x)], where=place(cupy, where), b=place(cupy, b)
        )
        exact = exact_results("logsumexp", (x,), dtype, b=b, where=where)
        y, exact = of_one_type(y, exact)
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(np.isfinite(y), finite)
        unit = float(np.finfo(dtype).eps)
        size = np.maximum(1, np.maximum(np.abs(exact), np.abs(x).max(1)))
        error = np.abs(y[finite] - exact[finite])
        assert np.all(error <= 4 * unit * size[finite])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "asked"),
    [("float16", "float32"), ("float32", "bfloat16"), ("float16", "float64"),
     ("float64", "float16"), ("int8", "float64")],
)  # fmt: skip
def test_mixed_dtypes_in_each_tier(cupy, rng, kind, given, asked):
    for n in some_lengths(cupy, "softmax", asked, kind):
        x = (rng.standard_normal(KINDS[kind].shape(n)) * 5).astype(dtype_of(given))
        y = cupyflash.softmax(place(cupy, x), 1, dtype=asked)
        exact = oracle.softmax(x, 1, real=real_for(x.dtype, asked))
        assert y.dtype == dtype_of(asked)
        assert relative_error(y, exact, asked) <= BOUNDS["softmax"][asked]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_do_not_depend_on_each_other(cupy, rng, function, dtype, kind):
    """What a row becomes is the same beside any other rows, NaN among them."""
    for n in some_lengths(cupy, function, dtype, kind):
        shape = KINDS[kind].shape(n)
        if shape[0] * shape[2] == 1:
            continue
        given = inputs(rng, function, shape, dtype)
        first = to_host(call(function, [place(cupy, x) for x in given]))
        row = (..., shape[2] - 1) if shape[0] == 1 else (shape[0] - 1, ...)
        other = [np.full_like(x, np.nan) for x in given]
        for x, poisoned in zip(given, other, strict=True):
            poisoned[row] = x[row]
        second = to_host(call(function, [place(cupy, x) for x in other]))
        same_bits(np.ascontiguousarray(second[row]), np.ascontiguousarray(first[row]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_special_rows_in_each_tier(cupy, rng, function, dtype, kind):
    """All -inf, a NaN, a +inf: only that row."""
    for n in some_lengths(cupy, function, dtype, kind):
        shape = KINDS[kind].shape(n)
        (x,) = inputs(rng, function, shape, dtype)
        rows = np.moveaxis(x, 1, 2).reshape(-1, n)  # a copy where inner is not 1
        for i, value in enumerate((-np.inf, np.nan, np.inf)):
            rows[i % len(rows), rng.integers(n)] = value
        if len(rows) > 3:
            rows[-1] = -np.inf
        x = np.moveaxis(rows.reshape(shape[0], shape[2], n), 2, 1)
        x = np.ascontiguousarray(x)
        y = call(function, [place(cupy, x)])
        host, exact = of_one_type(y, exact_results(function, (x,), dtype))
        np.testing.assert_array_equal(np.isnan(host), np.isnan(exact))
        np.testing.assert_array_equal(np.isinf(host), np.isinf(exact))


@pytest.mark.parametrize("kind", ["one row", "few rows", "many rows"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_scores_far_from_zero_in_each_tier(cupy, rng, function, dtype, kind):
    """Beyond what powers of two reach, for whole rows or for parts of them."""
    for n in some_lengths(cupy, function, dtype, kind):
        (x,) = inputs(rng, function, KINDS[kind].shape(n), dtype)
        for turn in range(3):  # also where there is one row
            far = x.astype(np.float64)
            far[turn::3] += 3e6
            far[(turn + 1) % 3 :: 3] -= 3e6
            far[(turn + 2) % 3 :: 3, : n // 2 + 1] = -1e9
            far = far.astype(x.dtype)
            y = call(function, [place(cupy, far)])
            check(function, y, far, dtype, axis=1)


@pytest.mark.parametrize("n", [6, 9, 10, 12, 16, 30, 100])
def test_logsumexp_of_a_dozen_doubles(cupy, rng, n):
    """k log(2) is rounded once: the compiler merged it with the sum that follows.

    Its rounding, which is added to the log, was then in the log already.
    """
    worst = 0.0
    for _ in range(6):
        x = rng.normal(size=(4001, n)) * np.exp(rng.uniform(-9, 3, size=(4001, 1)))
        near = x[::3]  # whose log is near 0
        near -= oracle.logsumexp(near, 1, keepdims=True, real=np.float64)[0]
        near[1::2] -= near[1::2].max(1, keepdims=True)
        y = to_host(cupyflash.logsumexp(place(cupy, x), 1))
        exact = exact_results("logsumexp", (x,), "float64")
        worst = max(worst, ulps(y, exact, x.max(1), "float64"))
    assert worst <= LOGSUMEXP_ULPS["float64"]


@pytest.mark.parametrize("kind", ["one row", "few rows", "many rows"])
def test_logsumexp_of_floats_about_what_is_summed_again(cupy, rng, kind):
    """Results about 0 and about 4 in size, where the kernel changes its mind."""
    for n in some_lengths(cupy, "logsumexp", "float32", kind):
        x = rng.standard_normal(KINDS[kind].shape(n))
        x -= oracle.logsumexp(x, 1, real=np.float64)[0][:, None]
        for result in (-4.5, -4.1, -2.0, -0.4, 0.0, 0.4, 2.0, 4.1, 4.2, 4.5):
            given = (x + result).astype(np.float32)
            y = call("logsumexp", [place(cupy, given)])
            assert_accurate("logsumexp", y, (given,), "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("vectors", "rows_per_sm"), [(275, 40), (4200, 3.2)])
def test_sums_of_rows_that_follow_each_other(cupy, rng, dtype, vectors, rows_per_sm):
    """A warp, or a block, goes on from row to row: each row is on its own.

    Usual rows, rows near 0, which are summed again, rows far from it and special ones.
    """
    length = vectors * 16 // dtype_of(dtype).itemsize + 3
    rows = int(rows_per_sm * runtime.device(0).num_sms)
    x = inputs(rng, "logsumexp", (rows, length, 1), dtype)[0][..., 0]
    kind = np.arange(rows) % 7
    near = x[kind == 1].astype(np.float64)
    x[kind == 1] = near - oracle.logsumexp(near, 1, real=np.float64)[0][:, None]
    x[kind == 2] += np.asarray(2000, x.dtype)
    for i, value in ((3, np.nan), (4, np.inf)):
        x[kind == i, rng.integers(length)] = value
    x[kind == 5] = -np.inf
    y = cupyflash.logsumexp(place(cupy, x), 1)
    same_bits(cupyflash.logsumexp(place(cupy, x), 1), y)
    special = np.where(kind == 3, np.nan, np.where(kind == 4, np.inf, -np.inf))
    usual = (kind < 3) | (kind == 6)
    np.testing.assert_array_equal(wide(y)[~usual], special[~usual])
    assert_accurate("logsumexp", to_host(y)[usual], (x[usual],), dtype)


@pytest.mark.parametrize(("mebibytes", "rows"), [(2.2, 12), (23, 2)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_parts_of_long_rows_that_follow_each_other(
    cupy, rng, function, dtype, mebibytes, rows
):
    """Blocks sum parts of one row while they write those of another.

    Usual rows, rows far from 0 and special ones, which must not touch each other.
    """
    length = int(mebibytes * 2**20) // dtype_of(dtype).itemsize | 3
    x = cupy.empty((rows, length), dtype_of(dtype))
    told = cupyflash.explain(function, x, 1)
    if told.kernel != "trail":
        pytest.skip(f"{told.kernel} takes this on this card")
    x = inputs(rng, function, (rows, length, 1), dtype)[0][..., 0]
    kind = np.arange(rows) % 5
    if dtype != "float16":
        x[kind == 1] -= np.asarray(3e6, x.dtype)
    for i, value in ((2, np.nan), (3, np.inf)):
        x[kind == i, rng.integers(length)] = value
    x[kind == 4] = -np.inf
    placed = place(cupy, x)
    y = getattr(cupyflash, function)(placed, 1)
    for _ in range(3):
        same_bits(getattr(cupyflash, function)(placed, 1), y)
    getattr(cupyflash, function)(placed, 1, out=placed)
    same_bits(placed, y)
    y = to_host(y)
    for i in np.flatnonzero(kind < 2)[-2:]:
        check(function, y[i : i + 1], x[i : i + 1], dtype, axis=1)
    for i in np.flatnonzero(kind > 1)[:3]:
        exact = getattr(oracle, function)(x[i : i + 1], 1)
        np.testing.assert_array_equal(np.isnan(wide(y[i : i + 1])), np.isnan(exact))
        np.testing.assert_array_equal(np.isinf(wide(y[i : i + 1])), np.isinf(exact))


@pytest.mark.parametrize(("mebibytes", "rows"), [(2.2, 12), (15, 3)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", ["softmax_vjp", "log_softmax_vjp"])
def test_gradients_of_parts_that_follow_each_other(
    cupy, rng, function, dtype, mebibytes, rows
):
    """A NaN stays in its row; the same from run to run, and in place."""
    length = int(mebibytes * 2**20) // dtype_of(dtype).itemsize | 3
    given = [x[..., 0] for x in inputs(rng, function, (rows, length, 1), dtype)]
    has_nan = np.arange(rows) % 3 == 1
    given[1][has_nan, rng.integers(length)] = np.nan
    placed = [place(cupy, x) for x in given]
    told = cupyflash.explain(function, *placed, 1)
    if told.kernel != "vjp_trail":
        pytest.skip(f"{told.kernel} takes this on this card")
    dx = getattr(cupyflash, function)(*placed, 1)
    for _ in range(3):
        same_bits(getattr(cupyflash, function)(*placed, 1), dx)
    getattr(cupyflash, function)(*placed, 1, out=placed[1])
    same_bits(placed[1], dx)
    dx = to_host(dx)
    assert np.isnan(wide(dx[has_nan])).all()
    for i in np.flatnonzero(~has_nan)[-2:]:
        row = [x[i : i + 1] for x in given]
        exact = getattr(oracle, function)(*row, 1)
        vjp_error_is_small(dx[i : i + 1], *row, exact, dtype, 1.0)


@pytest.mark.parametrize("n", [8, 16, 64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_rows_of_which_some_are_aligned(cupy, rng, function, dtype, n):
    """Of the rows of a warp some are whole vectors, and some have ends beside them."""
    (x,) = inputs(rng, function, (300, n + 1, 1), dtype)
    x = x[..., 0]
    placed = place(cupy, x)
    out = cupy.empty_like(placed)
    call(function, [placed[:, :n]], out=out[:, :n])
    check(function, to_host(out)[:, :n], x[:, :n], dtype, axis=1)


@pytest.mark.parametrize("n", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_short_rows_are_the_same_wherever_they_begin(cupy, rng, function, dtype, n):
    """As in the tier that takes what does not begin at a whole vector."""
    (x,) = inputs(rng, function, (301, n, 1), dtype)
    x = x[..., 0]
    for i, value in enumerate((np.nan, np.inf, -np.inf)):
        x[7 + i, rng.integers(n)] = value
    x[10] = -np.inf
    x[11, 1:] = -np.inf  # what is left is exactly 1
    aligned, shifted = place(cupy, x), place(cupy, x, "shifted")
    kernels = [cupyflash.explain(function, a, 1).kernel for a in (aligned, shifted)]
    assert kernels[1] == "tiled"
    assert kernels[0] == "short" or function == "log_softmax"
    y, z = (to_host(call(function, [a])) for a in (aligned, shifted))
    if function == "softmax":  # a log near 0 shows the order of its sum
        same_bits(y, z)
    rows = np.r_[:7, 11:301]
    for result in (y, z):
        assert result[11, 0] == (1 if function == "softmax" else 0)
        check(function, result[rows], x[rows], dtype, axis=1)
    # Quarters from -2 to 2, and 16 more of each, are exact in all types.
    x = (rng.integers(-8, 9, size=(301, n)) / 4).astype(x.dtype)
    y, z = (
        to_host(call(function, [place(cupy, a)])) for a in (x, x + x.dtype.type(16))
    )
    if function == "softmax":
        same_bits(y, z)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("outer", "length", "inner_bytes"),
    # A warp has whole tiles; or it joins the parts of tiles, of which the last is
    # narrower; then a block does; some lanes have no column.
    [
        (2080, 256, 128),
        (1, 150, 1 << 18 | 192),
        (1000, 300, 128),
        (1, 300_000, 128),
        (2, 400_000, 48),
    ],
)
def test_columns_whose_rows_warps_share(cupy, rng, outer, length, inner_bytes, dtype):
    """Sums near 1, which are read again, and special values: a column is on its own."""
    shape = (outer, length, inner_bytes // dtype_of(dtype).itemsize)
    told = cupyflash.explain("logsumexp", cupy.empty(shape, dtype_of(dtype)), 1)
    if told.kernel != "logsumexp_shares":
        pytest.skip(f"{told.kernel} takes this on this card")
    (x,) = inputs(rng, "logsumexp", shape, dtype)
    column = x.astype(np.float64)[0, :, 0]
    column = (column - oracle.logsumexp(column[None], 1)[0]).astype(x.dtype)
    x[0, :, 0] = x[-1, :, -1] = column
    largest = x.max(1)
    x[0, :, 1] = -np.inf
    for i, value in enumerate((np.nan, np.inf)):
        x[0, rng.integers(shape[1]), 2 + i] = value
    usual = np.ones((shape[0], shape[2]), bool)
    usual[0, 1:4] = False
    y = to_host(cupyflash.logsumexp(place(cupy, x), 1))
    same_bits(cupyflash.logsumexp(place(cupy, x), 1), y)
    shifted = cupyflash.logsumexp(place(cupy, x, "shifted"), 1)
    np.testing.assert_array_equal(np.isnan(wide(shifted)), np.isnan(wide(y)))
    exact = exact_results("logsumexp", (x,), dtype)
    np.testing.assert_array_equal(wide(y)[0, 1:4], [-np.inf, np.nan, np.inf])
    actual, exact, largest = y[usual], exact[usual], largest[usual]
    if dtype in LOGSUMEXP_ULPS:
        assert ulps(actual, exact, largest, dtype) <= LOGSUMEXP_ULPS[dtype]
    else:
        size = np.maximum(np.abs(exact), np.abs(wide(largest)))
        assert np.all(np.abs(wide(actual) - exact) <= LOGSUMEXP_RELATIVE[dtype] * size)
    beside_nan = np.full_like(x, np.nan)
    beside_nan[0, :, 0], beside_nan[-1, :, -1] = x[0, :, 0], x[-1, :, -1]
    again = to_host(cupyflash.logsumexp(place(cupy, beside_nan), 1))
    same_bits(again[0, :1], y[0, :1])
    same_bits(again[-1, -1:], y[-1, -1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_tier_can_be_captured(cupy, rng, function, kind):
    """And replayed: nothing is left over from one launch to the next."""
    stream = cupy.cuda.Stream(non_blocking=True)
    for n in some_lengths(cupy, function, "float32", kind):
        given = inputs(rng, function, KINDS[kind].shape(n), "float32")
        with stream:
            placed = [place(cupy, x) for x in given]
            expected = call(function, placed)
            out = cupy.empty_like(expected)
            call(function, placed, out=out)
            stream.synchronize()
            stream.begin_capture()
            try:
                call(function, placed, out=out)
            finally:
                graph = stream.end_capture()
            for _ in range(3):
                out.fill(np.nan)
                graph.launch(stream)
                same_bits(out, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_axes_that_lie_together_are_one(cupy, rng, function):
    """axis=None and tuples go the way of one long axis."""
    kernels = set()
    for shape in ((3, 5, 7), (30, 40, 50), (20, 300, 100), (8, 500, 600)):
        given = inputs(rng, function, shape, "float32")
        placed = [place(cupy, x) for x in given]
        compute = getattr(cupyflash, function)
        size = int(np.prod(shape))
        for axis, flat, flat_axis in (
            (None, (size,), 0),
            ((0, 1, 2), (size,), 0),
            ((1, 2), (shape[0], shape[1] * shape[2]), 1),
            ((0, 1), (shape[0] * shape[1], shape[2]), 0),
        ):
            y = compute(*placed, axis=axis)
            one = compute(*(x.reshape(flat) for x in placed), axis=flat_axis)
            same_bits(y.reshape(one.shape), one)
            told = cupyflash.explain(function, *placed, axis=axis)
            flattened = [x.reshape(flat) for x in placed]
            same = cupyflash.explain(function, *flattened, axis=flat_axis)
            assert told.kernel == same.kernel
            kernels.add(told.kernel)
    assert kernels


def test_every_row_of_the_table_is_reached(cupy):
    """By "auto" on this card; a row that nothing reaches is not tested above."""
    reached = set()
    for function in FUNCTIONS:
        for dtype in ("float32", "float64"):
            for kind in KINDS:
                reached |= set(thresholds(cupy, function, dtype, kind).values())
            for n in (5, 5000, 1 << 20):  # neither rows nor columns: test_softmax
                x = cupy.empty((3, n, 2), dtype_of(dtype))[..., 0]
                reached.add(launch_of(function, x)[0])
            # So many long columns that none has to be shared.
            for n in (40_000, 70_000):
                x = cupy.empty((140, n, 4), dtype_of(dtype))
                reached.add(launch_of(function, x)[0])
            # Two rows that a row of the table reads once.
            x = cupy.empty((2, 1 << 20), dtype_of(dtype))
            reached.add(launch_of(function, x)[0])
            # A row that is longer than the L2 cache.
            x = cupy.empty((1, 1 << 24), dtype_of(dtype))
            reached.add(launch_of(function, x)[0])
            # Columns that fill a card.
            x = cupy.empty((1, 4096, 1 << 13), dtype_of(dtype))
            reached.add(launch_of(function, x)[0])
    reached = {kernel_of(tier) for tier in reached}
    expected = {row.name for row in softmax_registry.KERNELS if "auto" in row.methods}
    assert expected <= reached, expected - reached
