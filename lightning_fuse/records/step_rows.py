"""``steps.jsonl``: one JSON object per optimizer step, applied or skipped, in order.

A row holds what the step contract reports and what the recorder adds::

    {"global_step": 3, "update": 2, "applied": false, "reason": "nonfinite", "grad_norm": "Infinity", "clip_coef": 1.0,
     "loss_scale_before": 1024.0, "loss_scale_after": 512.0, "window_size": 1, "optimizer": 0,
     "optimizer_ms": 0.41, "train_seconds": 0.73}

``global_step`` counts optimizer steps from 1, skips included; ``update`` counts applied ones. Non-finite numbers are
strings, see ``strict_json``.

Each row is flushed as it is written. A kill can only tear the last line; the reader passes over it and the writer cuts
it off. When a run resumes, the rows after the checkpoint's step are dropped first, so that no step appears twice.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_fuse.records.durable import replace_file
from lightning_fuse.records.strict_json import decode, encode


class StepRows:
    """The writer of ``steps.jsonl``.

    Args:
        path: The file; made if missing.
        keep_through: Rows with a larger ``global_step`` are dropped, with a torn last line. 0 starts from nothing, None
            keeps every whole row.

    Raises:
        ValueError: A line before the last one is not a JSON object with a ``global_step``.
    """

    def __init__(self, path: Path, keep_through: int | None = None) -> None:
        self.path = Path(path)
        if self.path.exists():
            _drop_after(self.path, keep_through)
        self._file: io.TextIOWrapper | None = self.path.open("a", encoding="utf-8", newline="")

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row and hands it to the system, so that killing the process does not lose it.

        Args:
            row: Its keys and values; ``global_step`` is required.

        Raises:
            KeyError: The row has no ``global_step``.
            RuntimeError: The writer is closed.
        """
        if self._file is None:
            raise RuntimeError(f"{self.path} is closed; open it again with StepRows(path)")
        row["global_step"]  # a row that cannot be cut on resume must not get into the file
        self._file.write(encode(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_step_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the rows, one after the other.

    Args:
        path: A ``steps.jsonl``.

    Yields:
        One dict per row, non-finite numbers as floats. A torn last line is passed over.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line before the last one is not a JSON object with a ``global_step``.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line, path, number)
            if row is not None:
                yield row


def last_step(path: Path) -> int | None:
    """The ``global_step`` of the last whole row, or None without a file or rows."""
    if not Path(path).exists():
        return None
    step = None
    for row in read_step_rows(path):
        step = int(row["global_step"])
    return step


def _parse(line: str, path: Path, number: int) -> dict[str, Any] | None:
    """A line as a row; None where the line has no end, which is how a kill leaves it."""
    if not line.endswith("\n"):
        return None
    try:
        row = decode(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("global_step"), int):
        raise ValueError(
            f"{path}, line {number} is {line.strip()[:80]!r}; expected a JSON object with an integer global_step; "
            "mend or remove that line, or resume into another run folder"
        )
    return row


def _drop_after(path: Path, keep_through: int | None) -> None:
    """Rewrites the file without later rows and without a torn end, and leaves it alone where there are none."""
    kept: list[str] = []
    changed = False
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line, path, number)
            if row is None or (keep_through is not None and row["global_step"] > keep_through):
                changed = True
            else:
                kept.append(line)
    if changed:
        replace_file(path, kept)
