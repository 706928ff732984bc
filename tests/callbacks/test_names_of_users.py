"""Names belong to the user: what a module logs arrives under its names, and ours are names that nobody else uses."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fuse.callbacks import Fuse, StepMonitor

NAMES = ("epoch", "update", "scale", "skips", "seconds", "loss_scale", "global_step", "skipped")
BARE = {"accelerator": "cpu", "enable_model_summary": False}


class Logs(LightningModule):
    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))
        self.names = names

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for place, name in enumerate(self.names):
            self.log(name, 100.0 * (place + 1) + batch_idx, batch_size=1, prog_bar=True)
        return (self.w * batch).sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


def loader() -> Any:
    return DataLoader(torch.ones(4), batch_size=None)


@pytest.mark.parametrize("callbacks", [[Fuse], [Fuse, StepMonitor]], ids=["fuse", "monitor"])
def test_every_name_of_the_module_arrives(tmp_path: Path, callbacks: list[Any]) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="scale", mode="max", save_top_k=1)
    trainer = Trainer(
        max_epochs=1,
        callbacks=[*(make() for make in callbacks), best],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=False,
        **BARE,
    )
    trainer.fit(Logs(), loader())
    wanted = {name: 100.0 * (place + 1) + 3 for place, name in enumerate(NAMES)}
    assert {name: float(trainer.callback_metrics[name]) for name in NAMES} == wanted
    assert float(best.best_model_score) == wanted["scale"]
    shown = trainer.progress_bar_metrics
    assert {name: shown[name] for name in NAMES} == wanted
    assert ("fuse/skips" in shown) is (StepMonitor in callbacks)
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for place, name in enumerate(NAMES):
        assert {float(row[name]) for row in rows if row[name]} >= {100.0 * (place + 1) + batch for batch in range(4)}


@pytest.mark.parametrize("name", ["step", "val/step", "fused"])
def test_a_module_that_logs_one_of_these_trains_as_in_stock(tmp_path: Path, name: str) -> None:
    seen = []
    for callbacks in ([], [Fuse(), StepMonitor()]):
        trainer = Trainer(
            max_epochs=1, callbacks=callbacks, logger=CSVLogger(tmp_path), enable_progress_bar=False, **BARE
        )
        trainer.fit(Logs((name,)), loader())
        seen.append(float(trainer.callback_metrics[name]))
    assert seen[0] == seen[1] == 103.0


@pytest.mark.parametrize("callbacks", [[Fuse], [Fuse, StepMonitor]], ids=["fuse", "monitor"])
@pytest.mark.parametrize("validates", [False, True])
def test_a_step_that_takes_the_iterator_of_the_loader(tmp_path: Path, callbacks: list[Any], validates: bool) -> None:
    class Takes(Logs):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return (self.w * batch).sum()

    if validates:
        Takes.validation_step = lambda self, batch: None
    module = Takes()
    trainer = Trainer(
        max_epochs=1, callbacks=[make() for make in callbacks], logger=CSVLogger(tmp_path), log_every_n_steps=1, **BARE
    )
    trainer.fit(module, loader(), loader() if validates else None)
    assert trainer.global_step == 4
    assert not torch.equal(module.w, torch.ones(4))


def test_the_key_of_a_learning_rate_monitor(tmp_path: Path) -> None:
    rates = LearningRateMonitor()
    trainer = Trainer(max_epochs=1, callbacks=[Fuse(), rates], logger=CSVLogger(tmp_path), log_every_n_steps=1, **BARE)
    trainer.fit(Logs(), loader())
    assert list(rates.lrs) == ["lr-FusedAdamW"]  # docs/compatibility.md says so
