"""LastCheckpoint: every so many steps and at the end, once per step, always under one name."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_fuse.callbacks.last_checkpoint import LastCheckpoint


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

    def _save(self, trainer: L.Trainer) -> None:
        before = self._saved_at
        super()._save(trainer)
        if self._saved_at != before:
            self.steps = [*getattr(self, "steps", []), self._saved_at]


def fit(callback: LastCheckpoint, ckpt_path: Path | None = None, **settings: object) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 4)), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        max_epochs=-1, **settings,
    )  # fmt: skip
    trainer.fit(Module(), data, ckpt_path=ckpt_path)


def test_it_saves_on_time_and_at_the_end(tmp_path: Path) -> None:
    watch = Watch(tmp_path, every=4)
    fit(watch, max_steps=10)
    assert watch.steps == [4, 8, 10]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 10


def test_a_window_of_batches_is_saved_once(tmp_path: Path) -> None:
    watch = Watch(tmp_path, every=2)
    fit(watch, max_steps=4, accumulate_grad_batches=3)
    assert watch.steps == [2, 4]


def test_a_resumed_run_does_not_save_what_it_has_just_read(tmp_path: Path) -> None:
    fit(Watch(tmp_path, every=4), max_steps=4)
    watch = Watch(tmp_path, every=4)
    fit(watch, tmp_path / "last.ckpt", max_steps=8)
    assert watch.steps == [8]


def test_every_must_be_a_step_or_more(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"callbacks\.last\.every=0"):
        LastCheckpoint(tmp_path, every=0)
