"""A run that is killed 50 times at random moments, in saves too, ends as one that was never touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fuse.records import read_metrics, read_step_rows, read_summary
from tests.composing import ROOT
from tests.resuming import equal

KILLS = 50
RESULT = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "FusePrecision")
TIMES = ("ms", "sec", "per_s")  # of what the clock decides


def timeless(rows: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not any(time in key for time in TIMES)} for row in rows]


@pytest.mark.slow
def test_fifty_kills_leave_no_trace(tmp_path: Path, run_python: Any) -> None:
    done = run_python(str(ROOT / "tests" / "soak" / "lives.py"), str(tmp_path), str(KILLS), "7", timeout=290)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    print(report)
    assert report["codes"] == [0, 0], (tmp_path / "killed.log").read_text()[-2000:]
    assert report["during_saves"] >= KILLS // 10
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first, second = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, killed))
    assert first["global_step"] == second["global_step"] == report["rows"]
    for key in RESULT:
        assert equal(first[key], second[key]), key
    rows = [timeless(read_step_rows(run / "steps.jsonl")) for run in (whole, killed)]
    assert [row["global_step"] for row in rows[1]] == list(range(1, report["rows"] + 1))  # none lost, none doubled
    assert rows[0] == rows[1]
    metrics = [timeless(read_metrics(run / "metrics.csv")) for run in (whole, killed)]
    assert metrics[0] == metrics[1]
    resumes = json.loads((killed / "manifest.json").read_text())["resumed_from"]
    assert len(resumes) > KILLS // 3  # many lives began where another one was killed
    # Time to target: at the same update, and no clock has counted more than the lives.
    one, two = (read_summary(run / "summary.json") for run in (whole, killed))
    assert one.status == two.status == "finished"
    assert (one.updates, one.skips, one.best["value"]) == (two.updates, two.skips, two.best["value"])
    best = [torch.load(run / "checkpoints" / "best.ckpt", weights_only=True) for run in (whole, killed)]
    assert equal(best[0]["state_dict"], best[1]["state_dict"])
    assert one.target["reached"]
    assert two.target["updates"] == one.target["updates"]
    assert 0 < two.target["train_seconds"] <= two.target["wall_seconds"] <= two.wall_seconds <= report["alive"]
