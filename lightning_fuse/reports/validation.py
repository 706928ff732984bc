"""What a run folder holds is data that anybody may have written: it is read by type, within bounds, and never trusted.

Only regular files are opened (a pipe or a device would hang), only up to a size, and an entry of another type than
expected becomes a note and counts as missing.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MOST_JSON = 16 << 20  # bytes of one JSON file
LONGEST_TEXT = 300  # characters of one entry
LARGEST = 1e300
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading and never waits for a writer.

    Args:
        path: The file, or a link to one.

    Returns:
        The open file.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is a pipe, a device or a folder.
        OSError: It cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no regular file")
    return os.fdopen(handle, "rb")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.

    Returns:
        The object.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is no regular file, too large, or no JSON object.
    """
    with open_regular(path) as file:
        data = file.read(MOST_JSON + 1)
    if len(data) > MOST_JSON:
        raise ValueError(f"it has more than {MOST_JSON >> 20} MiB")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {shorten(value)}, expected a JSON object")
    return value


def number(value: Any) -> float | None:
    """A value as a number, the non-finite ones included; None where it is none, or is too large to reckon with."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return None if abs(value) > LARGEST else float(value)


def group_word(entry: Any, key: str) -> str:
    """The word of a configuration group: the entry itself, or one key of it; "unknown" where there is none."""
    value = entry.get(key) if isinstance(entry, Mapping) else entry
    return "unknown" if value is None or isinstance(value, Mapping | list) else str(value)[:80]


def shorten(value: Any, most: int = 60) -> str:
    """A value in a message, on one line and never long."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= most else f"{text[:most]}…"


class Entries:
    """A JSON object, read by type; what has another type is noted and counts as missing.

    Args:
        values: The object.
        where: What notes call it: the file's name.
        notes: Where notes go.
    """

    def __init__(self, values: Mapping[str, Any], where: str, notes: list[str]) -> None:
        self.values, self.where, self.notes = values, where, notes

    def _missing(self, key: str, expected: str) -> None:
        value = self.values.get(key)
        if value is not None:
            self.notes.append(f"{self.where}: {key} is {shorten(value)}, expected {expected}; it is left out")

    def number(self, key: str) -> float | None:
        """A finite number, or None."""
        value = number(self.values.get(key))
        if value is None or not math.isfinite(value):
            self._missing(key, "a number")
            return None
        return value

    def whole(self, key: str) -> int | None:
        """A whole number, or None."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and number(value) is not None:
            return value
        self._missing(key, "a whole number")
        return None

    def text(self, key: str) -> str | None:
        """A text, cut where it is very long, or None."""
        value = self.values.get(key)
        if isinstance(value, str):
            return value[:LONGEST_TEXT]
        self._missing(key, "a text")
        return None

    def table(self, key: str) -> Entries:
        """An object inside; empty where there is none."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            self._missing(key, "a JSON object")
            value = {}
        return Entries(value, f"{self.where}: {key}", self.notes)

    def tables(self, key: str) -> list[Entries]:
        """The objects of a list; what else it holds is left out."""
        value = self.values.get(key)
        if not isinstance(value, list):
            self._missing(key, "a list")
            return []
        return [Entries(item, f"{self.where}: {key}", self.notes) for item in value if isinstance(item, Mapping)]
