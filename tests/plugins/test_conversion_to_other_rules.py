"""Fuse(optimizer="lion_fused" | "lars_fused" | "lamb_fused"): what a change of rule takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from lightning_fuse import FusedLAMB, FusedLARS, FusedLion
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.plugins.optimizer_conversion import FUSED, OptimizerSpec, convert_optimizer

OTHERS = {"lion_fused": FusedLion, "lars_fused": FusedLARS, "lamb_fused": FusedLAMB}


def parameters() -> dict[str, Parameter]:
    return {"weight": Parameter(torch.ones(2, 3)), "bias": Parameter(torch.ones(3))}


def take_over(make: Callable[..., Optimizer], word: str, steps: int = 0, **settings: Any) -> FusedOptimizer:
    params = parameters()
    old = make(
        [{"params": [params["weight"]], "lr": 0.25}, {"params": [params["bias"]], "weight_decay": 0.0}], **settings
    )
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.ones_like(p)
        old.step()
    made = convert_optimizer(old, OptimizerSpec(word), {p: name for name, p in params.items()}).fused
    assert isinstance(made, OTHERS[word])
    for p in params.values():
        p.grad = torch.ones_like(p)
    before = {name: p.detach().clone() for name, p in params.items()}
    made.step()
    assert all((p < before[name]).all() for name, p in params.items())
    return made


def test_the_words_are_known() -> None:
    assert {word: FUSED[word] for word in OTHERS} == OTHERS


@pytest.mark.parametrize("word", OTHERS)
@pytest.mark.parametrize("make", [AdamW, SGD])
def test_lr_and_decay_are_taken_over(make: type[Optimizer], word: str) -> None:
    groups = take_over(make, word, lr=0.125, weight_decay=0.0625).param_groups
    assert [group["lr"] for group in groups] == [0.25, 0.125]
    assert [group["weight_decay"] for group in groups] == [0.0625, 0.0]
    assert [group["param_names"] for group in groups] == [["weight"], ["bias"]]


def test_what_both_rules_have_is_taken_over() -> None:
    (lion, _), (lamb, _) = (
        take_over(AdamW, word, lr=0.1, betas=(0.5, 0.75), eps=0.25).param_groups
        for word in ("lion_fused", "lamb_fused")
    )
    assert lion["betas"] == lamb["betas"] == (0.5, 0.75)
    assert lamb["eps"] == 0.25
    lars = take_over(SGD, "lars_fused", lr=0.1, momentum=0.5, nesterov=True).param_groups[0]
    assert (lars["momentum"], lars["nesterov"], lars["trust_coefficient"]) == (0.5, True, 0.001)


@pytest.mark.parametrize(
    ("make", "word", "settings", "key"),
    [
        (AdamW, "lion_fused", {}, "exp_avg"),
        (AdamW, "lamb_fused", {}, "exp_avg_sq"),
        (SGD, "lars_fused", {"momentum": 0.5}, "momentum_buffer"),
    ],
)
def test_moments_of_the_same_name_go_along(make: type[Optimizer], word: str, settings: dict, key: str) -> None:
    made, fresh = (take_over(make, word, steps, lr=0.1, **settings) for steps in (2, 0))
    values = [next(iter(optimizer.state.values()))[key] for optimizer in (made, fresh)]
    assert not torch.equal(*values)


def test_a_dampening_that_lars_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dampening=0\.5: LARS has none"):
        take_over(SGD, "lars_fused", lr=0.1, momentum=0.5, dampening=0.5)
