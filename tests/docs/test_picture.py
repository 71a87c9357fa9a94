"""The interactive picture of the docs: its numbers, and the page in a real browser.

The numbers need `mini-racer`, the page `playwright` and a Chromium. Both packages come
with the extra `docs`; where there is no browser, the page is not tested.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import cupyflash

PAGE = Path(__file__).parents[2] / "docs" / "_static" / "steps.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


# --- the algorithms, without a page --------------------------------------------------


@pytest.fixture(scope="module")
def call():
    """Call a function of the page by name, in a JavaScript engine without a browser."""
    py_mini_racer = pytest.importorskip(
        "py_mini_racer", reason="needs mini-racer, of the docs extra"
    )
    html = PAGE.read_text("utf-8")
    (source,) = re.findall(r'<script id="algorithms">(.*?)</script>', html, re.DOTALL)
    context = py_mini_racer.MiniRacer()
    context.eval(source)
    # Infinity is not JSON.
    context.eval(
        "const told = (key, x) => x === -Infinity ? '-inf' : x === Infinity ? 'inf' : x"
    )

    def call(name, *arguments):
        listed = ", ".join(json.dumps(a) for a in arguments)
        return json.loads(context.eval(f"JSON.stringify({name}({listed}), told)"))

    return call


@pytest.mark.parametrize(
    "row", [[1, 3, -2, 2.5, 6, 4, 6, -1], [5], [-700, 700], [9, 8, 7, 6], [3, 3, 3]]
)
def test_online_softmax_holds_the_sum_of_what_it_has_read(call, row):
    steps = call("onlineSoftmax", row)
    assert [s["phase"] for s in steps].count("sum") == len(row)
    for step in steps[1 : len(row) + 1]:
        read = np.array(row[: step["at"] + 1], np.float64)
        assert step["m"] == read.max()
        lse = step["m"] + np.log(step["d"])
        np.testing.assert_allclose(lse, cupyflash.logsumexp(read), rtol=1e-14)
    result = cupyflash.softmax(np.array(row, np.float64))
    np.testing.assert_allclose(steps[-1]["y"], result, rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize("blocks", [(4, 2), (1, 1), (3, 5), (16, 16)])
def test_tiled_attention_gives_out_and_lse(call, blocks):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 7, 3)) * 3
    v = v[:, :2]
    steps = call("tiledAttention", q.tolist(), k.tolist(), v.tolist(), *blocks)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(steps[-1]["out"], out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(steps[-1]["lse"], lse, rtol=1e-13)


def test_tiled_attention_goes_in_five_steps_and_counts_what_it_moves(call):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 6, 4)).tolist()
    steps = call("tiledAttention", q, k, v, 3, 2)
    inner = ["stream", "rescale", "fuse"] * 3
    assert [s["phase"] for s in steps] == ["anchor", *inner, "write"] * 2
    assert max(s["held"] for s in steps) == 3 * 2
    # q, out and lse once; k and v once for each of the two tiles of queries.
    assert steps[-1]["moved"] == 2 * 6 * 4 + 6 + 2 * (2 * 6 * 4)


def test_what_is_not_a_row_of_numbers_is_refused(call):
    assert call("parse", "1 2\n3, 4", "q") == [[1, 2], [3, 4]]
    for text in ("", "1 2\n3", "1 x", "1 inf"):
        with pytest.raises(Exception, match="q: "):
            call("parse", text, "q")


def test_the_page_needs_nothing_from_elsewhere():
    html = PAGE.read_text("utf-8")
    assert not re.findall(r"https?:|src=|@import|<link", html)


def test_no_link_to_the_page_names_a_part_of_it():
    """In a frame that part is scrolled to, and the page around it with it."""
    docs = PAGE.parents[1]
    pages = [*docs.glob("*.md"), *docs.glob("guides/*"), *docs.glob("lesson/*.*")]
    hashes = {
        name
        for page in pages
        for name in re.findall(r"steps\.html#([\w-]+)", page.read_text("utf-8"))
    }
    assert hashes == {"online", "tiled"}
    assert not hashes & set(re.findall(r'id="([\w-]+)"', PAGE.read_text("utf-8")))


# --- the page in a browser -----------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    """The path of a Chromium: of the system, or of `playwright install chromium`."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, of the docs extra"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        with playwright.sync_playwright() as started:
            path = started.chromium.executable_path
    if not Path(path).exists():
        pytest.skip("no Chromium on the path, and none of playwright install chromium")
    return path


