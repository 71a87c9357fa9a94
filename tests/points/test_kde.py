"""Kernel density estimates beside SciPy's, and by its tests."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cupyflash import points
from tests.points.test_gradients import differences


def estimates(d=3, n=700):
    rng = np.random.default_rng(0)
    data = rng.normal(size=(d, d)) @ rng.normal(size=(d, n)) + 100
    weights = rng.random(n)
    return (
        points.GaussianKDE(data, weights=weights),
        stats.gaussian_kde(data, weights=weights),
    )


def test_passes_the_tests_of_scipy(tmp_path):
    if find_spec("scipy.stats.tests") is None:
        pytest.skip("this SciPy was installed without its tests")
    tests = Path(__file__).parents[1]
    paths = [tests / "support", tests.parent, os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "scipy_kde_suite", "-W", "ignore"]
    command += ["--pyargs", "scipy.stats.tests.test_kdeoth"]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # with no settings of pytest
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 40


@pytest.mark.parametrize("d", [1, 2, 5])
def test_densities(d):
    ours, theirs = estimates(d)
    at = theirs.resample(50, seed=1)
    np.testing.assert_allclose(ours(at), theirs(at), rtol=1e-10)
    np.testing.assert_allclose(ours.pdf(at), theirs(at), rtol=1e-10)
    np.testing.assert_allclose(ours.logpdf(at), theirs.logpdf(at), rtol=1e-10)
    own = theirs.dataset
    np.testing.assert_allclose(ours(ours.dataset), theirs(own), rtol=1e-10)
    np.testing.assert_allclose(
        ours.logpdf(ours.dataset), theirs.logpdf(own), rtol=1e-10
    )
    far = at + 1e4
    np.testing.assert_allclose(ours.logpdf(far), theirs.logpdf(far), rtol=1e-10)


def test_integrals_and_marginals():
    ours, theirs = estimates()
    mean, cov = np.full(3, 100.0), np.eye(3) * 2
    assert ours.integrate_gaussian(mean, cov) == pytest.approx(
        theirs.integrate_gaussian(mean, cov)
    )
    other = stats.gaussian_kde(theirs.dataset[:, :50] + 1)
    assert ours.integrate_kde(other) == pytest.approx(theirs.integrate_kde(other))
    kept = ours.marginal([0, -1])
    assert isinstance(kept, points.GaussianKDE)
    at = kept.dataset[:, :5]
    np.testing.assert_allclose(kept(at), theirs.marginal([0, -1])(at), rtol=1e-10)
    assert isinstance(ours, stats.gaussian_kde)


@pytest.mark.parametrize("log", [False, True])
def test_gradient(log):
    ours, _ = estimates(2, 60)
    at = ours.dataset[:, :4] + 0.3
    found = ours.gradient(at, log=log)
    value = ours.logpdf if log else ours
    exact = differences(lambda z: value(z).sum(), [at], 0)
    np.testing.assert_allclose(found, exact, atol=1e-6 * np.abs(exact).max())


def test_errors():
    ours, _ = estimates()
    with pytest.raises(ValueError, match="points have dimension 2, dataset has"):
        ours(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="must be unique"):
        ours.marginal([0, 0])
    with pytest.raises(ValueError, match="invalid for a distribution in 3"):
        ours.marginal([3])
    with pytest.raises(TypeError, match="points must hold real numbers, got complex"):
        ours(np.zeros((3, 4), complex))
    with pytest.raises(TypeError, match="dataset must hold real numbers"):
        points.GaussianKDE(np.zeros((3, 40), complex))


def test_infinitely_far_points_have_no_density():
    ours, _ = estimates(1)
    assert ours([np.inf]) == 0
    assert ours.logpdf([np.inf]) == -np.inf


def test_masked_arrays_are_refused():
    data = np.random.default_rng(0).normal(size=(2, 20))
    masked = np.ma.masked_array(data, mask=data > 1)
    with pytest.raises(TypeError, match="dataset is a masked array"):
        points.GaussianKDE(masked)
    with pytest.raises(TypeError, match="weights is a masked array"):
        points.GaussianKDE(data, weights=masked[0])
    kde = points.GaussianKDE(data)
    for function in (kde, kde.logpdf, kde.gradient):
        with pytest.raises(TypeError, match="points is a masked array"):
            function(masked)


def test_points_as_far_away_as_numbers_go():
    kde = points.GaussianKDE(np.random.default_rng(0).normal(size=(2, 20)))
    with np.errstate(all="raise"):
        found = kde(np.array([[0.0, 1.7e308, -1.7e308], [0.0, 0.0, 1.7e308]]))
    assert found[0] > 0
    assert found[1] == found[2] == 0
