"""The tool that looks at the built site sees what it should."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGE = """<!doctype html><meta name="viewport" content="width=device-width">
<div class="bd-sidebar-primary"><nav>{menu}</nav></div>
<div class="bd-article" style="max-width: 800px">{body}</div>"""
FAULTS = {
    "the page is": ("", "<p style='width: 2000px'>far</p>"),
    "a formula is cut off": (
        "",
        "<div class='formula' style='overflow: hidden; height: 9px'>x<br>y</div>",
    ),
    "code scrolls": ("", "<pre style='overflow: auto'>" + 300 * "x" + "</pre>"),
    "a line of code wraps": (
        "",
        "<pre style='white-space: pre-wrap; line-height: 20px'>"
        + 60 * "word "
        + "</pre>",
    ),
    "missing picture": ("", "<img src='none.png'>"),
    "twice in a menu": ("<a href='a.html'>A</a> <a href='a.html'>B</a>", ""),
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    pytest.importorskip("playwright", reason="needs playwright, of the docs extra")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("needs Chromium")
    spec = importlib.util.spec_from_file_location("c", ROOT / "tools/check_site.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "SITE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_site.py"])

    def run():
        with pytest.raises(SystemExit) as end:
            tool.main()
        return end.value.code

    return run


def test_each_fault_of_a_page_is_found(check, tmp_path, capsys):
    for number, (menu, body) in enumerate(FAULTS.values()):
        page = PAGE.format(menu=menu, body=body)
        (tmp_path / f"page{number}.html").write_text(page, "utf-8")
    assert check() == 1
    lines = capsys.readouterr().out.splitlines()
    for number, fault in enumerate(FAULTS):
        of_page = [line for line in lines if line.startswith(f"page{number}.html")]
        assert any(fault in line for line in of_page), (fault, of_page)


def test_a_good_page_is_not_complained_about(check, tmp_path, capsys):
    body = "<h1>A page</h1><p>Text.</p><pre>x = 1</pre>"
    page = PAGE.format(menu="<a href='a.html'>A</a>", body=body)
    (tmp_path / "page.html").write_text(page, "utf-8")
    assert check() == 0
    assert "1 pages, 0 complaints" in capsys.readouterr().out


def test_without_a_site_it_says_how_to_build_one(check):
    assert "make docs" in check()
