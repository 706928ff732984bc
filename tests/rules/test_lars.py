"""LARS against its oracle, update by update; what must not pass for it; norms of zero (case 38); vectors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedLARS, FusedSGD
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.rules import RULES
from tests.oracles import SGDOracle, StandStill
from tests.oracles_layerwise import LARSOracle, LionOracle
from tests.rules.lockstep import Update, excess, record

SETTINGS: dict[str, Any] = {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.2, "trust_coefficient": 0.02, "eps": 0.01}
FORMS = pytest.mark.parametrize("nesterov", [False, True])
EVERY_STATE = pytest.mark.parametrize("state", STATE_FORMATS)


@cache
def ours(**changes: Any) -> list[Update]:
    return record(lambda params: FusedLARS(params, **{**SETTINGS, **changes}), SETTINGS)


def stepped(weight: Any, grad: Any, steps: int = 1, **settings: Any) -> torch.Tensor:
    """The weight after some updates with the same gradient."""
    p = Parameter(torch.as_tensor(weight, dtype=torch.float32).clone())
    optimizer = FusedLARS([("w", p)], **{"lr": 0.1, **settings})
    for _ in range(steps):
        p.grad = torch.as_tensor(grad, dtype=torch.float32).expand_as(p).clone()
        optimizer.step()
    return p.detach()


@FORMS
def test_it_follows_the_oracle(nesterov: bool) -> None:
    settings = {**SETTINGS, "nesterov": nesterov}
    assert excess(ours(nesterov=nesterov), LARSOracle, settings) <= 1
    assert excess(ours(nesterov=nesterov, maximize=True), LARSOracle, {**settings, "maximize": True}) <= 1


@FORMS
@pytest.mark.parametrize(
    "change",
    [
        {"everywhere": True},
        {"decoupled": True},
        {"maximize": True},
        {"lr": SETTINGS["lr"] * 1.01},
        {"momentum": SETTINGS["momentum"] + 0.001},
        {"weight_decay": SETTINGS["weight_decay"] * 1.01},
        {"trust_coefficient": SETTINGS["trust_coefficient"] * 1.01},
        {"eps": SETTINGS["eps"] * 2},
    ],
    ids=str,
)
def test_another_setting_fails(nesterov: bool, change: dict[str, Any]) -> None:
    assert excess(ours(nesterov=nesterov), LARSOracle, {**SETTINGS, "nesterov": nesterov, **change}) > 10


@FORMS
@pytest.mark.parametrize("other", [SGDOracle, LionOracle, StandStill])
def test_another_rule_fails(nesterov: bool, other: type) -> None:
    settings = {**SETTINGS, "nesterov": nesterov, "dampening": 0.0, "betas": (0.8, 0.95)}
    assert excess(ours(nesterov=nesterov), other, settings) > 10
    assert excess(ours(nesterov=nesterov), LARSOracle, {**settings, "nesterov": not nesterov}) > 10


def test_the_worked_example() -> None:
    """|p| = 5, |g| = 10, decay 0.5: trust = 0.1 * 5 / (10 + 2.5) = 0.04, step = 0.5 * 0.04 * (g + p / 2)."""
    found = stepped([[3.0, 4.0]], [[6.0, -8.0]], lr=0.5, weight_decay=0.5, trust_coefficient=0.1, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([[3 - 0.02 * 7.5, 4 + 0.02 * 6.0]]), rtol=2**-22, atol=0)


def test_the_step_does_not_depend_on_the_size_of_the_gradient() -> None:
    small, large = (stepped(torch.ones(4, 8), size, trust_coefficient=0.1, eps=0.0) for size in (1e-2, 1e6))
    torch.testing.assert_close(small, large, rtol=2**-22, atol=0)
    assert (small < 1).all()


@EVERY_STATE
def test_a_weight_of_zero_is_not_stuck(state: str) -> None:
    """Case 38: trust 1 where the weight is zero, so it leaves zero by lr * gradient; and goes on from there."""
    first = stepped(torch.zeros(2, 150), 1.0, state=state, weight_decay=0.5)
    assert torch.equal(first, torch.full((2, 150), -0.1))
    later = stepped(torch.zeros(2, 150), 1.0, steps=10, state=state, weight_decay=0.5)
    assert later.isfinite().all()
    assert (later < first).all()


@EVERY_STATE
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_gradient_of_zero_is_no_nan(state: str, eps: float) -> None:
    """Case 38: trust 1, so the weight decays by lr * weight_decay; both zero moves nothing."""
    decayed = stepped(torch.ones(2, 150), 0.0, state=state, weight_decay=0.5, eps=eps)
    torch.testing.assert_close(decayed, torch.full((2, 150), 0.95), rtol=2**-22, atol=0)
    nothing = torch.zeros(2, 150)
    assert torch.equal(stepped(nothing, 0.0, steps=3, state=state, weight_decay=0.5, eps=eps), nothing)


def test_the_trust_ratio_is_clamped() -> None:
    """A weight of norm 2 over a gradient of norm 2e-9: trust 1e6 without the limit of 100."""
    moved = 1.0 - stepped(torch.ones(2, 2), 1e-9, lr=1e6, trust_coefficient=1e-3, eps=0.0).double()
    torch.testing.assert_close(moved, torch.full((2, 2), 1e6 * 100 * 1e-9).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_norms_are_over_the_whole_parameter(layout: str) -> None:
    """Rows of very different size, more elements than one chunk of a sum holds: one ratio for all of them."""
    weight = torch.randn(300, 16, 4, 4) * torch.logspace(-3, 3, 300).view(-1, 1, 1, 1)
    grad = torch.randn_like(weight) * torch.logspace(2, -2, 300).view(-1, 1, 1, 1)
    expected = 0.02 * weight.double().norm() / (grad.double().norm() + 0.01)
    if layout == "channels_last":
        weight = weight.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        weight, grad = weight.permute(3, 1, 2, 0), grad.permute(3, 1, 2, 0)
    p = Parameter(weight)
    before = p.detach().clone()
    optimizer = FusedLARS([p], lr=1.0, trust_coefficient=0.02, eps=0.01)
    p.grad = grad
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[p]["momentum_buffer"].double(), expected * grad.double(), rtol=2**-22, atol=0
    )
    torch.testing.assert_close(p.detach().double(), before.double() - expected * grad.double(), rtol=1e-6, atol=1e-6)


@FORMS
def test_vectors_and_scalars_take_plain_momentum(nesterov: bool) -> None:
    """Bit for bit FusedSGD; the matrix beside them does not."""
    shapes = {"weight": (3, 4), "bias": (4,), "gain": ()}
    torch.manual_seed(3)
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    runs, words = [], []
    for make in (FusedLARS, FusedSGD):
        params = {name: Parameter(value.clone()) for name, value in start.items()}
        optimizer = make(params.items(), lr=0.1, momentum=0.8, weight_decay=0.2, nesterov=nesterov)
        generator = torch.Generator().manual_seed(4)
        for _ in range(5):
            for p in params.values():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        runs.append(params)
        words = words or [spec.rule.name for spec in optimizer.specs()]
    assert torch.equal(runs[0]["bias"], runs[1]["bias"])
    assert torch.equal(runs[0]["gain"], runs[1]["gain"])
    assert not torch.allclose(runs[0]["weight"], runs[1]["weight"])
    word = "sgd_nesterov" if nesterov else "sgd_momentum"
    assert words == ["lars_nesterov" if nesterov else "lars", word, word]


def test_the_form_may_change_in_training() -> None:
    p, b = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    optimizer = FusedLARS([("w", p), ("b", b)])
    p.grad, b.grad = torch.ones(2, 2), torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["nesterov"] = True
    optimizer.step()
    assert [spec.rule.name for spec in optimizer.specs()] == ["lars_nesterov", "sgd_nesterov"]
    assert optimizer.state[p]["step"].item() == 2


def test_it_keeps_one_moment() -> None:
    params = {"w": Parameter(torch.ones(4, 256)), "b": Parameter(torch.ones(4))}
    assert FusedLARS(params.items()).state_bytes() == {"step": 16, "momentum_buffer": 4112}
    small = FusedLARS(params.items(), state="int8").state_bytes()
    assert small == {"step": 16, "momentum_buffer.codes": 1024, "momentum_buffer.scale": 32, "momentum_buffer": 16}


def test_the_rules_are_the_registered_ones() -> None:
    for nesterov, word in ((False, "lars"), (True, "lars_nesterov")):
        optimizer = FusedLARS([Parameter(torch.ones(1, 1))], nesterov=nesterov)
        assert optimizer._rule(optimizer.param_groups[0]) is RULES[word]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": float("inf")}, "lr=inf"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True.*needs momentum > 0"),
        ({"trust_coefficient": 0.0}, "trust_coefficient=0: no layer would ever move"),
        ({"trust_coefficient": float("nan")}, "trust_coefficient=nan"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": "much"}, "weight_decay='much'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedLARS([Parameter(torch.ones(2, 2))], **settings)


def test_dampening_is_refused() -> None:
    """The SGD rules of vectors have one, LARS has not."""
    with pytest.raises(TypeError, match="FusedLARS has no argument 'dampening'"):
        FusedLARS([Parameter(torch.ones(2, 2))], dampening=0.5)
    with pytest.raises(ValueError, match=r"dampening=0\.5: LARS has none"):
        FusedLARS([{"params": [Parameter(torch.ones(2))], "dampening": 0.5}])


def test_torchs_sgd_state_loads_and_what_sgd_does_not_know_stays() -> None:
    p, q = Parameter(torch.ones(2, 3)), Parameter(torch.ones(2, 3))
    theirs = torch.optim.SGD([p], lr=0.25, momentum=0.5)
    p.grad = torch.ones(2, 3)
    theirs.step()
    optimizer = FusedLARS([q], trust_coefficient=0.125, state="bf16")
    optimizer.load_state_dict(theirs.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["trust_coefficient"]) == (0.25, 0.5, 0.125)
    assert torch.equal(optimizer.state[q]["momentum_buffer"].float(), torch.ones(2, 3))
