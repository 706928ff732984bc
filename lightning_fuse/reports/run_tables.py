"""``steps.jsonl`` and ``metrics.csv`` of a run, in bounded time and memory however long the run was.

Rows are read in blocks and kept as columns of numbers. A row that a kill cut short is passed over; rows and values of
another shape are left out and counted in a note.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from lightning_fuse.reports.validation import number, open_regular

BLOCK = 4 << 20  # bytes read at a time
LONGEST_LINE = 1 << 20
MOST_BYTES = 48 << 20  # of step rows that are read whole; of longer files every n-th row and all skipped ones
MOST_POINTS = 20_000  # kept of one metric, evenly spaced, the last always
MOST_METRICS = 100
READ: dict[str, Any] = {
    **{"header": None, "index_col": False, "na_filter": False, "low_memory": False},
    **{"on_bad_lines": "skip", "encoding_errors": "replace"},
}
KEYS = ("step", "update", "epoch", "train_seconds")
STEP_NUMBERS = {
    "global_step": "step",
    "optimizer": "optimizer",
    "applied": "applied",
    "optimizer_ms": "optimizer_ms",
    "train_seconds": "seconds",
    "window_size": "window",
    "loss_scale_before": "before",
    "loss_scale_after": "after",
}


@dataclass
class Steps:
    """What the comparison takes from the step rows.

    Attributes:
        optimizer_ms: Median of the applied steps.
        training_step_ms: Median from one step to the next, on the train clock.
        last_step: The last one recorded.
        windows: Columns ``step``, ``window``: micro-batches of each step.
        scales: Columns ``step``, ``scale``: the first loss scale, and wherever it moved.
        skipped: Columns ``step``, ``reason``, ``scale``.
        notes: What is odd.
    """

    optimizer_ms: float | None = None
    training_step_ms: float | None = None
    last_step: float | None = None
    windows: pd.DataFrame = field(default_factory=pd.DataFrame)
    scales: pd.DataFrame = field(default_factory=pd.DataFrame)
    skipped: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: list[str] = field(default_factory=list)


@dataclass
class Measurements:
    """``metrics.csv``: metric to its points (columns ``step``, ``update``, ``seconds``, ``value``), and notes."""

    points: dict[str, pd.DataFrame] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_steps(path: Path) -> Steps:
    """Reads the step rows.

    Args:
        path: A ``steps.jsonl``.

    Returns:
        Their figures.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no regular file.
    """
    steps = Steps()
    blocks, bad, strange = [], 0, dict.fromkeys(STEP_NUMBERS, 0)
    with open_regular(path) as file:
        every = -(-os.fstat(file.fileno()).st_size // MOST_BYTES)
        if every > 1:
            steps.notes.append(f"{path.name}: a long run, one of {every} step rows is read, and all skipped ones")
        for lines in _line_blocks(file):
            last = len(lines) - 1
            kept = [line for i, line in enumerate(lines) if i % every == 0 or i == last or b"false" in line]
            rows, faults = _rows_of(kept if every > 1 else lines)
            bad += faults
            frame = pd.DataFrame({new: _numbers(rows, old, strange) for old, new in STEP_NUMBERS.items()})
            frame["reason"] = [None if row.get("applied", True) else str(row.get("reason"))[:40] for row in rows]
            sound = np.isfinite(frame["step"])
            bad += len(frame) - int(sound.sum())
            blocks.append(frame[sound])
    del strange["global_step"]  # such rows are counted above
    if bad:
        steps.notes.append(f"{path.name}: {bad:,} row{'s' if bad > 1 else ''} cannot be read and are left out")
    steps.notes += [f"{path.name}: {n:,} values of {key} are no number, left out" for key, n in strange.items() if n]
    table = pd.concat(blocks, ignore_index=True) if blocks else pd.DataFrame()
    if not table.empty:
        _summarize(steps, table)
    return steps


def read_measurements(path: Path) -> Measurements:
    """Reads the table of metrics.

    Args:
        path: A ``metrics.csv``.

    Returns:
        Points per metric, in order; what is no number is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no such table.
    """
    found: dict[str, list[pd.DataFrame]] = {}
    notes: list[str] = []
    dropped = 0
    with open_regular(path) as file:
        head = file.readline(LONGEST_LINE).decode("utf-8", "replace")
        columns = next(csv.reader([head]), [])
        if not set(KEYS) - {"epoch"} <= set(columns):
            raise ValueError(f"its first line is {head[:60]!r}, expected the columns {', '.join(KEYS)}")
        names = [name for name in dict.fromkeys(columns) if name not in KEYS]
        if len(names) > MOST_METRICS:
            notes.append(f"{path.name}: {len(names):,} metrics, the first {MOST_METRICS} are taken")
        for lines in _line_blocks(file):
            text = io.BytesIO(b"".join(lines))
            table = pd.read_csv(text, names=range(len(columns)), **READ)
            found_keys = {
                key: pd.to_numeric(table[columns.index(key)], errors="coerce") for key in KEYS if key in columns
            }
            keys = pd.DataFrame(found_keys)
            sound = np.isfinite(keys).all(axis=1)
            dropped += len(lines) - int(sound.sum())
            place = keys[sound].rename(columns={"train_seconds": "seconds"}).astype(float)
            for name in names[:MOST_METRICS]:
                cells = table.loc[sound, columns.index(name)]
                values = pd.to_numeric(cells, errors="coerce")
                words = not pd.api.types.is_numeric_dtype(cells)
                measured = values.notna() | (cells.astype(str).str.lower() == "nan" if words else True)
                if measured.any():
                    points = place.loc[measured, ["step", "update", "seconds"]].assign(value=values[measured])
                    found.setdefault(name, []).append(points)
    if dropped:
        notes.append(f"{path.name}: {dropped:,} row{'s' if dropped > 1 else ''} cannot be read and are left out")
    points = {name: _thin(pd.concat(parts, ignore_index=True), MOST_POINTS) for name, parts in found.items()}
    return Measurements({name: points[name] for name in names if name in points}, notes)


def token_counter(config: Mapping[str, Any], windows: pd.DataFrame | None) -> Callable[[pd.Series], pd.Series | None]:
    """Steps to tokens seen: every micro-batch of every window counts, of skipped steps too.

    Args:
        config: The run's configuration.
        windows: As in ``Steps``.

    Returns:
        A function from steps to tokens (samples without a context), or to None where the batch size is not known.
    """

    def whole(group: str, key: str, other: float) -> float:
        settings = config.get(group)
        value = number(settings.get(key)) if isinstance(settings, Mapping) else None
        return value if value is not None and 0 < value < math.inf else other

    batch = whole("data", "batch_size", 0)
    each = batch * whole("data", "context", 1) * whole("trainer", "devices", 1) * whole("trainer", "num_nodes", 1)
    window = whole("trainer", "accumulate_grad_batches", 1)
    if not batch:
        return lambda steps: None
    if windows is None or windows.empty:
        return lambda steps: each * window * steps
    # An imported run has only the rows that were logged; the steps between had full windows.
    gaps = windows["step"].diff().fillna(windows["step"]).clip(lower=1) - 1
    seen = pd.Series((windows["window"].fillna(window) + window * gaps).cumsum().to_numpy(), index=windows["step"])
    seen = seen[~seen.index.duplicated(keep="last")]
    return lambda steps: each * steps.map(seen).fillna(window * steps)


def _thin(table: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most so many rows, evenly spaced, the same ones of equally long tables, the last always."""
    if len(table) <= most:
        return table
    every = -(-len(table) // most)
    kept = (np.arange(len(table)) % every == every - 1) | (np.arange(len(table)) == len(table) - 1)
    return table[kept].reset_index(drop=True)


def _line_blocks(file: BinaryIO) -> Iterator[list[bytes]]:
    """Whole lines, some megabytes at a time; a last line without an end, and one without measure, are left out."""
    rest = b""
    while block := file.read(BLOCK):
        lines = (rest + block).splitlines(keepends=True)
        rest = lines.pop() if not lines[-1].endswith(b"\n") else b""
        rest = rest if len(rest) <= LONGEST_LINE else b""
        if lines:
            yield lines


def _rows_of(lines: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        rows = [_row_of(line) for line in lines]
    sound = [row for row in rows if isinstance(row, dict)]
    return sound, len(rows) - len(sound)


def _row_of(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _numbers(rows: list[dict[str, Any]], key: str, strange: dict[str, int]) -> pd.Series:
    given = pd.Series([row.get(key) for row in rows], dtype=object)
    try:
        values = pd.to_numeric(given, errors="coerce")
    except (OverflowError, TypeError):  # an integer beyond every float
        values = given.map(number)
    strange[key] += int((values.isna() & given.notna() & (given != "NaN")).sum())
    return values.astype(float)


def _summarize(steps: Steps, table: pd.DataFrame) -> None:
    applied = table["applied"].fillna(1.0) != 0
    steps.optimizer_ms = _median(table.loc[applied, "optimizer_ms"])
    steps.last_step = float(table["step"].iloc[-1])
    # Rows of one step (several optimizers) stand together; only the clock between steps counts.
    clock = table.loc[table["seconds"].notna(), ["step", "seconds"]].drop_duplicates("step", keep="last").diff()
    forward = clock[(clock["step"] > 0) & (clock["seconds"] > 0)]
    # An imported run has only the rows that were logged, so a gap may be several steps.
    steps.training_step_ms = _median(1000 * forward["seconds"] / forward["step"])
    steps.windows = table.loc[table["optimizer"].fillna(0) == 0, ["step", "window"]]
    steps.skipped = table.loc[~applied, ["step", "reason", "before"]].rename(columns={"before": "scale"})
    known = table[table["before"].notna() & table["after"].notna()]
    if not known.empty:
        moved = known[known["after"] != known["after"].shift(fill_value=known["before"].iloc[0])]
        first = pd.DataFrame({"step": known["step"].iloc[:1], "scale": known["before"].iloc[:1]})
        later = moved[["step", "after"]].rename(columns={"after": "scale"})
        steps.scales = pd.concat([first, later], ignore_index=True)


def _median(values: pd.Series) -> float | None:
    known = values[np.isfinite(values)]
    return None if known.empty else float(known.median())
