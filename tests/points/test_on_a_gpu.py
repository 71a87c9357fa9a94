"""What scientists call, on CuPy arrays, beside the same on NumPy's."""

import numpy as np
import pytest

from cupyflash import points

pytestmark = pytest.mark.gpu


def clouds(dim=3, dtype=np.float64):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, dim)), rng.normal(size=(400, dim)) + 0.5
    return x.astype(dtype), y.astype(dtype)


def both(cupy, function, *arrays):
    """Results on NumPy and on CuPy, these as NumPy arrays."""
    on_gpu = function(*map(cupy.asarray, arrays))
    assert isinstance(on_gpu, cupy.ndarray)
    return function(*arrays), cupy.asnumpy(on_gpu)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinkhorn(cupy, dtype):
    x, y = clouds(dtype=dtype)
    tol = 1e-4 if dtype == np.float32 else 1e-9
    for options in ({}, {"reach": 1.0}):
        for part in (
            lambda t: t.f - t.f.mean(),  # its constant is free
            lambda t: t.barycenters(),
            lambda t: t.gradient()[1],
            lambda t: t.plan.T @ t.plan.marginal(),
        ):
            found, on_gpu = both(
                cupy,
                lambda a, b, part=part, options=options: part(
                    points.sinkhorn(a, b, epsilon=0.5, tol=tol, **options)
                ),
                x,
                y,
            )
            scale = np.abs(found).max()
            np.testing.assert_allclose(on_gpu, found, atol=50 * tol * scale)
    far = both(
        cupy, lambda a, b: points.sinkhorn_divergence(a, b, epsilon=0.5).value, x, y
    )
    assert far[0] == pytest.approx(far[1], rel=1e-3)


def test_density(cupy):
    x, y = (z.T for z in clouds())
    weights = np.random.default_rng(1).random(300)
    here = points.GaussianKDE(x, weights=weights)
    there = points.GaussianKDE(cupy.asarray(x), weights=cupy.asarray(weights))
    on_gpu = cupy.asarray(y)
    for name in ("evaluate", "logpdf", "gradient"):
        found = getattr(there, name)(on_gpu)
        assert isinstance(found, cupy.ndarray)
        exact = getattr(here, name)(y)
        np.testing.assert_allclose(cupy.asnumpy(found), exact, rtol=1e-9, atol=1e-12)
    own = cupy.asnumpy(there(there.dataset))
    np.testing.assert_allclose(own, here(x), rtol=1e-9)
    mean, cov = np.zeros(3), np.eye(3)
    exact = here.integrate_gaussian(mean, cov)
    found = there.integrate_gaussian(cupy.asarray(mean), cov)
    assert float(found) == pytest.approx(exact)
    assert float(there.integrate_kde(there)) == pytest.approx(here.integrate_kde(here))
    kept = there.marginal([1])
    assert float(kept.integrate_box_1d(-1, 1)) == pytest.approx(
        here.marginal([1]).integrate_box_1d(-1, 1)
    )
    drawn = there.resample(2000, seed=0)
    assert drawn.shape == (3, 2000)
    assert float(abs(drawn.mean(axis=1) - there.dataset @ there.weights).max()) < 0.2
    with pytest.raises(TypeError, match="both be NumPy or both be CuPy"):
        there(y)


def test_mean_shift(cupy):
    x = np.concatenate([clouds(2)[0], clouds(2)[0] + 9])
    found = points.mean_shift(x, 1.5)
    on_gpu = points.mean_shift(cupy.asarray(x), 1.5)
    assert len(on_gpu.cluster_centers) == len(found.cluster_centers) == 2
    gaps = cupy.asnumpy(on_gpu.cluster_centers)[:, None] - found.cluster_centers
    assert np.abs(gaps).max(axis=2).min(axis=1).max() < 0.05
    same = (cupy.asnumpy(on_gpu.labels) == found.labels).mean()
    assert max(same, 1 - same) > 0.99


def test_two_samples(cupy):
    x, y = clouds()
    for function in (points.energy_distance, points.mmd):
        found = function(x, y, permutations=70, rng=0)
        on_gpu = function(cupy.asarray(x), cupy.asarray(y), permutations=70, rng=0)
        assert float(on_gpu.statistic) == pytest.approx(float(found.statistic))
        assert on_gpu.pvalue == pytest.approx(found.pvalue)


def test_operator(cupy):
    from cupyx.scipy.sparse.linalg import cg

    x, _ = clouds(2)
    target = np.sin(x[:, 0])
    a = cupy.asarray(x)
    operator = points.KernelOperator(a, a, diagonal=1e-2)
    found, info = cg(
        operator, cupy.asarray(target), rtol=1e-10, M=operator.preconditioner(50, rng=0)
    )
    assert info == 0
    here = points.KernelOperator(x, x, diagonal=1e-2)
    np.testing.assert_allclose(here @ cupy.asnumpy(found), target, atol=1e-8)
    v = np.ones((300, 2))
    np.testing.assert_allclose(
        cupy.asnumpy(operator.H @ cupy.asarray(v)), here.H @ v, rtol=1e-10
    )


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern32", "cauchy"])
def test_gradients(cupy, kernel):
    x, y = clouds()
    rng = np.random.default_rng(2)
    v, weights = rng.normal(size=(400, 2)), rng.normal(size=400)
    dout, dlse = rng.normal(size=(300, 2)), rng.normal(size=300)
    for function, arrays, options in (
        (points.mean_vjp, (dout, x, y, v, weights), {"dlse": dlse}),
        (points.logsumexp_vjp, (dlse, x, y, weights), {}),
        (points.kernel_sum_vjp, (dout, x, y, v), {}),
    ):
        found = function(*arrays, kernel=kernel, **options)
        on_gpu = function(
            *map(cupy.asarray, arrays),
            kernel=kernel,
            **{name: cupy.asarray(z) for name, z in options.items()},
        )
        for one, other in zip(found, on_gpu, strict=True):
            if one is not None:
                scale = np.abs(one).max()
                np.testing.assert_allclose(
                    cupy.asnumpy(other), one, atol=1e-9 * scale, rtol=0
                )
