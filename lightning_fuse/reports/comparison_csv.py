"""``comparison.csv``: a row of plain numbers per run, for a spreadsheet, and to be compared again without curves."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from lightning_fuse.reports.groups import TITLE
from lightning_fuse.reports.run import FIGURES, UNKNOWN, Run, Target
from lightning_fuse.reports.stats import Comparison
from lightning_fuse.reports.validation import number, open_regular

LARGEST = 64 << 20  # bytes that are read
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is a formula to a spreadsheet
TARGET = ("train_seconds", "wall_seconds", "updates", "tokens")


def csv_text(comparison: Comparison) -> str:
    """Every run as one row.

    Args:
        comparison: A comparison.

    Returns:
        CSV; texts that a spreadsheet would take for a formula begin with an apostrophe.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    final = f"final_{comparison.metric}"
    targets = ["target", "target_reached", *(f"target_{name}" for name in TARGET[:3]), f"target_{comparison.tokens}"]
    heads = ["run", "configuration", "baseline", *TITLE, "seed", "status", "recipe", final, *FIGURES]
    writer.writerow([*heads, *targets, "data_hash", "hardware", "remarks"])
    for group in comparison.groups:
        for run in group.runs:
            words = [group.words[name] for name in TITLE]
            cells: list[Any] = [run.name, group.label, group is comparison.baseline, *words, run.seed, run.status]
            cells += [run.recipe, run.finals.get(comparison.metric)]
            cells += [getattr(run, name) for name in FIGURES]
            target = run.target
            cells += [None] * 6 if target is None else [target.label, target.reached]
            cells += [] if target is None else [getattr(target, name) for name in TARGET]
            writer.writerow([_cell(cell) for cell in (*cells, run.data_hash, run.hardware, "; ".join(run.notes))])
    return text.getvalue()


def read_csv(path: Path) -> list[Run]:
    """Reads ``comparison.csv`` back.

    Args:
        path: The file.

    Returns:
        Its runs, without measurements in between.

    Raises:
        ValueError: It is no such file.
    """
    with open_regular(path) as file:
        text = file.read(LARGEST).decode("utf-8", "replace")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    if not rows or not {"configuration", "seed", "status"} <= set(rows[0]):
        raise ValueError(f"{path} is no comparison.csv (columns configuration, seed, status, …); name another file")
    return [_run({str(key): _text(cell) for key, cell in row.items()}) for row in rows]


def _run(row: dict[str, str]) -> Run:
    seed = row.get("seed", "")
    run = Run(row.get("run") or f"{row['configuration']} seed {seed}", label=row["configuration"])
    run.config = {name: row.get(name) or UNKNOWN for name in TITLE}
    run.config["data"] = {"context": int("target_tokens" in row)}  # tokens were counted, or samples
    run.seed = int(seed) if seed.lstrip("-").isdecimal() and len(seed) < 20 else None
    run.status, run.recipe = row["status"] or UNKNOWN, row.get("recipe") or UNKNOWN
    run.data_hash, run.hardware = row.get("data_hash") or None, row.get("hardware", "")
    for name in FIGURES:
        setattr(run, name, _number(row.get(name)))
    finals = {key.removeprefix("final_"): _number(cell) for key, cell in row.items() if key.startswith("final_")}
    run.finals = {name: value for name, value in finals.items() if value is not None}
    if row.get("target"):
        reached = {"True": True, "False": False}.get(row.get("target_reached", ""))
        when = {name: _number(row.get(f"target_{name}")) for name in TARGET[:3]}
        when["tokens"] = _number(row.get("target_tokens") or row.get("target_samples"))
        run.targets = [Target(row["target"], row["target"].split(" ")[0], reached, **when)]
    run.notes = [row["remarks"]] if row.get("remarks") else []
    return run


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA) else value
    return "" if value is None else int(value) if isinstance(value, float) and value.is_integer() else value


def _text(cell: Any) -> str:
    text = cell if isinstance(cell, str) else ""
    return text[1:] if text.startswith("'") and text[1:].startswith(FORMULA) else text


def _number(cell: str | None) -> float | None:
    try:
        return number(float(cell)) if cell else None
    except ValueError:
        return None
