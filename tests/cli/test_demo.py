"""The demo computes what it says: a posterior, a density, and its tables."""

import json

import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose

from cupyflash._cli import demo, demo_density, demo_fit
from cupyflash._cli import main as cli


@pytest.fixture
def fitted():
    """Pixels drawn from the prior, measured with noise, and 4,096 simulations."""
    rng = np.random.default_rng(3)
    theta = demo_fit.draw_from_prior(rng, 4096)
    truth = demo_fit.phantom(rng, 16)
    signals = demo_fit.simulate(truth)
    measured = signals + demo_fit.NOISE * rng.standard_normal(signals.shape)
    return theta, truth, measured


def test_the_posterior_is_bayes_rule(fitted):
    """Mean, deviation and evidence, from likelihoods written out in float64."""
    theta, _, measured = fitted
    logs = scipy.stats.norm.logpdf(
        measured[:, None], demo_fit.simulate(theta), demo_fit.NOISE
    ).sum(axis=2)
    evidence = scipy.special.logsumexp(logs, axis=1)
    weights = np.exp(logs - evidence[:, None])
    mean = weights @ theta
    deviation = np.sqrt(weights @ theta**2 - mean**2)

    found = demo_fit.Simulations(theta).posterior(measured)
    width = demo_fit.HIGH - demo_fit.LOW
    assert_allclose(found[0] / width, mean / width, atol=2e-4)
    assert_allclose(found[1] / width, deviation / width, atol=2e-4)
    assert_allclose(found[2], evidence - np.log(len(theta)), atol=0.02)


def test_blocks_give_the_same_posterior(fitted):
    theta, _, measured = fitted
    simulations = demo_fit.Simulations(theta)
    width = demo_fit.HIGH - demo_fit.LOW
    ours, theirs = (
        np.stack(found[:2]) / width
        for found in (
            simulations.posterior(measured),
            simulations.posterior_of_blocks(measured),
        )
    )
    assert_allclose(ours, theirs, atol=1e-4)


def test_the_best_match_is_the_nearest_simulation(fitted):
    theta, _, measured = fitted
    signals = demo_fit.simulate(theta)
    nearest = ((measured[:, None] - signals) ** 2).sum(axis=2).argmin(axis=1)
    simulations = demo_fit.Simulations(theta)
    assert_allclose(simulations.best_match_of_blocks(measured)[0], theta[nearest])
    pytest.importorskip("sklearn")
    assert_allclose(simulations.best_match(measured)[0], theta[nearest])


def test_the_truth_is_drawn_from_the_prior():
    """Each part of the prior's box has its share of pixels, in every phantom."""
    for seed in range(3):
        maps = demo_fit.phantom(np.random.default_rng(seed), 64)
        levels = (maps - demo_fit.LOW) / (demo_fit.HIGH - demo_fit.LOW)
        assert_allclose(np.sort(levels[:, 0]), (np.arange(64**2) + 0.5) / 64**2)
        counts, _ = np.histogramdd(levels, 4, [(0, 1)] * 3)
        assert_allclose(counts, 64)


def test_the_stated_error_is_the_error():
    """Of pixels enough for 3 percent, with simulations enough for less."""
    rng = np.random.default_rng(0)
    truth = demo_fit.phantom(rng, 48)
    clean = demo_fit.simulate(truth)
    measured = clean + demo_fit.NOISE * rng.standard_normal(clean.shape)
    simulations = demo_fit.Simulations(demo_fit.draw_from_prior(rng, 2**14))
    mean, deviation, _ = simulations.posterior(measured)
    error = np.sqrt(((mean - truth) ** 2).mean(axis=0))
    assert_allclose(np.sqrt((deviation**2).mean(axis=0)), error, rtol=0.045)


def test_the_posterior_beats_its_peers_and_states_its_error(fitted):
    theta, truth, measured = fitted
    simulations = demo_fit.Simulations(theta)
    mean, deviation, _ = simulations.posterior(measured)
    error = np.sqrt(((mean - truth) ** 2).mean(axis=0))
    assert_allclose(np.sqrt((deviation**2).mean(axis=0)), error, rtol=0.25)
    match, _ = simulations.best_match_of_blocks(measured)
    assert (error < np.sqrt(((match - truth) ** 2).mean(axis=0))).all()


def test_log_density_and_gradient():
    data = demo_density.sample(np.random.default_rng(2), 400)
    assert_allclose(np.cov(data.T), np.eye(demo_density.DIMENSIONS), atol=1e-12)
    width = demo_density.scott(data)
    found, gradient = demo_density.log_density(data, data, width)
    kde = scipy.stats.gaussian_kde(data.T)
    assert_allclose(found, kde.logpdf(data.T), rtol=1e-12)
    assert_allclose(demo_density.by_scipy(data, data, width), found, rtol=1e-12)
    assert demo._slope_error(data, width, gradient) < 1e-6
    pytest.importorskip("sklearn")
    assert_allclose(demo_density.by_scikit_learn(data, data, width), found, rtol=1e-12)


@pytest.mark.parametrize("missing", [(), ("matplotlib", "sklearn")])
def test_the_whole_demo(missing, monkeypatch, tmp_path, capsys):
    """All parts in small, also without the packages of the others."""
    has = demo._has
    monkeypatch.setattr(demo, "_has", lambda name: name not in missing and has(name))
    monkeypatch.setitem(demo.SIZES, 32, demo.Size(256, 200, 8))
    monkeypatch.setattr(demo.demo_ladder, "N", 64)
    assert cli.main(["demo", "--cpu", "--size", "32", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "demo.json").read_text("utf-8"))
    assert report["fit"]["prior"]["myelin fraction"] == [0.0, 0.3]
    assert report["fit"]["methods"][0]["posterior_sd"]
    assert len(report["density"]["methods"]) == (2 if missing else 4)
    assert {"n", "softmax", "attention", "overflow"} <= set(report["ladder"])
    drawn = (tmp_path / "fit.png").exists()
    assert drawn == (not missing and has("matplotlib"))
    said = capsys.readouterr().out
    assert "uniform from 0 to 0.3" in said
    assert ("matplotlib is missing" in said) == (not drawn)
