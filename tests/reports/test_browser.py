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

from lightning_fuse.reports.compare import compare
from lightning_fuse.reports.page import write_comparison
from tests.reports.run_folders import write_run, write_seeds

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
GIVEN = os.environ.get("LIGHTNING_FUSE_BROWSER")
BROWSER = GIVEN or next((path for name in NAMES if (path := shutil.which(name))), None)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SMALLEST_TEXT = 10.0  # pixels of a figure's letters on the screen
# Letters of a figure that are too small, cut off, or over one another.
TEXT_FAULTS = """smallest => Array.from(document.querySelectorAll('.chart svg')).flatMap(svg => {
  const texts = Array.from(svg.querySelectorAll('text')).filter(t => t.textContent && t.style.opacity !== '0'
    && getComputedStyle(t).opacity !== '0').map(t => [t.textContent, t.getBoundingClientRect()]);
  const name = svg.closest('figure').id, frame = svg.getBoundingClientRect(), found = [];
  texts.forEach(([text, a], i) => {
    if (a.height < smallest) found.push(name + ': small ' + text);
    if (a.left < frame.left - 2 || a.right > frame.right + 2) found.push(name + ': cut off ' + text);
    texts.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
        found.push(name + ': ' + text + ' over ' + other);
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
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    seen = Visit(page)
    page.on("console", lambda message: seen.console.append(message.text))
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    page.on("request", lambda sent: seen.requests.append(sent.url))
    page.context.set_offline(True)
    page.goto(html.as_uri())
    page.evaluate("window.ready")
    return seen


def marks(page: Any, figure: str, kind: str = "path") -> list[str]:
    """The groups of a figure's lines or bars that are drawn, by their colour."""
    return page.evaluate(
        """([figure, kind]) => Array.from(document.querySelectorAll(`#${figure} .chart .mark-${kind} path`))
             .filter(e => e.getAttribute('d')).map(e => e.getAttribute('stroke') ?? e.getAttribute('fill'))""",
        [figure, kind],
    )


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
        """Array.from(document.querySelectorAll('figure')).map(figure => {
             const {width, height} = figure.querySelector('.chart svg').getBoundingClientRect();
             const ink = Array.from(figure.querySelectorAll('.chart path')).filter(e => e.getAttribute('d'));
             return {name: figure.id, width, height, drawn: ink.length};
           })"""
    )
    assert len(boxes) == 9
    assert [box for box in boxes if box["width"] < 300 or box["height"] < 100 or not box["drawn"]] == []


def test_letters_in_figures_are_readable_and_do_not_overlap(visit: Visit) -> None:
    assert visit.page.evaluate(TEXT_FAULTS, SMALLEST_TEXT) == []


def test_words_contrast_with_the_paper(visit: Visit) -> None:
    """The ratio of WCAG for text, at least 4.5, of every element that shows some."""
    worst = visit.page.evaluate(
        """(() => {
             const parts = c => c.match(/[\\d.]+/g).map((v, i) => c[0] === 'c' && i < 3 ? 255 * v : Number(v));
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
             return Array.from(document.querySelectorAll('h1,h2,h3,p,li,td,th,dt,dd,figcaption,.badge,button,label,'
               + 'summary,.chart svg text'))
               .filter(e => e.textContent && e.checkVisibility())
               .map(e => { const s = getComputedStyle(e), ink = e instanceof SVGElement ? s.fill : s.color;
                 const [a, b] = [light(ink), light(paper(e))].sort((x, y) => y - x);
                 return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.textContent.slice(0, 30)]; })
               .sort((x, y) => x[0] - y[0])[0];
           })()"""
    )
    assert worst[0] >= 4.5, worst


@pytest.fixture
def desktop(browser: Any, html: Path) -> Iterator[Any]:
    """A fresh page, so that a test may click."""
    seen = opened(browser, html, "desktop", "light")
    yield seen.page
    assert seen.console == []
    assert seen.requests == [html.as_uri()]
    seen.page.close()


def hover(page: Any, figure: str, across: float, down: float) -> str:
    """What the page says beside the pointer."""
    chart = page.locator(f"#{figure} .chart svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 4)
    page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down, steps=5)
    page.wait_for_selector("#vg-tooltip-element.visible", timeout=5000)
    return page.locator("#vg-tooltip-element").inner_text()


def test_hovering_says_the_value_and_the_seeds(desktop: Any) -> None:
    said = hover(desktop, "curves", 0.5, 0.45)
    assert "mean" in said
    assert "seed 0: 3" in said
    assert "train seconds" in said


