"""The page holds everything itself, the figures hold the data, and nothing that a run is called breaks them."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_fuse.reports.charts import BarChart, Line, LineChart, charts_of
from lightning_fuse.reports.comparison import Comparison, compare
from lightning_fuse.reports.output import write_comparison
from lightning_fuse.reports.page import page
from lightning_fuse.reports.svg import Scale, log_ticks, nice_ticks, svg, tick_text
from lightning_fuse.reports.tables import csv_text, markdown_text, target_table
from tests.reports.run_folders import write_run, write_seeds

VOID = {"meta", "link", "br", "img", "hr", "input"}
LOADING = {"src", "srcset", "href", "action", "data", "poster", "xlink:href"}


class Reader(HTMLParser):
    """Notes unbalanced tags, scripts, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "iframe", "object", "embed"):
            self.faults.append(f"<{tag}>")
        for name, value in attributes:
            if name.startswith("on"):
                self.faults.append(f"{tag} {name}")
            if name in LOADING and value and not value.startswith(("#", "data:")):
                self.faults.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")


def faults_of(html: str) -> list[str]:
    reader = Reader()
    reader.feed(html)
    found = reader.faults + [f"<{tag}> is never closed" for tag in reader.open]
    return found + re.findall(r"https?://[^\s'\"<]*|url\([^)]*\)|@import", html)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    write_seeds(tmp_path, "adamw_torch", "fp32", (1.69, 1.70, 1.71))
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.70, 1.70), optimizer_ms=1.5)
    write_run(tmp_path / "scaled", "adamw_fused", "bf16", losses=(4.0, 3.0, 1.9, 1.9), skips=(2, 9), scale=2.0**16)
    return compare([tmp_path])


def test_the_page_needs_nothing_else(comparison: Comparison) -> None:
    assert faults_of(page(comparison)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "<script src='x.js'></script>",
        "<img src='https://example.org/x.png'>",
        "<link rel='stylesheet' href='style.css'>",
        "<p onclick='x()'></p>",
        "<style>p { background: url(x.png) }</style>",
        "<div>",
    ],
)
def test_the_check_sees_what_it_is_for(comparison: Comparison, planted: str) -> None:
    assert faults_of(page(comparison).replace("</main>", f"{planted}</main>"))


def test_verdicts_stand_first_and_in_words(comparison: Comparison) -> None:
    html = page(comparison)
    order = [html.index(f"id='{name}'") for name in ("verdicts", "figures", "configurations", "runs", "notes")]
    assert order == sorted(order)
    assert html.index("Same val/loss within the band") < order[1]
    assert "74 % less state" in html[: order[1]]


def test_a_strange_name_stays_text(tmp_path: Path) -> None:
    write_run(tmp_path / "<b>&'x'", "<script>alert(1)</script>", settings={"optimizer__lr": "<i>"})
    write_run(tmp_path / "b", "adamw_torch", seed=1)
    html = page(compare([tmp_path]), title="<u>title</u>")
    assert faults_of(html) == []
    assert "<script>" not in html
    assert "<u>" not in html
    assert "| &lt;b>&'x'" in markdown_text(compare([tmp_path]))


def test_every_figure_is_there(comparison: Comparison) -> None:
    names = [chart.name for chart in charts_of(comparison)]
    assert names == [
        *("val-loss-by-update", "val-loss-by-seconds", "difference-by-step", "loss-scale", "state-bytes"),
        *("optimizer-step", "training-step", "target-seconds", "target-updates"),
    ]
    html = page(comparison)
    assert [name for name in names if f'<svg id="{name}"' not in html] == []


def test_curves_are_means_with_the_seeds_range(comparison: Comparison) -> None:
    chart = charts_of(comparison)[0]
    assert isinstance(chart, LineChart)
    baseline = chart.lines[0]
    assert [x for x, _ in baseline.points] == [10, 20, 30, 40]
    assert baseline.points[-1][1] == pytest.approx(1.70)
    assert (baseline.low[-1], baseline.high[-1]) == (1.69, 1.71)


def test_loss_scales_move_and_mark_their_skips(comparison: Comparison) -> None:
    chart = next(chart for chart in charts_of(comparison) if chart.name == "loss-scale")
    assert isinstance(chart, LineChart)
    [line] = chart.lines  # the only run with a scale
    assert line.points == [(1, 2.0**16), (2, 2.0**15), (9, 2.0**14), (40, 2.0**14)]
    assert line.marks == [(2, 2.0**16), (9, 2.0**15)]
    assert svg(chart).count('class="skip"') == 2


def test_bars_are_as_long_as_their_values(comparison: Comparison) -> None:
    chart = next(chart for chart in charts_of(comparison) if chart.name == "state-bytes")
    assert isinstance(chart, BarChart)
    widths = [float(width) for width in re.findall(r'class="bar" x="2" y="[\d.]+" width="([\d.]+)"', svg(chart))]
    values = [bar.value for bar in chart.bars]
    assert values == [8000, 2062, 4000]
    assert [width / widths[0] for width in widths] == pytest.approx([value / 8000 for value in values], abs=1e-3)


