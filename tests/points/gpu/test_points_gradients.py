"""Gradients of points on a card beside sums over all pairs in float64."""

import itertools

import numpy as np
import pytest

from cupyflash import points
from cupyflash._points import kernels

pytestmark = pytest.mark.gpu

# Relative to the largest, or to a fifth of the root of the sum of squares of its terms;
# by points and bandwidths, to half of it.
ALLOWED = {"float32": 2e-6, "float64": 1e-13}


def stretched(d2):
    return np.exp(-np.sqrt(1 + d2)) * (2 + np.tanh(d2))


def exact(reduction, dout, x, y, v, kernel, width, weights=None):
    """Gradients by name, and what their errors are measured by."""
    row = kernels.find(kernel, "kernel_sum")
    slope, factor = kernels.slope_of(row)
    scale = 1 / np.broadcast_to(width, x.shape[1:])
    gaps = (x[:, None] - y) * scale
    d2 = (gaps * gaps).sum(axis=-1)
    sizes = np.abs(dout) @ np.abs(v).T
    if reduction == "kernel_sum":
        c = factor * slope.value(d2)
        sizes, products, weight = np.abs(c) * sizes, dout @ v.T, row.value(d2)
    else:
        scores = row.log(d2) + (0 if weights is None else weights)
        top = scores.max(axis=1, keepdims=True)
        lse = top + np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
        weight = np.exp(scores - lse)
        if slope.log is None or slope.expression is not None:
            c = factor * slope.value(d2) * np.exp(scores - row.log(d2) - lse)
        else:
            c = factor * np.exp(slope.log(d2) + scores - row.log(d2) - lse)
        through = (dout * (weight @ v)).sum(axis=1, keepdims=True)
        sizes = np.abs(c) * (sizes + np.abs(through))
        products = dout @ v.T - through
    of_pairs = (c * products)[..., None] * gaps
    sizes = sizes[..., None] * np.abs(gaps)

    def root(terms, axes):
        return np.sqrt((terms**2).sum(axis=axes)).max()

    of_gaps = of_pairs * gaps
    by_gaps = sizes * np.abs(gaps)
    if np.ndim(width) == 0:  # a term is what a pair brings, of all axes
        of_gaps, by_gaps = (a.sum(axis=-1, keepdims=True) for a in (of_gaps, by_gaps))
    # NumPy sums the last axis in pairs, and others one by one.
    of_gaps = np.ascontiguousarray(of_gaps.reshape(-1, of_gaps.shape[-1]).T)
    of_gaps = 2 * scale[: len(of_gaps)] * of_gaps.sum(axis=-1)
    root_of_gaps = root(2 * scale[: by_gaps.shape[-1]] * by_gaps, (0, 1))
    found = {
        "dx": (-2 * scale * of_pairs.sum(axis=1), root(2 * scale * sizes, 1)),
        "dy": (2 * scale * of_pairs.sum(axis=0), root(2 * scale * sizes, 0)),
        "dvalues": (weight.T @ dout, np.sqrt((weight**2).T @ dout**2).max()),
        "dbandwidth": (of_gaps.sum() if np.ndim(width) == 0 else of_gaps, root_of_gaps),
    }
    if weights is not None:
        found["dlog_weights"] = (
            (weight * products).sum(axis=0),
            root(weight * (np.abs(dout) @ np.abs(v).T), 0),
        )
    shares = {"dx": 2, "dy": 2, "dbandwidth": 2}
    return {
        name: (g, max(np.abs(g).max(), size / shares.get(name, 5)))
        for name, (g, size) in found.items()
    }


def problem(dim, n=150, m=170, columns=2, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, dim)), rng.normal(size=(m, dim))
    v, dout = rng.normal(size=(m, columns)), rng.normal(size=(n, columns))
    return [a.astype(np.float32) for a in (dout, x, y, v)]


def check(cupy, arrays, kernel="gaussian", width=1.0, weights=None, dtypes=ALLOWED):
    reductions = ("kernel_sum", "mean") if weights is None else ("mean",)
    for reduction, dtype in itertools.product(reductions, dtypes):
        if kernel == "energy" and reduction == "mean":
            continue
        wide = [a.astype(np.float64) for a in arrays]
        expected = exact(reduction, *wide, kernel, width, weights)
        given = [cupy.asarray(a, dtype) for a in arrays]
        if weights is not None:
            given.append(cupy.asarray(weights, dtype))
        # Memory that is not NaN by chance would hide what nobody writes.
        poison = cupy.full(1 << 22, np.nan, np.float32)
        del poison
        function = getattr(points, f"{reduction}_vjp")
        found = function(*given, kernel=kernel, bandwidth=width)
        for name, (gradient, size) in expected.items():
            one = cupy.asnumpy(getattr(found, name)).astype(np.float64)
            error = np.abs(one - gradient).max()
            assert error <= ALLOWED[dtype] * size, (
                reduction,
                dtype,
                name,
                error / size,
            )


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_two_clusters_far_apart(cupy, kernel, dim):
    """What x_i sum_j c_ij and sum_j c_ij y_j have in common is far larger than dx_i."""
    dout, x, y, v = problem(dim)
    y[::2] += 100
    check(cupy, (dout, x, y, v), kernel)


