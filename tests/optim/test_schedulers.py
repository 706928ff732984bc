"""Every learning-rate scheduler of torch drives our optimizers as it drives torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from lightning_fuse import FusedAdamW, FusedSGD
from tests.optim.models import updates


def sequential(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.CosineAnnealingLR(optimizer, 6)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


def chained(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=4),
}
BASES = {"LRScheduler", "_LRScheduler"}


def test_every_scheduler_of_torch_is_here() -> None:
    known = {
        name
        for name, value in vars(schedulers).items()
        if isinstance(value, type) and issubclass(value, schedulers.LRScheduler) and name not in BASES
    }
    assert known <= set(SCHEDULERS)


def drive(optimizer: torch.optim.Optimizer, scheduler: Any, p: Parameter) -> list[tuple[float, float]]:
    """(learning rate in force, what the step subtracted) of 10 steps with gradient 1 and no state."""
    rows = []
    for _ in range(10):
        p.grad = torch.ones_like(p)
        lr = float(optimizer.param_groups[0]["lr"])
        rows.append((lr, updates([p], optimizer)[0].item()))
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
    return rows


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_the_rate_in_force_is_torchs(name: str, tensor: bool, recwarn: pytest.WarningsRecorder) -> None:
    lr: Any = torch.tensor(0.125) if tensor else 0.125
    ours_p, theirs_p = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    momentum = {"momentum": 0.9} if name == "OneCycleLR" else {}  # it moves the momentum, too, and insists on one
    ours = FusedSGD([ours_p], lr=lr, **momentum)
    theirs = torch.optim.SGD([theirs_p], lr=lr.clone() if tensor else lr, foreach=False, **momentum)
    expected = drive(theirs, SCHEDULERS[name](theirs), theirs_p)
    found = drive(ours, SCHEDULERS[name](ours), ours_p)
    assert [lr for lr, _ in found] == pytest.approx([lr for lr, _ in expected], rel=1e-6)
    assert len({lr for lr, _ in found}) > 1
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_one_cycle_moves_the_first_beta() -> None:
    ours, theirs = (cls([Parameter(torch.ones(1))]) for cls in (FusedAdamW, torch.optim.AdamW))
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=10)
        for _ in range(4):
            optimizer.step()
            scheduler.step()
    assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"] != (0.9, 0.999)
    torch.testing.assert_close(ours.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0])


def test_a_scheduler_resumes_with_its_optimizer() -> None:
    def make() -> tuple[Parameter, FusedAdamW, Any]:
        p = Parameter(torch.ones(2, 130))
        optimizer = FusedAdamW([("p", p)], lr=0.1, state="int8")
        return p, optimizer, schedulers.CosineAnnealingLR(optimizer, 8)

    def train(p: Parameter, optimizer: FusedAdamW, scheduler: Any, steps: range) -> None:
        for step in steps:
            p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
            scheduler.step()

    whole, half, rest = make(), make(), make()
    train(*whole, range(8))
    train(*half, range(4))
    rest[0].data.copy_(half[0].data)
    rest[1].load_state_dict(half[1].state_dict())
    rest[2].load_state_dict(half[2].state_dict())
    train(*rest, range(4, 8))
    assert torch.equal(whole[0], rest[0])
    assert whole[1].param_groups[0]["lr"] == rest[1].param_groups[0]["lr"]
