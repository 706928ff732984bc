"""RunRecorder writes a run folder that is right at the end, after a kill, an error and a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fuse.callbacks import ExactResume, Fuse, RunRecorder, StepMonitor, TimeToTarget
from lightning_fuse.callbacks.run_result import show_table
from lightning_fuse.records import read_manifest, read_metrics, read_step_rows, read_summary
from tests.cases import Four, batches, half, one_bad, quiet_trainer

CONFIG = {"seed": 7, "optimizer": {"name": "adamw_torch", "lr": 0.01}}


class Task(Four):
    """Logs in every hook that recipes log in."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().training_step(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.log("train/tokens_per_s", 100.0 + self.trainer.global_step)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val/loss", self.w.mean())


def fit(
    folder: Path, *others: Any, module: Any = None, loader: Any = None, resume: Path | None = None, **settings: Any
):
    recorder = RunRecorder(folder, CONFIG, data_hash="sha256:x")
    callbacks = [Fuse(), StepMonitor(), *others, recorder]
    settings = {"max_epochs": 2, "log_every_n_steps": 2, "enable_checkpointing": True, **settings}
    if not any(isinstance(other, ModelCheckpoint) for other in others):
        settings["enable_checkpointing"] = False
    trainer = quiet_trainer(*callbacks, default_root_dir=folder, **settings)
    trainer.fit(
        module or Task(),
        loader or one_bad(4),
        batches(1),
        ckpt_path=resume,
        weights_only=None if resume is None else True,
    )
    return trainer, recorder


def keeps(folder: Path, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", filename="{step}", save_top_k=-1, **settings)


def steps_of(folder: Path) -> list[int]:
    return [row["global_step"] for row in read_step_rows(folder / "steps.jsonl")]


def test_a_run_leaves_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    best = ModelCheckpoint(folder / "checkpoints", filename="best", monitor="val/loss")
    loader = one_bad(4, 1)
    fit(folder, TimeToTarget(target=0.975), best, loader=loader, precision=half(1024), gradient_clip_val=0.5)
    manifest = read_manifest(folder / "manifest.json")
    assert (manifest["config"], manifest["seed"], manifest["data_hash"]) == (CONFIG, 7, "sha256:x")
    assert manifest["resumed_from"] == []

    rows = list(read_step_rows(folder / "steps.jsonl"))
    assert [row["global_step"] for row in rows] == list(range(1, 9))
    assert [row["reason"] for row in rows] == ["ok", "nonfinite", "ok", "ok"] * 2
    assert [row["loss_scale_after"] for row in rows] == [1024, 512, 512, 512, 512, 256, 256, 256]
    assert rows[0]["clip_coef"] == pytest.approx(0.25)
    assert all(row["optimizer_ms"] > 0 for row in rows)
    assert [row["train_seconds"] for row in rows] == sorted(row["train_seconds"] for row in rows)

    metrics = read_metrics(folder / "metrics.csv")
    assert [(row["step"], row["update"], row["epoch"]) for row in metrics] == [
        (2, 1, 0),
        (4, 3, 0),
        (6, 4, 1),
        (8, 6, 1),
    ]
    assert [row["train/tokens_per_s"] for row in metrics] == [102, 104, 106, 108]
    assert [row.get("val/loss") for row in metrics][1::2] == pytest.approx([0.97, 0.94], abs=1e-3)
    assert "train/loss_epoch" in metrics[1]
    assert not {"fuse/skips", "fuse/loss_scale"} & metrics[0].keys()

    summary = read_summary(folder / "summary.json")
    assert (summary.status, summary.reason) == ("finished", None)
    assert (summary.global_step, summary.updates, summary.skips, summary.epochs) == (8, 6, {"nonfinite": 2}, 2)
    assert summary.loss_scale == 256
    assert summary.tokens_per_s == 105
    assert summary.optimizer_ms > 0
    measured = sum(row["optimizer_ms"] for row in rows) / 1e3
    assert summary.optimizer_share == pytest.approx(measured / summary.train_seconds, rel=1e-6)
    assert 0 < summary.optimizer_share < 1
    assert summary.target["updates"] == 3
    assert summary.best["step"] == 8
    assert Path(summary.best["checkpoint"]).name.startswith("best")
    assert summary.peak_memory_bytes > 2**24
    assert Path(summary.last_checkpoint).is_file()
    [optimizer] = summary.optimizers
    assert (optimizer.name, optimizer.master, optimizer.parameters) == ("adamw_fused", "none", 4)
    assert optimizer.formats == {"fp32": 4}
    assert optimizer.kernel
    assert optimizer.total_bytes >= 32
    shown = capsys.readouterr().out
    for word in ("updates", "6 of 8 steps, 2 skipped (nonfinite 2)", "adamw_fused", "master weights", "run folder"):
        assert word in shown


def test_other_optimizers_and_no_contract(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recorder = RunRecorder(folder, CONFIG, table=False)
    quiet_trainer(recorder, max_epochs=1, log_every_n_steps=1).fit(Task(), one_bad(3), batches(1))
    summary = read_summary(folder / "summary.json")
    assert (summary.global_step, summary.updates, summary.loss_scale) == (3, 3, None)
    [optimizer] = summary.optimizers
    assert (optimizer.name, optimizer.kernel, optimizer.master) == ("adamw_torch", None, None)
    assert optimizer.state_bytes == {"step": 4, "exp_avg": 16, "exp_avg_sq": 16}
    assert optimizer.describe() == "adamw_torch"


class Falling(Task):
    """Fails, or is interrupted, at the sixth step."""

    error: type[BaseException] = RuntimeError

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.trainer.global_step == 5:
            raise self.error("told to")
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("error", "raised", "status", "table"),
    [(RuntimeError, RuntimeError, "failed", False), (KeyboardInterrupt, SystemExit, "interrupted", True)],
)
def test_errors_and_interruptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: type, raised: type, status: str, table: bool
) -> None:
    folder = tmp_path / "run"
    module = Falling()
    module.error = error
    with pytest.raises(raised):
        fit(folder, module=module)
    summary = read_summary(folder / "summary.json")
    assert (summary.status, summary.reason) == (status, f"{error.__name__}: told to")
    assert summary.updates == 5
    assert steps_of(folder) == [1, 2, 3, 4, 5]
    assert ("run folder" in capsys.readouterr().out) == table


