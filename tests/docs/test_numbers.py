"""Numbers of the docs come from reports that say what they are of, and are not old."""

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
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
NEWEST = re.compile(r"newest\(\"(\w+)\"\)")


def tool(name):
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = tool("readme_tables")
TEXTS = [page.read_text("utf-8") for page in READERS]
# The benchmarks of which a page shows the newest report of a GPU.
KINDS = {kind for text in TEXTS for kind in NEWEST.findall(text)}
KINDS |= {TABLES.FORWARD, TABLES.BACKWARD}
SHOWN = sorted(
    {first or second for text in TEXTS for first, second in NAMED.findall(text)}
    | {TABLES.newest(kind)[0].removesuffix(".json") for kind in KINDS}
)


def release(version):
    """(0, 2) of 0.2.1."""
    return tuple(int(part) for part in version.split(".")[:2])


def test_reports_are_found():
    assert {"demo", "softmax", "memory", "dram", "attention_table"} <= KINDS
    assert {"demo_cpu", "attention_h200"} <= {*SHOWN}


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
def numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return tool("measure_all")


def test_every_number_of_a_card_has_a_step(numbers):
    """One command measures what is shown; what one machine measured once is named."""
    # Experiments, quoted with a date, what needs two cards, and what needs torch.
    once = {"long_keys_h200", "hopper_terms_h200", "attention_h200"}
    once |= {"two_gpus_h100", "two_gpus_h200", "triton_h100", "landscape_h200"}
    once |= {"two_gpus_dask_h200", "landscape_vjp_h200"}
    once |= {"flex_h100", "flex_h200", "flex_changes_h200"}
    files = {Path(name).stem for step in numbers.STEPS for name in step.writes}
    written = {n.format(card=c) for n in files for c in ("h100", "h200")}
    on_gpu = {n for n in SHOWN if n.endswith(("_h100", "_h200"))}
    assert on_gpu - once <= written
    assert {f"{kind}_{{card}}" for kind in KINDS - {"triton"}} <= files


def test_the_steps_fit_their_time(numbers):
    assert sum(step.seconds for step in numbers.STEPS) < 0.9 * 20 * 60
    for count, most in ((3, 330), (4, 260)):
        parts = [numbers.part(f"{i}/{count}") for i in range(1, count + 1)]
        steps = [step for steps in parts for step in steps]
        assert sorted(steps, key=numbers.STEPS.index) == [*numbers.STEPS]
        assert max(sum(step.seconds for step in steps) for steps in parts) < most
    for wrong in ("0/3", "4/3", "half"):
        with pytest.raises(argparse.ArgumentTypeError):
            numbers.part(wrong)


def test_the_options_of_each_step_are_those_of_its_script(numbers):
    """Checked by the scripts themselves, in the order given; --help is the last."""
    for step in numbers.STEPS:
        words = [word.format("a.json", folder=".") for word in step.command]
        done = subprocess.run(
            [sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout, step.name


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L40S", "l40"),
        ("", ""),
    ],
)
def test_reports_have_names_of_cards(gpu, name):
    assert TABLES.card(gpu) == name


def test_the_newest_report_of_a_card_is_shown(tmp_path, monkeypatch):
    def report(name, gpu, date):
        machine = {"gpu": gpu, "date": date} if gpu else {"date": date}
        (tmp_path / name).write_text(json.dumps({"machine": machine}))

    monkeypatch.setattr(TABLES, "RESULTS", tmp_path)
    report("softmax_h200.json", "NVIDIA H200", "2026-01-01")
    report("softmax_h100.json", "NVIDIA H100 PCIe", "2026-01-02")
    report("softmax_cpu.json", "", "2026-01-03")
    report("softmax_walls_h200.json", "NVIDIA H200", "2026-01-04")
    assert TABLES.newest("softmax")[0] == "softmax_h100.json"
    report("softmax_h200.json", "NVIDIA H200", "2026-01-05")
    assert TABLES.newest("softmax")[0] == "softmax_h200.json"
    with pytest.raises(FileNotFoundError, match=r"no demo_CARD\.json"):
        TABLES.newest("demo")


