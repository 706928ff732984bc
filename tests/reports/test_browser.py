"""The page in a real browser, headless, desktop and phone: no error, no request, figures drawn, all of it fits.

Needs playwright (extra ``test``) and a Chromium that the machine has: ``make browser`` installs one where it may.
Without them the tests are skipped, unless LIGHTNING_FUSE_BROWSER is set: its value is the browser, and it must work.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_fuse.reports.comparison import compare
from lightning_fuse.reports.output import write_comparison
from tests.reports.run_folders import write_run, write_seeds

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
GIVEN = os.environ.get("LIGHTNING_FUSE_BROWSER")
BROWSER = GIVEN or next((path for name in NAMES if (path := shutil.which(name))), None)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SMALLEST_TEXT = 10.0  # pixels of a figure's letters on the screen
# Of every figure: letters that are too small, cut off, or over one another.
TEXT_FAULTS = """smallest => Array.from(document.querySelectorAll('svg')).flatMap(svg => {
  const texts = Array.from(svg.querySelectorAll('text'))
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  const frame = svg.getBoundingClientRect(), found = [];
  texts.forEach(([text, a], i) => {
    if (a.height < smallest) found.push(svg.id + ': small ' + text);
    if (a.left < frame.left - 1 || a.right > frame.right + 1) found.push(svg.id + ': cut off ' + text);
    texts.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        found.push(svg.id + ': ' + text + ' over ' + other);
    });
  });
  return found;
})"""

if GIVEN is None:
    pytest.importorskip("playwright", reason="playwright is not installed (pip install 'lightning_fuse[test]')")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine; `make browser` installs one", allow_module_level=True)


@dataclass
class Visit:
    """An open page and what it did since it was opened."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container's root has no sandbox, and often a small /dev/shm.
        opened = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything: many groups, a loss scale, skips, long names and remarks."""
    root = tmp_path_factory.mktemp("runs")
    write_seeds(root, "adamw_torch", "fp32", (1.69, 1.70, 1.71))
    write_seeds(root, "adamw_fused", "int8", (1.70, 1.70, 1.70), optimizer_ms=1.5)
    write_seeds(root, "adamw_bnb_with_a_long_name", "int8", (1.80, 1.81, 1.82), optimizer_ms=9.5)
    write_run(root / "skips", "adamw_fused", "bf16", skips=(2, 9, 21), scale=2.0**16)
    write_run(root / "failed", "lion_fused", "fp32", status="failed", reason="RuntimeError: " + "long words " * 20)
    write_comparison(compare([root]), root / "out", png=False)
    return root / "out" / "page.html"


def opened(browser: Any, html: Path, size: str, scheme: str) -> Visit:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    seen = Visit(page)
    page.on("console", lambda message: seen.console.append(message.text))
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    page.on("request", lambda sent: seen.requests.append(sent.url))
    page.goto(html.as_uri())
    return seen


@pytest.fixture(scope="module", params=[(s, c) for s in SIZES for c in ("light", "dark")], ids="-".join)
def visit(request: pytest.FixtureRequest, browser: Any, html: Path) -> Iterator[Visit]:
    seen = opened(browser, html, *request.param)
    yield seen
    seen.page.close()


def test_nothing_is_said_and_nothing_is_asked_for(visit: Visit, html: Path) -> None:
    assert visit.console == []
    assert visit.requests == [html.as_uri()]  # the page itself


def test_it_fits_the_width(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_figures_are_drawn(visit: Visit) -> None:
    boxes = visit.page.evaluate(
        """Array.from(document.querySelectorAll('svg')).map(svg => {
             const {width, height} = svg.getBoundingClientRect();
             const ink = Array.from(svg.querySelectorAll('.line, .bar, .area'));
             return {name: svg.id, width, height, drawn: ink.filter(e => e.getBoundingClientRect().width > 0).length,
                     painted: ink.every(e => /rgb/.test(getComputedStyle(e).stroke + getComputedStyle(e).fill))};
           })"""
    )
    assert len(boxes) == 9
    assert [box for box in boxes if box["width"] < 300 or box["height"] < 150] == []
    assert [box["name"] for box in boxes if not (box["drawn"] and box["painted"])] == []


def test_letters_in_figures_are_readable_and_do_not_overlap(visit: Visit) -> None:
    assert visit.page.evaluate(TEXT_FAULTS, SMALLEST_TEXT) == []


def test_words_contrast_with_the_paper(visit: Visit) -> None:
    """The ratio of WCAG for text, at least 4.5, of every element that shows some."""
    worst = visit.page.evaluate(
        """(() => {
             const parts = c => c.match(/[\\d.]+/g).map(Number);
             const light = c => parts(c).slice(0, 3).map(v => v / 255)
               .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
               .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
             const paper = e => {
               for (; e; e = e.parentElement) {
                 const c = getComputedStyle(e).backgroundColor;
                 if (parts(c)[3] !== 0) return c;
               }
               return 'rgb(255,255,255)';
             };
             return Array.from(document.querySelectorAll('h1,h2,h3,p,li,td,th,dt,dd,figcaption,.badge,svg text'))
               .map(e => { const s = getComputedStyle(e), ink = e instanceof SVGElement ? s.fill : s.color;
                 const [a, b] = [light(ink), light(paper(e))].sort((x, y) => y - x);
                 return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.textContent.slice(0, 30)]; })
               .sort((x, y) => x[0] - y[0])[0];
           })()"""
    )
    assert worst[0] >= 4.5, worst


def test_the_checks_see_what_they_are_for(browser: Any, html: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted.html"
    bad = (
        "<script>console.log('said')</script><img src='other.png'><div style='width:2000px'>wide</div>"
        "<svg viewBox='0 0 1000 50'><text x='0' y='20' font-size='9'>one</text><text x='2' y='20'>two</text></svg>"
    )
    planted.write_text(html.read_text(encoding="utf-8").replace("</main>", f"{bad}</main>"), encoding="utf-8")
    seen = opened(browser, planted, "phone", "light")
    assert "said" in seen.console
    assert seen.requests == [planted.as_uri(), (tmp_path / "other.png").as_uri()]
    assert not seen.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert {fault.split(": ")[1] for fault in seen.page.evaluate(TEXT_FAULTS, SMALLEST_TEXT)} >= {
        "small one",
        "one over two",
    }
    seen.page.close()
