"""Cases 15-18: what follows applied updates: schedulers, counters, records."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import BAD, NONE, Four, adamw, batches, half, one_bad, quiet_trainer, sgd, train
from tests.cases import Outcomes as Watch

FUSES = {"ours": {}, "kept": {"optimizer": None}}
PRECISIONS = {"32-true": lambda: "32-true", "16-mixed": half}
STOCK_ORDER = "ignore:Detected call of `lr_scheduler.step:UserWarning"


@pytest.fixture(params=FUSES)
def settings(request):
    return FUSES[request.param]


@pytest.fixture(params=PRECISIONS)
def precision(request):
    return PRECISIONS[request.param]()


def counting(**config):
    """A module whose lr is 1 / (1 + scheduler steps) of 0.12."""
    return Four(lambda ps: adamw(ps, lr=0.12), lambda optimizer: LambdaLR(optimizer, lambda n: 1 / (1 + n)), **config)


class AtUpdates(Watch):
    """Keeps the lr that each applied update used."""

    def __init__(self):
        super().__init__()
        self.lrs = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.now = optimizer.param_groups[0]["lr"]

    def on_step_outcome(self, trainer, pl_module, outcome):
        super().on_step_outcome(trainer, pl_module, outcome)
        if outcome.applied:
            self.lrs.append(self.now)


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step:UserWarning")
def test_case_15_schedulers_follow_applied_updates(precision, settings):
    module, lrs = counting(), AtUpdates()
    train(module, one_bad(8, 0, 1), Fuse(**settings), lrs, precision=precision)
    assert lrs.lrs == pytest.approx([0.12 / (1 + n) for n in range(6)])
    assert module.lrs[-1] == pytest.approx(0.12 / 7)


@pytest.mark.filterwarnings(STOCK_ORDER)
def test_case_15_stock_advances_on_skipped_steps():
    module = counting()
    train(module, one_bad(8, 0, 1), precision=half())
    assert module.lrs[-1] == pytest.approx(0.12 / 9)


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step:UserWarning")
def test_case_15_no_gradient_and_veto_do_not_advance_either(precision, settings):
    class Vetoes(Four):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
                contract_of(self.trainer).skip_next()

    module = Vetoes(lambda ps: adamw(ps, lr=0.12), lambda optimizer: LambdaLR(optimizer, lambda n: 1 / (1 + n)))
    train(module, batches(1, NONE, 1, 1), Fuse(**settings), precision=precision)
    assert module.lrs == pytest.approx([0.06, 0.06, 0.06, 0.04])


@pytest.mark.filterwarnings("error:Detected call of")
def test_case_15_no_order_warning_where_an_epoch_scheduler_follows_skipped_steps(settings):
    module = Four(sgd, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), interval="epoch")
    train(module, one_bad(1, 0), Fuse(**settings), max_epochs=2)
    assert module.lrs == [0.5, 0.25]  # epochs are counted, whatever became of their steps


def test_case_15_one_cycle_never_overruns(precision, settings):
    """A schedule over exactly as many steps as there are updates; one step more would raise."""
    module = Four(adamw, lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6))
    train(module, one_bad(8, 0, 3, 4), Fuse(**settings), precision=precision)
    assert len(module.lrs) == 8
    assert module.lrs[2:5] == [module.lrs[2]] * 3


def test_case_16_updates_beside_global_steps(settings, tmp_path):
    module, outcomes = Four(), Watch()
    trainer = quiet_trainer(Fuse(**settings), outcomes, precision=half(), max_steps=5)
    trainer.fit(module, one_bad(20, 0, 2, 3))
    contract = contract_of(trainer)
    assert (trainer.global_step, contract.global_step, contract.updates) == (5, 5, 2)
    assert outcomes.of("update") == [0, 1, 1, 1, 2]
    assert outcomes.of("global_step") == [1, 2, 3, 4, 5]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = quiet_trainer(Fuse(**settings), more := Watch(), precision=half(), max_steps=6)
    again.fit(Four(), one_bad(20), ckpt_path=tmp_path / "a.ckpt")
    assert (more.of("global_step"), more.of("update")) == ([6], [3])
    assert contract_of(again).skips["nonfinite"] == 3


@pytest.mark.filterwarnings(STOCK_ORDER)
def test_case_16_stock_stops_after_two_real_updates():
    module = Four()
    trainer, _ = train(module, one_bad(20, 0, 2, 3), precision=half(), max_steps=5)
    assert trainer.global_step == 5
    assert float(trainer.optimizers[0].state[module.w]["step"]) == 2


@pytest.mark.parametrize(
    ("loader", "epochs", "frequency", "expected"),
    [
        (one_bad(32), 1, 2, 4),  # 8 windows of 4
        (one_bad(16), 2, 2, 4),  # 4 windows an epoch
        (one_bad(12), 3, 2, 4),  # 3 windows an epoch: 9 updates
        (one_bad(20), 2, 3, 3),  # 5 windows an epoch: 10 updates
        (one_bad(32, 0, 31), 1, 2, 3),  # 8 windows, 2 of them skipped
        (one_bad(8), 2, 100, 0),
    ],
)
def test_case_17_frequency_counts_applied_updates(loader, epochs, frequency, expected, settings):
    module = counting(frequency=frequency)
    train(module, loader, Fuse(**settings), max_epochs=epochs, accumulate_grad_batches=4)
    assert module.lrs[-1] == pytest.approx(0.12 / (1 + expected))


def test_case_17_stock_counts_batches():
    module = counting(frequency=2)
    train(module, one_bad(32), accumulate_grad_batches=4)
    assert module.lrs[-1] == pytest.approx(0.12 / 9)


def test_case_17_frequency_goes_on_over_a_resume(settings, tmp_path):
    whole = counting(frequency=2)
    train(whole, one_bad(12), Fuse(**settings), max_epochs=4, accumulate_grad_batches=4)
    first, _ = train(counting(frequency=2), one_bad(12), Fuse(**settings), max_epochs=1, accumulate_grad_batches=4)
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = counting(frequency=2)
    quiet_trainer(Fuse(**settings), max_epochs=4, accumulate_grad_batches=4).fit(
        second, one_bad(12), ckpt_path=tmp_path / "a.ckpt"
    )
    assert second.lrs == whole.lrs[12:]
    assert torch.equal(second.w, whole.w)


def test_case_17_epoch_schedulers_count_epochs(settings):
    module = Four(adamw, lambda optimizer: StepLR(optimizer, 1, 0.5), interval="epoch")
    train(module, one_bad(4, 1), Fuse(**settings), max_epochs=3)
    assert module.lrs[-1] == pytest.approx(0.01 * 0.125)


def test_case_18_one_record_per_optimizer_step(settings):
    _, outcomes = train(Four(), one_bad(8, 0, 1), Fuse(**settings), precision=half(1024.0), gradient_clip_val=1.0)
    records = [outcome.record() for outcome in outcomes.seen]
    assert len(records) == 8
    assert [r["reason"] for r in records] == ["nonfinite"] * 2 + ["ok"] * 6
    assert [r["global_step"] for r in records] == list(range(1, 9))
    assert [r["update"] for r in records] == [0, 0, 1, 2, 3, 4, 5, 6]
    before, after = [r["loss_scale_before"] for r in records], [r["loss_scale_after"] for r in records]
    assert (before, after) == ([1024.0, 512.0] + [256.0] * 6, [512.0] + [256.0] * 7)
    assert [r["grad_norm"] for r in records[2:]] == [2.0] * 6
    assert [r["clip_coef"] for r in records[2:]] == pytest.approx([0.5] * 6, rel=1e-5)
    assert all(r["applied"] == (r["reason"] == "ok") for r in records)
    json.dumps(records)


def test_case_18_the_module_is_told_too(settings):
    class Told(Four):
        def on_step_outcome(self, trainer, pl_module, outcome):
            assert trainer is self.trainer
            assert pl_module is self
            self.told = [*getattr(self, "told", []), outcome.reason]

    module = Told()
    train(module, one_bad(3, 1), Fuse(**settings))
    assert module.told == ["ok", "nonfinite", "ok"]


def test_case_18_counts_survive_a_resume(settings, tmp_path):
    first, _ = train(Four(), batches(BAD, 1, NONE, 1), Fuse(**settings), precision=half())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(Fuse(**settings), precision=half(), max_epochs=2)
    second.fit(Four(), batches(BAD, 1, NONE, 1), ckpt_path=tmp_path / "a.ckpt")
    contract = contract_of(second)
    assert (contract.global_step, contract.updates) == (8, 4)
    assert contract.skips == {"nonfinite": 2, "no_grad": 2, "user": 0}
    assert contract.loss_scale.value == 256.0
