"""The table of docs/state_formats.md in its short form, through the command that a person runs."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.rival_codecs import LinearInt8, mapped, power_nearest
from tests.tolerances import FORMAT_ERROR_FALLEN, FORMAT_ERROR_LINEAR, FORMAT_ERROR_REAL


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root, folder = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("table")
    command = [sys.executable, str(root / "scripts" / "format_error.py"), "--short", "--csv", str(folder / "out.csv")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "closed loop" in done.stdout
    with (folder / "out.csv").open(encoding="utf-8") as file:
        return {row.pop("scheme"): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}


def row(rows: dict[str, dict[str, float]], word: str) -> dict[str, float]:
    return next(values for name, values in rows.items() if name.split()[0] == word)


@pytest.mark.slow
def test_int8_is_close_to_float32_moments(rows: dict[str, dict[str, float]]) -> None:
    int8 = row(rows, "int8")
    assert int8["gpt"] < FORMAT_ERROR_REAL
    assert int8["fallen_0.5"] < FORMAT_ERROR_FALLEN
    assert int8["fallen_1"] < FORMAT_ERROR_FALLEN
    assert int8["bytes_per_parameter"] == pytest.approx(2.0625)


@pytest.mark.slow
def test_nearest_rounding_of_the_same_codes_sticks(rows: dict[str, dict[str, float]]) -> None:
    nearest = row(rows, "roots")
    assert nearest["fallen_0.5"] > 2 * FORMAT_ERROR_FALLEN
    assert nearest["fallen_1"] > 2 * FORMAT_ERROR_FALLEN


@pytest.mark.slow
def test_linear_int8_explodes(rows: dict[str, dict[str, float]]) -> None:
    linear = row(rows, "linear")
    assert all(linear[column] > FORMAT_ERROR_LINEAR for column in ("gpt", "stationary_0.5", "fallen_0.5", "fallen_1"))
    assert linear["worst_update"] > 1000


def test_the_rivals_read_back_what_they_can_represent() -> None:
    levels = torch.linspace(0, 1, 256)
    on_the_map = levels[torch.randint(0, 256, (4, 256))]
    on_the_map[:, 0] = 1.0
    assert torch.equal(mapped(levels)(on_the_map, 1), on_the_map)
    roots = (torch.arange(0, 128).float() / 127) ** 2
    torch.testing.assert_close(power_nearest(2, 127.0)(roots, 1), roots)
    line = torch.arange(-63, 65).float()
    torch.testing.assert_close(LinearInt8(True)(line * 127 / 64, 1), torch.round(line * 127 / 64) * 1.0)
