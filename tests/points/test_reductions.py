"""Log-sums, sums and means of points beside plain float64 sums."""

import itertools

import numpy as np
import pytest

from cupyflash import points
from tests.support import pairs

CLOUDS = {
    "tiles": (150, 300),
    "skips": (200, 1300),
    "one": (1, 1),
    "many": (1, 700),
    "few": (300, 2),
}


def clouds(rng, size, dim, offset, bandwidth, dtype):
    num_x, num_y = size
    x = rng.normal(size=(num_x, dim)) + offset * bandwidth
    y = rng.normal(size=(num_y, dim)) + offset * bandwidth
    y[num_y // 2] = y[0]
    x[num_x // 2] = y[0]
    weights = rng.normal(size=num_y)
    weights[-1] = -np.inf if num_y > 1 else 0.0
    values = rng.normal(size=(num_y, 2))
    return [z.astype(dtype) for z in (x, y, weights, values)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0, 1e3, 1e6])
@pytest.mark.parametrize("dim", [1, 3, 7, 40])
@pytest.mark.parametrize("kernel", pairs.KERNELS)
def test_as_exact_as_promised(kernel, dim, offset, dtype):
    rng = np.random.default_rng([dim, int(offset)])
    sizes = itertools.cycle(CLOUDS.values())
    for bandwidth, size in zip([0.02, 0.3, 3.0, 50.0, 0.3], sizes, strict=False):
        x, y, weights, values = clouds(rng, size, dim, offset, bandwidth, dtype)
        options = {"kernel": kernel, "bandwidth": bandwidth}
        total = points.kernel_sum(x, y, values, **options)
        assert total.dtype == dtype
        pairs.assert_sums(total, pairs.kernel_sum(x, y, values, **options))
        if kernel == "energy":
            continue
        out, lse = points.mean(x, y, values, weights, return_lse=True, **options)
        _, exact = pairs.logsumexp(x, y, weights, **options)
        pairs.assert_lse(lse, exact)
        pairs.assert_lse(points.logsumexp(x, y, weights, **options), exact)
        pairs.assert_sums(out, pairs.mean(x, y, values, weights, **options), exact)


@pytest.mark.parametrize("dim", [1, 2, 64, 300])
def test_points_far_apart(dim):
    """All weights are tiny, and some more than others."""
    rng = np.random.default_rng(dim)
    x, y = rng.normal(size=(50, dim)), rng.normal(size=(400, dim)) + 1e3
    v = rng.normal(size=(400, 3))
    for dtype in ("float32", "float64"):
        a, b, c = (z.astype(dtype) for z in (x, y, v))
        out, lse = points.mean(a, b, c, return_lse=True)
        pairs.assert_lse(lse, pairs.logsumexp(a, b)[1])
        exact = pairs.mean(a, b, c)
        # A score near -5e5 * dim has 16 digits of its own in float64.
        assert np.abs(out - exact).max() <= 2e-6 * np.abs(exact).max() + 1e-9 * dim


def test_skipped_tiles_change_nothing():
    rng = np.random.default_rng(3)
    y = np.concatenate([rng.normal(size=(3000, 2)), rng.normal(size=(9, 2)) + 80])
    x = np.concatenate([y[::40], rng.uniform(-100, 100, (60, 2))])
    b = rng.normal(size=(len(y), 1))
    for kernel in ("gaussian", "laplacian", "matern32", "matern52"):
        pairs.assert_lse(
            points.logsumexp(x, y, kernel=kernel),
            pairs.logsumexp(x, y, None, kernel)[1],
        )
        exact = pairs.kernel_sum(x, y, b, kernel)
        total = points.kernel_sum(x, y, b, kernel=kernel)
        pairs.assert_sums(total, exact)
        # Far from all others a sum keeps its own digits, too.
        kept = np.abs(exact) > 1e-290
        mass = pairs.kernel_sum(x, y, np.abs(b), kernel)
        assert (np.abs(total - exact)[kept] <= 1e-13 * mass[kept]).all()


def test_batches_broadcast():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 1, 20, 2)), rng.normal(size=(4, 30, 2))
    weights, v = rng.normal(size=(3, 1, 30)), rng.normal(size=(30, 2))
    out, lse = points.mean(x, y, v, weights, return_lse=True)
    assert out.shape == (3, 4, 20, 2)
    assert lse.shape == (3, 4, 20)
    for i, j in np.ndindex(3, 4):
        pairs.assert_sums(out[i, j], pairs.mean(x[i, 0], y[j], v, weights[i, 0]))
        _, exact = pairs.logsumexp(x[i, 0], y[j], weights[i, 0])
        pairs.assert_lse(lse[i, j], exact)


