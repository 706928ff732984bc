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
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning_fuse.records.strict_json import decode, encode

BLOCK = 1 << 16  # bytes that are read at once from the end of a file


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
    with Path(path).open("rb") as file:
        for line in _lines_from_the_end(file):
            row = _parse(line.decode(errors="replace"), path, -1)
            if row is not None:
                return int(row["global_step"])
    return None


def _lines_from_the_end(file: BinaryIO) -> Iterator[bytes]:
    """The last lines of a file, the last one first; the one without an end, which a kill leaves, included."""
    place, tail = file.seek(0, io.SEEK_END), b""
    while place:
        size = min(BLOCK, place)
        place -= size
        file.seek(place)
        first, *whole = (file.read(size) + tail).splitlines(keepends=True)
        yield from reversed(whole)
        tail = first  # may have begun in the block before
    if tail:
        yield tail


def _parse(line: str, path: Path, number: int) -> dict[str, Any] | None:
    """A line as a row; None where the line has no end, which is how a kill leaves it. -1 is no known number."""
    if not line.endswith("\n"):
        return None
    try:
        row = decode(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("global_step"), int):
        where = "a line near the end" if number < 0 else f"line {number}"
        raise ValueError(
            f"{path}, {where} is {line.strip()[:80]!r}; expected a JSON object with an integer global_step; "
            "mend or remove that line, or resume into another run folder"
        )
    return row


def _drop_after(path: Path, keep_through: int | None) -> None:
    """Cuts later rows and a torn end off, and leaves the file alone where there are none."""
    with path.open("rb") as file:
        end = file.seek(0, io.SEEK_END)
        keep = end
        for line in _lines_from_the_end(file):
            row = _parse(line.decode(errors="replace"), path, -1)
            if row is not None and (keep_through is None or row["global_step"] <= keep_through):
                break
            keep -= len(line)
    # Rows stand in order of their steps, so what goes is the end of the file, and cutting it leaves no half.
    if keep < end:
        os.truncate(path, keep)
