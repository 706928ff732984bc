"""The page holds everything itself, says the answer first, and nothing that a run is called breaks an output."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_fuse.reports.compare import compare
from lightning_fuse.reports.comparison_csv import csv_text
from lightning_fuse.reports.page import page, write_comparison
from lightning_fuse.reports.stats import Comparison
from lightning_fuse.reports.tables import headlines, markdown_text, tables_of
from tests.reports.run_folders import write_run, write_seeds

VOID = {"meta", "link", "br", "img", "hr", "input", "line"}
LOADING = {"src", "srcset", "href", "action", "data", "poster", "xlink:href"}


class Reader(HTMLParser):
    """Notes unbalanced tags, the scripts, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag in ("iframe", "object", "embed", "img"):
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

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def faults_of(html: str) -> list[str]:
    reader = Reader()
    reader.feed(html)
    style = re.findall(r"url\([^)]*\)|@import", re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    # The page's own three: its data, Vega, and what it does with both.
    many = [] if len(reader.scripts) == 3 else [f"{len(reader.scripts)} scripts"]
    return reader.faults + [f"<{tag}> is never closed" for tag in reader.open] + style + many


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    write_seeds(tmp_path, "adamw_torch", "fp32", (1.69, 1.70, 1.71))
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.70, 1.70), optimizer_ms=1.5)
    write_run(tmp_path / "scaled", "adamw_fused", "bf16", losses=(4.0, 3.0, 1.9, 1.9), skips=(2, 9), scale=2.0**16)
    return compare([tmp_path])


def test_the_page_needs_nothing_else(comparison: Comparison) -> None:
    html = page(comparison)
    assert faults_of(html) == []
    assert "default-src 'none'" in html


@pytest.mark.parametrize(
    "planted",
    [
        "<script src='x.js'></script>",
        "<script>x()</script>",
        "<img src='https://example.org/x.png'>",
        "<link rel='stylesheet' href='style.css'>",
        "<p onclick='x()'></p>",
        "<style>p { background: url(x.png) }</style>",
        "<div>",
    ],
)
def test_the_check_sees_what_it_is_for(comparison: Comparison, planted: str) -> None:
    assert faults_of(page(comparison).replace("</main>", f"{planted}</main>"))


def test_the_answer_stands_first_and_in_words(comparison: Comparison) -> None:
    html = page(comparison)
    order = [html.index(f'id="{name}"') for name in ("answer", "figures", "configurations", "runs", "notes")]
    assert order == sorted(order)
    headline = "74 % less state, same loss, step 1.3 × as fast, training no clear difference"
    assert headline in html[: order[1]]
    assert f"- **ours int8**: {headline}." in markdown_text(comparison)


def test_a_strange_name_stays_text_everywhere(tmp_path: Path) -> None:
    settings = {"optimizer__lr": "<i>", "recipe__name": "</script><script>alert(2)</script>"}
    write_run(tmp_path / "<b>&'x'", "<script>alert(1)</script>", settings=settings)
    write_run(tmp_path / "b|[c](d)", "adamw_torch", seed=1, settings={"recipe__name": settings["recipe__name"]})
    comparison = compare([tmp_path])
    html = page(comparison, title="<u>title</u>")
    assert faults_of(html) == []
    assert "<script>alert" not in html
    assert "<u>" not in html
    text = markdown_text(comparison)
    assert "| &lt;b>&'x'" in text
    assert r"| b\|\[c\](d)" in text
    assert "<script" not in text


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_cell_is_a_formula(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / name, "adamw_torch", settings={"recipe__name": name})
    write_run(tmp_path / "b", "adamw_fused", reason=name, settings={"recipe__name": name}, data_hash=name)
    rows = list(csv.DictReader(io.StringIO(csv_text(compare([tmp_path], allow_different_data=True)), newline="")))
    texts = [
        cell for row in rows for key, cell in row.items() if key in ("run", "configuration", "recipe", "data_hash")
    ]
    assert [text for text in texts if text.startswith(("=", "+", "-", "@", "\t"))] == []
    assert rows[1]["run"] == f"'{name}" or rows[0]["run"] == f"'{name}"


