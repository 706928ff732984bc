"""One run with three loggers: the same names with the same numbers in each file, read back from disk."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fuse import Fuse
from lightning_fuse.callbacks import StepMonitor
from lightning_fuse.reports.wandb_log import find_logs, read_wandb
from tests.cases import NONE, Four, batches, half, train

Curves = dict[str, dict[int, float]]  # name -> x -> number
NAMES = {
    *("step/update", "step/global_step", "step/train_seconds", "step/skipped", "step/skipped/nonfinite"),
    *("step/skipped/no_grad", "step/loss_scale", "step/grad_norm", "step/grad_norm_clipped", "step/clip_coef"),
    *("step/lr/0", "step/optimizer_ms", "step/state_bytes"),
}


def of_csv(folder: Path) -> Curves:
    (path,) = folder.rglob("metrics.csv")
    found: Curves = {}
    for row in csv.DictReader(path.open()):
        for name, text in row.items():
            if name.startswith("step/") and text:
                found.setdefault(name, {})[int(row["step"])] = float(text)
    return found


def of_tensorboard(folder: Path) -> Curves:
    events = EventAccumulator(str(folder / "version_0")).Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("step/")]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def of_wandb(folder: Path) -> Curves:
    (log,) = find_logs(folder)
    until = time.monotonic() + 30  # the end is written by a process of W&B's own
    while (run := read_wandb(log)).exit_code is None and time.monotonic() < until:
        time.sleep(0.1)
    found: Curves = {}
    for row in run.history:
        for name, value in row.items():
            if name.startswith("step/"):
                found.setdefault(name, {})[int(row["trainer/global_step"])] = float(value)
    return found


def test_every_logger_gets_the_same_names_and_numbers(tmp_path: Path) -> None:
    loggers = [
        CSVLogger(tmp_path / "csv"),
        TensorBoardLogger(tmp_path, name="tb", version=0),
        WandbLogger(save_dir=tmp_path / "wandb", mode="offline"),
    ]
    (tmp_path / "wandb").mkdir()
    loader = batches(1, math.inf, NONE, 1, 1, 1)
    settings = {"precision": half(1024.0), "gradient_clip_val": 1.0, "logger": loggers, "log_every_n_steps": 1}
    try:
        train(Four(), loader, Fuse(), StepMonitor(), **settings)
    finally:
        wandb.finish()
    curves = [of_csv(tmp_path / "csv"), of_tensorboard(tmp_path / "tb"), of_wandb(tmp_path / "wandb")]
    for found in curves:
        assert set(found) == NAMES
        for name, points in curves[0].items():
            assert found[name].keys() == points.keys(), name
            assert found[name] == pytest.approx(points, rel=1e-6, nan_ok=True), name  # TensorBoard keeps float32
    assert curves[0]["step/update"] == {0: 1, 1: 1, 2: 1, 3: 2, 4: 3, 5: 4}
    assert curves[0]["step/loss_scale"] == {0: 1024, **dict.fromkeys(range(1, 6), 512)}
    assert curves[0]["step/skipped"] == {0: 0, 1: 1, **dict.fromkeys(range(2, 6), 2)}
    assert 2 not in curves[0]["step/grad_norm"]
