"""Random problems on NumPy, new ones in each run, and gradients of such."""

import secrets

import numpy as np
import pytest

from tests.support import fuzz_points, fuzz_points_vjp


@pytest.mark.parametrize("number", range(12))
def test_random_problems(number):
    seed = secrets.randbits(31)
    problem = fuzz_points.draw(seed)
    if problem["x"].shape[-2] > 4096:
        problem["x"] = problem["x"][..., :4096, :]
    share = fuzz_points.share_of_promise(problem, np)
    assert share <= 1, f"seed {seed}: {share}, {fuzz_points.summary(problem)}"


@pytest.mark.parametrize("number", range(12))
def test_gradients_of_random_problems(number):
    seed = secrets.randbits(31)
    error = fuzz_points_vjp.error(seed)
    assert error < fuzz_points_vjp.ALLOWED, f"seed {seed}: {error}"
