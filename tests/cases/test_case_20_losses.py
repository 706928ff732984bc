"""Cases 11, 19 and 20 in a Trainer, and that every case of the contract has its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, Timer

from lightning_fuse import Fuse
from lightning_fuse.callbacks import TimeToTarget
from tests.cases import BAD, Four, adamw, batches, half, quiet_trainer, sgd, train

TESTS = Path(__file__).parents[1]
CASES = {f"{number:02d}" for number in range(1, 25)}
# Whose right value is a promise of ours about something that stock Lightning has not, or only documents otherwise.
WITHOUT_STOCK = {"14", "18"}


@pytest.mark.parametrize(
    "make", [lambda ps: sgd(ps, momentum=0.9), lambda ps: sgd(ps, momentum=0.9, fused=True), adamw]
)
@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_case_11_an_overflow_on_the_first_batch_leaves_no_trace(make, fuse):
    with_bad, without = Four(make), Four(make)
    first, _ = train(with_bad, batches(BAD, 1, 2), Fuse(**fuse), precision=half(1024.0))
    second, _ = train(without, batches(1, 2), Fuse(**fuse), precision=half(1024.0))
    assert torch.equal(with_bad.w, without.w)
    one, two = (trainer.optimizers[0].state_dict()["state"] for trainer in (first, second))
    assert one[0].keys() == two[0].keys()
    assert all(torch.equal(torch.as_tensor(one[0][key]), torch.as_tensor(two[0][key])) for key in one[0])


class Logged(Four):
    """Logs the loss that it returns, 4 for a batch of 1 while the weights are ones."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_case_20_what_is_logged_is_the_loss_that_training_step_returned(fuse, accumulate):
    module = Logged(lambda ps: sgd(ps, lr=0.0))
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "precision": half(2.0**16)}
    trainer, _ = train(module, batches(1, 1, 1, 1, 1), Fuse(**fuse), **settings)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == dict.fromkeys(
        ("loss", "loss_step", "loss_epoch"), 4.0
    )
    assert float(trainer.progress_bar_metrics["loss_step"]) == 4.0


def test_case_20_stock_hands_callbacks_a_share_of_it():
    seen = []
    look = LambdaCallback(on_train_batch_end=lambda _t, _m, outputs, *_: seen.append(float(outputs["loss"])))
    train(Four(lambda ps: sgd(ps, lr=0.0)), batches(1, 1, 1, 1), look, accumulate_grad_batches=4)
    assert seen == [1.0] * 4  # of 4.0


def test_case_19_stock_timer_runs_backwards_in_a_second_fit():
    timer, seen = Timer(), []
    look = LambdaCallback(on_train_batch_end=lambda *_: seen.append(timer.time_elapsed("train")))
    module, trainer = Four(), quiet_trainer(timer, look, max_epochs=1)
    trainer.fit(module, batches(1))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(1))
    assert seen[0] > 0.0 > seen[1]


def test_case_20_a_target_is_compared_with_what_was_logged():
    class Both(Logged):
        def validation_step(self, batch):
            self.log("val_loss", Four.training_step(self, batch))

    # A quarter of it, as Lightning divides it for the backward, would never reach that.
    target = TimeToTarget("val_loss", 3.9, mode="max")
    trainer = quiet_trainer(Fuse(), target, accumulate_grad_batches=4, max_epochs=1)
    trainer.fit(Both(lambda ps: sgd(ps, lr=0.0)), batches(1, 1, 1, 1), batches(1))
    assert target.reached is not None
    assert target.reached.value == 4.0


def test_every_case_of_the_contract_has_a_test_that_is_called_after_it():
    names = [
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_case_\w+)", path.read_text(), re.MULTILINE)
    ]
    found = {name[len("test_case_") :][:2] for name in names}
    assert found >= CASES
    beside = {name[len("test_case_") :][:2] for name in names if "_stock_" in name}
    assert beside >= CASES - WITHOUT_STOCK
