"""Learning rates at the edges: ends of schedules, one tensor in several groups, compiled steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR, LinearLR, StepLR

from lightning_fuse import FusedAdamW, FusedLion, FusedSGD


@pytest.mark.parametrize("make", [FusedAdamW, FusedLion, FusedSGD])
@pytest.mark.parametrize("lr", [0.1, 1e-3])
def test_a_schedule_that_ends_a_rounding_below_zero_trains_on_as_with_zero(make: type[FusedAdamW], lr: float) -> None:
    p = Parameter(torch.ones(4))
    optimizer = make([p], lr=lr)
    scheduler = LinearLR(optimizer, start_factor=1 / 3, end_factor=0.0, total_iters=4)
    for _ in range(6):
        p.grad = torch.ones(4)
        optimizer.step()
        scheduler.step()
    assert -1e-12 < optimizer.param_groups[0]["lr"] < 0.0
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    resumed = make([q := Parameter(before.clone())], lr=lr)
    resumed.load_state_dict(optimizer.state_dict())
    q.grad = torch.ones(4)
    resumed.step()
    assert torch.equal(q, before)


@pytest.mark.parametrize("lr", [-0.1, -1e-9, float("nan"), torch.tensor(-0.1)])
def test_a_negative_rate_that_no_rounding_makes_is_refused(lr: float | torch.Tensor) -> None:
    optimizer = FusedAdamW([p := Parameter(torch.ones(4))])
    p.grad = torch.ones(4)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"lr=.*must be a finite number >= 0"):
        optimizer.step()


@pytest.mark.parametrize("by_default", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_groups_that_share_one_tensor_are_scheduled_apart(by_default: bool, count: int) -> None:
    lr = torch.tensor(1.0)
    own: dict[str, Any] = {} if by_default else {"lr": lr}
    groups: list[dict[str, Any]] = [{"params": [Parameter(torch.ones(2))], **own} for _ in range(count)]
    optimizer = FusedAdamW(groups, lr=lr if by_default else 1e-3)
    factors = [0.5, 0.1, 0.25][:count]
    LambdaLR(optimizer, [partial(max, factor) for factor in factors])  # of epoch 0 that is the factor
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(factors)
    assert float(lr) == 1.0


def test_a_tensor_that_one_group_has_alone_stays_the_users() -> None:
    lr = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [
        {"params": [Parameter(torch.ones(2))], "lr": lr},
        {"params": [Parameter(torch.ones(3))]},
    ]
    optimizer = FusedAdamW(groups)
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_compiled_step_gives_equal_bits_and_nothing_is_compiled_for_it() -> None:
    torch._dynamo.reset()
    weights = [Parameter(torch.linspace(-1, 1, 280).view(2, 140)) for _ in range(2)]
    ours, compiled = (FusedAdamW([w], lr=0.1, state="int8") for w in weights)
    counter = CompileCounter()
    step = torch.compile(compiled.step, backend=counter)
    for number in range(4):
        for optimizer, w in zip((ours, compiled), weights, strict=True):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            w.grad = w.detach().clone() * (number + 1)
        ours.step()
        step()
    assert torch.equal(*weights)
    assert counter.frame_count == 0


def test_a_compiled_training_step_with_a_scheduler_compiles_the_model_alone() -> None:
    torch._dynamo.reset()
    weights = [Parameter(torch.linspace(-1, 1, 280).view(2, 140)) for _ in range(2)]
    pair = [FusedAdamW([w], lr=0.1, state="int8") for w in weights]
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in pair]
    counter = CompileCounter()

    def train(optimizer: FusedAdamW, w: Parameter) -> None:
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()

    compiled = torch.compile(lambda: train(pair[1], weights[1]), backend=counter)
    for number in range(5):
        train(pair[0], weights[0])
        compiled()
        for scheduler in schedulers:
            scheduler.step()
        if number == 1:
            seen = counter.frame_count
    assert torch.equal(*weights)
    assert counter.frame_count == seen
