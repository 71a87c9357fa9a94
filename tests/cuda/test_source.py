"""Finding cuda_src/, joining headers, and shipping both in the wheel."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cupyflash._cuda import source

ROOT = Path(__file__).parents[2]
KERNELS = sorted(
    p.relative_to(source.CUDA_SRC).as_posix() for p in source.CUDA_SRC.rglob("*.cu")
)
HEADERS = sorted(
    p.relative_to(source.CUDA_SRC).as_posix() for p in source.CUDA_SRC.rglob("*.cuh")
)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder in the place of cuda_src/; write(name, text) puts a file there."""
    monkeypatch.setattr(source, "CUDA_SRC", tmp_path)
    source.load.cache_clear()

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    yield write
    source.load.cache_clear()


def origins(text):
    """{line as written: (file, line)} as a compiler would report it."""
    found, file, line = {}, None, 0
    for text_line in text.split("\n"):
        seam = re.fullmatch(r'#line (\d+) "([^"]+)"', text_line)
        if seam:
            line, file = int(seam[1]), seam[2]
        else:
            if text_line.strip():
                found[text_line] = (file, line)
            line += 1
    return found


def test_headers_are_pasted_once_and_lines_stay_true(tree):
    tree("a.cu", '// a1\n#include "h/one.cuh"\n#include "h/two.cuh"\n\n// a5\n')
    tree("h/one.cuh", '// one1\n#include "h/two.cuh"\n// one3')
    tree("h/two.cuh", "// two1\n\n// two3\n")
    text = source.load("a.cu")
    assert text.count("// two1") == 1
    assert origins(text) == {
        "// a1": ("a.cu", 1),
        "// one1": ("h/one.cuh", 1),
        "// two1": ("h/two.cuh", 1),
        "// two3": ("h/two.cuh", 3),
        "// one3": ("h/one.cuh", 3),
        "// a5": ("a.cu", 5),
    }


def test_headers_of_cuda_are_left_to_the_compiler(tree):
    tree("a.cu", "#include <cuda_fp16.h>\nint x;\n")
    assert "#include <cuda_fp16.h>" in source.load("a.cu")


def test_headers_may_include_each_other(tree):
    tree("a.cu", '#include "x.cuh"\n')
    tree("x.cuh", '#include "y.cuh"\n// x\n')
    tree("y.cuh", '#include "x.cuh"\n// y\n')
    assert source.load("a.cu").count("// x") == 1


def test_a_changed_header_changes_the_text(tree):
    tree("a.cu", '#include "h.cuh"\n')
    tree("h.cuh", "// before\n")
    before = source.load("a.cu")
    tree("h.cuh", "// after\n")
    source.load.cache_clear()
    assert source.load("a.cu") != before


def test_a_missing_header_is_named(tree):
    tree("a.cu", '#include "nowhere.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cuh"):
        source.load("a.cu")


def test_there_are_kernels():
    assert any(name.startswith("softmax/") for name in KERNELS)
    assert any(name.startswith("attention/") for name in KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_join_completely(name):
    text = source.load(name)
    assert not re.search(r'^\s*#include\s+"', text, re.MULTILINE)
    # Every non-empty line of the kernel's own is reported where it stands.
    own = (source.CUDA_SRC / name).read_text(encoding="utf-8").split("\n")
    for file, line in origins(text).values():
        if file == name:
            assert own[line - 1].strip()


def test_every_header_is_used():
    text = "".join(source.load(name) for name in KERNELS)
    # Those of score functions stand before text that is made at run time.
    text += source.load("expr/intervals.cuh")
    unused = [h for h in HEADERS if f'#line 1 "{h}"' not in text]
    assert not unused


@pytest.mark.parametrize("name", [*KERNELS, *HEADERS])
def test_sources_are_ascii_and_say_what_they_are(name):
    text = (source.CUDA_SRC / name).read_text(encoding="ascii")
    assert text.startswith("// SPDX-License-Identifier: MIT\n// ")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The path of a wheel built from a copy of this tree."""
    return _built("wheel", tmp_path_factory.mktemp("wheel"), "*.whl")


def _built(form, target, pattern):
    """The path of what setuptools' own hook makes, as pip and build call it."""
    pytest.importorskip("setuptools", minversion="77")
    # Built in a copy: build/ and egg-info of the checkout are left alone.
    copy = _copy_of_the_tree(target / "tree")
    code = (
        "import sys; from setuptools import build_meta; "
        f"print(build_meta.build_{form}(sys.argv[1]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return next(target.glob(pattern))


def modules_of_the_checkout():
    return {p.relative_to(ROOT).as_posix() for p in (ROOT / "cupyflash").rglob("*.py")}


def _copy_of_the_tree(target):
    import shutil

    target.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    folders = (
        "benchmarks",
        "cupyflash",
        "cuda_src",
        "docs",
        "examples",
        "tests",
        "tools",
    )
    for name in folders:
        ignore = shutil.ignore_patterns("__pycache__", "_build", "generated")
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    return target


def test_the_wheel_holds_the_cuda_sources(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {
            name.removeprefix("cupyflash/cuda_src/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("cupyflash/cuda_src/")
        }
    expected = {n: (source.CUDA_SRC / n).read_bytes() for n in [*KERNELS, *HEADERS]}
    assert {n: b for n, b in shipped.items() if n.endswith((".cu", ".cuh"))} == expected


def test_the_source_distribution_holds_what_a_wheel_is_made_of(tmp_path):
    """And the tests with all that they read."""
    with tarfile.open(_built("sdist", tmp_path, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"cuda_src/{name}" for name in [*KERNELS, *HEADERS]}
    expected |= modules_of_the_checkout()
    assert expected | {"cupyflash/py.typed", "CHANGELOG.md", "LICENSE"} <= names
    folders = ("tests", "docs", "examples", "benchmarks", "tools")
    tracked = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".md", ".rst", ".json", ".txt")
    }
    made = re.compile(r"docs/(_build|generated|reference/generated)/")
    assert {name for name in tracked if not made.match(name)} <= names


def test_the_wheel_holds_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert modules_of_the_checkout() <= names
    assert "cupyflash/py.typed" in names
    assert not any(name.startswith("tests") for name in names)


def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    """Import from the unpacked wheel alone: sources are found beside the package."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import cupyflash, numpy as np\n"
        "from cupyflash._cuda import source as _source\n"
        f"_source.load({KERNELS[0]!r})\n"
        "print(_source.CUDA_SRC)\n"
        "print(cupyflash.softmax(np.zeros(4)).sum())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == [
        str(tmp_path / "cupyflash" / "cuda_src"),
        "1.0",
    ]
