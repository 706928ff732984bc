"""Optimizers that are put into a Trainer in the middle of training are taken over, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_fuse.callbacks import Fuse
from lightning_fuse.optim import FusedAdamW, FusedSGD
from lightning_fuse.plugins import contract_of

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(LightningModule):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(40, 40))
        self.automatic_optimization = not by_hand
        self.exchange: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.exchange is not None and batch_idx == 2:
            self.exchange(self.trainer, self)
        loss = (self.w * batch).sum()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.1)


class Exchange(Callback):
    """Puts other optimizers in, before the third batch."""

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.exchange(trainer, pl_module)


def through_trainer(make: Any) -> Any:
    def exchange(trainer: Trainer, module: Net) -> None:
        trainer.optimizers = [make([module.w])]

    return exchange


def through_strategy(make: Any) -> Any:
    def exchange(trainer: Trainer, module: Net) -> None:
        trainer.strategy.optimizers = [make([module.w])]

    return exchange


def fit(module: Net, *callbacks: Any) -> Trainer:
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **QUIET)
    trainer.fit(module, DataLoader(torch.ones(6), batch_size=None))
    return trainer


@pytest.mark.parametrize("way", [through_trainer, through_strategy])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_exchanged_optimizer_is_taken_over(way: Any, by_hand: bool) -> None:
    found: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append(trainer.optimizers[0])

    exchange = way(lambda params: SGD(params, lr=0.5, momentum=0.9))
    ours, stock = Net(by_hand), Net(by_hand)
    trainer = fit(ours, Exchange(exchange), Fuse(state="int8"), Look())
    fit(stock, Exchange(exchange))
    assert [type(optimizer) for optimizer in found] == [FusedAdamW] * 2 + [FusedSGD] * 4
    assert set(found[-1].formats().values()) == {"int8"}
    assert contract_of(trainer).updates == 6
    torch.testing.assert_close(ours.w, stock.w, rtol=2e-2, atol=0.0)


def test_an_optimizer_exchanged_inside_a_training_step() -> None:
    ours, stock = Net(by_hand=True), Net(by_hand=True)
    ours.exchange = stock.exchange = through_trainer(lambda params: SGD(params, lr=0.5))
    trainer = fit(ours, Fuse())
    fit(stock)
    assert contract_of(trainer).updates == 6
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=0.0)


def test_one_that_cannot_be_taken_over_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS evaluates"):
        fit(Net(by_hand=False), Exchange(through_trainer(torch.optim.LBFGS)), Fuse(optimizer=None))
    with pytest.raises(ValueError, match="Adagrad"):
        fit(Net(by_hand=False), Exchange(through_trainer(torch.optim.Adagrad)), Fuse())


def test_a_kept_optimizer_may_be_exchanged_for_any_other() -> None:
    ours, stock = Net(by_hand=False), Net(by_hand=False)
    exchange = through_strategy(torch.optim.Adagrad)
    fit(ours, Exchange(exchange), Fuse(optimizer=None))
    fit(stock, Exchange(exchange))
    assert torch.equal(ours.w, stock.w)
