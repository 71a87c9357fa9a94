"""The files round the package agree with it: version, address, versions of Python."""

import configparser
import hashlib
import importlib.util
import re
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(cupyflash.__file__).parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
URL = SETUP["metadata"]["url"]


def text_of(name):
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CHANGELOG.md", r"^## (\S+) \(\d{4}-\d\d-\d\d\)$"),
        ("CITATION.cff", r"^version: (\S+)$"),
        ("conda-forge/recipe.yaml", r'^  version: "(\S+)"$'),
    ],
)
def test_each_file_names_this_version(file, pattern):
    """The first that it names, where it names more."""
    assert re.search(pattern, text_of(file), re.MULTILINE)[1] == cupyflash.__version__


def test_the_citation_is_of_the_day_of_the_changelog():
    day = re.search(r"^date-released: (\S+)$", text_of("CITATION.cff"), re.MULTILINE)
    assert f"## {cupyflash.__version__} ({day[1]})\n" in text_of("CHANGELOG.md")


def test_the_recipe_asks_for_what_setup_asks_for():
    recipe = pytest.importorskip("yaml").safe_load(text_of("conda-forge/recipe.yaml"))
    listed = {need.replace(" ", "") for need in recipe["requirements"]["run"][1:]}
    assert listed == set(SETUP["options"]["install_requires"].split())


def test_the_digest_of_a_release_goes_into_the_recipe(tmp_path):
    spec = importlib.util.spec_from_file_location("r", ROOT / "tools/conda_recipe.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    recipe = text_of("conda-forge/recipe.yaml")
    sdist = tmp_path / f"cupyflash-{cupyflash.__version__}.tar.gz"
    sdist.write_bytes(b"abc")
    new = tool.with_digest(recipe, sdist)
    assert f'sha256: "{hashlib.sha256(b"abc").hexdigest()}"' in new
    with pytest.raises(ValueError, match="give cupyflash-"):
        tool.with_digest(recipe, tmp_path / "cupyflash-0.0.1.tar.gz")


def test_one_address():
    """Whoever moves the repository finds every place by the address of setup.cfg."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*"), *ROOT.glob("*.cff")]
    pages += [ROOT / "conda-forge" / "recipe.yaml", *ROOT.glob("docs/**/*.md")]
    other = {
        f"{page.relative_to(ROOT)}: {found}"
        for page in pages
        if page.is_file()
        for found in re.findall(
            r"https://github\.com/[\w-]*/?cupyflash[\w/-]*", page.read_text("utf-8")
        )
        if not found.startswith(URL)
    }
    assert not other
    assert all(
        line.split(" = ")[1].startswith((URL, "https://cupyflash.readthedocs.io"))
        for line in SETUP["metadata"]["project_urls"].split("\n")[1:]
    )


def test_the_readme_renders_anywhere():
    """On PyPI there is no repository beside it."""
    links = re.findall(r"\]\(([^)#][^)]*)\)", text_of("README.md"))
    assert links
    assert all(link.startswith("https://") for link in links)


def test_links_of_the_readme_into_the_repository_lead_somewhere():
    paths = re.findall(
        re.escape(URL) + r"/(?:blob|tree|raw)/main/([^)#\s\"]+)", text_of("README.md")
    )
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_what_a_test_of_another_library_needs_is_installed_somewhere():
    """Else it is skipped everywhere, and nothing tests what the docs say of it."""
    needed = set()
    for name in ("core/test_interop.py", "docs/test_migrating.py"):
        text = text_of(f"tests/{name}")
        needed |= set(re.findall(r'importorskip\("(\w+)', text))
        needed |= set(re.findall(r'^    "(\w{2,})(?:\.\w+)?",$', text, re.MULTILINE))
    extras = SETUP["options.extras_require"]
    listed = re.findall(r"^[\w-]+", extras["interop"] + extras["test"], re.MULTILINE)
    assert {"jax", "torch", "xarray"} <= needed
    assert needed <= {name.replace("-", "_") for name in listed} | {"cupy"}
    jobs = text_of(".github/workflows/test.yml")
    assert '".[test,interop,lint]"' in jobs


def test_every_python_of_the_classifiers_is_tested():
    yaml = pytest.importorskip("yaml")
    test = yaml.safe_load(text_of(".github/workflows/test.yml"))
    matrix = test["jobs"]["test"]["strategy"]["matrix"]
    listed = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert matrix["python"] == listed
    assert {name.split("-")[0] for name in matrix["os"]} == {
        "ubuntu",
        "macos",
        "windows",
    }


@pytest.mark.parametrize(
    "file",
    sorted(
        path.relative_to(ROOT).as_posix()
        for pattern in (".github/**/*.yml", ".readthedocs.yaml", "CITATION.cff")
        for path in ROOT.glob(pattern)
    ),
)
def test_yaml_can_be_read(file):
    assert pytest.importorskip("yaml").safe_load(text_of(file))
