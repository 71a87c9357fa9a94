"""SciPy's own tests of the softmax family, run with this package's functions."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import scipy

TESTS = "scipy.special.tests.test_logsumexp"
VERSION = tuple(int(n) for n in re.findall(r"\d+", scipy.__version__)[:2])


def run(tmp_path, **environment):
    if importlib.util.find_spec("scipy.special.tests") is None:
        pytest.skip("this SciPy was installed without its tests")
    tests = Path(__file__).parents[1]
    paths = [tests / "support", tests.parent, os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "scipy_suite", "-W", "ignore", "--pyargs", TESTS]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # with no settings of pytest
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_on_numpy(tmp_path):
    assert run(tmp_path) >= 11


@pytest.mark.gpu
@pytest.mark.skipif(VERSION < (1, 15), reason="these tests know NumPy alone")
def test_on_cupy(tmp_path, cupy):
    passed = run(tmp_path, SCIPY_ARRAY_API='["cupy"]')
    assert passed > 30
