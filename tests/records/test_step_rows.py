"""Step rows survive kills and resumes without a gap or a double."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lightning_fuse.records import StepRows, last_step, read_step_rows


def write(path: Path, steps: range, **extra) -> None:
    rows = StepRows(path)
    for step in steps:
        rows.append({"global_step": step, **extra})
    rows.close()


def steps_in(path: Path) -> list[int]:
    return [row["global_step"] for row in read_step_rows(path)]


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    row = {"global_step": 1, "applied": False, "reason": "nonfinite", "grad_norm": math.inf, "loss_scale_before": None}
    rows = StepRows(path)
    rows.append(row)
    assert list(read_step_rows(path)) == [row]  # on disk before the file is closed
    assert json.loads(path.read_text())["grad_norm"] == "Infinity"


@pytest.mark.parametrize("torn", ['{"global_step": 4, "appl', '{"global_step": 4}', "{"])
def test_a_torn_last_line_is_passed_over_and_then_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 4))
    with path.open("a") as file:
        file.write(torn)  # no line end: how a kill leaves it
    assert steps_in(path) == [1, 2, 3]
    write(path, range(4, 6))
    assert steps_in(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("keep", "left"), [(0, []), (2, [1, 2]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])]
)
def test_a_resume_drops_later_rows(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 5))
    StepRows(path, keep_through=keep).close()
    assert steps_in(path) == left
    assert last_step(path) == (left[-1] if left else None)


def test_several_optimizers_may_share_a_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for optimizer in (0, 1):
        write(path, range(3, 4), optimizer=optimizer)
    StepRows(path, keep_through=3).close()
    assert steps_in(path) == [3, 3]


def test_nothing_is_rewritten_without_need(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 5))
    inode = path.stat().st_ino
    StepRows(path, keep_through=4).close()
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("line", ["not json", "[1]", '{"update": 3}'])
def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"global_step": 1}}\n{line}\n{{"global_step": 3}}\n')
    with pytest.raises(ValueError, match=r"line 2 is .* expected a JSON object with an integer global_step; mend"):
        list(read_step_rows(path))
    with pytest.raises(ValueError, match=r"a line near the end is .* expected a JSON object"):
        StepRows(path, keep_through=1)
    assert len(path.read_text().splitlines()) == 3


def test_a_row_needs_its_step_and_an_open_file(tmp_path: Path) -> None:
    rows = StepRows(tmp_path / "steps.jsonl")
    with pytest.raises(KeyError):
        rows.append({"update": 1})
    rows.close()
    rows.close()
    with pytest.raises(RuntimeError, match="is closed; open it again"):
        rows.append({"global_step": 1})
    assert last_step(tmp_path / "nothing") is None


@pytest.mark.parametrize("width", [1, 70_000, 200_000])
def test_the_last_row_is_found_from_the_end(tmp_path: Path, width: int) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"not JSON, and never read\n")
    with path.open("a") as file:
        file.writelines(json.dumps({"global_step": step, "note": "x" * width}) + "\n" for step in range(1, 5))
        file.write('{"global_step": 5')
    assert last_step(path) == 4
    StepRows(path, keep_through=2).close()
    assert last_step(path) == 2
    assert len(path.read_bytes().splitlines()) == 3
