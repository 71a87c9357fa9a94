"""Every float through the exponentials of the kernels, and what judges the doubles."""

import numpy as np
import pytest

from cupyflash._cli import main as cli
from cupyflash._cli import measure
from cupyflash._reference import exponentials


@pytest.mark.gpu
def test_all_floats(cupy, capsys):
    """All 2^32 of them; the special values among them."""
    assert cli.main(["check", "--exhaustive"]) == 0
    text = capsys.readouterr().out
    assert "0 failed" in text
    for function in (*exponentials.FLOATS, *exponentials.DOUBLES):
        assert function in text


@pytest.mark.gpu
def test_a_wrong_function_is_found(cupy, monkeypatch):
    """2^x is right in the special values and nowhere else."""
    found = list(exponentials._of_all_floats("exp2f", 2.0))
    assert len(found) == 2
    for finding in found:
        assert finding.ulps > 1e5
        assert not finding.is_good


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(measure, "cuda_device_count", lambda: 0)
    assert cli.main(["check", "--exhaustive"]) == 1
    assert "needs a GPU" in capsys.readouterr().err


def test_ulps_of_doubles():
    x = exponentials.doubles(1 << 16)
    y = np.exp(x)
    assert exponentials.ulps_of_doubles(x, y).max() <= 1
    up = np.nextafter(y, np.inf)
    assert exponentials.ulps_of_doubles(x, up)[y > 1e-300].min() > 0
    for place in (0, -1):
        wrong = y.copy()
        wrong[place] = np.nan
        assert exponentials.ulps_of_doubles(x, wrong)[place] == np.inf
    lost = np.where(np.isnan(x), 1, y)
    assert exponentials.ulps_of_doubles(x, lost).max() == np.inf


def test_the_sample_has_the_special_values():
    x = exponentials.doubles(1 << 12)
    assert np.isnan(x).any()
    assert (x == -np.inf).any()
    assert (x[~np.isnan(x)] <= 0).all()
