"""LAMB against its oracle, update by update; what must not pass for it; norms of zero (case 38)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedLAMB
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.rules import RULES
from tests.oracles import AdamOracle, StandStill
from tests.oracles_layerwise import LAMBOracle, LionOracle
from tests.rules.lockstep import Update, excess, record

SETTINGS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.02, "weight_decay": 0.2}
EVERY_STATE = pytest.mark.parametrize("state", STATE_FORMATS)


@cache
def ours(**changes: Any) -> list[Update]:
    return record(lambda params: FusedLAMB(params, **{**SETTINGS, **changes}), SETTINGS)


def stepped(weight: Any, grad: Any, steps: int = 1, **settings: Any) -> torch.Tensor:
    """The weight after some updates with the same gradient."""
    p = Parameter(torch.as_tensor(weight, dtype=torch.float32).clone())
    optimizer = FusedLAMB([("w", p)], **{"lr": 0.1, **settings})
    for _ in range(steps):
        p.grad = torch.as_tensor(grad, dtype=torch.float32).expand_as(p).clone()
        optimizer.step()
    return p.detach()


def test_it_follows_the_oracle() -> None:
    assert excess(ours(), LAMBOracle, SETTINGS) <= 1
    assert excess(ours(maximize=True), LAMBOracle, {**SETTINGS, "maximize": True}) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"trusted": False},
        {"coupled": True},
        {"maximize": True},
        {"lr": SETTINGS["lr"] * 1.01},
        {"betas": (0.801, 0.95)},
        {"betas": (0.8, 0.951)},
        {"eps": SETTINGS["eps"] * 1.1},
        {"weight_decay": SETTINGS["weight_decay"] * 1.01},
    ],
    ids=str,
)
def test_another_setting_fails(change: dict[str, Any]) -> None:
    assert excess(ours(), LAMBOracle, {**SETTINGS, **change}) > 10


@pytest.mark.parametrize("other", [AdamOracle, LionOracle, StandStill])
def test_another_rule_fails(other: type) -> None:
    assert excess(ours(), other, {**SETTINGS, "amsgrad": False, "decoupled": True}) > 10


def test_a_step_is_lr_times_the_norm_of_the_weight() -> None:
    """Whatever the gradient's size; all of one sign here, so that every element moves by lr times itself."""
    for size in (1e-3, 1.0, 1e6):
        found = stepped(torch.full((4, 8), 3.0), size, lr=0.25, eps=0.0, weight_decay=0.0)
        torch.testing.assert_close(found, torch.full((4, 8), 2.25), rtol=2**-21, atol=0)


def test_the_worked_example() -> None:
    """|p| = 5, first step u = (1, -1) + 0.5 p = (2.5, 1): p - 0.1 * 5 / |u| * u."""
    found = stepped([[3.0, 4.0]], [[6.0, -8.0]], eps=0.0, weight_decay=0.5)
    rate = 0.5 / (2.5**2 + 1) ** 0.5
    torch.testing.assert_close(found, torch.tensor([[3 - rate * 2.5, 4 - rate * 1.0]]), rtol=2**-21, atol=0)


@EVERY_STATE
def test_a_weight_of_zero_is_not_stuck(state: str) -> None:
    """Case 38: trust 1 where the weight is zero, so its first step is Adam's; and it goes on from there."""
    first = stepped(torch.zeros(2, 150), 1.0, state=state)
    torch.testing.assert_close(first, torch.full((2, 150), -0.1), rtol=1e-5, atol=0)
    later = stepped(torch.zeros(2, 150), 1.0, steps=10, state=state)
    assert later.isfinite().all()
    assert (later < first).all()


@EVERY_STATE
def test_a_gradient_of_zero_is_no_nan(state: str) -> None:
    """Case 38: without decay there is nothing to subtract, with it u = decay * p, and the weight loses lr of itself."""
    assert torch.equal(stepped(torch.ones(2, 150), 0.0, steps=3, state=state, weight_decay=0.0), torch.ones(2, 150))
    decayed = stepped(torch.ones(2, 150), 0.0, state=state, weight_decay=0.5)
    torch.testing.assert_close(decayed, torch.full((2, 150), 0.9), rtol=2**-21, atol=0)
    assert torch.equal(stepped(torch.zeros(2, 150), 0.0, steps=3, state=state), torch.zeros(2, 150))


def test_norms_are_over_the_whole_parameter() -> None:
    """Rows of very different size, more elements than one chunk of a sum holds: one ratio, |p| / |u|, for all."""
    weight = torch.randn(600, 128) * torch.logspace(-2, 2, 600).view(-1, 1)
    grad = torch.randn_like(weight)
    found = {}
    for make in (FusedLAMB, FusedAdamW):
        p = Parameter(weight.clone())
        p.grad = grad.clone()
        make([p], lr=1.0, eps=1e-6, weight_decay=0.25).step()
        found[make] = (weight - p.detach()).double()
    adam = found[FusedAdamW]  # with lr 1, AdamW's step is u
    expected = adam * (weight.double().norm() / adam.norm())
    # Adam's step was found as a difference of weights: half a unit of 2^9 at most, times a ratio below 32.
    torch.testing.assert_close(found[FusedLAMB], expected, rtol=1e-5, atol=32 * 2.0**-15)
    by_row = adam * (weight.double().norm(dim=1) / adam.norm(dim=1)).view(-1, 1)
    assert (found[FusedLAMB] - by_row).abs().max() > 1


def test_defaults_and_rule() -> None:
    optimizer = FusedLAMB([Parameter(torch.ones(1))])
    expected = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "maximize": False}
    assert optimizer.defaults == expected
    assert optimizer._rule(optimizer.param_groups[0]) is RULES["lamb"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
        ({"eps": -1.0}, "eps=-1"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedLAMB([Parameter(torch.ones(2, 2))], **settings)
    with pytest.raises(TypeError, match="FusedLAMB has no argument 'amsgrad'"):
        FusedLAMB([Parameter(torch.ones(1))], amsgrad=True)
