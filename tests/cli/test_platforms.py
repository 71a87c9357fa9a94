"""The CPU path on Windows and macOS, as far as Linux can play them."""

import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash
from cupyflash._cli import measure
from cupyflash._cuda import device, source

ROOT = Path(cupyflash.__file__).parent.parent

# What each system lacks is gone before the first import; what must not be asked for on
# the CPU path fails when it is.
PLAY = """
import builtins, ctypes, multiprocessing, os, platform, subprocess, sys, tempfile
import concurrent.futures.process, multiprocessing.reduction, threading
import numpy as np, scipy.special  # all of these have looked at the system by now
import threadpoolctl
found = threadpoolctl.ThreadpoolController().lib_controllers
# Each system has its own way to find them.
threadpoolctl.ThreadpoolController._load_libraries = (
    lambda self: self.lib_controllers.extend(found)
)

system = {system!r}
for name in {absent!r}:
    if hasattr(os, name):
        delattr(os, name)
sys.platform = {{"Windows": "win32", "Darwin": "darwin"}}[system]
platform.system = lambda: system

class Library(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name and "cu" in os.path.basename(str(name)).lower():
            raise AssertionError(f"asked for {{name}}")
        super().__init__(name, *args, **kwargs)

ctypes.CDLL = Library
for name in {hidden!r}:
    sys.modules[name] = None
_open = builtins.open
def no_proc(path, *args, **kwargs):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(path)
    return _open(path, *args, **kwargs)
builtins.open = no_proc
"""

USE = """
import cupyflash
from cupyflash._cli import measure as _measure
x = np.random.default_rng(0).standard_normal((2, 300, 16))
y = cupyflash.softmax(x, axis=-1)
np.testing.assert_allclose(y, scipy.special.softmax(x, axis=-1))
for method in ("naive", "safe", "online", "tiled", "auto"):
    out, lse = cupyflash.attention(
        x, x, x, causal=True, return_lse=True, method=method
    )
grads = cupyflash.attention_vjp(x, x, x, x, out, lse, causal=True)
assert grads.dq.shape == x.shape
assert cupyflash.explain("attention", x, x, x).backend == "numpy"
facts = _measure.machine(False)
assert facts["processor"] and facts["cores"] >= 1
assert _measure.cuda_device_count() == 0
print("works")
"""

# rich writes by another way on Windows, which is not here.
HIDDEN = ("cupy", "cupyx", "fcntl", "resource", "pwd", "grp", "rich")
ABSENT = {
    "Windows": ("sched_getaffinity", "register_at_fork", "fork", "getuid", "uname"),
    "Darwin": ("sched_getaffinity",),
}


@pytest.mark.parametrize("system", ABSENT)
def test_the_cpu_path(system):
    code = PLAY.format(system=system, absent=ABSENT[system], hidden=HIDDEN) + USE
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "works\n"


@pytest.mark.parametrize("system", ABSENT)
def test_the_command_line(system):
    code = PLAY.format(system=system, absent=ABSENT[system], hidden=HIDDEN) + (
        "from cupyflash._cli import main as _cli\nsys.exit(_cli.main(['info']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert cupyflash.__version__ in result.stdout


def test_the_driver_has_its_name_on_each_system():
    """No other module asks for it by name."""
    assert device.driver_library("win32") == "nvcuda.dll"
    assert device.driver_library("linux") == "libcuda.so.1"
    named = [
        path.name
        for path in (ROOT / "cupyflash").rglob("*.py")
        if "libcuda" in path.read_text("utf-8")
    ]
    assert named == ["device.py"]


def test_the_commit_is_found_where_git_writes_slashes(monkeypatch):
    """Git prints C:/a/b on Windows, where a path reads C:\\a\\b."""
    monkeypatch.delenv("CUPYFLASH_COMMIT", raising=False)
    root = source.CUDA_SRC.parent.resolve()

    def git(folder, *words):
        return {"rev-parse": f"{root}/./", "status": ""}[words[0]].removesuffix("/")

    monkeypatch.setattr(measure, "_git", git)
    assert measure._commit()
