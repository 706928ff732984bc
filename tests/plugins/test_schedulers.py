"""Every kind of scheduler goes on driving the optimizer that took over, and follows applied updates."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch.optim import lr_scheduler as s

from lightning_fuse import Fuse
from tests.cases import BAD, Four, adamw, batches, half, one_bad, quiet_trainer, sgd, train

pytestmark = pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step:UserWarning")


class Warmup:
    """A wrapper as people write them: no LRScheduler, holds another one, drives the groups itself at first."""

    def __init__(self, optimizer, steps, after_scheduler):
        self.optimizer, self.steps, self.after_scheduler, self.count = optimizer, steps, after_scheduler, 0
        self.base = [group["lr"] for group in optimizer.param_groups]

    def step(self, metric=None):
        self.count += 1
        if self.count <= self.steps:
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * self.count / self.steps
        else:
            self.after_scheduler.step()

    def state_dict(self):
        return {"count": self.count, "after": self.after_scheduler.state_dict()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.after_scheduler.load_state_dict(state["after"])


class HoldsGroups:
    """Drives the groups that it kept when it was made."""

    def __init__(self, optimizer):
        self.optimizer, self.groups = optimizer, list(optimizer.param_groups)

    def step(self, metric=None):
        for group in self.groups:
            group["lr"] *= 0.9

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def sequential(optimizer):
    parts = [s.LinearLR(optimizer, 0.1, 1.0, 3), s.CosineAnnealingLR(optimizer, 6)]
    return s.SequentialLR(optimizer, parts, [3])


def nested(optimizer):
    return s.ChainedScheduler([sequential(optimizer), s.StepLR(optimizer, 2, 0.5)], optimizer)


def doubly_wrapped(optimizer):
    return Warmup(optimizer, 2, Warmup(optimizer, 2, s.ExponentialLR(optimizer, 0.5)))


KINDS = {
    "lambda": lambda o: s.LambdaLR(o, lambda n: 1 / (1 + n)),
    "multiplicative": lambda o: s.MultiplicativeLR(o, lambda n: 0.95),
    "step": lambda o: s.StepLR(o, 3, 0.5),
    "multi_step": lambda o: s.MultiStepLR(o, [2, 5], 0.1),
    "exponential": lambda o: s.ExponentialLR(o, 0.9),
    "polynomial": lambda o: s.PolynomialLR(o, 8),
    "cosine": lambda o: s.CosineAnnealingLR(o, 5),
    "warm_restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
    "one_cycle": lambda o: s.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: s.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    "sequential": sequential,
    "chained": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)], o),
    "nested": nested,
    "custom_wrapper": lambda o: Warmup(o, 3, s.CosineAnnealingLR(o, 6)),
    "custom_wrapper_twice": doubly_wrapped,
    "custom_groups": HoldsGroups,
}
FUSES = {
    "auto": {},
    "int8": {"state": "int8"},
    "kept": {"optimizer": None},
    "other_rule": {"optimizer": "adam_fused"},
}


class Steps(Four):
    """Custom schedulers need a ``lr_scheduler_step``; also notes betas, which OneCycleLR moves."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trace = []

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step() if metric is None else scheduler.step(metric)

    def on_before_optimizer_step(self, optimizer):
        group = optimizer.param_groups[0]
        self.trace.append((group["lr"], group.get("betas"), group.get("momentum")))

    def on_step_outcome(self, trainer, pl_module, outcome):
        if not outcome.applied:
            self.trace.pop()


def two_groups(params):
    return adamw([{"params": params, "lr": 0.02}])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fuse", FUSES)
def test_the_lr_of_every_update_is_stocks(kind, fuse):
    stock, ours = Steps(two_groups, KINDS[kind]), Steps(two_groups, KINDS[kind])
    train(stock, one_bad(8))
    trainer, _ = train(ours, one_bad(8), Fuse(**FUSES[fuse]))
    assert len({lr for lr, _, _ in stock.trace}) > 1
    assert ours.trace == stock.trace
    assert ours.lrs == stock.lrs
    assert trainer.lr_scheduler_configs[0].scheduler.__class__ is KINDS[kind](two_groups([ours.w])).__class__


@pytest.mark.parametrize("kind", KINDS)
def test_the_lr_of_every_update_is_stocks_whatever_is_skipped(kind):
    stock, ours = Steps(two_groups, KINDS[kind]), Steps(two_groups, KINDS[kind])
    train(stock, one_bad(6))
    train(ours, one_bad(9, 0, 4, 5), Fuse(), precision=half())
    assert ours.trace == stock.trace


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("one_cycle", "cyclic")])
def test_sgd_with_momentum(kind):
    def momentum(params):
        return sgd(params, lr=0.01, momentum=0.9, nesterov=True)

    stock, ours = Steps(momentum, KINDS[kind]), Steps(momentum, KINDS[kind])
    train(stock, one_bad(8))
    train(ours, one_bad(8), Fuse(state="bf16"))
    assert ours.trace == stock.trace


