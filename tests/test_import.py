"""`import cupyflash`: with NumPy alone, quickly, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(cupyflash.__file__).parent.parent
OPTIONAL = ("cupy", "ml_dtypes", "rich", "matplotlib", "skimage")

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ImportError(name + " is hidden")

sys.meta_path.insert(0, Hidden())
"""


def python(code, **options):
    """Standard output of a fresh interpreter that runs `code`."""
    result = subprocess.run(
        [sys.executable, *options.pop("flags", ()), "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_works_without_anything_optional():
    hide = HIDE.format(hidden=OPTIONAL)
    code = """
import numpy as np, cupyflash
x = np.ones((2, 3, 4), np.float32)
print(cupyflash.softmax(x).sum(), cupyflash.attention(x, x, x).shape)
print(cupyflash.explain("softmax", x).backend)
"""
    lines = python(hide + code).split("\n")
    total, *shape = lines[0].split(" ", 1)
    assert float(total) == pytest.approx(1, abs=1e-6)
    assert shape == ["(2, 3, 4)"]
    assert lines[1] == "numpy"


def test_imports_nothing_heavy():
    code = f"""
import sys, cupyflash
import numpy as np
x = np.ones((2, 3, 4), np.float32)
cupyflash.attention(x, x, x), cupyflash.softmax(x)
print([name for name in {(*OPTIONAL, "scipy.special")!r} if name in sys.modules])
"""
    used = python(code).strip()
    assert used == "[]"


def test_is_quick(tmp_path):
    """50 ms of a core beyond NumPy, in the best of some tries.

    With bytecode, which an installed package has: the first try writes it.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    code = """
import time, numpy
start = time.process_time()
import cupyflash
print(time.process_time() - start)
"""
    assert min(float(python(code, env=env)) for _ in range(5)) < 0.05


def test_public_names():
    assert set(cupyflash.__all__) == {
        "AttentionGrads",
        "attention",
        "attention_vjp",
        "explain",
        "log_softmax",
        "log_softmax_vjp",
        "logsumexp",
        "merge_attention_states",
        "softmax",
        "softmax_vjp",
    }
    for name in cupyflash.__all__:
        assert callable(getattr(cupyflash, name))
    assert cupyflash.__version__.count(".") == 2


def test_warnings_are_errors_on_import():
    python("import cupyflash", flags=("-W", "error"))


@pytest.mark.parametrize(
    "module", ["_cuda.kernel", "_cuda.source", "_softmax.gpu.registry"]
)
def test_tables_never_import_cupy(module):
    hide = HIDE.format(hidden=("cupy", "cupyx", "cupy_backends"))
    python(
        hide + f"import cupyflash.{module}, cupyflash._attention.gpu.forward_registry"
    )
