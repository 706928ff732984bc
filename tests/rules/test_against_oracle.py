"""Every rule, through its public class, against float64 NumPy over a thousand steps; and what must not pass.

Two groups with settings of their own; gradients that are zero, missing, or of a skipped step; an element whose gradient
stays zero for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fuse.optim import FusedAdam, FusedAdamW
from lightning_fuse.rules import RULES
from tests.oracles import Array, StandStill
from tests.rules.rule_table import CASES, WITH_TESTS_OF_THEIR_OWN, RuleCase
from tests.tolerances import WORKED_EXAMPLE, rule_bound

SHAPES = ((7, 5), (11,), (), (2, 3, 4))
STEPS = 1000
SIZE = 4.0  # no |theta| grows beyond it; asserted
RATIO = 8.0  # |g| < 5 and sqrt(v_hat) stays above 0.6 where g is not small; asserted as |update| within it

Gradients = list[list[Array | None]]


def second_group(settings: dict[str, Any]) -> dict[str, Any]:
    return {"lr": settings["lr"] * 1.5, "weight_decay": settings["weight_decay"] / 4}


@cache
def start() -> list[Array]:
    noise = np.random.default_rng(1)
    return [noise.uniform(-2, 2, shape).astype(np.float32).astype(np.float64) for shape in SHAPES]


@cache
def stream(steps: int) -> tuple[Gradients, list[bool]]:
    """Gradients, some of them missing or zero, and whether each step is applied."""
    noise = np.random.default_rng(2)
    gradients: Gradients = []
    for step in range(steps):
        row: list[Array | None] = []
        for shape in SHAPES:
            g = noise.normal(0.0, 1.0, shape).clip(-4, 4).astype(np.float32).astype(np.float64)
            chance = noise.random()
            if 100 <= step < 400 and shape:
                g[0] = 0.0
            row.append(None if chance < 0.1 else 0.0 * g if chance < 0.2 else g)
        gradients.append(row)
    return gradients, [noise.random() > 0.05 for _ in range(steps)]


def run_ours(case: RuleCase, steps: int, skip: bool = True) -> list[Array]:
    params = [torch.nn.Parameter(torch.tensor(p, dtype=torch.float32)) for p in start()]
    optimizer = case.make([{"params": params[:2]}, {"params": params[2:], **second_group(case.settings)}])
    gradients, applied = stream(steps)
    for row, keep in zip(gradients, applied, strict=True):
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else torch.tensor(g, dtype=torch.float32)
            if skip and not keep and p.grad is not None:
                p.grad += torch.inf
        optimizer.found_inf = torch.tensor(0.0 if keep or not skip else 1.0)
        optimizer.step()
    return [p.detach().double().numpy() for p in params]


def run_oracle(case: RuleCase, steps: int, control: type | None = None, **changes: Any) -> list[Array]:
    halves = []
    for part, group in ((slice(0, 2), {}), (slice(2, 4), second_group({**case.settings, **changes}))):
        values = start()[part]
        oracle = case.make_oracle(values, **{**changes, **group}) if control is None else control(values)
        gradients, applied = stream(steps)
        for row, keep in zip(gradients, applied, strict=True):
            oracle.step(row[part], applied=keep)
        halves += oracle.values
    return halves


def bound(case: RuleCase, steps: int) -> float:
    return rule_bound({**case.settings, "lr": second_group(case.settings)["lr"]}, steps, SIZE, RATIO)


def distance(a: Sequence[Array], b: Sequence[Array]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


@cache
def ours(rule: str) -> list[Array]:
    return run_ours(CASES[rule], STEPS)


def test_every_rule_has_a_case() -> None:
    assert set(CASES) <= set(RULES) <= set(CASES) | WITH_TESTS_OF_THEIR_OWN
    for name, case in CASES.items():
        optimizer = case.make([torch.nn.Parameter(torch.zeros(2))])
        assert optimizer._rule(optimizer.param_groups[0]) is RULES[name]


@pytest.mark.parametrize("rule", CASES)
def test_it_follows_the_oracle(rule: str) -> None:
    found, true = ours(rule), run_oracle(CASES[rule], STEPS)
    assert max(float(np.abs(p).max()) for p in true) < SIZE
    assert distance(true, start()) > 0.1
    assert distance(found, true) <= bound(CASES[rule], STEPS)


@pytest.mark.parametrize("rule", CASES)
def test_an_optimizer_that_does_nothing_fails(rule: str) -> None:
    assert distance(ours(rule), run_oracle(CASES[rule], STEPS, control=StandStill)) > 10 * bound(CASES[rule], STEPS)


@pytest.mark.parametrize("rule", CASES)
def test_every_other_rule_fails(rule: str) -> None:
    for other, case in CASES.items():
        if other != rule:
            off = distance(ours(rule), run_oracle(case, STEPS))
            assert off > 10 * bound(CASES[rule], STEPS), f"{other} passes for {rule}: {off}"


def changed(case: RuleCase) -> list[dict[str, Any]]:
    """Every hyperparameter off by a little."""
    settings = {**case.settings, **case.switches}
    changes: list[dict[str, Any]] = [{"lr": settings["lr"] * 1.02}, {"weight_decay": settings["weight_decay"] * 1.05}]
    if case.is_adam:
        beta1, beta2 = settings["betas"]
        changes += [{"betas": (beta1 - 0.02, beta2)}, {"betas": (beta1, beta2 - 0.005)}, {"eps": settings["eps"] * 1.5}]
    elif settings["momentum"]:
        changes.append({"momentum": settings["momentum"] - 0.01})
        changes += [{"dampening": settings["dampening"] + 0.02}] if not settings["nesterov"] else []
    return changes


@pytest.mark.parametrize(
    ("rule", "change"),
    [(rule, change) for rule, case in CASES.items() for change in changed(case)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_hyperparameter_that_is_a_little_off_fails(rule: str, change: dict[str, Any]) -> None:
    assert distance(ours(rule), run_oracle(CASES[rule], STEPS, **change)) > bound(CASES[rule], STEPS)


@pytest.mark.parametrize("rule", CASES)
def test_counting_a_skipped_step_fails(rule: str) -> None:
    """The same gradients with nothing skipped end elsewhere: the stream's skips are seen."""
    unskipped = run_ours(CASES[rule], STEPS, skip=False)
    assert distance(unskipped, run_oracle(CASES[rule], STEPS)) > bound(CASES[rule], STEPS)


