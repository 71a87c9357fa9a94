"""Kernels of points on a card beside float64 of the same inputs."""

import math

import numpy as np
import pytest

from cupyflash import points
from tests.support import fuzz_points

pytestmark = pytest.mark.gpu

SIZE = 20_011  # tiles that are not whole


def problem(reduction, dim=3, c=12.5, size=SIZE, offset=0.0, weights="normal", **more):
    """A problem of fuzz_points in the unit cube, with K = exp(-c d^2) if gaussian."""
    rng = np.random.default_rng(dim)
    dtype = np.dtype(more.get("dtype", "float32"))
    x, y = (rng.random((size, dim)) for _ in range(2))
    h = None
    if weights is not None and reduction != "kernel_sum":
        h = rng.standard_normal(size)
        h *= 200 if weights == "wild" else 1
        if weights == "gaps":
            h[rng.random(size) < 0.3] = -np.inf
        if weights == "none":
            h[:] = -np.inf
        if weights == "potential":
            h += 0.7 * c * (y * y).sum(axis=1)
    columns = more.get("columns", 3)
    values = None if reduction == "logsumexp" else rng.standard_normal((size, columns))
    bandwidth = more.get("bandwidth", math.sqrt(0.5 / c))
    found = {"x": x + offset, "y": y + offset + more.get("apart", 0.0), "weights": h}
    found["values"] = values
    found = {name: a if a is None else a.astype(dtype) for name, a in found.items()}
    if more.get("twins"):
        found["y"] = np.repeat(found["y"][: size // 50 + 1], 50, axis=0)[:size]
        found["x"][: size // 2] = found["y"][: size // 2]
    kernel = more.get("kernel", "gaussian")
    if "precision" in more:
        found["precision"] = more["precision"]
    return {**found, "reduction": reduction, "kernel": kernel, "bandwidth": bandwidth}


def check(given):
    cupy = pytest.importorskip("cupy")
    # Memory that is not NaN by chance would hide what nobody writes.
    poison = cupy.full(1 << 24, np.nan, np.float32)
    del poison
    share = fuzz_points.share_of_promise(given, cupy)
    assert share <= 1, fuzz_points.summary(given)


@pytest.mark.parametrize("reduction", fuzz_points.REDUCTIONS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"c": 200.0},
        {"c": 0.5},
        {"c": 1e6},
        {"c": 1e10},
        {"c": 1e-6},
        {"c": 50.0, "offset": 1e2},
        {"c": 50.0, "offset": 1e5},
        {"c": 1e4, "twins": True},
        {"c": 100.0, "apart": 3.0},
        {"c": 50.0, "weights": "wild"},
        {"c": 50.0, "weights": "gaps"},
        {"c": 50.0, "weights": "none"},
        {"c": 1000.0, "weights": "potential"},
        {"weights": None},
        {"size": 1},
        {"size": 777},
        {"size": 100_000, "c": 2.0},
        {"size": 100_000, "c": 50.0},
        {"columns": 1},
        {"columns": 4},
        {"columns": 7},
        {"bandwidth": (0.2, 0.1, 0.7)},
        *({"dim": dim, "c": 3.0} for dim in (1, 2, 4, 5, 6, 7, 8, 9, 33, 64, 150, 300)),
        *({"dim": dim, "c": 100.0} for dim in (2, 8, 64)),
        {"dim": 64, "c": 1.0, "size": 500},
        {"dtype": "float64"},
        {"dtype": "float64", "offset": 1e5},
        {"dtype": "float64", "c": 1e6},
        {"dtype": "float64", "dim": 20, "size": 2000},
        *(
            {"dim": dim, "size": 300, "bandwidth": (1.5,) * (dim - 1) + (2.5,), **dtype}
            for dim in (9, 17)  # the last chunk of 16 axes has few
            for dtype in ({}, {"dtype": "float64"})
        ),
    ],
    ids=str,
)
def test_gaussian(reduction, change):
    check(problem(reduction, **change))


@pytest.mark.parametrize("reduction", fuzz_points.REDUCTIONS)
@pytest.mark.parametrize(
    "change",
    [
        *({"dim": dim, "c": 1.0} for dim in (9, 16, 33, 64, 65, 150, 300)),
        *({"c": c} for c in (1e-6, 20.0, 1e6)),
        {"c": 0.5, "offset": 1e3},
        {"c": 0.5, "apart": 3.0},  # from the middle of both 17 bandwidths or less
        {"c": 0.5, "apart": 1e3},
        {"c": 0.5, "weights": "wild"},
        {"c": 0.5, "weights": "gaps"},
        {"c": 0.5, "weights": "none"},
        {"c": 0.5, "weights": "potential"},
        {"weights": None, "c": 0.5, "twins": True},
        {"c": 0.5, "size": 777},
        {"c": 0.5, "columns": 1},
        {"c": 0.5, "columns": 7},
        {"dim": 9, "bandwidth": tuple(np.linspace(0.5, 2, 9).tolist())},
    ],
    ids=str,
)
def test_tf32(reduction, change):
    """Within what coordinates of 11 bits change, also of rows that are made again."""
    check(problem(reduction, **{"dim": 64, "precision": "tf32", **change}))


def test_tf32_has_less_than_the_digits_of_float32():
    """So that the kernel of one part is what has been compared."""
    cupy = pytest.importorskip("cupy")
    given = problem("logsumexp", dim=64, c=5.0, size=3000)
    exact, _ = fuzz_points.exact(given, np.arange(3000), np)
    errors = [
        abs(fuzz_points.run({**given, "precision": precision}, cupy).get() - exact)
        for precision in ("float32", "tf32")
    ]
    assert errors[0].max() < 2e-5 < 4e-5 < errors[1].max() < 2e-2


def test_tf32_exchanged():
    """A pair has one kernel in both directions: sinkhorn then meets its marginals."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(3)
    x, y = (cupy.asarray(rng.random((n, 20), "f4") + n / 5000) for n in (2300, 2100))
    options = {"bandwidth": 0.7, "precision": "tf32"}
    a, b = (cupy.asarray(np.eye(n, 8, dtype="f4")) for n in (2300, 2100))
    forth = points.kernel_sum(x, y, b, **options).get()[:8]
    back = points.kernel_sum(y, x, a, **options).get()[:8]
    np.testing.assert_allclose(forth, back.T, rtol=2e-6)
    exact = points.kernel_sum(x, y, b, bandwidth=0.7).get()[:8]
    assert np.abs(forth / exact - 1).max() > 2e-5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1500, 9000])
@pytest.mark.parametrize(
    "kernel",
    ["laplacian", "cauchy", "matern32", "matern52", "inverse_multiquadric", "energy"],
)
def test_other_kernels(kernel, size, dtype):
    for reduction in fuzz_points.REDUCTIONS:
        if kernel == "energy" and reduction != "kernel_sum":
            continue
        for dim in (3, 20):
            given = problem(reduction, dim, size=size, dtype=dtype, kernel=kernel)
            check(given)


POWER = 2.5

FUNCTIONS = {
    "rational": lambda d2: (1 + d2 / POWER) ** -POWER,
    "large": lambda d2: 1e30 * np.exp(-d2),
    "compact": lambda d2: np.where(d2 < 1.0, 1.0 - d2, 0.0),
    "cusp": lambda d2: np.exp(-np.sqrt(d2)),
}


def cloud_pair(dtype, dim, far=0.0):
    """x, y, v and log weights, some of -inf."""
    rng = np.random.default_rng(dim)
    x, y = rng.normal(size=(70, dim)) + far, rng.normal(size=(300, dim))
    x[1] = y[0] + far
    v, weights = rng.normal(size=(300, 2)), 3 * rng.normal(size=300)
    weights[3] = -np.inf
    return [a.astype(dtype) for a in (x, y, v, weights)]


def assert_like(found, exact, dtype):
    found, exact = np.asarray(found.get(), np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    assert (found[~finite] == exact[~finite]).all()
    found, exact = found[finite], exact[finite]
    scale = max(1.0, np.abs(exact).max(initial=0.0))
    allowed = 4e-6 if dtype == "float32" else 1e-12
    assert np.abs(found - exact).max(initial=0.0) <= allowed * scale


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dim", "far"), [(3, 0.0), (3, 40.0), (20, 0.0)])
@pytest.mark.parametrize("kernel", FUNCTIONS.values(), ids=FUNCTIONS)
def test_function_of_d2(kernel, dim, far, dtype):
    """As on NumPy, also where K is 1e-1000."""
    cupy = pytest.importorskip("cupy")
    arrays = cloud_pair(dtype, dim, far)
    x, y, v, weights = map(cupy.asarray, arrays)
    a, b, c, w = arrays
    options = {"kernel": kernel, "bandwidth": 1.3}
    exact, exact_lse = points.mean(a, b, c, w, return_lse=True, **options)
    out, lse = points.mean(x, y, v, weights, return_lse=True, **options)
    assert_like(out, exact, dtype)
    assert_like(lse, exact_lse, dtype)
    assert_like(points.logsumexp(x, y, weights, **options), exact_lse, dtype)
    total = points.kernel_sum(a, b, c, **options)
    assert_like(points.kernel_sum(x, y, v, **options), total, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["rational", "cusp"])
def test_gradients_of_a_function_of_d2(name, dtype):
    """Two points coincide: at a cusp they contribute nothing to each other."""
    cupy = pytest.importorskip("cupy")
    kernel, arrays = FUNCTIONS[name], cloud_pair(dtype, 3)
    rng = np.random.default_rng(0)
    dout, dlse = (rng.normal(size=s).astype(dtype) for s in ((70, 2), (70,)))
    exact = points.mean_vjp(dout, *arrays, dlse=dlse, kernel=kernel, bandwidth=1.3)
    found = points.mean_vjp(
        cupy.asarray(dout),
        *map(cupy.asarray, arrays),
        dlse=cupy.asarray(dlse),
        kernel=kernel,
        bandwidth=1.3,
    )
    assert all(np.isfinite(x).all() for x in exact)
    for one, other in zip(found, exact, strict=True):
        assert_like(one, other, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["rational", "cusp"])
def test_gradients_of_a_cloud_by_itself(name, dtype):
    """Each point coincides with one at least."""
    cupy = pytest.importorskip("cupy")
    kernel, (x, *_) = FUNCTIONS[name], cloud_pair(dtype, 3)
    x[:2] = x[2]
    rng = np.random.default_rng(0)
    b, dout = (rng.normal(size=len(x)).astype(dtype) for _ in range(2))
    exact = points.kernel_sum_vjp(dout, x, x, b, kernel=kernel)
    on_gpu = map(cupy.asarray, (dout, x, x, b))
    found = points.kernel_sum_vjp(*on_gpu, kernel=kernel)
    for of in "dx", "dy", "dvalues":
        assert_like(getattr(found, of), getattr(exact, of), dtype)


def test_a_batch_is_its_entries():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    x = cupy.asarray(rng.random((2, 3, 700, 3), np.float32))
    y = cupy.asarray(rng.random((3, 9000, 3), np.float32))
    v = cupy.asarray(rng.random((9000, 2), np.float32))
    out, lse = points.mean(x, y, v, bandwidth=0.1, return_lse=True)
    assert out.shape == (2, 3, 700, 2)
    for i, j in np.ndindex(2, 3):
        one, of_one = points.mean(x[i, j], y[j], v, bandwidth=0.1, return_lse=True)
        cupy.testing.assert_allclose(out[i, j], one, rtol=3e-6, atol=1e-6)
        cupy.testing.assert_allclose(lse[i, j], of_one, rtol=3e-6)


def test_a_batch_of_more_entries_than_a_grid_has():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    x = cupy.asarray(rng.random((70_000, 2, 1), np.float32))
    y = cupy.asarray(rng.random((3, 1), np.float32))
    lse = points.logsumexp(x, y, bandwidth=0.5)
    assert lse.shape == (70_000, 2)
    flat = points.logsumexp(x.reshape(-1, 1), y, bandwidth=0.5)
    cupy.testing.assert_allclose(lse.ravel(), flat, rtol=2e-6, atol=2e-6)


def test_the_curve_steps_from_cell_to_cell():
    """Cells of a full grid, in the order of the curve, are neighbours."""
    cupy = pytest.importorskip("cupy")
    from cupyflash._points.gpu import clouds

    for dim, side in ((1, 256), (2, 32), (3, 8)):
        axes = np.meshgrid(*[np.arange(side)] * dim, indexing="ij")
        cells = np.stack(axes, axis=-1).reshape(1, -1, dim).astype(np.float32)
        cells = np.random.default_rng(0).permutation(cells, axis=1)
        order = clouds.order(cupy.asarray(cells)).get()[0]
        steps = np.abs(np.diff(cells[0, order], axis=0)).sum(axis=1)
        assert (steps == 1).all(), dim


def test_the_bits_stay_from_run_to_run():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    x = cupy.asarray(rng.random((100_000, 3), np.float32))
    first = points.logsumexp(x, x, bandwidth=0.5)
    for _ in range(3):
        assert (points.logsumexp(x, x, bandwidth=0.5) == first).all()


def test_what_is_not_finite_shows():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    x, y = (cupy.asarray(rng.random((9000, 3), np.float32)) for _ in range(2))
    x[5, 1] = np.nan
    lse = points.logsumexp(x, y, bandwidth=0.1)
    assert cupy.isnan(lse[5])
    assert int(cupy.isnan(lse).sum()) == 1
    x[5, 1], y[7, 2] = 0.5, np.inf
    assert bool(cupy.isfinite(points.logsumexp(x, y, bandwidth=0.1)).all())


@pytest.mark.parametrize("seed", range(0, 100, 5))
def test_random_problems(seed):
    cupy = pytest.importorskip("cupy")
    for n in range(seed, seed + 5):
        given = fuzz_points.draw(n)
        share = fuzz_points.share_of_promise(given, cupy)
        assert share <= 1, (n, fuzz_points.summary(given))


@pytest.mark.parametrize(
    "seed", [70112, 70219, 70328, 70445, 70617, 70699, 70836, 70989]
)
def test_problems_that_lost_digits(seed):
    """Large float64 scores, tiny float32 sums, means that cancel."""
    check(fuzz_points.draw(seed))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("far", [math.inf, 1e300])
@pytest.mark.parametrize("kernel", ["matern32", "matern52", "laplacian", "cauchy"])
def test_points_infinitely_far_have_no_weight(kernel, far, dtype):
    """Squared distances overflow, and what a factor grows to meets a weight of 0."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(5)
    x, y = (rng.random((200, 3)).astype(dtype) for _ in range(2))
    b = rng.random((200, 2)).astype(dtype)
    with np.errstate(over="ignore"):
        end = np.full((1, 3), far, dtype)
    more, more_b = np.concatenate([y, end]), np.concatenate([b, b[:1]])
    x, y, b, more, more_b = map(cupy.asarray, (x, y, b, more, more_b))
    allowed = {"float32": 2e-6, "float64": 1e-13}[dtype]
    for function, given, values in (
        (points.kernel_sum, more, (more_b,)),
        (points.mean, more, (more_b,)),
        (points.logsumexp, more, ()),
    ):
        expected = function(x, y, *((b,) if values else ()), kernel=kernel)
        found = function(x, given, *values, kernel=kernel)
        assert float(abs(found - expected).max()) <= allowed * float(
            abs(expected).max()
        )
