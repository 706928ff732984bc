"""Writes a comparison into a folder: page, Markdown, CSV, figures."""

from __future__ import annotations

from pathlib import Path

from lightning_fuse.reports.charts import charts_of
from lightning_fuse.reports.comparison import Comparison
from lightning_fuse.reports.page import page
from lightning_fuse.reports.png import write_pngs
from lightning_fuse.reports.tables import csv_text, markdown_text

PAGE, MARKDOWN, CSV, FIGURES = "page.html", "comparison.md", "comparison.csv", "figures"


def write_comparison(
    comparison: Comparison, folder: str | Path, *, title: str | None = None, png: bool = True
) -> list[Path]:
    """Writes everything; files of an earlier comparison in the folder are replaced.

    Args:
        comparison: What to write.
        folder: Where; made if missing.
        title: Heading of the page; None names recipe and count.
        png: Also draw the figures as PNG, with matplotlib.

    Returns:
        What was written: page, Markdown, CSV, and the folder of the figures.

    Raises:
        ImportError: ``png`` without matplotlib.
        OSError: The folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    texts = {PAGE: page(comparison, title), MARKDOWN: markdown_text(comparison), CSV: csv_text(comparison)}
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8", newline="")
    written = [place / name for name in texts]
    if png:
        figures = place / FIGURES
        figures.mkdir(exist_ok=True)
        write_pngs(charts_of(comparison), figures)
        written.append(figures)
    return written
