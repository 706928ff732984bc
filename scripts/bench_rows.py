"""Rows of measurements with what they were measured on, appended to a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def append_rows(rows: Iterable[Mapping[str, Any]], described: Mapping[str, Any], path: Path) -> None:
    """Appends rows; a new file gets a heading.

    Args:
        rows: One mapping per line, all with the same keys.
        described: Hardware and versions, repeated in every line.
        path: The file; its folder is made.
    """
    lines = [{**row, **described} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]) if lines else [])
        if fresh:
            writer.writeheader()
        writer.writerows(lines)