def test_one_cycle_moves_momentum_too():
    def momentum(params):
        return sgd(params, lr=0.01, momentum=0.9)

    def cycle(optimizer):
        return s.OneCycleLR(optimizer, 0.1, total_steps=9)

    stock, ours = Steps(momentum, cycle), Steps(momentum, cycle)
    train(stock, one_bad(8))
    train(ours, one_bad(8), Fuse())
    assert ours.trace == stock.trace
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("fuse", FUSES)
def test_reduce_on_plateau(interval, fuse):
    class Plateau(Four):
        def training_step(self, batch):
            self.log("level", 1.0)
            return super().training_step(batch)

    config = {"interval": interval, "monitor": "level", "frequency": 1}

    def plateau(optimizer):
        return s.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    stock, ours = Plateau(adamw, plateau, **config), Plateau(adamw, plateau, **config)
    train(stock, one_bad(6), max_epochs=4)
    trainer, _ = train(ours, one_bad(6), Fuse(**FUSES[fuse]), max_epochs=4)
    assert ours.lrs == stock.lrs
    assert len(set(ours.lrs)) > 1
    assert trainer.lr_scheduler_configs[0].scheduler.optimizer is trainer.optimizers[0]


def test_plateau_is_not_asked_after_a_skipped_step():
    class Plateau(Four):
        def training_step(self, batch):
            self.log("level", 1.0)
            return super().training_step(batch)

    module = Plateau(adamw, lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0), interval="step", monitor="level")
    train(module, batches(1, BAD, BAD, BAD, 1), Fuse())
    assert module.lrs == [0.01] * 5  # asked after the first and the last batch, and the last is noted before


def test_frequency_with_every_kind():
    for kind in ("sequential", "custom_wrapper", "one_cycle"):
        stock, ours = Steps(two_groups, KINDS[kind], frequency=2), Steps(two_groups, KINDS[kind], frequency=2)
        train(stock, one_bad(8))
        train(ours, one_bad(8), Fuse())
        assert ours.trace == stock.trace


def test_the_users_lr_scheduler_step_is_called_once_per_update():
    class Counts(Four):
        calls = 0

        def lr_scheduler_step(self, scheduler, metric):
            self.calls += 1
            super().lr_scheduler_step(scheduler, metric)

    module = Counts(adamw, KINDS["step"])
    train(module, one_bad(12, 0, 1, 7), Fuse(), accumulate_grad_batches=2)
    assert module.calls == 4  # 6 windows, 2 of them with an overflow


def test_several_schedulers_of_one_optimizer_each_have_their_frequency():
    class Both(Four):
        def configure_optimizers(self):
            optimizer = adamw([self.w], lr=1.0)
            first, second = s.ExponentialLR(optimizer, 0.5), s.ExponentialLR(optimizer, 0.1)
            return [optimizer], [
                {"scheduler": first, "interval": "step", "frequency": 1},
                {"scheduler": second, "interval": "step", "frequency": 3},
            ]

    module = Both()
    train(module, one_bad(8, 0, 1), Fuse())
    assert module.lrs[-1] == pytest.approx(0.5**6 * 0.1**2)


def test_resume_goes_on_with_the_schedule(tmp_path):
    whole = Steps(two_groups, KINDS["sequential"])
    train(whole, one_bad(4, 1), Fuse(), max_epochs=2)
    first, _ = train(Steps(two_groups, KINDS["sequential"]), one_bad(4, 1), Fuse())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = Steps(two_groups, KINDS["sequential"])
    quiet_trainer(Fuse(), max_epochs=2).fit(second, one_bad(4, 1), ckpt_path=tmp_path / "a.ckpt")
    assert second.trace == whole.trace[3:]
    assert torch.equal(second.w, whole.w)


def test_the_frequency_is_still_the_number_that_was_given():
    module = Four(adamw, KINDS["step"], frequency=3)
    trainer, _ = train(module, one_bad(2), Fuse())
    frequency = trainer.lr_scheduler_configs[0].frequency
    assert frequency == 3
    assert copy.deepcopy(frequency) == 3
    assert pickle.loads(pickle.dumps(frequency)) == 3
    copy.deepcopy(trainer.optimizers[0])


def test_schedulers_stepped_by_hand_in_manual_optimization():
    class ByHand(Four):
        def __init__(self):
            super().__init__(adamw, lambda o: s.ExponentialLR(o, 0.5))
            self.automatic_optimization = False

        def training_step(self, batch):
            self.optimizers().zero_grad()
            self.manual_backward((self.w * batch).sum())
            self.optimizers().step()
            self.lr_schedulers().step()

    module = ByHand()
    train(module, one_bad(3), Fuse(state="int8"))
    assert module.lrs == [0.005, 0.0025, 0.00125]
    assert all(a > b for a, b in pairwise(module.lrs))


@pytest.mark.parametrize("scheduler", [
    lambda o: s.LambdaLR(o, [lambda n: 0.5, lambda n: 0.1]),
    lambda o: s.MultiplicativeLR(o, [lambda n: 0.5, lambda n: 0.1]),
])  # fmt: skip
def test_groups_that_shared_a_tensor_lr_have_each_its_own(scheduler):
    class Two(Four):
        def __init__(self):
            super().__init__(None, scheduler)
            self.v = torch.nn.Parameter(torch.ones(4))

        def training_step(self, batch):
            return ((self.w + self.v) * batch).sum()

        def configure_optimizers(self):
            self._optimizer = lambda params: adamw([{"params": params}, {"params": [self.v]}], lr=torch.tensor(1.0))
            return super().configure_optimizers()

    trainer, _ = train(Two(), one_bad(1), Fuse())
    one, other = (float(group["lr"]) for group in trainer.optimizers[0].param_groups)
    assert one == pytest.approx(5 * other)
