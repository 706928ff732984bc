"""Callbacks that several Trainers use follow the present one, keep no former one alive, and work without us later."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fuse.callbacks import Fuse

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
BAD = float("inf")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.w * batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*callbacks: Callback, batches: list[float], **settings: Any) -> tuple[Trainer, Net]:
    trainer, module = Trainer(max_epochs=1, callbacks=list(callbacks), **{**QUIET, **settings}), Net()
    trainer.fit(module, DataLoader(torch.tensor(batches), batch_size=None))
    return trainer, module


@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5)])
def test_one_averaging_callback_in_several_trainers(make: Any) -> None:
    shared = make()
    for batches in ([1.0, 2.0], [BAD, 3.0, 1.0], [2.0, BAD]):
        _, mine = fit(shared, Fuse(), batches=batches, enable_checkpointing=False)
        _, fresh = fit(make(), Fuse(), batches=batches, enable_checkpointing=False)
        assert torch.equal(mine.w, fresh.w)
        shared._latest_update_step = 0  # stock keeps it from Trainer to Trainer
    _, without = fit(shared, batches=[1.0, 2.0], enable_checkpointing=False)
    _, stock = fit(make(), batches=[1.0, 2.0], enable_checkpointing=False)
    assert torch.equal(without.w, stock.w)


@pytest.mark.parametrize("window", ["mean", "carry"])
def test_a_checkpoint_by_time_in_several_trainers(tmp_path: Path, window: Any) -> None:
    shared = ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), save_top_k=-1, filename="{step}")
    seen: list[int] = []

    class Look(Callback):
        def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    for _ in range(2):
        fit(shared, Fuse(window=window), Look(), batches=[1.0] * 4, accumulate_grad_batches=2)
    assert set(seen) <= {2, 4}
    seen.clear()
    fit(shared, Look(), batches=[1.0] * 4, accumulate_grad_batches=2)
    assert 1 in seen  # stock saves inside windows


class Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError


def is_kept_alive(shared: Callback, *others: Callback) -> bool:
    """Whether a callback that the user keeps, and all that is on it, holds a Trainer whose fit is over."""
    trainer, module = Trainer(max_epochs=1, callbacks=[shared, *others], **QUIET), Net()
    with suppress(ZeroDivisionError):
        trainer.fit(module, DataLoader(torch.ones(4), batch_size=None))
    assert not any(type(one).__name__ == "ContractCallback" for one in trainer.callbacks)  # the user may have this list
    assert not any(hasattr(value, "func") for value in vars(shared).values())
    former = weakref.ref(trainer)
    del trainer, module
    gc.collect()
    return former() is not None


@pytest.mark.parametrize("others", [[], [Fails]], ids=["ends", "fails"])
@pytest.mark.parametrize("averages", [False, True])
def test_a_former_trainer_is_kept_alive_no_more_than_in_stock(
    tmp_path: Path, averages: bool, others: list[Any]
) -> None:
    def shared() -> Callback:
        if averages:
            return WeightAveraging()
        return ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=9))

    ours, stock = shared(), shared()
    kept = is_kept_alive(ours, Fuse(), *(make() for make in others))
    assert kept <= is_kept_alive(stock, *(make() for make in others))


def test_the_same_trainer_fits_again() -> None:
    trainer, module = fit(Fuse(window="drop"), batches=[1.0] * 5, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(torch.ones(5), batch_size=None))
    # Two windows of each epoch; the fifth batch is dropped.
    torch.testing.assert_close(module.w.detach(), torch.full((4,), 1.0 - 4 * 0.1))
