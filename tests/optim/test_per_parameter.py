"""Every parameter is stepped by itself: its own counter, its own formats, no matter which call or list it is in."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.rules import RULES
from tests.optim.models import bits, give_gradients, parameters, same_bits, train, updates
from tests.rules.rule_table import CASES
from tests.tolerances import UNIT_STEP

EVERY_RULE = pytest.mark.parametrize("rule", CASES)
RULE_AND_STATE = [(r, s) for r in CASES for s in (STATE_FORMATS if RULES[r].moments else ["fp32"])]


@pytest.mark.parametrize(("rule", "state"), RULE_AND_STATE)
def test_several_optimizers_give_the_same_bits_as_one(rule: str, state: str) -> None:
    """Case 36."""
    params, split = parameters(), parameters()
    one = CASES[rule].make(params.items(), state=state)
    names = list(split)
    # A bare vector under int8 is fp32 whichever list it is in; names keep formats the same.
    several = [CASES[rule].make([(n, split[n])], state=state) for n in names]
    for step in range(5):
        train(one, params, [step])
        give_gradients(split, step)
        for optimizer in reversed(several):
            optimizer.step()
    found = {}
    for name, optimizer in zip(names, several, strict=True):
        found.update(bits(optimizer, {name: split[name]}))
    assert same_bits(found, bits(one, params))


@EVERY_RULE
def test_the_order_of_parameters_does_not_matter(rule: str) -> None:
    params, turned = parameters(), parameters()
    one = CASES[rule].make(params.items())
    other = CASES[rule].make(list(turned.items())[::-1])
    train(one, params, range(4))
    train(other, turned, range(4))
    assert same_bits(bits(one, params), bits(other, turned))


@pytest.mark.parametrize(("rule", "state"), RULE_AND_STATE)
def test_a_missing_gradient_is_not_a_zero_gradient(rule: str, state: str) -> None:
    """Missing on odd steps: as if only the even steps had been; nothing of it moves meanwhile."""
    params, alone = parameters(), parameters()
    optimizer = CASES[rule].make(params.items(), state=state)
    even = CASES[rule].make(alone.items(), state=state)
    for step in range(6):
        give_gradients(params, step)
        if step % 2:
            params["wide"].grad = None
            before = bits(optimizer, {"wide": params["wide"]})
            optimizer.step()
            assert same_bits(bits(optimizer, {"wide": params["wide"]}), before)
        else:
            optimizer.step()
            train(even, alone, [step])
    assert same_bits(bits(optimizer, {"wide": params["wide"]}), bits(even, {"wide": alone["wide"]}))
    assert optimizer.state[params["wide"]]["step"].item() == 3
    assert optimizer.state[params["bias"]]["step"].item() == 6


def test_a_zero_gradient_does_move() -> None:
    """The control of the test above."""
    p = Parameter(torch.ones(3))
    optimizer = FusedAdamW([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.ones(3)
    optimizer.step()
    p.grad = torch.zeros(3)
    assert (updates([p], optimizer)[0] > 0).all()


@pytest.mark.parametrize("state", STATE_FORMATS)
@pytest.mark.parametrize("how", ["added", "first gradient"])
def test_a_late_parameter_takes_a_first_step_of_one_lr(state: str, how: str) -> None:
    """Case 36: its bias correction starts at 1 at step 5, whether its group or its gradient came late."""
    early, late = Parameter(torch.zeros(2, 130)), Parameter(torch.zeros(2, 130))
    groups = [("early", early)] if how == "added" else [("early", early), ("late", late)]
    optimizer = FusedAdamW(groups, lr=1e-3, weight_decay=0.0, state=state)
    for _ in range(4):
        early.grad = torch.randn(2, 130)
        optimizer.step()
    if how == "added":
        optimizer.add_param_group({"params": [("late", late)]})
    early.grad, late.grad = torch.randn(2, 130), torch.randn(2, 130) * 100
    moved = updates([late], optimizer)[0] / 1e-3
    assert (moved.abs() - 1).abs().max() < UNIT_STEP
    assert torch.equal(moved.sign(), late.grad.double().sign())


def test_formats_are_chosen_per_parameter() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items(), state=[("bias", "bf16"), ("deep.*", "int8_bf16"), ("*i*", "fp32"), "int8"])
    assert optimizer.formats() == {"wide": "fp32", "deep.kernel": "int8_bf16", "bias": "bf16", "gain": "fp32"}
    by_group = FusedAdamW(
        [{"params": [("wide", params["wide"])], "state": "bf16"}, {"params": [("bias", params["bias"])]}], state="int8"
    )
    assert by_group.formats() == {"wide": "bf16", "bias": "fp32"}


@pytest.mark.parametrize("state", ["int8", "int8_bf16"])
def test_vectors_stay_fp32_unless_they_are_named(state: str) -> None:
    params = parameters()
    assert FusedAdamW(params.items(), state=state).formats()["bias"] == "fp32"
    named = FusedAdamW(params.items(), state=[("bias", state), "fp32"])
    assert named.formats() == {"wide": "fp32", "deep.kernel": "fp32", "bias": state, "gain": "fp32"}
    train(named, params, range(2))
    assert named.state[params["bias"]]["exp_avg.codes"].shape == (7,)


def test_mixed_formats_equal_each_format_by_itself() -> None:
    params = parameters()
    mixed = FusedAdamW(params.items(), state=[("deep.*", "bf16"), "int8"])
    train(mixed, params, range(4))
    for state, name in (("int8", "wide"), ("bf16", "deep.kernel")):
        alone = parameters()
        optimizer = FusedAdamW(alone.items(), state=state)
        train(optimizer, alone, range(4))
        assert same_bits(bits(mixed, {name: params[name]}), bits(optimizer, {name: alone[name]}))


def test_parameters_of_several_dtypes_in_one_optimizer() -> None:
    a, b = Parameter(torch.ones(2, 130)), Parameter(torch.ones(2, 130, dtype=torch.bfloat16))
    optimizer = FusedAdamW([("a", a), ("b", b)], lr=1e-3, state="int8", master="split")
    for _ in range(3):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
    assert "remainder" not in optimizer.state[a]
    joined = (b.detach().view(torch.int16).int() << 16) + optimizer.state[b]["remainder"].int()
    assert torch.equal(joined.view(torch.float32), a.detach())