def test_a_vector_of_values_gives_a_vector():
    x, y, b = np.zeros((4, 2)), np.ones((3, 2)), np.arange(3.0)
    assert points.kernel_sum(x, y, b).shape == (4,)
    assert points.mean(x, y, b).shape == (4,)
    assert points.mean(x, y, b[:, None]).shape == (4, 1)


@pytest.mark.parametrize(("num_x", "num_y"), [(0, 3), (3, 0), (0, 0)])
def test_no_points(num_x, num_y):
    x, y = np.zeros((2, num_x, 3)), np.zeros((num_y, 3))
    v = np.ones((num_y, 2))
    assert (points.logsumexp(x, y) == np.full((2, num_x), -np.inf)).all()
    assert (points.kernel_sum(x, y, v) == np.zeros((2, num_x, 2))).all()
    out, lse = points.mean(x, y, v, return_lse=True)
    assert (out == np.zeros((2, num_x, 2))).all()
    assert (lse == np.full((2, num_x), -np.inf)).all()


def test_points_without_weight():
    rng = np.random.default_rng(0)
    x, y, v = rng.normal(size=(5, 2)), rng.normal(size=(6, 2)), rng.normal(size=6)
    out, lse = points.mean(x, y, v, np.full(6, -np.inf), return_lse=True)
    assert (lse == -np.inf).all()
    assert (out == 0).all()


def test_nan_stays_in_its_row():
    x, y = np.zeros((2, 3)), np.ones((4, 3))
    x[0, 0] = np.nan
    lse = points.logsumexp(x, y)
    assert np.isnan(lse[0])
    assert np.isfinite(lse[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_computed_as_float32(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, dtype, dtype)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(5, 2)).astype(dtype), rng.normal(size=(9, 2)).astype(dtype)
    lse = points.logsumexp(x, y)
    assert lse.dtype == np.float32
    pairs.assert_lse(lse, pairs.logsumexp(x, y)[1])


def test_integers_and_lists_are_float64():
    lse = points.logsumexp([[0, 0]], [[1, 1], [2, 2]])
    assert lse.dtype == np.float64
    assert lse == pytest.approx([np.log(np.exp(-1) + np.exp(-4))])


def test_a_bandwidth_for_each_axis():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(900, 3)) * [1, 10, 100]
    width = np.array([0.5, 20.0, 300.0])
    pairs.assert_lse(
        points.logsumexp(x, y, bandwidth=width),
        pairs.logsumexp(x, y, None, "gaussian", width)[1],
    )


def test_functions_of_d2():
    rng = np.random.default_rng(1)
    x, y, v = rng.normal(size=(40, 3)), rng.normal(size=(300, 3)), rng.normal(size=300)
    for power in (1.0, 0.25):
        lse = points.logsumexp(x, y, kernel=lambda d2, p=power: np.exp(-p * d2))
        _, exact = pairs.logsumexp(x, y, None, "gaussian", (2 * power) ** -0.5)
        pairs.assert_lse(lse, exact)
    far = points.logsumexp(x, y + 100, kernel=lambda d2: 2.0 * np.exp(-d2 / 2))
    _, exact = pairs.logsumexp(x, y + 100)
    pairs.assert_lse(far, exact + np.log(2))
    signed = points.kernel_sum(x, y, v, kernel=lambda d2: np.sin(np.sqrt(d2)))
    pairs.assert_sums(signed, np.sin(pairs.distances(x, y)) @ v)
    constant = points.kernel_sum(x, y, v, kernel=lambda d2: 3.0)
    assert constant == pytest.approx(np.full(40, 3 * v.sum()))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [17, 300, 2048])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern32", "matern52"])
def test_some_points_near_and_some_far_in_many_dimensions(kernel, dim, dtype):
    """Errors of a root of a large d2 are those of its weight."""
    rng = np.random.default_rng(dim)
    x, y = 0.01 * rng.normal(size=(9, dim)) + 30, rng.normal(size=(300, dim))
    x[:3] = y[:3]
    weights, v = 3 * rng.normal(size=300), rng.normal(size=(300, 2))
    x, y, weights, v = (5.23 * z.astype(dtype) for z in (x, y, weights, v))
    options = {"kernel": kernel, "bandwidth": 5.23}
    out, lse = points.mean(x, y, v, weights, return_lse=True, **options)
    pairs.assert_lse(lse, pairs.logsumexp(x, y, weights, **options)[1])
    pairs.assert_sums(out, pairs.mean(x, y, v, weights, **options))