def test_a_killed_run_says_running_and_its_resume_doubles_nothing(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shared = {"max_epochs": 3, "val_check_interval": 2}
    fit(whole, TimeToTarget(target=0.955), ExactResume(), keeps(whole, every_n_train_steps=3), **shared)

    class Dying(Task):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.trainer.global_step == 8:
                shutil.copytree(killed, tmp_path / "snapshot")  # what a SIGKILL here would leave

    fit(
        killed,
        TimeToTarget(target=0.955),
        ExactResume(),
        keeps(killed, every_n_train_steps=3),
        module=Dying(),
        **shared,
    )
    shutil.rmtree(killed)
    shutil.move(tmp_path / "snapshot", killed)
    assert read_summary(killed / "summary.json").status == "running"
    with (killed / "steps.jsonl").open("a") as file:
        file.write('{"global_step": 9, "upd')  # torn by the kill
    assert steps_of(killed) == list(range(1, 9))

    path = killed / "checkpoints" / "step=6.ckpt"
    fit(killed, TimeToTarget(target=0.955), ExactResume(), keeps(killed, every_n_train_steps=3), resume=path, **shared)
    assert steps_of(killed) == steps_of(whole) == list(range(1, 13))
    changing = {"train_seconds"}
    timeless = [
        [{k: v for k, v in row.items() if k not in changing} for row in read_metrics(folder / "metrics.csv")]
        for folder in (whole, killed)
    ]
    assert timeless[0] == timeless[1]
    one, two = (read_summary(folder / "summary.json") for folder in (whole, killed))
    assert (two.status, two.updates, two.skips) == ("finished", one.updates, one.skips)
    assert two.target["updates"] == one.target["updates"]
    assert two.best["value"] == one.best["value"]
    [resumed] = read_manifest(killed / "manifest.json")["resumed_from"]
    assert (resumed["global_step"], resumed["config_changes"]) == (6, {})
    assert resumed["checkpoint"].endswith("step=6.ckpt")


def test_a_resume_into_a_new_folder_starts_its_own_files(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    fit(old, keeps(old, every_n_train_steps=4), max_epochs=1)
    fit(new, resume=old / "checkpoints" / "step=4.ckpt", max_epochs=2)
    assert steps_of(new) == [5, 6, 7, 8]
    assert read_manifest(new / "manifest.json")["resumed_from"][0]["global_step"] == 4
    assert read_summary(new / "summary.json").updates == 8
    assert steps_of(old) == [1, 2, 3, 4]


def test_a_folder_of_another_run_is_refused_and_untouched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(folder, max_epochs=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(
        ValueError, match=r"already holds a run \(manifest.json\); resume it from its checkpoint, or name"
    ):
        fit(folder, max_epochs=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_second_fit_goes_on_in_the_same_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer, _ = fit(folder, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, one_bad(4), batches(1))
    assert steps_of(folder) == list(range(1, 9))
    assert read_summary(folder / "summary.json").updates == 8


def test_resuming_a_finished_run_leaves_its_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(folder, keeps(folder, every_n_train_steps=4), max_epochs=1)
    before = (folder / "summary.json").read_bytes()
    last = folder / "checkpoints" / "step=4.ckpt"
    fit(folder, keeps(folder, every_n_train_steps=4), resume=last, max_steps=4)
    assert (folder / "summary.json").read_bytes() == before


def test_everything_is_valid_json(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(folder, loader=one_bad(4, 0, 2))

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    texts = [(folder / name).read_text() for name in ("manifest.json", "summary.json")]
    for text in [*texts, *(folder / "steps.jsonl").read_text().splitlines()]:
        json.loads(text, parse_constant=refuse)


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr("lightning.pytorch.trainer.trainer.Trainer.is_global_zero", False)
    fit(folder)
    assert not folder.exists()


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown mode 'least'; known: max, min"):
        RunRecorder(tmp_path, mode="least")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        fit(file)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_path_of_the_table_is_cut(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    path = "runs/2026-11-30/09-19-16_byte_lm_adamw_fused_int8/checkpoints/best.ckpt"
    show_table("run", [("resume goes on from", path), ("to target", "val/loss <= 2 after 38.7 s of training " * 3)])
    lines = capsys.readouterr().out.splitlines()
    assert sum(path in line for line in lines) == 1
    assert max(len(line) for line in lines if "│" in line) <= width