def test_hovering_over_a_bar_says_its_range(desktop: Any) -> None:
    rows = desktop.locator("#optimizer-step .chart svg .mark-text.role-mark text").all_text_contents()
    said = hover(desktop, "optimizer-step", 0.36, (rows.index("1.5 ms") + 0.5) / len(rows))
    assert "1.5 ms" in said
    assert "adamw ours int8" in said


def test_a_click_in_the_legend_hides_a_series_everywhere_and_shows_it_again(desktop: Any) -> None:
    button = desktop.locator("#legend button", has_text="adamw ours int8")
    figures = ("curves", "final-by-state", "optimizer-step")
    before = {figure: desktop.locator(f"#{figure} .chart svg").inner_html() for figure in figures}
    lines = len(marks(desktop, "curves", "line"))
    button.click()
    desktop.wait_for_function("n => document.querySelectorAll('#curves .mark-line path').length < n", arg=lines)
    assert button.get_attribute("aria-pressed") == "false"
    hidden = {figure: desktop.locator(f"#{figure} .chart svg").inner_html() for figure in figures}
    assert [figure for figure in figures if hidden[figure] == before[figure]] == []
    assert "adamw ours int8" not in desktop.locator("#optimizer-step .chart svg").text_content()
    button.click()
    desktop.wait_for_function("n => document.querySelectorAll('#curves .mark-line path').length === n", arg=lines)
    assert "adamw ours int8" in desktop.locator("#optimizer-step .chart svg").text_content()


def test_axis_metric_and_scale_change(desktop: Any) -> None:
    def words() -> list[str]:
        return desktop.locator("#curves .chart svg text").all_text_contents()

    assert {"updates", "val/loss"} <= set(words())
    for choice, label in (("tokens", "tokens"), ("seconds", "train seconds")):
        desktop.select_option("#axis", choice)
        desktop.wait_for_function("l => document.querySelector('#curves svg').textContent.includes(l)", arg=label)
        assert "updates" not in words()
    desktop.select_option("#metric", "train/loss")
    desktop.wait_for_function("document.querySelector('#curves svg').textContent.includes('train/loss')")
    path = "document.querySelector('#curves .mark-line path').getAttribute('d')"
    straight = desktop.evaluate(path)
    desktop.check("#log")
    desktop.wait_for_function(f"before => {path} !== before", arg=straight)


def test_dragging_pans_and_the_whole_range_comes_back(desktop: Any) -> None:
    path = "document.querySelector('#curves .mark-line path').getAttribute('d')"
    before = desktop.evaluate(path)
    desktop.locator("#curves .chart svg").scroll_into_view_if_needed()
    box = desktop.locator("#curves .chart svg").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    desktop.mouse.move(*middle)
    desktop.mouse.down()
    desktop.mouse.move(middle[0] + 80, middle[1] + 20, steps=4)
    desktop.mouse.up()
    desktop.wait_for_function(f"before => {path} !== before", arg=before)
    desktop.click("#reset")
    desktop.wait_for_function(f"before => {path} === before", arg=before)


def test_a_heading_sorts_by_number_both_ways(desktop: Any) -> None:
    def column() -> list[str]:
        return desktop.locator("#configurations tbody tr td:nth-child(8)").all_inner_texts()

    head = desktop.locator("#configurations thead th button", has_text="opt. step")
    head.click()
    up = column()
    assert up[0] == "1.5 ms"
    assert up == sorted(up, key=lambda cell: float(cell.split()[0]))
    head.click()
    assert column() == sorted(up, key=lambda cell: -float(cell.split()[0]))


def test_the_theme_can_be_turned(desktop: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    colours = marks(desktop, "curves", "line")
    light = desktop.evaluate(paper)
    desktop.click("#theme")
    desktop.wait_for_function(f"before => {paper} !== before", arg=light)
    desktop.wait_for_function(
        "c => document.querySelector('#curves .mark-line path').getAttribute('stroke') !== c", arg=colours[0]
    )
    assert set(marks(desktop, "curves", "line")).isdisjoint(colours)


def test_the_checks_see_what_they_are_for(browser: Any, html: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted.html"
    bad = (
        "<script>console.log('said')</script><img src='other.png'><div style='width:2000px'>wide</div>"
        "<figure id='bad'><div class='chart'><svg viewBox='0 0 2000 50'><text x='0' y='20' font-size='9'>one</text>"
        "<text x='2' y='20' font-size='90'>two</text></svg></div></figure>"
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
