"""The metrics table grows columns, keeps one row per step and resumes without doubling."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from lightning_fuse.records import MetricsTable, read_metrics


def record(table: MetricsTable, step: int, **metrics) -> None:
    table.record(step=step, update=step, epoch=0, train_seconds=step / 10, metrics=metrics)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_columns_grow_in_order_of_appearance(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    assert lines(path) == ["step,update,epoch,train_seconds"]
    record(table, 1, loss=2.0)
    record(table, 2, loss=1.5, val=1.75)
    record(table, 3, loss=1.0)
    assert lines(path) == [
        "step,update,epoch,train_seconds,loss,val",
        "1,1,0,0.1,2.0,",
        "2,2,0,0.2,1.5,1.75",
        "3,3,0,0.3,1.0,",
    ]
    assert read_metrics(path)[0] == {"step": 1, "update": 1, "epoch": 0, "train_seconds": 0.1, "loss": 2.0}


def test_one_row_per_step(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.csv")
    record(table, 5, loss=2.0)
    record(table, 5, val=3.0)  # a new column
    record(table, 5, loss=2.5)  # no new column
    record(table, 6, loss=1.0)
    rows = read_metrics(table.path)
    assert [(row["step"], row.get("loss"), row.get("val")) for row in rows] == [(5, 2.5, 3.0), (6, 1.0, None)]


@pytest.mark.parametrize("keep", [0, 1, 2, 3, None])
def test_a_resume_drops_later_rows_and_reopens_the_last(tmp_path: Path, keep: int | None) -> None:
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    for step in (1, 2, 3):
        record(table, step, loss=float(step))
    with path.open("a") as file:
        file.write("4,4,0,0.")  # torn by a kill
    again = MetricsTable(path, keep_through=keep)
    last = 3 if keep is None else keep
    assert [row["step"] for row in read_metrics(path)] == list(range(1, last + 1))
    if last:
        record(again, last, val=9.0)
    record(again, 4, loss=4.0)
    assert [row["step"] for row in read_metrics(path)] == [*range(1, last + 1), 4]
    assert [row.get("val") for row in read_metrics(path)] == [*[None] * (last - 1), *([9.0] if last else []), None]


def test_odd_names_and_numbers(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.csv")
    record(table, 1, **{'a,"b"': math.nan, "ü": -math.inf, "kind": "text, more"})
    record(table, 2, **{"ü": 1e-300})
    record(table, 2, **{"ü": 2e-300})
    first, second = read_metrics(table.path)
    assert math.isnan(first['a,"b"'])
    assert (first["ü"], first["kind"], second["ü"]) == (-math.inf, "text, more", 2e-300)
    with table.path.open(newline="", encoding="utf-8") as file:
        assert {len(row) for row in csv.reader(file)} == {7}


def test_bad_input(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.csv")
    record(table, 3, loss=1.0)
    with pytest.raises(ValueError, match=r"step 2 lies before the last row, step 3"):
        record(table, 2, loss=1.0)
    with pytest.raises(ValueError, match=r"metric 'epoch' has the name of a key column .*; rename it"):
        record(table, 4, epoch=1.0)
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("time,loss\n1,2\n")
    with pytest.raises(ValueError, match="is not a metrics table"):
        MetricsTable(foreign)
    assert foreign.read_text() == "time,loss\n1,2\n"
    broken = tmp_path / "broken.csv"
    broken.write_text("step,update,epoch,train_seconds\n1,2\n3,3,0,1\n")
    with pytest.raises(ValueError, match="row 2 has 2 cells, expected 4"):
        read_metrics(broken)