def test_csv_is_one_row_per_run_of_plain_numbers(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert len(rows) == 7
    first = rows[0]
    assert [first[key] for key in ("baseline", "optimizer", "state", "seed")] == ["True", "adamw_torch", "fp32", "0"]
    figures = {"final_val/loss": 1.69, "state_bytes": 8000, "target_updates": 30, "target_tokens": 30 * 1024}
    figures |= {"target_train_seconds": 3, "target_wall_seconds": 4, "checkpoint_bytes": 5000, "optimizer_ms": 2}
    assert {key: float(first[key]) for key in figures} == figures


def test_a_csv_is_compared_again_to_the_same_words(comparison: Comparison, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_comparison(comparison, out, png=False)
    again = compare([out / "comparison.csv"])
    assert [finding.text for finding in again.findings] == [finding.text for finding in comparison.findings]
    assert [finding.headline for finding in again.findings] == [finding.headline for finding in comparison.findings]
    assert csv_text(again) == csv_text(comparison)
    assert faults_of(page(again)) == []


def test_the_readme_says_what_the_comparison_says(repo_root: Path) -> None:
    lines = headlines(compare([repo_root / "benchmarks" / "flagship_byte_lm" / "comparison.csv"]))
    assert len(lines) == 7
    assert "\n".join(lines) in (repo_root / "README.md").read_text(encoding="utf-8")


def test_markdown_tables_are_rectangular(comparison: Comparison) -> None:
    lines = [line for line in markdown_text(comparison).splitlines() if line.startswith("|")]
    blocks: list[set[int]] = []
    for line in lines:
        if set(line) <= set("|:- "):
            blocks.append(set())
        elif blocks:
            blocks[-1].add(line.replace("\\|", "").count("|"))
    assert len(blocks) == 3
    assert "**same** · ours int8" in markdown_text(comparison)


def test_every_column_of_every_table_is_on_the_page(comparison: Comparison) -> None:
    html = page(comparison)
    for table in tables_of(comparison):
        section = html[html.index(f'<section id="{table.name}"') :]
        section = section[: section.index("</section>")]
        assert re.findall(r'title="sort">([^<]*)<', section) == table.heads
        assert section.count("<tr>") == 1 + len(table.rows)


def test_everything_is_written(comparison: Comparison, tmp_path: Path) -> None:
    written = write_comparison(comparison, tmp_path / "out")
    assert [path.name for path in written] == ["page.html", "comparison.md", "comparison.csv", "figures"]
    assert len(list((tmp_path / "out" / "figures").glob("*.png"))) == 10


@pytest.mark.parametrize("name", ["page.html", "comparison.md", "comparison.csv", "figures"])
def test_a_link_in_the_output_is_replaced_and_not_followed(comparison: Comparison, tmp_path: Path, name: str) -> None:
    out, aim = tmp_path / "out", tmp_path / "aim"
    out.mkdir()
    if name == "figures":
        aim.mkdir()
    else:
        aim.write_text("mine", encoding="utf-8")
    os.symlink(aim, out / name)
    write_comparison(comparison, out, png=name == "figures")
    assert not (out / name).is_symlink()
    assert list(aim.iterdir()) == [] if aim.is_dir() else aim.read_text(encoding="utf-8") == "mine"


def test_one_configuration_alone_has_a_page(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.71))
    html = page(compare([tmp_path]))
    assert faults_of(html) == []
    assert "nothing to compare it with" in html


def test_more_groups_than_colours_differ_in_dashes(tmp_path: Path) -> None:
    for number in range(10):
        write_run(tmp_path / f"{number}", "adamw_fused", "fp32", settings={"optimizer__lr": number})
    html = page(compare([tmp_path]))
    assert faults_of(html) == []
    looks = re.findall(r'style="--series: var\(--c(\d)\)"><svg.*?stroke-dasharray="([^"]*)"', html)
    assert len(looks) == len(set(looks)) == 10


def test_the_monitor_is_the_first_metric_to_choose(tmp_path: Path) -> None:
    settings = {"recipe": {"name": "digits", "monitor": "train/loss", "mode": "min"}}
    write_run(tmp_path / "a", settings=settings)
    write_run(tmp_path / "b", "adamw_fused", settings=settings)
    comparison = compare([tmp_path])
    assert comparison.metric == "train/loss"
    assert re.findall(r"<option>([^<]*)", page(comparison)) == ["train/loss", "val/loss"]
    assert compare([tmp_path], metric="val/loss").metric == "val/loss"


def test_several_targets_have_a_table_of_their_own(comparison: Comparison, tmp_path: Path) -> None:
    assert "targets" not in [table.name for table in tables_of(comparison)]
    path = tmp_path / "adamw_torch_fp32_0" / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    easy = {"metric": "val/loss", "mode": "min", "target": 3.5, "reached": True, "value": 3.0}
    easy |= {"train_seconds": 2.0, "wall_seconds": 3.0, "updates": 20, "samples": 160, "tokens": 20480}
    hard = {"metric": "val/loss", "mode": "min", "target": 1.0, "reached": False}
    summary["targets"] = [easy, summary["target"], hard]
    path.write_text(json.dumps(summary), encoding="utf-8")
    table = next(table for table in tables_of(compare([tmp_path])) if table.name == "targets")
    rows = {row[1].text: [cell.text for cell in row[2:]] for row in table.rows if row[0].text == "torch fused fp32"}
    assert rows["val/loss ≤ 3.5"] == ["1 of 1", "2.0 s", "3.0 s", "20", "20,480"]
    assert rows["val/loss ≤ 1"] == ["0 of 1", "–", "–", "–", "–"]
    assert rows["val/loss ≤ 2"][0] == "3 of 3"
