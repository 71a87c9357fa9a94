"""Every error of a caller of the reductions, by its message."""

import numpy as np
import pytest

from cupyflash import points
from cupyflash._points import kernels, problem
from tests.support import pairs

X, Y, V = np.zeros((4, 3)), np.zeros((5, 3)), np.zeros((5, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: points.logsumexp(X[0], Y), ValueError, r"x must have shape .*x\[:, N"),
        (
            lambda: points.logsumexp(X, Y[:, :2]),
            ValueError,
            "same number of dimensions",
        ),
        (lambda: points.logsumexp(X, None), TypeError, "y must be an array, got None"),
        (lambda: points.logsumexp(X + 1j, Y), TypeError, "x must hold real numbers"),
        (
            lambda: points.logsumexp(X, Y, np.zeros(4)),
            ValueError,
            r"log_weights must have shape \(\.\.\., 5\)",
        ),
        (
            lambda: points.kernel_sum(X, Y, np.zeros((4, 2))),
            ValueError,
            r"b must have shape \(\.\.\., 5, columns\)",
        ),
        (lambda: points.mean(X, Y, 1.0), ValueError, "v must have shape"),
        (
            lambda: points.mean(np.zeros((2, 4, 3)), np.zeros((3, 5, 3)), V),
            ValueError,
            r"leading axes do not broadcast: x \(2,\), y \(3,\)",
        ),
        (
            lambda: points.logsumexp(X, Y, kernel="triweight"),
            ValueError,
            "kernel must be one of 'gaussian', 'laplacian'",
        ),
        (
            lambda: points.logsumexp(X, Y, kernel="energy"),
            ValueError,
            "use kernel_sum",
        ),
        (
            lambda: points.logsumexp(X, Y, kernel=lambda s: s),
            TypeError,
            "asks for s: it may ask for d2",
        ),
        (
            lambda: points.logsumexp(X, Y, kernel=np.exp),
            TypeError,
            "kernel must be a plain function",
        ),
        (
            lambda: points.logsumexp(X, Y, kernel=lambda d2: d2 < 1),
            TypeError,
            r"a kernel returns a number: write np\.where",
        ),
        (
            lambda: points.logsumexp(X, Y, kernel=lambda d2: d2 * X[0, 0]),
            TypeError,
            "kernels of points only take numbers",
        ),
        (lambda: points.logsumexp(X, Y, bandwidth=0), ValueError, "above 0, got 0"),
        (
            lambda: points.logsumexp(X, Y, bandwidth=np.nan),
            ValueError,
            "must be finite",
        ),
        (
            lambda: points.logsumexp(X, Y, bandwidth=[1.0, 2.0]),
            ValueError,
            r"have shape \(3,\)",
        ),
        (lambda: points.logsumexp(X, Y, bandwidth="scott"), TypeError, "real number"),
        (
            lambda: points.mean(X, Y, V, return_lse=1),
            TypeError,
            "return_lse must be a bool",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_problem_is_plain():
    found, is_vector = problem.points(
        "mean", X[None], Y, np.zeros(5), V, "laplacian", [1.0, 2.0, 4.0], True
    )
    assert not is_vector
    assert found.batch == (1,)
    assert (found.num_x, found.num_y, found.dim, found.num_values) == (4, 5, 3, 2)
    assert found.scale == (1.0, 0.5, 0.25)
    assert not found.isotropic
    assert found.out_shape == (1, 4, 2)
    assert found.lse_shape == (1, 4)
    assert found.log_weights.shape == (1, 5)
    assert found.dtype == "float64"


def test_one_array_of_float64_decides():
    narrow = X.astype(np.float32)
    assert points.logsumexp(narrow, narrow, 0.5).dtype == np.float32
    assert points.logsumexp(narrow, Y).dtype == np.float64


@pytest.mark.parametrize("name", pairs.KERNELS)
def test_rows_are_the_kernels_that_are_documented(name):
    d = np.array([0.0, 2.0**-10, 0.5, 2.0, 30.0], np.longdouble)
    d2, row = (d * d).astype(np.float64), kernels.KERNELS[name]
    np.testing.assert_allclose(row.value(d2), pairs.KERNELS[name](d), rtol=1e-13)
    if row.log is not None:
        np.testing.assert_allclose(
            row.log(d2), pairs.LOGS[name](d), rtol=1e-13, atol=1e-15
        )


@pytest.mark.parametrize("name", kernels.NAMES)
def test_slopes_are_derivatives(name):
    d2, step = np.array([0.2, 1.0, 7.0]), 1e-5
    row = kernels.KERNELS[name]
    slope, factor = kernels.slope_of(row)
    numeric = (row.value(d2 - step) - row.value(d2 + step)) / (2 * step)
    np.testing.assert_allclose(factor * slope.value(d2), numeric, rtol=1e-8)
    np.testing.assert_allclose(np.exp(slope.log(d2)), slope.value(d2), rtol=1e-13)


@pytest.mark.parametrize("row", kernels.KERNELS.values(), ids=lambda row: row.name)
def test_kernels_end_where_they_are_said_to(row):
    if row.reach is not None:
        for digits in (10.0, 40.0, 300.0):
            d2 = np.array(row.reach(digits))
            assert row.log(d2) <= -digits


def test_a_bandwidth_may_have_more_than_64_bits():
    x = np.ones((4, 2))
    for bandwidth in (2**70, [1, 2**70], (2**70, 1.5)):
        want = points.logsumexp(x, 2 * x, bandwidth=np.array(bandwidth, float))
        got = points.logsumexp(x, 2 * x, bandwidth=bandwidth)
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="bandwidth is too large for float64"):
        points.logsumexp(x, x, bandwidth=10**400)
    for wrong in (np.array(2**70, object), [2**70, None]):
        with pytest.raises(TypeError, match="bandwidth must be a real number"):
            points.logsumexp(x, x, bandwidth=wrong)
