"""The lesson of the docs: its pages run with the site; here is what they rely on."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import cupyflash

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "docs" / "lesson"
PAGES = sorted(LESSON.glob("[a-z]_*.py"))


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(str(LESSON))
    import _measured

    yield _measured
    del sys.modules["_measured"]


def test_there_are_five_pages_in_order():
    titles = [page.read_text("utf-8").splitlines()[1] for page in PAGES]
    assert [title.split()[0] for title in titles] == list("12345")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_measures_the_four_methods_and_checks_the_claims(page, measured):
    text = page.read_text("utf-8")
    compile(text, str(page), "exec")
    for call in ("by_method", "print_rows", "check_claims"):
        assert f"measured.{call}(" in text
    for name in re.findall(r'measured\.result\("(\w+)"\)', text):
        report = ROOT / "benchmarks" / "results" / f"{name}.json"
        assert json.loads(report.read_text("utf-8"))["machine"]["gpu"]
    for kind in re.findall(r'measured\.newest\("(\w+)"\)', text):
        assert measured.newest(kind)["machine"]["gpu"]
    for link in re.findall(r"\.\./\.\./(_static/[\w.]+)", text):
        assert (ROOT / "docs" / link).exists()


@pytest.mark.parametrize("row_length", [100, 1024])
def test_the_counted_traffic_is_that_of_the_table(measured, row_length):
    table = (ROOT / "cuda_src" / "softmax" / "README.md").read_text("utf-8")
    x = np.random.default_rng(0).standard_normal((100, row_length)).astype(np.float32)
    for method in measured.METHODS:
        with measured.counted() as count:
            y = cupyflash.softmax(x, axis=-1, method=method)
        (sweeps,) = re.findall(
            rf"^\| `ladder/{method}\.cu` .* (\d) N \|$", table, re.MULTILINE
        )
        assert count["read"] + count["written"] == int(sweeps) * x.size
        np.testing.assert_allclose(y.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("seconds", "megabytes", "said"),
    [
        (1.9, 95, ["1.9 times faster; 2 to 4 times does not hold", "9.5 times less"]),
        (2.0, 100, ["2 to 4 times holds", "10 to 20 times holds"]),
        (4.1, 201, ["more than 2 to 4 times", "more than 10 to 20 times"]),
    ],
)
def test_a_claim_holds_only_where_it_was_measured(
    measured, capsys, seconds, megabytes, said
):
    def row(seconds, megabytes):
        return {"seconds": seconds, "extra_bytes": megabytes * 2**20}

    rows = {"safe": row(seconds, megabytes), "tiled": row(1.0, 10)}
    measured.check_claims(rows, plain="safe")
    told = capsys.readouterr().out
    for words in said:
        assert words in told


def test_a_measured_row_is_complete(measured):
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    calls = measured.by_method(cupyflash.softmax, x, axis=-1)
    exact = cupyflash.softmax(x.astype(np.float64), axis=-1)
    for row in measured.measure(calls, exact, of_each=True).values():
        assert row["seconds"] > 0
        assert 0 <= row["extra_bytes"]
        assert 0 < row["max_error"] < 1e-5
