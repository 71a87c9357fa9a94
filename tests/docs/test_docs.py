"""What the documentation shows runs: docstrings, README, guides, examples."""

import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


FUNCTIONS = [n for n in cupyflash.__all__ if inspect.isfunction(getattr(cupyflash, n))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_have_examples_that_run(name):
    function = getattr(cupyflash, name)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(function, name, globs={})
    assert test.examples, f"{name} has no example"
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_name_every_parameter(name):
    function = getattr(cupyflash, name)
    text = inspect.getdoc(function)
    section = text.split("Parameters\n----------\n")[1]
    for heading in ("Returns\n-------\n", "Raises\n------\n"):
        assert heading in text
    section = section.split("Returns\n-------\n")[0]
    documented = re.findall(r"^([\w*, ]+?)(?: :.*)?$", section, re.MULTILINE)
    names = {n.strip().lstrip("*") for line in documented for n in line.split(",")}
    assert set(inspect.signature(function).parameters) <= names


def public_names():
    """All that users import, such as cupyflash.points.sinkhorn."""
    for name in ("", ".scores", ".points", ".dask", ".dask.points", ".distributed"):
        module = pytest.importorskip(f"cupyflash{name}")
        for item in module.__all__:
            if not inspect.ismodule(getattr(module, item)) and item[0] != "_":
                yield f"{module.__name__}.{item}"


def test_the_reference_has_every_public_name():
    listed, module = set(), None
    for line in (ROOT / "docs/reference/index.rst").read_text("utf-8").splitlines():
        if line.startswith(".. currentmodule::"):
            module = line.split()[-1]
        elif re.fullmatch(r"   \w+", line):
            listed.add(f"{module}.{line.strip()}")
    assert listed == set(public_names())


def run_block(language, text, names):
    """Run one block; what it defines is there for the next."""
    if language == "pycon":
        test = doctest.DocTestParser().get_doctest(text, names, "block", None, 0)
        runner = doctest.DocTestRunner()
        assert runner.run(test, clear_globs=False).failed == 0, text
        names.update(test.globs)
    else:
        exec(compile(text, "block", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """In order, as one reader would type them; those for CuPy where there is a GPU."""
    try:
        import cupy

        has_gpu = cupy.is_available()
    except ImportError:
        has_gpu = False
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for language, text in FENCE.findall(page.read_text("utf-8")):
        if language not in ("python", "pycon"):
            continue
        if has_gpu or not re.search(r"\b(cupy|torch|jax)\b", text):
            run_block(language, text, names)


@pytest.mark.parametrize(
    "script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name
)
def test_examples_say_what_they_need(script):
    """Each can be read without running: it compiles and has a docstring."""
    tree = compile(script.read_text("utf-8"), str(script), "exec", flags=0x400)
    first = tree.body[0].value.value
    assert isinstance(first, str)
    assert script.name.split(".")[0] in script.read_text("utf-8")


def test_links_between_pages_exist():
    missing = []
    for page in PAGES:
        for target in re.findall(
            r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")
        ):
            if not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing


@pytest.mark.gpu
def test_the_first_block_of_the_readme_runs_as_a_script(cupy, tmp_path):
    """As a reader would: copied into a file."""
    found = [
        t for lang, t in FENCE.findall(PAGES[0].read_text("utf-8")) if lang == "python"
    ]
    script = tmp_path / "readme.py"
    script.write_text(found[0], "utf-8")
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
