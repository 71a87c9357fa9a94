"""Mean shift beside scikit-learn's."""

import numpy as np
import pytest

from cupyflash import points


def clouds():
    rng = np.random.default_rng(0)
    middles = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 7.0]])
    return np.concatenate(
        [
            rng.normal(size=(n, 2)) + m
            for n, m in zip((80, 60, 40), middles, strict=True)
        ]
    ), middles


def test_finds_the_clouds():
    x, middles = clouds()
    told = []
    found = points.mean_shift(x, 1.0, progress=lambda *now: told.append(now))
    assert len(found.cluster_centers) == 3
    assert np.abs(found.cluster_centers - middles).max() < 0.5
    assert np.abs(np.bincount(found.labels) - [80, 60, 40]).max() <= 1
    assert told[-1][0] == found.iterations
    assert told[-1][1] <= 1e-3


def test_as_scikit_learn():
    cluster = pytest.importorskip("sklearn.cluster")
    x, _ = clouds()
    theirs = cluster.MeanShift(bandwidth=2.0).fit(x)
    ours = points.mean_shift(x, 2.0, kernel="flat")
    assert len(ours.cluster_centers) == len(theirs.cluster_centers_)
    for centre in theirs.cluster_centers_:
        gaps = np.linalg.norm(ours.cluster_centers - centre, axis=1)
        assert gaps.min() < 0.3
    pairs = set(zip(ours.labels.tolist(), theirs.labels_.tolist(), strict=True))
    assert len(pairs) <= len(theirs.cluster_centers_) + 1


def test_seeds_and_points_left_out():
    x, _ = clouds()
    x = np.concatenate([x, [[40.0, 40.0]]])
    seeds = np.array([[0.5, 0.5], [5.0, 0.0]])
    found = points.mean_shift(x, 1.5, seeds=seeds, cluster_all=False)
    assert found.cluster_centers.shape == (2, 2)
    assert found.labels[-1] == -1
    assert points.mean_shift(x, 1.5, seeds=seeds).labels[-1] >= 0


def test_errors():
    with pytest.raises(ValueError, match="must have shape"):
        points.mean_shift(np.zeros((0, 2)), 1.0)
    with pytest.raises(ValueError, match="bandwidth must be finite and above 0"):
        points.mean_shift(np.zeros((3, 2)), 0.0)
    with pytest.raises(ValueError, match="no seed has a point"):
        points.mean_shift(
            np.zeros((3, 2)), 1.0, seeds=np.ones((1, 2)) * 9, kernel="flat"
        )
    with pytest.raises(ValueError, match="x must be finite"):
        points.mean_shift(np.array([[0.0], [np.nan]]), 1.0)
    with pytest.raises(ValueError, match="max_iter must be at least 0, got -1"):
        points.mean_shift(np.zeros((3, 2)), 1.0, max_iter=-1)
    with pytest.raises(ValueError, match="'inverse_multiquadric', 'flat', got 'round'"):
        points.mean_shift(np.zeros((3, 2)), 1.0, kernel="round")
    with pytest.raises(TypeError, match="cluster_all must be a bool"):
        points.mean_shift(np.zeros((3, 2)), 1.0, cluster_all="all")
