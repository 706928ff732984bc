"""A Trainer, its callbacks, its plugin and its optimizers can be pickled and deep-copied after a fit, and go on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim import lr_scheduler as s
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.callbacks.exact_resume import ExactResume
from lightning_fuse.callbacks.step_monitor import StepMonitor
from lightning_fuse.plugins import contract_of
from tests.cases import Four, adamw, half, quiet_trainer
from tests.cases.manual import Manual

COPIES = {"pickle": lambda one: pickle.loads(pickle.dumps(one)), "deepcopy": copy.deepcopy}


def schedule(optimizer):
    return s.SequentialLR(optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [2])


class Automatic(Four):
    def __init__(self):
        super().__init__(adamw, schedule)


class ByHand(Manual):
    def __init__(self):
        super().__init__(adamw)


def fitted(make, fuse, precision):
    module = make()
    callbacks = [ExactResume(), StepMonitor(), *([] if fuse is None else [Fuse(**fuse)])]
    trainer = quiet_trainer(*callbacks, precision="32-true" if precision == "32-true" else half(8.0))
    trainer.fit(module, DataLoader(torch.ones(4), batch_size=1))
    return module, trainer


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("make", [Automatic, ByHand])
@pytest.mark.parametrize(
    ("fuse", "precision"),
    [({}, "32-true"), ({"optimizer": None}, "32-true"), ({"state": "bf16"}, "32-true"), ({}, "16-mixed")],
)
def test_everything_of_a_finished_fit(way, make, fuse, precision):
    module, trainer = fitted(make, fuse, precision)
    for one in (*trainer.callbacks, trainer.precision_plugin, trainer.optimizers[0], module):
        COPIES[way](one)
    copied = COPIES[way](trainer)
    assert contract_of(copied).updates == 4
    for (p, held), (q, kept) in zip(
        trainer.optimizers[0].state.items(), copied.optimizers[0].state.items(), strict=True
    ):
        assert torch.equal(p, q)
        assert all(torch.equal(held[key], kept[key]) for key in held)
    for one in (trainer, copied):
        one.fit_loop.max_epochs = 2
        one.fit(one.lightning_module, DataLoader(torch.ones(4), batch_size=1))
    assert torch.equal(trainer.lightning_module.w, copied.lightning_module.w)
    assert contract_of(trainer).updates == contract_of(copied).updates == 8


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_optimizer_steps_on(way):
    _, trainer = fitted(Automatic, {"state": "bf16"}, "32-true")
    copied = COPIES[way](trainer.optimizers[0])
    assert copied.formats() == {"w": "bf16"}
    for one in (trainer.optimizers[0], copied):
        (p,) = one.param_groups[0]["params"]
        p.grad = torch.full((4,), 2.0)
        one.step()
    assert torch.equal(copied.param_groups[0]["params"][0], trainer.optimizers[0].param_groups[0]["params"][0])


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_fuse_serves_another_trainer(way):
    _, trainer = fitted(Automatic, {"state": "bf16"}, "32-true")
    fuse = next(callback for callback in trainer.callbacks if isinstance(callback, Fuse))
    another = quiet_trainer(COPIES[way](fuse))
    another.fit(Automatic(), DataLoader(torch.ones(4), batch_size=1))
    assert another.optimizers[0].formats() == {"w": "bf16"}
