"""tools/compare_machine_code.py: which kernels two versions of the sources share."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cupyflash._cli import nvrtc

ROOT = Path(__file__).parents[2]
KERNEL = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= FACTOR; }\n'
OPTIONS = ("-std=c++17", "-lineinfo", "--ptxas-options=-v", "-arch=sm_80")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "path", sys.path[:])  # the tool puts the checkout first
    yield importlib.import_module("compare_machine_code")
    del sys.modules["compare_machine_code"]


@pytest.fixture(autouse=True)
def _compiler():
    if reason := nvrtc.unusable():
        pytest.skip(reason)


def kernel(text, source="a.cu", factor="2.0f", name="FACTOR"):
    """As `compile --list` has it, with the text of its source."""
    return {
        "operation": "softmax", "row": "a", "fast": False, "arch": "sm_80",
        "source": source, "entry": "k", "options": [*OPTIONS, f"-D{name}={factor}"],
        "text": f'#line 1 "{source}"\n{text}',
    }  # fmt: skip


def version(*kernels):
    return {(k["entry"], *sorted(k["options"])): k for k in kernels}


def counts(found):
    return {
        name: part if isinstance(part, int) else len(part)
        for name, part in found.items()
        if part
    }


CHANGED = KERNEL.replace("*=", "+=")
COMMENTED = "// what it does\n\n" + KERNEL.replace("{ ", "{  /* here */\n  ")
CONSTANT = "constexpr int kUnused = 3;\n" + KERNEL
SAME_CODE = KERNEL.replace("x[threadIdx.x]", "*(x + threadIdx.x)")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (kernel(KERNEL), kernel(KERNEL), {"same_text": 1}),
        (kernel(KERNEL), kernel(COMMENTED), {"same_text": 1}),
        (kernel(KERNEL), kernel(KERNEL, "moved/b.cu"), {"same_text": 1}),
        (kernel(KERNEL), kernel(SAME_CODE, "moved/b.cu"), {"same_code": 1}),
        (kernel(KERNEL), kernel(CONSTANT), {"same_code": 1}),
        (kernel(KERNEL), kernel(CHANGED), {"differs": 1}),
        (
            kernel(KERNEL),
            kernel(KERNEL.replace("FACTOR", "TIMES"), name="TIMES"),
            {"renamed": 1},
        ),
        (
            kernel(KERNEL),
            kernel(KERNEL, factor="3.0f"),
            {"only_before": 1, "only_after": 1},
        ),
    ],
)
def test_two_versions_of_a_kernel(tool, tmp_path, before, after, expected):
    found = tool.compare(version(before), version(after), tmp_path)
    assert counts(found) == expected


def test_what_differs_is_listed_with_its_numbers(tool, tmp_path, capsys):
    before, after = version(kernel(KERNEL)), version(kernel(CHANGED, "b.cu"))
    (line,) = tool.compare(before, after, tmp_path)["differs"]
    assert line["sources"] == ["a.cu", "b.cu"]
    for side in ("before", "after"):
        assert line[side]["registers"] > 0
        assert line[side]["spill_bytes"] == 0
        assert line[side]["instructions"] > 8
    tool.report(tool.compare(before, after, tmp_path))
    said = capsys.readouterr().out
    assert said.startswith("0 kernels are equal")
    assert "1 differ" in said
    assert "softmax/a b.cu: FACTOR=2.0f" in said


def test_a_comment_changes_no_machine_code(tool, tmp_path):
    """What the comparison by text stands on: compiled, the two are equal."""
    versions = version(kernel(KERNEL)), version(kernel(COMMENTED, "moved/b.cu"))
    found = tool.compare(*versions, tmp_path, exact=True)
    assert counts(found) == {"same_code": 1}


def test_what_was_compiled_is_not_compiled_again(tool, tmp_path, monkeypatch):
    versions = version(kernel(KERNEL)), version(kernel(CHANGED))
    first = tool.compare(*versions, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(tool, "compile_kernel", None)
    assert tool.compare(*versions, tmp_path) == first


def test_an_error_of_the_compiler_is_a_difference(tool, tmp_path):
    broken = kernel(KERNEL.replace("float* x", "float x"))
    found = tool.compare(version(broken), version(broken), tmp_path)
    assert counts(found) == {"same_text": 1}
    found = tool.compare(version(broken), version(broken), tmp_path, exact=True)
    assert counts(found) == {"differs": 1}
    assert "a.cu(1)" in found["differs"][0]["after"]["error"]


LISTS = """
import json, sys
from pathlib import Path
text = Path("k.cu").read_text()
kernel = dict(operation="softmax", row="a", fast=False, arch="sm_80", source="k.cu",
              entry="k", options={options})
Path(sys.argv[sys.argv.index("--list") + 1]).write_text(
    json.dumps(dict(kernels=[kernel], sources={{"k.cu": text}})))
"""


def test_revisions_and_folders(tool, tmp_path, monkeypatch, capsys):
    """By the command line; what a revision is checked out to is gone afterwards."""
    repository = tmp_path / "repository"
    (repository / "cupyflash").mkdir(parents=True)
    main = LISTS.format(options=[*OPTIONS, "-DFACTOR=2.0f"])
    (repository / "cupyflash" / "__main__.py").write_text(main)

    def git(*args):
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(repository), *name, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True)

    try:
        git("init", "-q")
    except OSError:
        pytest.skip("needs git")
    for message, text in (("first", KERNEL), ("second", CHANGED), ("third", COMMENTED)):
        (repository / "k.cu").write_text(text)
        git("add", ".")
        git("commit", "-q", "--no-verify", "-m", message)
    monkeypatch.setattr(tool.checkout.__wrapped__, "__defaults__", (repository,))
    report = tmp_path / "build" / "report.json"
    more = ["--cache", str(tmp_path / "cache"), "--arch", "sm_80", "--jobs", "1"]
    assert tool.main(["HEAD~2", str(repository), *more]) == 0
    assert tool.main(["HEAD~2", "HEAD~1", *more, "--json", str(report)]) == 1
    assert len(json.loads(report.read_text())["differs"]) == 1
    assert len(git("worktree", "list").stdout.splitlines()) == 1
    assert tool.main(["no-such", "HEAD", *more]) == 2
    assert "no-such is neither a folder" in capsys.readouterr().err
