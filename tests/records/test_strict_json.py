"""Whatever goes in, valid JSON comes out, and numbers come back."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_fuse.records.strict_json import decode, encode


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float


def strictly(text: str):
    """A reader that, unlike Python's default, takes no bare NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        ((1, 2), [1, 2]),
        ({3, 1}, [1, 3]),
        (Path("a") / "b", str(Path("a") / "b")),
        (Colour.RED, "red"),
        (Point(1, math.inf), {"x": 1, "y": "Infinity"}),
        (torch.tensor(3), 3),
        (torch.tensor(math.nan), "NaN"),
        ({1: {"deep": [math.nan]}}, {"1": {"deep": ["NaN"]}}),
        (True, True),
        (None, None),
    ],
)
def test_every_kind_has_one_valid_form(value, written) -> None:
    assert strictly(encode(value)) == written


def test_an_unknown_object_is_its_text() -> None:
    assert strictly(encode({"f": object})) == {"f": str(object)}
    assert "tensor" in strictly(encode(torch.ones(2)))


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1.5, 0, 2**70, 5e-324])
def test_numbers_come_back(number: float) -> None:
    back = decode(encode({"n": [number]}))["n"][0]
    assert back == number
    assert type(back) is type(number)


def test_nan_comes_back() -> None:
    assert math.isnan(decode(encode(math.nan)))
