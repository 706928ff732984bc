"""The comparison as one HTML page that needs nothing else, and all of a comparison in one folder.

The page is ``template/page.html`` with its style and script, Vega and the figures' data inside. It fetches nothing:
its content policy forbids it. Names of runs, metrics and settings are escaped wherever they stand.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from lightning_fuse.reports.charts import MOST_METRICS, figures_of, write_pngs
from lightning_fuse.reports.compare import metrics_of
from lightning_fuse.reports.comparison_csv import csv_text
from lightning_fuse.reports.significance import BADGES
from lightning_fuse.reports.stats import AXES, Comparison
from lightning_fuse.reports.tables import markdown_text, tables_of
from lightning_fuse.reports.theme import INK, PALETTES, PAPER, dash_of, theme

PAGE, MARKDOWN, CSV, FIGURES = "page.html", "comparison.md", "comparison.csv", "figures"


def write_comparison(
    comparison: Comparison, folder: str | Path, *, title: str | None = None, png: bool = True
) -> list[Path]:
    """Writes everything; files of an earlier comparison in the folder are replaced, links are not followed.

    Args:
        comparison: What to write.
        folder: Where; made if missing.
        title: Heading of the page; None names recipe and count.
        png: Also draw the figures as PNG.

    Returns:
        What was written: page, Markdown, CSV, and the folder of the figures.

    Raises:
        OSError: The folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    texts = {PAGE: page(comparison, title), MARKDOWN: markdown_text(comparison), CSV: csv_text(comparison)}
    for name, text in texts.items():
        _replace(place / name, text)
    written = [place / name for name in texts]
    if png:
        figures = place / FIGURES
        if figures.is_symlink():
            figures.unlink()
        figures.mkdir(exist_ok=True)
        write_pngs(figures_of(comparison, [comparison.metric]), figures)
        written.append(figures)
    return written


def page(comparison: Comparison, title: str | None = None) -> str:
    """The whole page.

    Args:
        comparison: What to show.
        title: The heading; None names the recipe and the count.

    Returns:
        HTML, complete in itself.
    """
    names = metrics_of(comparison.runs, comparison.metric if comparison.metric in _finals(comparison) else None)
    figures = figures_of(comparison, names)
    labels = [group.label for group in comparison.groups]
    tokens = any("tokens" in points and points["tokens"].notna().any() for points in comparison.runs[0].points.values())
    axes = {key: comparison.tokens if key == "tokens" else name for key, name in AXES.items()}
    data = {
        "figures": [{"name": figure.name, "spec": _packed(figure.spec)} for figure in figures],
        "themes": {mode: theme(mode) for mode in PALETTES},
    }
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "template"), autoescape=True)
    band = next((note for note in comparison.notes if note.startswith(("the band", "the baseline"))), "")
    many = [f"the page's curves show {MOST_METRICS} of {len(names)} metrics"] if len(names) > MOST_METRICS else []
    return environment.get_template("page.html").render(
        title=title or f"{comparison.recipe}: {len(labels)} configurations compared",
        lead=_lead(comparison),
        band=band[:1].upper() + band[1:],
        findings=comparison.findings,
        badges=BADGES,
        labels=labels,
        dashes=[" ".join(map(str, dash_of(place))) for place in range(len(labels))],
        palettes=PALETTES,
        paper=PAPER,
        ink=INK,
        figures=figures,
        metrics=names[:MOST_METRICS],
        axes={key: name for key, name in axes.items() if key != "tokens" or tokens},
        tables=tables_of(comparison),
        notes=[*many, *comparison.notes],
        provenance=_provenance(comparison),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        bundle=_bundle(),
    )


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from the installed vl-convert."""
    import vl_convert

    text: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub asks for a snippet
    return text.replace("</script", "<\\/script")


def _finals(comparison: Comparison) -> set[str]:
    return {name for run in comparison.runs for name in run.finals}


def _packed(spec: dict[str, Any]) -> dict[str, Any]:
    """Rows as columns, texts as places in a list; page.js unpacks them."""
    packed = {}
    for name, rows in spec["datasets"].items():
        columns: dict[str, Any] = {}
        for key in dict.fromkeys(key for row in rows for key in row):
            column = [row.get(key) for row in rows]
            if any(isinstance(value, str) for value in column):
                texts = list(dict.fromkeys(column))
                places = {text: place for place, text in enumerate(texts)}
                columns[key] = {"texts": texts, "places": [places[value] for value in column]}
            else:
                columns[key] = column
        packed[name] = {"length": len(rows), "columns": columns}
    return {**spec, "datasets": packed}


def _lead(comparison: Comparison) -> str:
    count = len(comparison.runs)
    seeds = sorted({seed for group in comparison.groups for seed in group.seeds if seed is not None})
    said = f"{count} run{'s' if count != 1 else ''} of {comparison.recipe}"
    if seeds:
        said += f" with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds[:20]))}"
    which = "lower" if comparison.mode == "min" else "higher"
    return f"{said}. Baseline: {comparison.baseline.label}. Quality: {comparison.metric} at the end, {which} is better."


def _provenance(comparison: Comparison) -> dict[str, str]:
    """Each value that a run recorded; several where runs differ."""
    names = dict.fromkeys(name for run in comparison.runs for name in run.provenance)
    values = {name: sorted({run.provenance.get(name, "") for run in comparison.runs} - {""}) for name in names}
    return {name: ", ".join(some if len(some) <= 4 else [some[0], "…", some[-1]]) for name, some in values.items()}


def _replace(path: Path, text: str) -> None:
    """Writes a file beside and moves it into place, so that a link there is replaced and not followed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
