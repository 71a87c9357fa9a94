"""The order of points in which tiles are small, and what skips by it."""

import numpy as np
import pytest

from cupyflash import points
from cupyflash._points.cpu import weights
from cupyflash._points.cpu.kd_tree import kd_order
from tests.support import pairs


@pytest.mark.parametrize("size", [1, 5, 16, 17, 32, 33, 100, 1000])
def test_an_order_has_each_point_once(size):
    points_ = np.random.default_rng(size).normal(size=(size, 3))
    assert (np.sort(kd_order(points_, 16)) == np.arange(size)).all()


def test_leaves_are_boxes_apart():
    line = np.random.default_rng(0).permutation(100.0 * np.arange(1000))[:, None]
    leaves = line[kd_order(line, 64)][:960, 0].reshape(15, 64)
    low, high = leaves.min(axis=1), leaves.max(axis=1)
    assert (np.sort(low)[1:] > np.sort(high)[:-1]).all()


def test_points_that_coincide_have_an_order():
    assert (np.sort(kd_order(np.zeros((500, 2)), 16)) == np.arange(500)).all()


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern32", "matern52"])
def test_kernels_of_few_pairs_are_those_of_all(kernel, monkeypatch):
    """In clusters of many axes only some pairs of a tile count."""
    rng = np.random.default_rng(1)
    middles = 8 * rng.normal(size=(40, 12))
    x, y = (
        middles[rng.integers(40, size=n)] + 0.3 * rng.normal(size=(n, 12))
        for n in (300, 1500)
    )
    b, options = rng.normal(size=(1500, 2)), {"kernel": kernel, "bandwidth": 0.7}
    counts = []
    of_few = weights._of_few
    monkeypatch.setattr(
        weights, "_of_few", lambda *args: counts.append(1) or of_few(*args)
    )
    pairs.assert_lse(
        points.logsumexp(x, y, **options), pairs.logsumexp(x, y, None, **options)[1]
    )
    of_lse = len(counts)
    pairs.assert_sums(
        points.kernel_sum(x, y, b, **options), pairs.kernel_sum(x, y, b, **options)
    )
    own = points.kernel_sum(y, y, b, **options)
    pairs.assert_sums(own[:200], pairs.kernel_sum(y[:200], y, b, **options))
    assert of_lse
    assert len(counts) > of_lse