@pytest.mark.parametrize("kernel", pairs.KERNELS)
@pytest.mark.parametrize("exponent", [-1000, -600, 600, 900])
def test_units_of_any_size(kernel, exponent):
    rng = np.random.default_rng(0)
    x, y, b = rng.normal(size=(5, 2)), rng.normal(size=(300, 2)), rng.normal(size=300)
    unit = 2.0**exponent
    total = points.kernel_sum(x * unit, y * unit, b, kernel=kernel, bandwidth=unit)
    assert (total == points.kernel_sum(x, y, b, kernel=kernel)).all()


@pytest.mark.parametrize("kernel", pairs.POSITIVE)
def test_bandwidths_of_any_size(kernel):
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(5, 2)), rng.normal(size=5)
    options = {"kernel": kernel, "return_lse": True}
    for width in (1e-300, 1e-160, 1e-20):
        out, lse = points.mean(x, x.copy(), v, bandwidth=width, **options)
        assert np.abs(lse).max() < 1e-13  # each alone
        assert (out == v).all() or kernel in ("cauchy", "inverse_multiquadric")
    for width in (1e20, 1e160, 1e300):
        out, lse = points.mean(x, x.copy(), v, bandwidth=width, **options)
        np.testing.assert_allclose(lse, np.log(5), rtol=1e-14)
        np.testing.assert_allclose(out, v.mean(), rtol=1e-13)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern32"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_distances_of_any_size(kernel, dtype):
    """Scores that have no digit left for a weight still make a finite log-sum."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(20, 2)).astype(dtype) for _ in range(2))
    x[0] = y[0]
    for width in (1e-6, 1e-10, 1e-17):
        lse = points.logsumexp(x, y, kernel=kernel, bandwidth=width)
        _, exact = pairs.logsumexp(x, y, None, kernel, width)
        np.testing.assert_allclose(lse, exact.astype(float), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("kernel", pairs.POSITIVE)
def test_infinitely_far_points_weigh_nothing(kernel):
    rng = np.random.default_rng(0)
    x, y, v = rng.normal(size=(4, 2)), rng.normal(size=(600, 2)), rng.normal(size=600)
    options = {"kernel": kernel, "return_lse": True}
    out, lse = points.mean(x, y, v, **options)
    x[1, 0] = np.inf
    some, some_lse = points.mean(x, y, v, **options)
    assert (some[1], some_lse[1]) == (0, -np.inf)
    assert points.kernel_sum(x, y, v, kernel=kernel)[1] == 0
    np.testing.assert_allclose(some[[0, 2, 3]], out[[0, 2, 3]], rtol=1e-12)
    np.testing.assert_allclose(some_lse[[0, 2, 3]], lse[[0, 2, 3]], rtol=1e-12)
    far = np.concatenate([y, [[np.inf, 0]]])
    found, _ = points.mean(x[:1], far, np.append(v, 1.0), **options)
    np.testing.assert_allclose(found, out[:1], rtol=1e-12)


@pytest.mark.parametrize("num_y", [7, 1500])
def test_an_infinite_weight_is_an_infinite_sum(num_y):
    rng = np.random.default_rng(0)
    x, y, v = (
        rng.normal(size=(5, 2)),
        rng.normal(size=(num_y, 2)),
        rng.normal(size=num_y),
    )
    weights = np.zeros(num_y)
    weights[3] = np.inf
    out, lse = points.mean(x, y, v, weights, return_lse=True)
    assert (lse == np.inf).all()
    assert np.isnan(out).all()
    assert (points.logsumexp(x, y, weights) == np.inf).all()


@pytest.mark.parametrize("kernel", ["laplacian", "matern32", "matern52"])
def test_near_points_after_far_ones_cost_no_digit(kernel):
    """A row that meets a far tile first does not measure distances from there."""
    slope = {"laplacian": 1, "matern32": 3**0.5, "matern52": 5**0.5}[kernel]
    rng = np.random.default_rng(3)
    near = rng.normal(size=(256, 3))
    x = near[:40].copy()
    x[::2] += 0.1 * rng.normal(size=(20, 3))
    y = np.concatenate([near + 60 / (slope * 3**0.5), near])
    gaps = x[:, None].astype(np.longdouble) - y
    scores = pairs.LOGS[kernel](np.sqrt((gaps * gaps).sum(axis=-1)))
    found = points.logsumexp(x, y, kernel=kernel)
    assert np.abs(found - np.log(np.exp(scores).sum(axis=-1))).max() < 5e-15
