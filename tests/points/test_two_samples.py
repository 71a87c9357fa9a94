"""Energy distance, MMD and permutation tests beside plain sums."""

import numpy as np
import pytest
from scipy import stats

from cupyflash import points
from tests.support import pairs


def samples(shift=0.0, dim=2):
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, dim)), rng.normal(size=(30, dim)) + shift


def test_energy_distance():
    x, y = samples(0.5, 1)
    exact = stats.energy_distance(x[:, 0], y[:, 0])
    assert points.energy_distance(x, y) == pytest.approx(exact, rel=1e-10)
    assert points.energy_distance(x, x) == pytest.approx(0, abs=1e-7)
    x, y = samples(0.5, 3)
    square = 2 * pairs.distances(x, y).mean()
    square -= pairs.distances(x, x).mean() + pairs.distances(y, y).mean()
    assert points.energy_distance(x, y) == pytest.approx(float(square) ** 0.5)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "energy"])
def test_mmd(kernel):
    x, y = samples(0.5)
    xx, yy, xy = (
        pairs.KERNELS[kernel](pairs.distances(a, b, 2.0))
        for a, b in ((x, x), (y, y), (x, y))
    )
    biased = float(xx.mean() + yy.mean() - 2 * xy.mean())
    found = points.mmd(x, y, kernel=kernel, bandwidth=2.0, unbiased=False)
    assert found == pytest.approx(biased)
    own = pairs.KERNELS[kernel](np.zeros(()))
    unbiased = (xx.sum() - 40 * own) / (40 * 39) + (yy.sum() - 30 * own) / (30 * 29)
    exact = float(unbiased - 2 * xy.mean())
    assert points.mmd(x, y, kernel=kernel, bandwidth=2.0) == pytest.approx(exact)


def test_energy_distance_of_points_without_coordinates():
    assert points.energy_distance(np.ones((5, 0)), np.ones((4, 0))) == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("share", [0.98, 0.5, -0.5, -0.98])
def test_energy_distance_of_points_of_any_size(rng, dtype, share):
    """Those of float64 reach 1e302, and 1e-302: squares would overflow, or be 0."""
    x, y = (rng.normal(size=(n, 3)).astype(dtype) for n in (50, 40))
    power = 2 * int(share * np.finfo(dtype).maxexp / 2)
    scaled = points.energy_distance(np.ldexp(x, power), np.ldexp(y, power))
    assert scaled.dtype == dtype
    exact = float(points.energy_distance(x, y))
    assert np.ldexp(scaled, -power // 2) == pytest.approx(exact, rel=1e-12)
    tested = points.energy_distance(
        np.ldexp(x, power), np.ldexp(y, power), permutations=9, rng=1
    )
    assert tested.statistic == scaled
    assert tested.pvalue == points.energy_distance(x, y, permutations=9, rng=1).pvalue


@pytest.mark.parametrize("function", [points.energy_distance, points.mmd])
def test_permutations(function):
    told = []
    x, y = samples(3.0)
    found = function(
        x, y, permutations=150, rng=0, progress=lambda *now: told.append(now)
    )
    assert found.pvalue == pytest.approx(1 / 151)
    assert found.null_distribution.shape == (150,)
    assert found.statistic == function(x, y)
    assert told == [(64, 150), (128, 150), (150, 150)]
    same = function(*samples(0.0), permutations=150, rng=0)
    assert same.pvalue > 0.05


def test_a_permutation_is_the_statistic_of_exchanged_points():
    x, y = samples(0.5)
    z = np.concatenate([x, y])
    found = points.energy_distance(x, y, permutations=1, rng=5)
    inside = np.random.default_rng(5).permutation(np.arange(70) < 40)
    exact = points.energy_distance(z[inside], z[~inside])
    assert found.null_distribution[0] == pytest.approx(exact)


def test_errors():
    x, y = samples()
    with pytest.raises(ValueError, match="at least 2 points"):
        points.mmd(x[:1], y)
    with pytest.raises(ValueError, match="same number of dimensions"):
        points.energy_distance(x, y[:, :1])
    with pytest.raises(ValueError, match="permutations must be at least 0, got -1"):
        points.mmd(x, y, permutations=-1)


def test_points_that_are_nan_prove_nothing():
    x, y = samples()
    x[3, 1] = np.nan
    for function in (points.energy_distance, points.mmd):
        found = function(x, y, permutations=9, rng=0)
        assert np.isnan(found.statistic)
        assert np.isnan(found.pvalue)
