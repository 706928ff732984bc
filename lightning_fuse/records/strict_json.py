"""Valid JSON for everything a run writes down.

JSON has no NaN and no infinity, and a reader in another language stops at Python's bare ``NaN``. So they are written as
the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, everywhere, and come back as floats when read here. ``null``
means "there is none" (no loss scale, no gradient), which is not the same thing.

What JSON cannot say is written as the nearest thing it can: tuples and sets as lists, paths and enums as strings, a
zero-dimensional tensor or NumPy scalar as its number, any other object as its ``str``.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any, *, indent: int | None = None) -> str:
    """Writes a value as JSON.

    Args:
        value: Anything; see the module for what is done to kinds that JSON does not have.
        indent: Spaces per level, or None for one line.

    Returns:
        Text that any JSON reader accepts.
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def decode(text: str) -> Any:
    """Reads JSON that ``encode`` wrote.

    Args:
        text: The JSON.

    Returns:
        Dicts, lists, strings, numbers, booleans and None; the three non-finite strings are floats again.

    Raises:
        ValueError: The text is not JSON (``json.JSONDecodeError``).
    """
    return _with_floats(json.loads(text))


def plain(value: Any) -> Any:
    """The JSON kinds nearest to a value: dict, list, str, int, float, bool or None, without non-finite floats."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _name_of(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return _scalar(value)


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _scalar(value: Any) -> Any:
    """A tensor or array scalar as its number (found by its ``item``, as this floor knows neither), else the text."""
    try:
        number = value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return str(value)
    return plain(number) if isinstance(number, (bool, int, float, str)) else str(value)


def _with_floats(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    return value
