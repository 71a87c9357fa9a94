"""Look at every page of the built site in Chromium, wide and narrow, light and dark.

    python tools/check_site.py [--shots FOLDER] [PAGE ...]

Reports pages that are wider than the window, formulas that are cut off, lines of code
that do not fit a wide window, descriptions in the reference beyond the window, initials
of authors that became lists, pictures that are missing, and links that appear twice in
a menu; exit code 1 if there are any. ``make docs`` builds the site. A PAGE is the start
of a path in docs/_build/html. With --shots, a screenshot of each page is written too.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "docs" / "_build" / "html"
WIDTHS = (1280, 390)
# Pages that the theme makes, and files for downloading.
_NOT_OURS = ("search.html", "genindex.html", "py-modindex.html")

_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()

# What is wrong with the page in the window, as a list of sentences.
_LOOK = """(wide) => {
  const found = [];
  const width = document.documentElement.clientWidth;
  const page = document.documentElement.scrollWidth;
  if (page > width + 1) found.push(`the page is ${page} wide in a window of ${width}`);
  const article = document.querySelector(".bd-article") || document.body;
  const start = (element) => element.textContent.trim().slice(0, 50);
  const scrolls = (element) => {
    for (let e = element.parentElement; e && e !== article; e = e.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  for (const e of article.querySelectorAll("pre, img, p, h1, h2, h3, li, code, svg"))
    if (e.getBoundingClientRect().right > width + 1 && !scrolls(e))
      found.push(`${e.tagName} reaches beyond the window: ${start(e)}`);
  for (const e of article.querySelectorAll("div.formula"))
    if (e.scrollHeight > e.clientHeight + 1)
      found.push(`a formula is cut off: ${start(e)}`);
  for (const e of article.querySelectorAll("pre")) {
    if (e.scrollWidth > e.clientWidth + 1) found.push(`code scrolls: ${start(e)}`);
    // What a page prints may wrap, and so may what a doctest prints.
    const prints = e.closest(".sphx-glr-script-out, .highlight-text, .highlight-pycon");
    if (!wide || prints) continue;
    const style = getComputedStyle(e);
    const line = parseFloat(style.lineHeight);
    const height =
      e.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
    const lines = e.textContent.replace(/\\n$/, "").split("\\n").length;
    if (height > line * (lines + 0.6)) found.push(`a line of code wraps: ${start(e)}`);
  }
  for (const e of article.querySelectorAll("table.autosummary td"))
    if (e.getBoundingClientRect().right > width + 1)
      found.push(`a description is out of sight: ${start(e)}`);
  for (const e of article.querySelectorAll(".footnote ol, .citation ol"))
    found.push(`an initial became a list: ${start(e)}`);
  for (const e of document.images)
    if (e.complete && !e.naturalWidth) found.push(`missing picture: ${e.src}`);
  for (const menu of document.querySelectorAll(".bd-sidebar-primary nav")) {
    const links = [...menu.querySelectorAll("a")].map((a) => a.href);
    for (const link of new Set(links.filter((a, i) => links.indexOf(a) !== i)))
      found.push(`twice in a menu: ${link}`);
  }
  return found;
}"""


def pages(starts):
    """The pages to look at, as paths relative to the site."""
    every = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    ours = [
        name
        for name in every
        if name not in _NOT_OURS
        and (not name.startswith("_") or name == "_static/steps.html")
    ]
    return [name for name in ours if not starts or name.startswith(tuple(starts))]


def look(browser, width, scheme, names, shots):
    """Complaints about pages at one width and in one colour scheme."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    # The list of versions is on the network, and not part of the page.
    context.route("http*://**/*", lambda route: route.abort())
    page = context.new_page()
    found = []
    for name in names:
        page.goto((SITE / name).as_uri())
        found += [
            f"{name} ({width}, {scheme}): {what}"
            for what in page.evaluate(_LOOK, width == max(WIDTHS))
        ]
        if shots:
            shot = f"{name.removesuffix('.html').replace('/', '.')}.{width}.{scheme}"
            page.screenshot(path=shots / f"{shot}.png", full_page=True)
    context.close()
    return found


def main():
    """Look at the pages that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--shots", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    names = pages(args.pages)
    if not names:
        sys.exit(f"no page in {SITE}: make docs")
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    candidates = ("chromium", "chromium-browser", "google-chrome", "chrome")
    binary = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, candidates)), None
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=_FLAGS)
        found = [
            line
            for width in WIDTHS
            for scheme in ("light", "dark")
            for line in look(browser, width, scheme, names, args.shots)
        ]
    print("\n".join(found))
    print(f"{len(names)} pages, {len(found)} complaints")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