@pytest.mark.parametrize("rule", CASES)
def test_it_follows_torch(rule: str) -> None:
    """Two hundred steps beside torch.optim's plain loop: both within the bound of exact arithmetic."""
    case, steps = CASES[rule], 200
    params = [torch.nn.Parameter(torch.tensor(p, dtype=torch.float32)) for p in start()]
    theirs = case.make_torch([{"params": params[:2]}, {"params": params[2:], **second_group(case.settings)}])
    for row in stream(steps)[0]:
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else torch.tensor(g, dtype=torch.float32)
        theirs.step()
    expected = [p.detach().double().numpy() for p in params]
    assert distance(run_ours(case, steps, skip=False), expected) <= 2 * bound(case, steps)
    for control in {case.twin, *CASES} - {rule}:
        if CASES[control].is_adam == case.is_adam:
            assert distance(run_ours(CASES[control], steps, skip=False), expected) > 2 * bound(case, steps), control
    assert distance(start(), expected) > 2 * bound(case, steps)


def one_step(optimizer_class: type, **settings: Any) -> torch.Tensor:
    theta = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    theta.grad = torch.tensor([0.1, -0.2])
    optimizer_class([theta], lr=0.01, **settings).step()
    return theta.detach()


def test_the_worked_example() -> None:
    decoupled = one_step(FusedAdamW, weight_decay=0.1)
    coupled = one_step(FusedAdam, weight_decay=0.1)
    # Decay first, 1 * (1 - 0.001) = 0.999, then Adam's first step, lr against the gradient's sign.
    torch.testing.assert_close(decoupled, torch.tensor([0.989, -1.988]), rtol=0, atol=WORKED_EXAMPLE)
    # Coupled: the decay has the gradient's sign and vanishes in the first normalised step.
    torch.testing.assert_close(coupled, torch.tensor([0.99, -1.99]), rtol=0, atol=WORKED_EXAMPLE)
    assert (decoupled - coupled).abs().min() > 100 * WORKED_EXAMPLE


@pytest.mark.parametrize("rule", CASES)
def test_maximizing_is_minimizing_the_negative(rule: str) -> None:
    case = CASES[rule]
    up, down = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5])) for _ in range(2))
    ascent, descent = case.make([up], maximize=True), case.make([down])
    for step in range(5):
        g = torch.tensor([0.1, -0.2, 0.0]) * (step + 1)
        up.grad, down.grad = g, -g
        ascent.step()
        descent.step()
    assert torch.equal(up, down)
