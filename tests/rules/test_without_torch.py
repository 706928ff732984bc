"""Laws that every optimizer obeys, for the rules that torch has no twin of: Lion, LARS, LAMB.

A saved run goes on with the same bits, small state trains like float32 state, and rules are pure.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn import functional as F

from lightning_fuse import FusedLAMB, FusedLARS, FusedLion
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels.reference import float32_scalars
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.rules import RULES
from tests.optim.models import bits, give_gradients, parameters, same_bits, train
from tests.tolerances import SMALL_STATE_LOSS

SETTINGS: dict[str, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    "lion": (FusedLion, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.2}),
    "lars": (FusedLARS, {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.2, "trust_coefficient": 0.02}),
    "lars_nesterov": (FusedLARS, {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.2, "nesterov": True}),
    "lamb": (FusedLAMB, {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.02, "weight_decay": 0.2}),
}
EVERY_RULE = pytest.mark.parametrize("rule", SETTINGS)


def make(rule: str, params: Any, **changes: Any) -> FusedOptimizer:
    cls, settings = SETTINGS[rule]
    return cls(params, **{**settings, **changes})


def combinations() -> Iterator[tuple[str, str, torch.dtype, str]]:
    for rule in SETTINGS:
        for state in STATE_FORMATS:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for name, master in MASTERS.items():
                    if dtype in master.dtypes:
                        yield rule, state, dtype, name


@pytest.mark.parametrize(
    ("rule", "state", "dtype", "master"), list(combinations()), ids=lambda value: str(value).removeprefix("torch.")
)
def test_train_6_is_train_3_save_load_train_3(rule: str, state: str, dtype: torch.dtype, master: str) -> None:
    settings = {"state": state, "master": master}
    params = parameters(dtype)
    optimizer = make(rule, params.items(), **settings)
    train(optimizer, params, range(3))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    weights = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    resumed = make(rule, weights.items(), **settings, lr=0.375)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert same_bits(bits(resumed, weights), bits(optimizer, params))
    fresh = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    forgetful = make(rule, fresh.items(), **settings)
    for one, its in ((optimizer, params), (resumed, weights), (forgetful, fresh)):
        train(one, its, range(3, 6))
    assert same_bits(bits(resumed, weights), bits(optimizer, params))
    assert not same_bits(bits(forgetful, fresh), bits(optimizer, params))


@EVERY_RULE
def test_a_missing_gradient_and_a_skip_change_no_bit(rule: str) -> None:
    params = parameters()
    optimizer = make(rule, params.items(), state="int8")
    train(optimizer, params, range(2))
    before = bits(optimizer, params)
    give_gradients(params, 2)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert same_bits(bits(optimizer, params), before)
    optimizer.found_inf = torch.tensor(0.0)
    params["wide"].grad = None
    optimizer.step()
    after = bits(optimizer, params)
    assert all(same_bits({key: before[key]}, {key: after[key]}) for key in before if key.startswith("wide"))
    assert not torch.equal(before["deep.kernel"], after["deep.kernel"])


@EVERY_RULE
def test_a_first_step_that_overflowed_leaves_no_trace(rule: str) -> None:
    """Case 11: [inf, g, g] equals [g, g]."""
    params, twins = parameters(), parameters()
    optimizer, other = make(rule, params.items()), make(rule, twins.items())
    for p in params.values():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    optimizer.found_inf = None
    train(optimizer, params, range(2))
    train(other, twins, range(2))
    assert same_bits(bits(optimizer, params), bits(other, twins))


@EVERY_RULE
def test_maximizing_is_minimizing_the_negative(rule: str) -> None:
    up, down = parameters(), parameters()
    ascent, descent = make(rule, up.items(), maximize=True), make(rule, down.items())
    for step in range(4):
        give_gradients(up, step)
        for name, p in down.items():
            p.grad = -up[name].grad
        ascent.step()
        descent.step()
    assert same_bits(bits(ascent, up), bits(descent, down))


@EVERY_RULE
def test_a_factor_on_the_gradient_is_a_smaller_gradient(rule: str) -> None:
    """The contract's factor reaches norms and moments alike; a power of two is exact."""
    params, scaled = parameters(), parameters()
    optimizer, other = make(rule, params.items()), make(rule, scaled.items())
    for step in range(3):
        give_gradients(params, step)
        give_gradients(scaled, step, scale=1024.0)
        optimizer.step()
        other.grad_factor = torch.tensor(2.0**-10)
        other.step()
    assert same_bits(bits(optimizer, params), bits(other, scaled))


@EVERY_RULE
def test_rules_are_pure(rule: str) -> None:
    one = RULES[rule]
    cls, settings = SETTINGS[rule]
    group = {**cls([Parameter(torch.ones(1, 1))]).defaults, **settings}
    p, g, *moments = (torch.randn(5, 3).abs() for _ in range(2 + len(one.moments)))
    before = [t.clone() for t in (p, g, *moments)]
    scalars = {**float32_scalars(one, group, 3), "trust": 0.5}
    first, second = (one.update(p, g, moments, dict(scalars)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip((p, g, *moments), before, strict=True))


TRAINING: dict[str, dict[str, Any]] = {
    "lion": {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "lars": {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3, "trust_coefficient": 0.02},
    "lars_nesterov": {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3, "trust_coefficient": 0.02},
    "lamb": {"lr": 3e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01},
}


@cache
def descent(rule: str, state: str, rate: float = 1.0) -> float:
    """The last losses of a small net in nats, from ln 8 = 2.08; every run sees the same batches."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    settings = TRAINING[rule]
    optimizer = make(rule, net.named_parameters(), **{**settings, "lr": settings["lr"] * rate}, state=state)
    teacher = torch.randn(32, 8)
    losses = []
    for _ in range(50):
        x = torch.randn(64, 32)
        loss = F.cross_entropy(net(x), (x @ teacher).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@EVERY_RULE
@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_small_state_trains_like_float32_state(rule: str, state: str) -> None:
    assert descent(rule, "fp32") < 1.0
    assert abs(descent(rule, state) - descent(rule, "fp32")) < SMALL_STATE_LOSS


@EVERY_RULE
def test_another_learning_rate_does_not(rule: str) -> None:
    """The control of the test above."""
    assert abs(descent(rule, "fp32", rate=2.0) - descent(rule, "fp32")) > 10 * SMALL_STATE_LOSS
