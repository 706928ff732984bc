"""LastCheckpoint: every so many steps and at the end, once per step, always under one name."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_fuse.callbacks.last_checkpoint import LastCheckpoint
from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(LastCheckpoint):
    """Notes the step of every save."""

    def save(self, trainer: L.Trainer) -> None:
        before = self._saved_at
        super().save(trainer)
        if self._saved_at != before:
            self.steps = [*getattr(self, "steps", []), self._saved_at]


def fit(callback: LastCheckpoint, ckpt_path: Path | None = None, **settings: object) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 4)), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        max_epochs=-1, **{"plugins": [AtomicCheckpointIO()], **settings},
    )  # fmt: skip
    trainer.fit(Module(), data, ckpt_path=ckpt_path)


def test_it_saves_on_time_and_at_the_end(tmp_path: Path) -> None:
    watch = Watch(tmp_path, every=4)
    fit(watch, max_steps=10)
    assert watch.steps == [4, 8, 10]
    assert steps_in(tmp_path) == {"last.ckpt": 10, "last-1.ckpt": 8}


@pytest.mark.parametrize("keep", [1, 3, 9])
def test_as_many_stay_as_are_asked_for(tmp_path: Path, keep: int) -> None:
    fit(LastCheckpoint(tmp_path, every=2, keep=keep), max_steps=10)
    names = ["last.ckpt", *(f"last-{age}.ckpt" for age in range(1, keep))]
    assert steps_in(tmp_path) == dict(zip(names, (10, 8, 6, 4, 2), strict=False))


def steps_in(folder: Path) -> dict[str, int]:
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in folder.iterdir()}


class Killed(Exception):
    """Stands for a kill: nothing is tidied up."""


@pytest.mark.parametrize("call", range(1, 4))
def test_killed_between_any_two_renames_two_checkpoints_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    fit(LastCheckpoint(tmp_path, every=2, keep=3), max_steps=6)
    replace, calls = Path.replace, iter(range(1, 100))

    def cut(self: Path, target: Path) -> Path:
        inside_the_writer = self.suffix == ".part" and "last-" not in self.name
        if not inside_the_writer and next(calls) == call:
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(Killed):
        fit(LastCheckpoint(tmp_path, every=2, keep=3), tmp_path / "last.ckpt", max_steps=8)
    monkeypatch.undo()
    whole = {path.name: torch.load(path)["global_step"] for path in tmp_path.glob("*.ckpt")}
    assert {8, 6} <= set(whole.values())
    assert "last.ckpt" in whole


def test_a_window_of_batches_is_saved_once(tmp_path: Path) -> None:
    watch = Watch(tmp_path, every=2)
    fit(watch, max_steps=4, accumulate_grad_batches=3)
    assert watch.steps == [2, 4]


def test_a_resumed_run_does_not_save_what_it_has_just_read(tmp_path: Path) -> None:
    fit(Watch(tmp_path, every=4), max_steps=4)
    watch = Watch(tmp_path, every=4)
    fit(watch, tmp_path / "last.ckpt", max_steps=8)
    assert watch.steps == [8]


def test_every_and_keep_must_be_one_or_more(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"callbacks\.last\.every=0"):
        LastCheckpoint(tmp_path, every=0)
    with pytest.raises(ValueError, match=r"keep_last=0: at least 1 checkpoint stays; callbacks.last=null writes none"):
        LastCheckpoint(tmp_path, every=1, keep=0)
