"""Our state in torch.optim's hands, and torch's in ours: the same training within the rounding of float32 (case 31)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedLAMB, FusedLARS, FusedLion
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.optim import FusedOptimizer, to_torch_state
from lightning_fuse.rules import RULES
from tests.optim.models import groups_of, parameters, train
from tests.rules.rule_table import CASES
from tests.tolerances import rule_bound

# |theta| of the shared parameters and |g|, |m| / (sqrt(v) + eps) of their gradients stay below these.
SIZE, RATIO = 8.0, 12.0


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def copies(params: dict[str, Parameter]) -> dict[str, Parameter]:
    return {name: Parameter(p.detach().clone()) for name, p in params.items()}


def in_torch(rule: str, ours: FusedOptimizer, params: dict[str, Parameter]) -> tuple[Any, dict[str, Parameter]]:
    """torch's optimizer with other numbers than ours, which has loaded our export."""
    weights = copies(params)
    theirs = CASES[rule].make_torch(list(weights.items()), lr=0.5)
    theirs.load_state_dict(through_a_file(to_torch_state(ours)))
    return theirs, weights


def farthest(a: dict[str, Parameter], b: dict[str, Parameter]) -> float:
    return max(float((a[name].detach().double() - b[name].detach().double()).abs().max()) for name in a)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("rule", CASES)
def test_torch_goes_on_with_our_training(rule: str, fused: bool) -> None:
    case, params = CASES[rule], parameters()
    ours = case.make(params.items())
    train(ours, params, range(5))
    theirs, weights = in_torch(rule, ours, params)
    if fused:
        theirs = type(theirs)(list(weights.items()), fused=True)
        theirs.load_state_dict(through_a_file(to_torch_state(ours)))
        for group in theirs.param_groups:
            group["fused"] = True
    train(ours, params, range(5, 15))
    train(theirs, weights, range(5, 15))
    # Both are float32 rules, each within the bound of exact arithmetic.
    bound = 2 * rule_bound(case.settings, 10, SIZE, RATIO)
    assert farthest(params, weights) <= bound
    assert all(p.abs().max() < SIZE for p in params.values())
    assert groups_of(theirs)[0]["lr"] == case.settings["lr"]


@pytest.mark.parametrize("rule", [rule for rule in CASES if RULES[rule].moments])
def test_without_the_state_torch_ends_elsewhere(rule: str) -> None:
    """The control: the bound tells a continued run from one that starts its moments anew."""
    case, params = CASES[rule], parameters()
    ours = case.make(params.items())
    train(ours, params, range(5))
    weights = copies(params)
    fresh = case.make_torch(list(weights.items()))
    train(ours, params, range(5, 15))
    train(fresh, weights, range(5, 15))
    assert farthest(params, weights) > 10 * 2 * rule_bound(case.settings, 10, SIZE, RATIO)


@pytest.mark.parametrize("state", STATE_FORMATS)
@pytest.mark.parametrize("rule", ["adamw", "adam_amsgrad", "sgd_momentum"])
def test_the_next_update_of_any_format_is_the_same(rule: str, state: str) -> None:
    """After it our moments are rounded again and torch's are not."""
    case, params = CASES[rule], parameters()
    ours = case.make(params.items(), state=state)
    train(ours, params, range(5))
    theirs, weights = in_torch(rule, ours, params)
    train(ours, params, range(5, 6))
    train(theirs, weights, range(5, 6))
    assert farthest(params, weights) <= 2 * rule_bound(case.settings, 1, SIZE, RATIO)


@pytest.mark.parametrize("rule", CASES)
def test_there_and_back_keeps_every_bit(rule: str) -> None:
    case, params = CASES[rule], parameters()
    ours = case.make(params.items())
    train(ours, params, range(3))
    theirs, weights = in_torch(rule, ours, params)
    back = case.make(copies(weights).items(), lr=0.5)
    back.load_state_dict(theirs.state_dict())
    for p, mine in zip(back.param_groups[0]["params"], params.values(), strict=True):
        for moment in RULES[rule].moments:
            assert torch.equal(back.state[p][moment.name], ours.state[mine][moment.name])
            if case.is_adam:
                assert torch.equal(back.state[p]["step"], ours.state[mine]["step"])
    assert groups_of(back) == groups_of(ours)


def test_what_torch_gets_is_torchs_own() -> None:
    """The same keys, kinds and dtypes as torch writes itself; nothing of ours."""
    params, weights = parameters(), parameters()
    ours, theirs = FusedAdamW(params.items(), state="int8"), torch.optim.AdamW(list(weights.items()))
    train(ours, params, range(2))
    train(theirs, weights, range(2))
    mine, its = to_torch_state(ours), theirs.state_dict()
    assert set(mine) == set(its)
    assert set(mine["param_groups"][0]) == set(its["param_groups"][0])
    for index, held in its["state"].items():
        assert {key: (value.dtype, value.shape) for key, value in held.items()} == {
            key: (value.dtype, value.shape) for key, value in mine["state"][index].items()
        }


def test_an_export_is_not_shared_with_the_optimizer() -> None:
    params = parameters()
    ours = FusedAdamW(params.items())
    train(ours, params, range(2))
    exported = to_torch_state(ours)
    before = exported["state"][0]["exp_avg"].clone()
    train(ours, params, range(2, 4))
    assert torch.equal(exported["state"][0]["exp_avg"], before)


def test_a_parameter_never_stepped_has_no_state_in_torch() -> None:
    params = parameters()
    ours = FusedAdamW(params.items())
    params["wide"].grad = torch.ones(3, 200)
    ours.step()
    assert list(to_torch_state(ours)["state"]) == [0]


@pytest.mark.parametrize("cls", [FusedLion, FusedLARS, FusedLAMB])
def test_a_rule_that_torch_lacks_is_refused(cls: type[FusedOptimizer]) -> None:
    params = parameters()
    with pytest.raises(ValueError, match=r"torch.optim has no optimizer of the rule .*; it has adamw, adam, sgd"):
        to_torch_state(cls(params.items(), lr=0.1))
