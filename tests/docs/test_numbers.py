"""Numbers of the docs come from reports that say what they are of, and are not old."""

import datetime
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Whatever reads or names a report: pages, lessons, and what makes tables and pictures.
READERS = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "tools" / "readme_tables.py",
    ROOT / "tools" / "readme_pictures.py",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/guides/*.*"),
    *ROOT.glob("docs/lesson/*.py"),
]
NAMED = re.compile(r"results/(\w+)\.json|\b(?:report|result)\(\"(\w+?)(?:\.json)?\"\)")
SHOWN = sorted(
    {
        first or second
        for page in READERS
        for first, second in NAMED.findall(page.read_text("utf-8"))
    }
)


def release(version):
    """(0, 2) of 0.2.1."""
    return tuple(int(part) for part in version.split(".")[:2])


def test_reports_are_found():
    assert {"demo_h200", "demo_cpu", "softmax_h200", "attention_table_h200"} <= {*SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_a_report_says_what_it_is_of(name):
    """The commit, a date, and a version that is at most one release behind."""
    machine = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["machine"]
    assert machine["commit"].strip("+"), f"{name} names no commit: measure it again"
    assert datetime.date.fromisoformat(machine["date"])
    major, minor = release(cupyflash.__version__)
    assert release(machine["cupyflash"]) >= (major, max(0, minor - 1)), (
        f"{name} is of {machine['cupyflash']}: measure it again (make numbers)"
    )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_no_report_is_of_an_unknown_version(path):
    """Experiments that name no commit are in docs/design/lab/results."""
    machine = json.loads(path.read_text("utf-8"))["machine"]
    assert machine["commit"].strip("+")
    assert datetime.date.fromisoformat(machine["date"])
    assert release(machine["cupyflash"])


def test_what_users_read_quotes_no_experiment():
    quoting = [page for page in READERS if "lab/results" in page.read_text("utf-8")]
    assert quoting == []


def test_the_docs_name_the_cards_that_the_code_has_run_on():
    reports = [json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*.json")]
    cards = {report["machine"].get("gpu") for report in reports} - {None}
    page = (ROOT / "docs" / "guides" / "install.md").read_text("utf-8")
    paragraph = page[page.index("**Cards it has run on.**") :].partition("\n\n")[0]
    assert cards
    assert [card for card in cards if card not in paragraph] == []


def test_the_demo_of_two_cores_ends_within_a_minute():
    report = json.loads((RESULTS / "demo_cpu.json").read_text("utf-8"))
    assert report["machine"]["cores"] == 2
    assert report["seconds"] < 60


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/on_a_gpu/*.txt")))
def test_an_output_of_the_gallery_says_what_it_is_of(page):
    first = page.read_text("utf-8").partition("\n")[0]
    found = re.search(
        r"cupyflash (\S+) \((\w+)\).*\d{4}-\d\d-\d\d, script \w{12}", first
    )
    assert found, f"{page.name} names no commit: make numbers"
    major, minor = release(cupyflash.__version__)
    assert release(found[1]) >= (major, max(0, minor - 1))


def test_the_page_on_testing_names_files_that_are_there():
    text = (ROOT / "docs" / "guides" / "testing.py").read_text("utf-8")
    named = re.findall(r"\"([\w/]*test_\w+\.py)\"", text)
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


def test_the_tables_are_those_of_the_reports():
    """What make tables writes."""
    tool = [sys.executable, str(ROOT / "tools" / "readme_tables.py"), "--check"]
    result = subprocess.run(tool, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def numbers():
    spec = importlib.util.spec_from_file_location("m", ROOT / "tools/measure_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_number_of_a_card_has_a_step(numbers):
    """One command measures what is shown; what one machine measured once is named."""
    once = {"long_keys_h200", "hopper_terms_h200"}  # experiments, quoted with a date
    written = {Path(name).stem for step in numbers.STEPS for name in step.writes}
    assert {n for n in SHOWN if n.endswith("_h200")} - once <= written
    for step in numbers.STEPS:
        script = step.command[0]
        assert script == "-m" or (ROOT / script).exists()
        assert all((ROOT / name).exists() for name in step.writes)


def test_a_step_that_fails_leaves_the_old_file(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    (tmp_path / "old.json").write_text("old")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    write = (
        "import sys; open(sys.argv[1], 'w').write('new'); sys.exit(int(sys.argv[2]))"
    )
    for code, left in (("3", "old"), ("0", "new")):
        step = numbers.Step("a", ("-c", write, "{0}", code), ("old.json",))
        assert bool(numbers.run(step, fresh)) == (code == "3")
        assert (tmp_path / "old.json").read_text() == left
    step = numbers.Step("b", ("-c", "pass"), ("none.json",))
    assert "without none.json" in numbers.run(step, fresh)