def test_a_step_that_fails_leaves_the_old_file(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    (tmp_path / "old.json").write_text("old")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    write = (
        "import sys; open(sys.argv[1], 'w').write('new'); sys.exit(int(sys.argv[2]))"
    )
    for code, left in (("3", "old"), ("0", "new")):
        step = numbers.Step("a", 1, ("-c", write, "{0}", code), ("old.json",))
        assert bool(numbers.run(step, fresh, "h100", 60)) == (code == "3")
        assert (tmp_path / "old.json").read_text() == left
    step = numbers.Step("b", 1, ("-c", "pass"), ("none_{card}.json",))
    assert "without none_h100.json" in numbers.run(step, fresh, "h100", 60)


def stub(numbers, name, seconds, code, *writes):
    """A step that runs `code`, with its first file as the first argument."""
    words = ("-c", f"import os, sys, time; {code}", *("{0}" for _ in writes))
    return numbers.Step(name, seconds, words, writes)


def test_several_cards_share_the_steps(numbers, tmp_path, monkeypatch, capsys):
    """The longest first; each has a card and cores; one that fails loses no other."""
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    note = (
        "open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' ' "
        "+ str(sorted(getattr(os, 'sched_getaffinity', lambda _: [])(0))))"
    )
    both = f"{note}; time.sleep(1)"  # the card of each is taken while the other begins
    steps = [
        stub(numbers, "short", 1, note, "short_{card}.txt"),
        stub(numbers, "wrong", 30, "print('a word'); sys.exit(3)"),
        stub(numbers, "late", 9_000, note, "late.txt"),
        stub(numbers, "one", 40, both, "one.txt"),
        stub(numbers, "two", 50, both, "two.txt"),
    ]
    cores = [frozenset(), frozenset()]
    if hasattr(os, "sched_getaffinity"):
        all_cores = sorted(os.sched_getaffinity(0))
        cores = [frozenset(all_cores[:1]), frozenset(all_cores[-1:])]
    on = [numbers.Lane("5", cores[0]), numbers.Lane("7", cores[1])]
    missing = numbers.run_all(steps, on, "h100", 60)
    assert missing == ["late: no time left", "wrong: exit code 3"]
    found = {
        name: (tmp_path / f"{name}.txt").read_text()
        for name in ("one", "two", "short_h100")
    }
    where = {"5": sorted(cores[0]), "7": sorted(cores[1])}
    assert {found["one"], found["two"]} == {f"{n} {where[n]}" for n in "57"}
    assert not (tmp_path / "late.txt").exists()
    lines = capsys.readouterr().out.splitlines()
    begun = [line.split()[1].strip(",") for line in lines if " on GPU " in line]
    assert begun[:2] in (["two", "one"], ["one", "two"])
    assert begun[2:] == ["wrong", "short"]
    # What a step prints stands before the line that says that it has ended.
    assert lines[lines.index("a word") + 1].startswith("--- wrong: ")


def test_lanes_divide_the_cores(numbers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(10)}, raising=False)
    on = numbers.lanes(["0", "1", "2", "3"])
    assert [lane.device for lane in on] == ["0", "1", "2", "3"]
    assert [sorted(lane.cores) for lane in on] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert numbers.lanes(["0"]) == [numbers.WHOLE]


def test_finish_needs_no_gpu_and_tells_what_failed(numbers, monkeypatch, capsys):
    """The rest of a measurement in parts, on any machine."""
    monkeypatch.setattr(numbers, "these_cards", lambda: pytest.fail("asks for a GPU"))
    monkeypatch.setattr(sys, "argv", ["measure_all.py", "--finish"])
    code = "import sys; sys.exit({})"
    monkeypatch.setattr(numbers, "AFTERWARDS", (("-c", code.format(0)),))
    assert numbers.main() == 0
    monkeypatch.setattr(numbers, "AFTERWARDS", (("-c", code.format(4)),) * 2)
    assert numbers.main() == 1
    assert capsys.readouterr().out.count("exit code 4") == 2


def test_a_part_leaves_the_tables_alone(numbers, monkeypatch):
    """Parts run side by side, and tables are made of the reports of all."""
    monkeypatch.setattr(numbers, "these_cards", lambda: ("h100", ["0"]))
    monkeypatch.setattr(numbers, "run_all", lambda *args: [])
    done = []
    monkeypatch.setattr(numbers, "finish", lambda: done.append(True) or [])
    for argv, times in ((["--part", "1/4"], 0), ([], 1), (["demo"], 1)):
        done.clear()
        monkeypatch.setattr(sys, "argv", ["measure_all.py", *argv])
        assert numbers.main() == 0
        assert len(done) == times


def test_pages_of_a_gpu_are_of_examples_that_use_one():
    """An example that stays on NumPy would be shown as what a GPU has computed."""
    on_gpu = tool("gpu_pages").on_gpu
    examples = [*ROOT.glob("examples/[!_]*.py")]
    assert on_gpu(ROOT / "examples" / "points_density.py")
    assert not on_gpu(ROOT / "examples" / "ladder.py")
    shown = {page.stem for page in ROOT.glob("docs/on_a_gpu/*")}
    assert shown <= {example.stem for example in examples if on_gpu(example)}


def test_a_step_that_hangs_ends_with_its_workers(numbers, tmp_path):
    """In its own time, and what it started ends with it."""
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"pathlib.Path({str(pid)!r}).write_text(str(p.pid)); p.wait()"
    )
    step = numbers.Step("c", 1, ("-c", code), ())
    assert numbers.run(step, tmp_path, "h100", 5) == "stopped after 5 s"
    for _ in range(100):
        status = Path(f"/proc/{pid.read_text()}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")
