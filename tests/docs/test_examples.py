"""The examples run, at their smallest size; each asserts that it is right."""

import ast
import configparser
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("[!_]*.py"))


def imported(script):
    """Names of the packages that a script imports."""
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_example_runs(script, xp, tmp_path):
    missing = [
        name
        for name in imported(script)
        if name != "_support" and importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "CUPYFLASH_SIZE": "tiny",
            "CUPYFLASH_XP": xp.__name__,
            "MPLBACKEND": "agg",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert not list(tmp_path.iterdir()), "an example leaves files behind"


# What pip calls a package that is imported by another name.
DISTRIBUTIONS = {
    "MDAnalysis": "MDAnalysisTests",
    "ot": "POT",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
}


@pytest.mark.parametrize(
    "script",
    [
        *SCRIPTS,
        *sorted(ROOT.glob("docs/lesson/*.py")),
        *sorted(ROOT.glob("docs/guides/*.py")),
    ],
    ids=lambda path: path.stem,
)
def test_the_site_installs_what_a_script_imports(script):
    """make docs and Read the Docs install the extras docs and gallery, no more."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = setup["options.extras_require"]
    needs = extras["docs"] + extras["gallery"] + setup["options"]["install_requires"]
    listed = {re.match(r"[\w.-]+", need)[0].lower() for need in needs.split()}
    own = {"_support", "_measured", "cupyflash", "cupy", "cupyx", "readme_tables"}
    missing = {
        name
        for name in set(imported(script)) - own - sys.stdlib_module_names
        if DISTRIBUTIONS.get(name, name).lower() not in listed
        and name != "MDAnalysisTests"
    }
    assert missing == set()


LICENCES = r"CC BY|[Ll]icence|copyright restrictions"


@pytest.mark.parametrize(
    "script",
    [
        path
        for path in SCRIPTS
        if re.search(
            r"^from (sklearn\.datasets|skimage|MDAnalysisTests\S*) import",
            path.read_text("utf-8"),
            re.MULTILINE,
        )
    ],
    ids=lambda path: path.stem,
)
def test_data_of_others_has_its_licence(script):
    """On the page itself, which shows pictures made of it."""
    text = ast.get_docstring(ast.parse(script.read_text("utf-8")))
    data = re.search(r"Data: .*?Run it:", " ".join(text.split()))
    assert data, "say where the data are from, and under which licence"
    assert re.search(LICENCES, data[0]), data[0]


def test_the_list_names_every_example():
    text = (ROOT / "examples" / "README.md").read_text("utf-8")
    for script in SCRIPTS:
        assert f"`{script.name}`" in text
