"""Kernel matrices as operators beside dense ones."""

import inspect

import numpy as np
import pytest
from scipy.sparse.linalg import LinearOperator, cg

from cupyflash import points
from tests.support import pairs


def test_products():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)), rng.normal(size=(30, 3))
    dense = pairs.KERNELS["matern32"](pairs.distances(x, y, 0.7)).astype(float)
    operator = points.KernelOperator(x, y, kernel="matern32", bandwidth=0.7)
    assert isinstance(operator, LinearOperator)
    assert operator.shape == (20, 30)
    v, w = rng.normal(size=30), rng.normal(size=(20, 4))
    np.testing.assert_allclose(operator @ v, dense @ v, atol=1e-12)
    np.testing.assert_allclose(operator.H @ w, dense.T @ w, atol=1e-12)
    np.testing.assert_allclose(operator.T @ w[:, 0], dense.T @ w[:, 0], atol=1e-12)
    np.testing.assert_allclose(operator @ np.eye(30), dense, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 40])
def test_conjugate_gradients(rank):
    rng = np.random.default_rng(0)
    x, target = rng.random((300, 2)), rng.normal(size=300)
    operator = points.KernelOperator(x, x, bandwidth=0.3, diagonal=1e-2)
    counts = []
    for preconditioner in (None, operator.preconditioner(rank or 1, rng=1)):
        steps = []
        found, info = cg(
            operator, target, rtol=1e-10, M=preconditioner, callback=steps.append
        )
        assert info == 0
        counts.append(len(steps))
    dense = pairs.KERNELS["gaussian"](pairs.distances(x, x, 0.3)).astype(float)
    exact = np.linalg.solve(dense + 1e-2 * np.eye(300), target)
    np.testing.assert_allclose(found, exact, atol=1e-7 * np.abs(exact).max())
    if rank:
        assert counts[1] < counts[0] / 3


def test_errors():
    x = np.zeros((4, 2))
    with pytest.raises(ValueError, match="diagonal needs as many points"):
        points.KernelOperator(x, x[:2], diagonal=1.0)
    with pytest.raises(
        ValueError, match="a preconditioner needs the matrix of a single"
    ):
        points.KernelOperator(x, x).preconditioner()
    with pytest.raises(ValueError, match="kernel must be one of"):
        points.KernelOperator(x, x, kernel="rbf")
    with pytest.raises(ValueError, match="must have two axes"):
        points.KernelOperator(np.zeros((3, 4, 2)), x)
    for cloud in (np.zeros((1, 4, 3)), np.zeros((2, 4, 3))):
        with pytest.raises(ValueError, match="x and y must have two axes, got"):
            points.KernelOperator(cloud, cloud)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        points.KernelOperator(x, x, diagonal=1.0).preconditioner(0)


def test_vectors_of_other_dtypes():
    x = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    operator = points.KernelOperator(x, x, diagonal=0.5)
    assert (operator @ np.ones(6)).dtype == operator.dtype == np.float32
    real, imaginary = np.arange(6.0), np.ones(6)
    found = operator @ (real + 1j * imaginary)
    assert (found.real == operator @ real).all()
    assert (found.imag == operator @ imaginary).all()


def test_help_shows_its_arguments():
    shown = list(inspect.signature(points.KernelOperator).parameters)
    assert shown == ["x", "y", "kernel", "bandwidth", "diagonal"]