@pytest.mark.parametrize("dim", [3, 9])
@pytest.mark.parametrize("kernel", [*kernels.NAMES, stretched])
def test_all_kernels(cupy, kernel, dim):
    check(cupy, problem(dim), kernel, 1.3)


@pytest.mark.parametrize("dim", [1, 3, 9])
@pytest.mark.parametrize("width", [0.1, 30.0])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern32"])
def test_short_and_long_bandwidths(cupy, kernel, width, dim):
    check(cupy, problem(dim), kernel, width, dtypes=("float32",))


@pytest.mark.parametrize("dim", [1, 8, 17, 70])
def test_a_bandwidth_of_each_axis(cupy, dim):
    width = np.random.default_rng(1).uniform(0.5, 2, dim) * dim**0.5
    check(cupy, problem(dim), "matern52", width)


@pytest.mark.parametrize("width", [1e-20, 1e20])
def test_bandwidths_whose_squares_overflow(cupy, width):
    dout, x, y, v = problem(2)
    x, y = (np.float32(width) * z for z in (x, y))
    given = [cupy.asarray(z) for z in (dout, x, y, v)]
    expected = points.mean_vjp(dout, x, y, v, bandwidth=width)
    found = points.mean_vjp(*given, bandwidth=width)
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            np.testing.assert_allclose(
                cupy.asnumpy(one), other, atol=2e-6 * np.abs(other).max(), rtol=0
            )


@pytest.mark.parametrize("dim", [2, 9])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_points_that_coincide(cupy, kernel, dim):
    dout, x, y, v = problem(dim)
    y[:150] = x
    y[150:] = x[:20]
    check(cupy, (dout, x, y, v), kernel)


@pytest.mark.parametrize("columns", [1, 3, 4, 9, 20])
def test_columns_of_values(cupy, columns):
    check(cupy, problem(3, columns=columns))
    check(cupy, problem(12, columns=columns), dtypes=("float32",))


@pytest.mark.parametrize("dim", [3, 12])
def test_log_weights(cupy, dim):
    arrays = problem(dim)
    weights = (5 * np.random.default_rng(2).normal(size=170)).astype(np.float32)
    check(cupy, arrays, width=2.0, weights=weights.astype(np.float64))
    large = weights + np.float32(4096)  # of log-sums no digit behind the point is left
    check(
        cupy, arrays, width=2.0, weights=large.astype(np.float64), dtypes=("float32",)
    )


@pytest.mark.parametrize("dim", [2, 20])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_many_pairs(cupy, kernel, dim):
    """Blocks of float32, and those of float64 for rows that are far from all points."""
    dout, x, y, v = problem(dim, 2050, 2060)
    x[:3] += 20
    check(cupy, (dout, x, y, v), kernel, 1.5, dtypes=("float32",))


def test_tiles_that_are_skipped(cupy):
    dout, x, y, v = problem(1, 4200, 4100, 1)
    check(cupy, (dout, x, 30 * y, v), width=0.3, dtypes=("float32",))


def test_sums_that_are_tiny(cupy):
    """Kernels of all pairs below 2^-100."""
    dout, x, y, v = problem(3)
    check(cupy, (dout, x, y + 8, v), width=1.0)


def test_batches_and_the_same_bits(cupy):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 3, 40, 2)), rng.normal(size=(50, 2))
    v, weights = rng.normal(size=(3, 50, 2)), rng.normal(size=50)
    dout, dlse = rng.normal(size=(2, 3, 40, 2)), rng.normal(size=(2, 3, 40))
    given = [cupy.asarray(a) for a in (dout, x, y, v, weights)]
    options = {"dlse": cupy.asarray(dlse), "bandwidth": 0.7}
    found = points.mean_vjp(*given, **options)
    again = points.mean_vjp(*given, **options)
    expected = points.mean_vjp(dout, x, y, v, weights, dlse=dlse, bandwidth=0.7)
    for one, two, other in zip(found, again, expected, strict=True):
        assert (one == two).all()
        assert one.shape == np.shape(other)
        scale = np.abs(other).max()
        np.testing.assert_allclose(cupy.asnumpy(one), other, atol=1e-12 * scale, rtol=0)


def test_rows_without_points_and_sizes_of_zero(cupy):
    dout, x, y, v = map(cupy.asarray, problem(2))
    nothing = cupy.full(170, -np.inf, np.float32)
    found = points.mean_vjp(dout, x, y, v, nothing)
    assert all((g == 0).all() for g in found)
    nothing[::2] = 0
    found = points.mean_vjp(dout, x, y, v, nothing)
    assert all(cupy.isfinite(g).all() for g in found)
    assert (found.dy[1::2] == 0).all()
    for n, m, dim, columns in ((0, 5, 2, 2), (4, 0, 2, 2), (4, 5, 0, 2), (4, 5, 2, 0)):
        a, b, values = x[:n, :dim], y[:m, :dim], v[:m, :columns]
        for grads in (
            points.kernel_sum_vjp(dout[:n, :columns], a, b, values),
            points.mean_vjp(dout[:n, :columns], a, b, values),
            points.logsumexp_vjp(dout[:n, 0], a, b),
        ):
            assert (grads.dx.shape, grads.dy.shape) == (a.shape, b.shape)
            assert grads.dvalues is None or grads.dvalues.shape == values.shape
            assert float(grads.dbandwidth) == 0 or n * m * dim
