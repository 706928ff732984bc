"""AdEMAMix against its oracle, update by update; its schedules; what must not pass for it."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedAdEMAMix
from lightning_fuse.rules import RULES
from lightning_fuse.rules.ademamix import decay_of, scheduled_alpha, scheduled_beta3, time_constant
from tests.oracles import AdamOracle, AdEMAMixOracle, SGDOracle, StandStill
from tests.rules.lockstep import Update, excess, record

SETTINGS: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.8, 0.98, 0.995),
    "alpha": 3.0,
    "t_alpha": 90,
    "t_beta3": 110,
    "eps": 0.02,
    "weight_decay": 0.2,
}


@cache
def ours(**changes: Any) -> list[Update]:
    return record(lambda params: FusedAdEMAMix(params, **{**SETTINGS, **changes}), SETTINGS)


@pytest.mark.parametrize(
    "change", [{}, {"maximize": True}, {"t_alpha": None}, {"t_beta3": None}, {"t_beta3": 1}], ids=str
)
def test_it_follows_the_oracle(change: dict[str, Any]) -> None:
    assert excess(ours(**change), AdEMAMixOracle, {**SETTINGS, **change}) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"maximize": True},
        {"lr": SETTINGS["lr"] * 1.01},
        {"weight_decay": SETTINGS["weight_decay"] * 1.01},
        {"betas": (0.801, 0.98, 0.995)},
        {"betas": (0.8, 0.981, 0.995)},
        {"betas": (0.8, 0.98, 0.9951)},
        {"alpha": 3.01},
        {"t_alpha": 91},
        {"t_alpha": None},
        {"t_beta3": 111},
        {"t_beta3": None},
        {"eps": 0.0201},
    ],
    ids=str,
)
def test_another_setting_fails(change: dict[str, Any]) -> None:
    assert excess(ours(), AdEMAMixOracle, {**SETTINGS, **change}) > 10


@pytest.mark.parametrize("other", [AdamOracle, SGDOracle, StandStill])
def test_another_rule_fails(other: type) -> None:
    settings = {**SETTINGS, "betas": SETTINGS["betas"][:2], "amsgrad": False, "decoupled": True}
    assert excess(ours(), other, {**settings, "momentum": 0.8, "dampening": 0.2, "nesterov": False}) > 10


@pytest.mark.parametrize("beta", [0.0, 1e-12, 0.1, 0.5, 0.9, 0.999, 0.9999, 1 - 2.0**-30])
def test_time_constants_are_those_of_a_library(beta: float) -> None:
    """Relative: a decay of 1 - 2^-30 has a time constant of a billion updates."""
    if beta:
        assert time_constant(beta) == pytest.approx(-1.0 / math.log(beta), rel=1e-14 + 2.0**-50 / (1 - beta))
    assert decay_of(time_constant(beta)) == pytest.approx(beta, rel=1e-12, abs=1e-13)


def test_schedules_start_with_adamw_and_end_on_time() -> None:
    group = {**SETTINGS, "betas": (0.9, 0.999, 0.9999), "t_alpha": 1000, "t_beta3": 1000}
    assert scheduled_alpha(group, 1) == pytest.approx(0.003, rel=1e-15)
    # Time constants by hand: 9.4912 + (9999.5 - 9.4912) / 1000 = 19.4812, and exp(-1 / 19.4812) = 0.94996.
    assert scheduled_beta3(group, 1) == pytest.approx(0.94996, abs=1e-5)
    steps = [scheduled_beta3(group, t) for t in range(1, 1002)]
    assert steps == sorted(steps)
    assert steps[998] < steps[999] == steps[1000] == 0.9999
    assert [scheduled_alpha(group, t) for t in (500, 1000, 5000)] == [1.5, 3.0, 3.0]


def test_a_slow_average_of_weight_zero_is_adamw() -> None:
    weights = np.random.default_rng(5).normal(size=(4, 130)).astype(np.float32)
    mixed, plain = (Parameter(torch.tensor(weights)) for _ in range(2))
    common = {"lr": 0.01, "weight_decay": 0.3, "eps": 1e-3}
    one = FusedAdEMAMix([mixed], betas=(0.8, 0.98, 0.99), alpha=0.0, **common)
    two = FusedAdamW([plain], betas=(0.8, 0.98), **common)
    for step in range(20):
        mixed.grad = torch.sin(torch.arange(520.0) * (step + 1)).view(4, 130)
        plain.grad = mixed.grad.clone()
        one.step()
        two.step()
    # (m / c) / d * lr against m / d * (lr / c): four roundings of an update of at most 1.1 lr, for 20 updates.
    assert (mixed - plain).abs().max() <= 20 * 4 * 2.0**-23 * (weights.max() + 1)
    assert not torch.equal(mixed, torch.tensor(weights))


@pytest.mark.parametrize("state", ["bf16", "int8", "int8_bf16"])
def test_narrow_state_trains_like_float32(state: str) -> None:
    """A noisy quadratic: the distance that narrow moments make is small beside the way that was gone."""

    def train(fmt: str) -> torch.Tensor:
        noise = torch.Generator().manual_seed(3)
        p = Parameter(torch.linspace(-1, 1, 512).view(2, 256).clone())
        optimizer = FusedAdEMAMix(
            [p], lr=2e-3, betas=(0.9, 0.99, 0.999), alpha=4.0, t_alpha=200, t_beta3=200, state=fmt
        )
        for _ in range(300):
            p.grad = (p.detach() - 0.5) + 0.1 * torch.randn(p.shape, generator=noise)
            optimizer.step()
        return p.detach()

    exact, narrow = train("fp32"), train(state)
    way = (exact - torch.linspace(-1, 1, 512).view(2, 256)).norm()
    assert 0 < (narrow - exact).norm() < 0.02 * way


def test_it_keeps_three_moments() -> None:
    p = Parameter(torch.ones(4, 256))
    optimizer = FusedAdEMAMix([p], state="int8")
    assert {key for key in optimizer.state_bytes() if key != "step"} == {
        f"{moment}.{part}" for moment in ("exp_avg", "exp_avg_slow", "exp_avg_sq") for part in ("codes", "scale")
    }
    assert [moment.name for moment in RULES["ademamix"].moments] == ["exp_avg", "exp_avg_slow", "exp_avg_sq"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": float("nan")}, "lr=nan"),
        ({"alpha": -1.0}, "alpha=-1"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"betas": (0.9, 0.999)}, "must be 3 numbers"),
        ({"betas": (0.9, 0.999, 1.0)}, r"betas\[2\]=1.0"),
        ({"t_alpha": 0}, "t_alpha=0"),
        ({"t_alpha": 2.5}, "t_alpha=2.5"),
        ({"t_beta3": -3}, "t_beta3=-3"),
        ({"t_beta3": True}, "t_beta3=True"),
        ({"eps": -1e-8}, "eps=-1e-08"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdEMAMix([Parameter(torch.ones(2, 2))], **settings)
