"""need_dscore= on CuPy arrays: on a card, and on kernels emulated on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import emulation
import named_gradients
import pytest

SCRIPT = Path(named_gradients.__file__)


def emulated(*names, order="first"):
    # In a process of its own, where no other CuPy has been imported.
    order = {"CUPYFLASH_EMULATION_ORDER": order, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "sm_75", *names],
        capture_output=True,
        text=True,
        env={**os.environ, **order},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


# One of the cases; ``python tests/support/named_gradients.py sm_75`` runs them all.
@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
def test_emulated_kernels_have_numpys_gradients_in_any_order_of_threads():
    bits = emulated("pairs of kinds")
    assert len(bits) == 1
    assert emulated("pairs of kinds", order="last") == bits


@pytest.mark.gpu
@pytest.mark.parametrize("name", named_gradients.CASES)
def test_gradients_are_those_of_numpy(name):
    import cupy

    named_gradients.check(name, cupy)