@pytest.fixture
def open_page(chromium):
    """Open the picture at a hash; afterwards, no script of it has failed."""
    from playwright.sync_api import sync_playwright

    errors = []
    with sync_playwright() as started:
        # The sandbox of Chromium refuses to run for root, as containers have it.
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )

        def open_page(hash):
            page = browser.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(f"{PAGE.as_uri()}#{hash}")
            return page

        yield open_page
        browser.close()
    assert not errors


def test_a_reader_steps_through_online_softmax(open_page):
    page = open_page("online")
    assert page.inner_text("#where") == "2 of 17"
    assert "Read x0 = 1: a new maximum" in page.inner_text("#said")
    page.keyboard.press("ArrowRight")
    assert "Read x1 = 3: a new maximum" in page.inner_text("#said")
    page.keyboard.press("ArrowLeft")
    assert "Read x0 = 1" in page.inner_text("#said")
    page.keyboard.press("End")
    assert page.is_disabled("#forward")
    result = cupyflash.softmax(np.array([1, 3, -2, 2.5, 6, 4, 6, -1]))
    assert f"{result[-2]:.3f}" in page.inner_html("#drawing")
    page.click("#first")
    page.click("#forward")
    assert page.inner_text("#where") == "2 of 17"
    page.fill("#slider", "8")
    assert page.inner_text("#where") == "9 of 17"


def test_a_reader_steps_through_the_tiles(open_page):
    page = open_page("online")
    page.click("#attention")
    said = []
    for _ in range(5):
        said.append(page.inner_text("#said")[:8])
        page.keyboard.press("ArrowRight")
    assert said == ["1 Anchor", "2 Stream", "3 Rescal", "4 Fuse: ", "2 Stream"]
    page.keyboard.press("End")
    assert page.inner_text("#said").startswith("5 Write")
    assert page.locator("#drawing rect").count() == 8 + 8 + 8 + 64


def test_a_reader_gives_numbers_of_their_own(open_page):
    page = open_page("online")
    page.click("summary")
    page.fill("#row", "0 2")
    assert page.inner_text("#where") == "2 of 5"
    page.fill("#row", "0 two")
    assert "not a number" in page.inner_text("#trouble")
    assert page.inner_text("#where") == "2 of 5"
    # Arrows that belong to the text do not turn the page.
    page.press("#row", "ArrowRight")
    assert page.inner_text("#where") == "2 of 5"

    page.click("#attention")
    q, k, v = np.random.default_rng(2).standard_normal((3, 5, 2)).round(2)
    # One at a time: what does not fit together in between is said, not thrown.
    for name, matrix in zip("qkv", (q, k, v), strict=True):
        lines = [" ".join(map(str, line)) for line in matrix]
        page.fill(f"#{name}", "\n".join(lines))
    page.fill("#block_m", "5")
    page.fill("#block_n", "2")
    assert page.inner_text("#trouble") == ""
    assert page.inner_text("#where") == "1 of 11"
    page.focus("#slider")
    page.keyboard.press("End")
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    last = page.evaluate("steps[at]")
    np.testing.assert_allclose(last["out"], out, rtol=1e-12)
    np.testing.assert_allclose(last["lse"], lse, rtol=1e-12)


def test_the_page_is_readable_when_narrow_and_when_dark(open_page):
    page = open_page("tiled")
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.emulate_media(color_scheme="dark")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(20, 24, 30)"
