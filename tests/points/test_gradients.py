"""Gradients of the reductions beside finite differences."""

import numpy as np
import pytest

from cupyflash import points
from cupyflash._points.kernels import NAMES

FUNCTIONS = {
    "rational": lambda d2: 1 / (1 + d2) ** 2 + 0.1,
    "wave": lambda d2: np.exp(-d2) * (1.1 + np.sin(d2)),
}
KERNELS = {name: name for name in NAMES} | FUNCTIONS


def differences(function, arguments, place, step=1e-6):
    """The gradient of a number by one of its arguments."""
    at = np.array(arguments[place], float)
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        sides = []
        for sign in (1, -1):
            moved = at.copy()
            moved[index] += sign * step
            changed = [*arguments[:place], moved, *arguments[place + 1 :]]
            sides.append(function(*changed))
        gradient[index] = (sides[0] - sides[1]) / (2 * step)
    return gradient


def check(function, arguments, gradients):
    for place, gradient in enumerate(gradients):
        exact = differences(function, arguments, place)
        assert gradient.shape == exact.shape
        scale = max(np.abs(exact).max(), 1e-2)
        np.testing.assert_allclose(gradient, exact, atol=1e-6 * scale, rtol=0)


def arguments(offset=0.0):
    """Two clouds, values, weights and gradients of results."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 4, 2)) + offset, rng.normal(size=(5, 2)) + offset
    v, weights = rng.normal(size=(5, 3)), rng.normal(size=5)
    return x, y, v, weights, rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4))


@pytest.mark.parametrize("bandwidth", [1.3, (0.7, 1.9)], ids=["one", "axes"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_sums(kernel, bandwidth):
    x, y, b, _, dout, _ = arguments()
    found = points.kernel_sum_vjp(dout, x, y, b, kernel=kernel, bandwidth=bandwidth)
    assert found.dlog_weights is None

    def value(x, y, b, width):
        return (points.kernel_sum(x, y, b, kernel=kernel, bandwidth=width) * dout).sum()

    by = found.dx, found.dy, found.dvalues, found.dbandwidth
    check(value, [x, y, b, bandwidth], by)


@pytest.mark.parametrize("bandwidth", [1.3, (0.7, 1.9)], ids=["one", "axes"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "energy"])
def test_means_and_log_sums(kernel, bandwidth):
    kernel = KERNELS[kernel]
    x, y, v, weights, dout, dlse = arguments()
    options = {"kernel": kernel, "bandwidth": bandwidth}
    found = points.mean_vjp(dout, x, y, v, weights, dlse=dlse, **options)

    def value(x, y, v, weights, width):
        out, lse = points.mean(
            x, y, v, weights, kernel=kernel, bandwidth=width, return_lse=True
        )
        return (out * dout).sum() + (lse * dlse).sum()

    by = found.dx, found.dy, found.dvalues, found.dlog_weights, found.dbandwidth
    check(value, [x, y, v, weights, bandwidth], by)
    out, lse = points.mean(x, y, v, weights, return_lse=True, **options)
    again = points.mean_vjp(
        dout, x, y, v, weights, out=out, lse=lse, dlse=dlse, **options
    )
    for one, other in zip(found, again, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)

    found = points.logsumexp_vjp(dlse, x, y, weights, **options)
    assert found.dvalues is None

    def log_sum(x, y, weights, width):
        lse = points.logsumexp(x, y, weights, kernel=kernel, bandwidth=width)
        return (lse * dlse).sum()

    by = found.dx, found.dy, found.dlog_weights, found.dbandwidth
    check(log_sum, [x, y, weights, bandwidth], by)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wherever_the_clouds_lie(dtype):
    """Gradients of clouds that were moved together are the same."""
    x, y, v, weights, dout, _ = (a.astype(dtype) for a in arguments())
    x, y = np.round(x * 8) / 8, np.round(y * 8) / 8
    near = points.mean_vjp(dout, x, y, v, weights)
    far = points.mean_vjp(dout, x + 1e5, y + 1e5, v, weights)
    for one, other in zip(near, far, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(
            one, other, atol=1e-6 if dtype == "float32" else 1e-9
        )


def test_points_without_weight_and_rows_without_points():
    x, y, v, weights, dout, dlse = arguments()
    weights[2] = -np.inf
    found = points.mean_vjp(dout, x, y, v, weights, dlse=dlse)
    assert all(np.isfinite(g).all() for g in found)
    assert (found.dy[2] == 0).all()
    assert (found.dvalues[2] == 0).all()
    found = points.mean_vjp(dout, x, y, v, np.full(5, -np.inf), dlse=dlse)
    assert all((g == 0).all() for g in found)


def test_coinciding_points_of_a_cusp():
    x = np.zeros((3, 2))
    for kernel in ("laplacian", "energy"):
        found = points.kernel_sum_vjp(
            np.ones((3, 1)), x, x, np.ones((3, 1)), kernel=kernel
        )
        assert (found.dx == 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_function_with_a_cusp(dtype):
    """Coinciding points contribute nothing, as with the same kernel by name."""
    x = np.random.default_rng(3).normal(size=(5, 3)).astype(dtype)
    b, dout = np.arange(5, dtype=dtype), np.ones(5, dtype)

    def laplacian(d2):
        return np.exp(-np.sqrt(d2))

    def gaussian(d2):  # the derivative at 0 is a number and counts
        return np.exp(-0.5 * d2)

    for function in laplacian, gaussian:
        for ours, theirs in zip(
            *(
                (
                    points.kernel_sum_vjp(dout, x, x, b, kernel=kernel),
                    points.logsumexp_vjp(dout, x, x, kernel=kernel),
                    points.mean_vjp(dout, x, x, b, kernel=kernel),
                )
                for kernel in (function, function.__name__)
            ),
            strict=True,
        ):
            for name in "dx", "dy", "dbandwidth":
                np.testing.assert_allclose(
                    getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6
                )


def test_vectors_and_errors():
    x, y, v, weights, dout, dlse = arguments()
    found = points.kernel_sum_vjp(dout[..., 0], x, y, v[:, 0])
    assert found.dvalues.shape == (5,)
    assert found.dbandwidth.shape == ()
    with pytest.raises(ValueError, match=r"dout must have shape \(2, 4, 3\), got"):
        points.mean_vjp(dout[0], x, y, v)
    with pytest.raises(TypeError, match="dlse must be an array, got None"):
        points.logsumexp_vjp(None, x, y)
    with pytest.raises(ValueError, match=r"lse must have shape \(2, 4\)"):
        points.logsumexp_vjp(dlse, x, y, weights, lse=dlse[0])


def test_sizes_of_zero():
    x, y = np.ones((4, 2)), np.zeros((5, 2))
    for sizes in ((0, 5, 2, 3), (4, 0, 2, 3), (4, 5, 0, 3), (4, 5, 2, 0)):
        n, m, dim, columns = sizes
        a, b, v = x[:n, :dim], y[:m, :dim], np.ones((m, columns))
        dout, dlse = np.ones((n, columns)), np.ones(n)
        for grads in (
            points.kernel_sum_vjp(dout, a, b, v),
            points.mean_vjp(dout, a, b, v, dlse=dlse),
            points.logsumexp_vjp(dlse, a, b),
        ):
            assert (grads.dx.shape, grads.dy.shape) == (a.shape, b.shape), sizes
            assert grads.dvalues is None or grads.dvalues.shape == v.shape
            assert np.shape(grads.dbandwidth) == ()
            assert np.isfinite(grads.dbandwidth)


@pytest.mark.parametrize("exponent", [-700, 500])
def test_units_of_any_size(exponent):
    x, y, v, w, dout, dlse = arguments()
    unit = 2.0**exponent
    one = points.mean_vjp(dout, x, y, v, w, dlse=dlse, bandwidth=0.7)
    other = points.mean_vjp(
        dout, x * unit, y * unit, v, w, dlse=dlse, bandwidth=0.7 * unit
    )
    np.testing.assert_allclose(other.dx * unit, one.dx, rtol=1e-12)
    np.testing.assert_allclose(other.dy * unit, one.dy, rtol=1e-12)
    np.testing.assert_allclose(other.dvalues, one.dvalues, rtol=1e-12)
    np.testing.assert_allclose(other.dbandwidth * unit, one.dbandwidth, rtol=1e-12)