def test_a_scale_puts_values_where_they_belong() -> None:
    assert [Scale(0, 10, 100, 200)(value) for value in (0, 5, 10, 20)] == [100, 150, 200, 200]
    assert Scale(1, 100, 0, 2, log=True)(10) == pytest.approx(1)
    assert Scale(3, 3, 0, 2)(3) == 0  # a flat line is no division by zero


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 900, [0, 200, 400, 600, 800]),
        (1.7, 4.0, [2.0, 2.5, 3.0, 3.5, 4.0]),
        (-0.01, 0.012, [-0.01, -0.005, 0, 0.005, 0.01]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_logarithmic_ticks() -> None:
    assert log_ticks(0.04, 2.3) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2])
    assert log_ticks(1e4, 1e8) == pytest.approx([1e4, 1e5, 1e6, 1e7, 1e8])


@pytest.mark.parametrize(
    ("value", "ticks", "text"),
    [
        (200, [0, 200], "200"),
        (0.005, [0, 0.005], "0.005"),
        (-2.5, [-2.5, 0], "−2.5"),
        (1e6, [], "1e6"),
        (2.5e5, [], "2.5e5"),
    ],
)
def test_tick_labels(value: float, ticks: list[float], text: str) -> None:
    assert tick_text(value, ticks) == text


def test_a_loss_scale_that_stands_still_has_a_number_at_its_axis() -> None:
    assert log_ticks(65536 / 1.08, 65536 * 1.08) == [65536.0]
    assert log_ticks(32768 / 1.08, 65536 * 1.08) == [32768.0, 65536.0]
    assert log_ticks(0.71, 0.79)


def test_the_baseline_lies_below_and_is_wide(comparison: Comparison) -> None:
    drawn = [part for part in svg(charts_of(comparison)[0]).split("<path ") if 'class="line' in part]
    assert ['class="line base"' in part for part in drawn] == [True] + [False] * (len(drawn) - 1)
    assert len(drawn) > 1


def test_a_line_of_one_point_is_a_dot() -> None:
    chart = LineChart("one", "One", "x", "y", [Line("a", 0, [(1.0, 2.0)])])
    assert 'class="dot"' in svg(chart)


def test_csv_is_one_row_per_run_of_plain_numbers(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert len(rows) == 7
    first = rows[0]
    assert (first["baseline"], first["optimizer"], first["state"], first["seed"]) == (
        "True",
        "adamw_torch",
        "fp32",
        "0",
    )
    assert (float(first["final_val/loss"]), float(first["state_bytes"])) == (1.69, 8000)
    assert (float(first["target_updates"]), float(first["target_tokens"])) == (30, 30 * 1024)
    assert (float(first["target_train_seconds"]), float(first["target_wall_seconds"])) == (3.0, 4.0)
    assert (float(first["checkpoint_bytes"]), float(first["optimizer_ms"])) == (5000, 2.0)


def test_markdown_tables_are_rectangular(comparison: Comparison) -> None:
    lines = [line for line in markdown_text(comparison).splitlines() if line.startswith("|")]
    blocks: list[set[int]] = []
    for line in lines:
        columns = line.replace("\\|", "").count("|")
        if set(line) <= set("|:- "):
            blocks.append(set())
        elif blocks:
            blocks[-1].add(columns)
    assert len(blocks) == 3
    assert "**same** · adamw_fused int8" in markdown_text(comparison)


def test_everything_is_written(comparison: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_comparison(comparison, tmp_path / "out")
    assert [path.name for path in written] == ["page.html", "comparison.md", "comparison.csv", "figures"]
    figures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert figures == sorted(f"{chart.name}.png" for chart in charts_of(comparison))
    for path in (tmp_path / "out" / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 3000


def test_one_configuration_alone_has_a_page(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.71))
    html = page(compare([tmp_path]))
    assert faults_of(html) == []
    assert "nothing to compare it with" in html


def test_more_groups_than_colours_have_dashes(tmp_path: Path) -> None:
    for number in range(10):
        write_run(tmp_path / f"{number}", "adamw_fused", "fp32", settings={"optimizer__lr": number})
    html = page(compare([tmp_path]))
    assert faults_of(html) == []
    assert 'stroke-dasharray="6 3"' in html


def test_several_targets_have_a_table_of_their_own(comparison: Comparison, tmp_path: Path) -> None:
    assert target_table(comparison).rows == []
    run = comparison.runs[0]
    assert run.summary is not None
    easy = {"metric": "val/loss", "mode": "min", "target": 3.5, "reached": True, "value": 3.0}
    easy |= {"train_seconds": 2.0, "wall_seconds": 3.0, "updates": 20, "samples": 160, "tokens": 20480}
    hard = {"metric": "val/loss", "mode": "min", "target": 1.0, "reached": False}
    run.summary.targets = [easy, hard]
    rows = target_table(comparison).rows
    assert rows[0] == ["adamw_torch fp32", "val/loss ≤ 3.5", "1 of 1", "2.0 s", "3.0 s", "20", "20,480"]
    assert rows[1] == ["adamw_torch fp32", "val/loss ≤ 1", "0 of 1", "–", "–", "–", "–"]
    assert "id='targets'" in page(comparison)
