"""What type checkers see of the public functions."""

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import cupyflash
from cupyflash._attention import api as attention_api
from cupyflash._softmax import api as softmax_api
from cupyflash.distributed import _ring
from cupyflash.points import _reductions

ROOT = Path(cupyflash.__file__).parent.parent

# A call and what both checkers must say of it. Arrays are Any: NumPy's or CuPy's.
REVEALED = {
    "cupyflash.softmax(x)": "Any",
    "cupyflash.attention(x, x, x)": "Any",
    "cupyflash.attention(x, x, x, return_lse=False)": "Any",
    "cupyflash.attention(x, x, x, return_lse=True)": "tuple[Any, Any]",
    "cupyflash.logsumexp(x, 0)": "Any",
    "cupyflash.logsumexp(x, axis=0, return_sign=True)": "tuple[Any, Any]",
    "cupyflash.merge_attention_states(x, x)": "tuple[Any, Any]",
    "cupyflash.attention_vjp(x, x, x, x, x, x).dq": "Any",
    "cupyflash.explain('softmax', x).kernel": "str",
    "cupyflash.points.mean(x, x, x)": "Any",
    "cupyflash.points.mean(x, x, x, return_lse=True)": "tuple[Any, Any]",
    "cupyflash.distributed.attention(x, x, x, return_lse=True)": "tuple[Any, Any]",
    "cupyflash.points.GaussianKDE(x).gradient(x)": "Any",
}
WRONG = (
    "cupyflash.attention(x, x, x, causl=True)",
    "cupyflash.attention(x, x, x, method='fast')",
    "cupyflash.attention(x, x, x, layout='bsd')",
    "cupyflash.logsumexp(x, return_sing=True)",
)


@pytest.fixture
def program(tmp_path):
    """A file with all calls, one a line."""
    lines = [
        "from typing import Any, reveal_type",
        "import cupyflash, cupyflash.distributed, cupyflash.points",
        "def f(x: Any) -> None:",
        *(f"    reveal_type({call})" for call in REVEALED),
        *(f"    {call}" for call in WRONG),
    ]
    path = tmp_path / "program.py"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def check(program, command, revealed, error):
    """Compare what a checker prints, line by line of the program."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = {}
    for line in result.stdout.splitlines():
        if match := re.search(r"program\.py:(\d+):", line):
            found.setdefault(int(match[1]), []).append(line)
    for number, (call, expected) in enumerate(REVEALED.items(), start=4):
        text = " ".join(found.get(number, [result.stdout + result.stderr]))
        (said,) = re.findall(revealed, text)
        assert said.replace("builtins.", "") == expected, call
    for number, call in enumerate(WRONG, start=4 + len(REVEALED)):
        assert any(error in line for line in found.get(number, [])), call


def test_mypy(program):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(program)]
    check(program, command, r'Revealed type is "([^"]+)"', "error:")


def test_pyright(program):
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if not (pyright or (pyright := shutil.which("pyright"))):
        pytest.skip("pyright is not installed")
    command = [pyright, "--pythonpath", sys.executable, str(program)]
    check(program, command, r' is "([^"]+)"', "error:")


@pytest.mark.parametrize(
    ("function", "flag"),
    [
        (attention_api.attention, "return_lse"),
        (softmax_api.logsumexp, "return_sign"),
        (_ring.attention, "return_lse"),
        (_reductions.mean, "return_lse"),
    ],
)
def test_overloads_have_the_arguments_of_their_function(function, flag):
    """A new option is not forgotten in one of them."""
    compare_with_overloads(function, flag)


@pytest.mark.parametrize(
    ("module", "name", "flag"),
    [
        ("_attention", "attention", "return_lse"),
        ("_softmax", "logsumexp", "return_sign"),
        ("points", "mean", "return_lse"),
    ],
)
def test_so_have_those_for_dask(module, name, flag):
    pytest.importorskip("dask.array")
    found = importlib.import_module(f"cupyflash.dask.{module}")
    compare_with_overloads(getattr(found, name), flag)


def compare_with_overloads(function, flag):
    own = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD  # for a better error at run time
    }
    overloads = typing.get_overloads(function)
    assert len(overloads) in (2, 3)  # one is enough where arrays are Any
    for overload in overloads:
        others = inspect.signature(overload).parameters
        assert set(others) == set(own)
        for name in set(own) - {flag}:
            assert others[name].default == own[name].default
            assert others[name].annotation == own[name].annotation
