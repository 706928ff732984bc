"""Lion against its oracle, update by update; what must not pass for it; case 39."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedLion
from lightning_fuse.rules import RULES
from lightning_fuse.rules.lion import sign
from tests.oracles import AdamOracle, SGDOracle, StandStill
from tests.oracles_layerwise import LionOracle
from tests.rules.lockstep import Update, excess, record

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.2}


@cache
def ours(**changes: Any) -> list[Update]:
    return record(lambda params: FusedLion(params, **{**SETTINGS, **changes}), SETTINGS)


def test_it_follows_the_oracle() -> None:
    assert excess(ours(), LionOracle, SETTINGS) <= 1
    assert excess(ours(maximize=True), LionOracle, {**SETTINGS, "maximize": True}) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"coupled": True},
        {"maximize": True},
        {"lr": SETTINGS["lr"] * 1.01},
        {"weight_decay": SETTINGS["weight_decay"] * 1.01},
        {"betas": (0.8, 0.951)},
        {"betas": (0.801, 0.95)},
        {"betas": (0.95, 0.8)},
    ],
    ids=str,
)
def test_another_setting_fails(change: dict[str, Any]) -> None:
    assert excess(ours(), LionOracle, {**SETTINGS, **change}) > 10


@pytest.mark.parametrize("other", [AdamOracle, SGDOracle, StandStill])
def test_another_rule_fails(other: type) -> None:
    adam = {"eps": 1e-8, "amsgrad": False, "decoupled": True}
    assert excess(ours(), other, {**SETTINGS, **adam, "momentum": 0.8, "dampening": 0.2, "nesterov": False}) > 10


def test_decay_comes_before_the_step() -> None:
    """Case 39: 1 * (1 - 0.1 * 0.5) + 0.1. Decay coupled into the gradient would give 0.9, decay afterwards 1.045."""
    p = Parameter(torch.ones(1))
    optimizer = FusedLion([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.full((1,), -1e-3)
    optimizer.step()
    assert p.item() == pytest.approx(1.05, abs=2**-23)


def test_every_element_moves_by_lr_whatever_its_gradient() -> None:
    p = Parameter(torch.zeros(5))
    optimizer = FusedLion([p], lr=0.25)
    p.grad = torch.tensor([1e-30, -3e38, 2.0, 0.0, -0.0])
    optimizer.step()
    assert p.tolist() == [-0.25, 0.25, -0.25, 0.0, 0.0]


def test_a_nan_stays_one() -> None:
    signs = sign(torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]))
    assert signs.nan_to_num(7.0).tolist() == [7.0, 1.0, -1.0, 0.0]
    p = Parameter(torch.ones(1, 4))
    optimizer = FusedLion([p], lr=0.25, state="int8")
    p.grad = torch.tensor([[torch.nan, 1.0, 1.0, 1.0]])
    optimizer.step()
    assert p.isnan().tolist() == [[True, False, False, False]]


def test_it_keeps_one_moment() -> None:
    p = Parameter(torch.ones(4, 256))
    assert FusedLion([p]).state_bytes() == {"step": 8, "exp_avg": 4096}
    assert FusedLion([p], state="int8").state_bytes() == {"step": 8, "exp_avg.codes": 1024, "exp_avg.scale": 32}


def test_defaults_are_the_papers() -> None:
    defaults = FusedLion([Parameter(torch.ones(1))]).defaults
    assert defaults == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    optimizer = FusedLion([Parameter(torch.ones(1))])
    assert optimizer._rule(optimizer.param_groups[0]) is RULES["lion"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": -1.0}, "lr=-1"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        ({"betas": 0.9}, "betas=0.9"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"state": "int9"}, "int9"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedLion([Parameter(torch.ones(2, 2))], **settings)
    with pytest.raises(TypeError, match="FusedLion has no argument 'eps'"):
        FusedLion([Parameter(torch.ones(1))], eps=1e-8)
