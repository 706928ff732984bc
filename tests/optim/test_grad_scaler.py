"""A plain loop with torch's GradScaler: unscaling in the kernel, skips, and what they leave alone (cases 11 and 12)."""

from __future__ import annotations

import pytest
import torch
from torch.amp import GradScaler
from torch.nn import Parameter

from lightning_fuse import FusedAdamW
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.rules import RULES
from tests.optim.models import bits, give_gradients, parameters, same_bits, train
from tests.rules.rule_table import CASES

EVERY_RULE = pytest.mark.parametrize("rule", CASES)
SCALE = 1024.0


def scaler_of(scale: float = SCALE) -> GradScaler:
    """A scaler that has seen a loss, as after ``scaler.scale(loss)``."""
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    scaler.scale(torch.ones(1))
    return scaler


def scaled(params: dict[str, Parameter], step: int, scale: float = SCALE) -> None:
    give_gradients(params, step, 1.0)
    for p in params.values():
        p.grad.mul_(scale)


def state_words(rule: str) -> list[str]:
    return list(STATE_FORMATS) if RULES[rule].moments else ["fp32"]


@pytest.mark.parametrize(("rule", "state"), [(r, s) for r in CASES for s in state_words(r)])
def test_three_ways_to_unscale_give_the_same_bits(rule: str, state: str) -> None:
    """Case 12: step, unscale and step, unscale and a clip that does nothing; and the run without any scale."""

    def run(way: str) -> tuple[FusedOptimizer, dict[str, Parameter]]:
        params = parameters()
        optimizer = CASES[rule].make(params.items(), state=state)
        scaler = scaler_of()
        for step in range(4):
            if way == "plain":
                give_gradients(params, step)
                optimizer.step()
                continue
            scaled(params, step)
            if way != "step":
                scaler.unscale_(optimizer)
            if way == "clip":
                torch.nn.utils.clip_grad_norm_(params.values(), 1e9)
            scaler.step(optimizer)
            scaler.update()
        return optimizer, params

    expected = bits(*run("plain"))
    for way in ("step", "unscale", "clip"):
        assert same_bits(bits(*run(way)), expected), way


def test_a_scale_that_is_ignored_is_seen() -> None:
    params, others = parameters(), parameters()
    optimizer, plain = FusedAdamW(params.items(), eps=1.0), FusedAdamW(others.items(), eps=1.0)
    scaled(params, 0)
    optimizer.step()
    train(plain, others, range(1))
    assert not same_bits(bits(optimizer, params), bits(plain, others))


@pytest.mark.parametrize(("rule", "state"), [(r, s) for r in CASES for s in state_words(r)])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale"])
def test_an_overflow_changes_no_bit(rule: str, state: str, unscale: bool) -> None:
    params = parameters(torch.bfloat16)
    optimizer = CASES[rule].make(params.items(), state=state, master="split")
    train(optimizer, params, range(2))
    before, scaler = bits(optimizer, params), scaler_of()
    scaled(params, 2)
    params["bias"].grad[3] = torch.inf
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(bits(optimizer, params), before)
    assert scaler.get_scale() == SCALE / 2


@EVERY_RULE
def test_an_overflow_in_the_first_step_is_as_if_it_had_not_been(rule: str) -> None:
    """Case 11: [inf, g, g] equals [g, g], the step counters too."""

    def run(overflow: bool) -> dict[str, torch.Tensor]:
        params = parameters()
        optimizer = CASES[rule].make(params.items())
        scaler = scaler_of()
        if overflow:
            scaled(params, 0)
            params["wide"].grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        for step in range(1, 3):
            scaled(params, step, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        assert all(state["step"] == 2 for state in optimizer.state.values())
        return bits(optimizer, params)

    assert same_bits(run(True), run(False))


def test_fp16_gradients_are_unscaled_in_float32() -> None:
    """A gradient below fp16's range after unscaling still arrives: torch's unscale_ would make it zero."""
    p = Parameter(torch.ones(8, dtype=torch.float16))
    optimizer = FusedAdamW([p], lr=0.5, weight_decay=0.0, eps=0.0)
    scaler = scaler_of(2.0**16)
    p.grad = torch.full((8,), 2.0**-14, dtype=torch.float16)  # 2^-30 unscaled; fp16 ends at 2^-24
    scaler.step(optimizer)
    assert torch.equal(p, torch.full((8,), 0.5, dtype=torch.float16))
    assert torch.equal(p.grad, torch.full((8,), 2.0**-14, dtype=torch.float16))


def test_the_scalers_attributes_do_not_stay() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items())
    scaler = scaler_of()
    scaled(params, 0)
    scaler.step(optimizer)
    assert getattr(optimizer, "found_inf", None) is None
    assert getattr(optimizer, "grad_scale", None) is None


def test_two_optimizers_share_a_scaler() -> None:
    """Only the one with the overflow is skipped."""
    a, b = {"a": Parameter(torch.zeros(2))}, {"b": Parameter(torch.zeros(2))}
    first, second = FusedAdamW(a.items(), lr=0.25), FusedAdamW(b.items(), lr=0.25)
    scaler = scaler_of()
    a["a"].grad, b["b"].grad = torch.tensor([torch.inf, 1.0]), torch.full((2,), SCALE)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert torch.equal(a["a"], torch.zeros(2))
    torch.testing.assert_close(b["b"].detach(), torch.full((2,), -0.25))
    assert scaler.get_scale() == SCALE / 2
