"""``metrics.csv``: one row per optimizer step at which something was measured, one column per metric.

The first four columns are always there; metric columns follow in the order in which they first appear, and a cell is
empty where a metric was not measured at that step::

    step,update,epoch,train_seconds,train/loss,val/loss
    50,49,0,2.71,2.93,
    100,98,0,5.38,2.61,2.58

``step`` is the global step (skips included), ``update`` the applied ones, ``train_seconds`` the time spent training
without validation. Non-finite numbers are written ``nan``, ``inf`` and ``-inf``.

What is measured twice at one step (the training metrics, then those of the validation that follows) goes into one row:
the last row stays open for its own step. A resumed run drops later rows and reopens the row of the checkpoint's step:
a validation that is run again replaces its numbers and does not double them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fuse.records.atomic_file import replace_file

KEY_COLUMNS = ("step", "update", "epoch", "train_seconds")


class MetricsTable:
    """The writer of ``metrics.csv``.

    Args:
        path: The file; made if missing.
        keep_through: Rows with a larger ``step`` are dropped, with a torn last line. 0 starts from nothing, None keeps
            every whole row.

    Raises:
        ValueError: The file is there and is not such a table.
    """

    def __init__(self, path: Path, keep_through: int | None = None) -> None:
        self.path = Path(path)
        self.columns: list[str] = list(KEY_COLUMNS)
        self._last: dict[str, str] = {}
        self._last_offset = 0
        if self.path.exists() and self.path.stat().st_size:
            self.columns, rows = _read(self.path)
            self._rewrite([row for row in rows if keep_through is None or int(row["step"]) <= keep_through])
        else:
            self._rewrite([])

    def record(
        self, *, step: int, update: int, epoch: int, train_seconds: float, metrics: Mapping[str, float | str]
    ) -> None:
        """Writes what was measured at a step; a second call for the last step adds to its row.

        Args:
            step: Global step, skips included; not smaller than that of the last row.
            update: Applied updates so far.
            epoch: The current epoch, from 0.
            train_seconds: Time spent training so far, without validation.
            metrics: Name to value. A new name becomes a new column.

        Raises:
            ValueError: ``step`` lies before the last row, or a metric has the name of a key column.
        """
        taken = [name for name in metrics if name in KEY_COLUMNS]
        if taken:
            raise ValueError(f"metric {taken[0]!r} has the name of a key column ({', '.join(KEY_COLUMNS)}); rename it")
        keys = {"step": step, "update": update, "epoch": epoch, "train_seconds": round(train_seconds, 3)}
        cells = {name: _cell(value) for name, value in {**keys, **metrics}.items()}
        last_step = int(self._last["step"]) if self._last else None
        if last_step is not None and step < last_step:
            raise ValueError(f"step {step} lies before the last row, step {last_step}; rows are written in order")
        same_row = last_step == step
        merged = {**self._last, **cells} if same_row else cells
        if not set(merged) <= set(self.columns):
            self._grow(merged, replace_last=same_row)
        else:
            self._write_at_end(merged, replace_last=same_row)

    def _write_at_end(self, row: dict[str, str], *, replace_last: bool) -> None:
        with self.path.open("r+b") as file:
            offset = file.seek(self._last_offset) if replace_last else file.seek(0, io.SEEK_END)
            file.write(_line([row.get(column, "") for column in self.columns]).encode())
            file.truncate()
        self._last, self._last_offset = row, offset

    def _grow(self, row: dict[str, str], *, replace_last: bool) -> None:
        rows = _read(self.path)[1]
        if replace_last:
            rows.pop()
        self.columns += [name for name in row if name not in self.columns]
        self._rewrite([*rows, row])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        lines = [_line(self.columns), *(_line([row.get(column, "") for column in self.columns]) for row in rows)]
        replace_file(self.path, lines)
        self._last = dict(rows[-1]) if rows else {}
        self._last_offset = len("".join(lines[:-1]).encode()) if rows else len(lines[0].encode())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the table.

    Args:
        path: A ``metrics.csv``.

    Returns:
        One dict per row, without the empty cells; step, update and epoch are ints, everything else is a float (a cell
        that is no number stays a string). A torn last line is passed over.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not such a table.
    """
    return [{name: _number(name, cell) for name, cell in row.items() if cell != ""} for row in _read(Path(path))[1]]


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]  # a torn last line has no end
    table = list(csv.reader(io.StringIO(whole, newline="")))
    if not table or tuple(table[0][: len(KEY_COLUMNS)]) != KEY_COLUMNS:
        raise ValueError(
            f"{path} is not a metrics table: its first columns are {text[:60]!r}, expected {','.join(KEY_COLUMNS)}; "
            "choose another run folder"
        )
    columns = table[0]
    for number, cells in enumerate(table[1:], start=2):
        if len(cells) != len(columns) or not cells[0].isdigit():
            raise ValueError(f"{path}, row {number} has {len(cells)} cells, expected {len(columns)}; mend or remove it")
    return columns, [dict(zip(columns, cells, strict=True)) for cells in table[1:]]


def _line(cells: list[str]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _number(name: str, cell: str) -> Any:
    if name in ("step", "update", "epoch"):
        return int(cell)
    try:
        return float(cell)
    except ValueError:
        return cell
