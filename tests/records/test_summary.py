"""The summary comes back from disk and reads well."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lightning_fuse.records import OptimizerSummary, RunSummary, read_summary, summary_table, write_summary

FULL = RunSummary(
    status="finished",
    global_step=1_002,
    updates=1_000,
    skips={"nonfinite": 2},
    epochs=3,
    loss_scale=512.0,
    optimizers=[
        OptimizerSummary(
            name="adamw_fused",
            kernel="reference",
            formats={"int8": 980_000, "fp32": 20_000},
            master="none",
            parameters=1_000_000,
            state_bytes={"exp_avg.codes": 1_000_000, "exp_avg.scale": 31_250},
        )
    ],
    peak_memory_bytes=3 * 2**29,
    tokens_per_s=18_432.4,
    optimizer_ms=0.512,
    optimizer_share=0.0128,
    train_seconds=40.0,
    validation_seconds=2.0,
    wall_seconds=43.0,
    target={
        "metric": "val/loss", "mode": "min", "target": 2.0,
        "reached": True, "train_seconds": 37.0, "wall_seconds": 39.5, "updates": 900,
    },
    best={"metric": "val/loss", "mode": "min", "value": 1.9, "step": 1_000, "checkpoint": "runs/1/best.ckpt"},
    last_checkpoint="runs/1/last.ckpt",
    run_folder="runs/1",
)  # fmt: skip


def test_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, FULL)
    assert read_summary(path) == FULL
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "from_a_later_version": 1}))
    assert read_summary(path) == FULL


def test_the_table_says_everything() -> None:
    table = dict(summary_table(FULL))
    assert table["updates"] == "1,000 of 1,002 steps, 2 skipped (nonfinite 2)"
    assert table["loss scale"] == "512"
    assert table["optimizer"] == "adamw_fused, int8 state (2.0 % in fp32), reference kernel"
    assert table["state bytes"] == "1.03 per parameter, 1007.1 KiB for 1,000,000 parameters"
    assert table["master weights"] == "none"
    assert table["peak memory"] == "1.5 GiB of the process"
    assert table["tokens/s"] == "18,432"
    assert table["ms per optimizer step"] == "0.51 (median), 1.3 % of the training time"
    assert table["to target"] == "val/loss <= 2 after 37.0 s of training (39.5 s in all), 900 updates"
    assert table["best"] == "val/loss 1.9000 at step 1,000"
    assert table["best checkpoint"] == "runs/1/best.ckpt"
    assert table["resume goes on from"] == "runs/1/last.ckpt"
    assert table["run folder"] == "runs/1"


def test_what_was_not_measured_is_left_out() -> None:
    table = dict(summary_table(RunSummary(status="failed", reason="ValueError: lr", run_folder="r")))
    assert table == {
        "status": "failed: ValueError: lr",
        "updates": "0 of 0 steps, none skipped",
        "loss scale": "none (not needed)",
        "run folder": "r",
    }


def test_a_target_that_was_not_reached() -> None:
    target = {"metric": "val/acc", "mode": "max", "target": 0.97, "reached": False}
    summary = RunSummary(status="interrupted", target=target, loss_scale=math.inf)
    assert dict(summary_table(summary))["to target"] == "val/acc >= 0.97 was not reached"


def test_several_targets_and_what_was_seen() -> None:
    reached = {"reached": True, "train_seconds": 3.0, "wall_seconds": 4.0, "updates": 50}
    near = {"metric": "val/loss", "mode": "min", "target": 2.5, **reached, "tokens": 51_200, "samples": 400}
    far = {"metric": "val/loss", "mode": "min", "target": 2.0, "reached": False}
    rows = summary_table(RunSummary(status="finished", target=far, targets=[near, far]))
    assert [text for label, text in rows if label == "to target"] == [
        "val/loss <= 2.5 after 3.0 s of training (4.0 s in all), 50 updates, 51,200 tokens",
        "val/loss <= 2 was not reached",
    ]
    near["tokens"] = None
    assert dict(summary_table(RunSummary(status="finished", target=near)))["to target"].endswith(", 400 samples")


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown status 'done'; known: running, finished, interrupted, failed"):
        RunSummary(status="done")
    path = tmp_path / "summary.json"
    for text in ("", "[]", "{}", '{"status": "done"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a run summary"):
            read_summary(path)


@pytest.mark.parametrize(
    ("status", "planned", "reason", "said"),
    [
        ("interrupted", 2_000, None, "interrupted at 27 of 2,000"),
        ("failed", 2_000, "ValueError: lr", "failed at 27 of 2,000: ValueError: lr"),
        ("running", None, None, "running"),
        ("finished", 27, None, "finished"),
    ],
)
def test_the_status_says_how_far_it_came(status: str, planned: int | None, reason: str | None, said: str) -> None:
    summary = RunSummary(status=status, global_step=27, planned_steps=planned, reason=reason)
    assert dict(summary_table(summary))["status"] == said
