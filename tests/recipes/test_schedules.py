"""Schedules: the factor at the first, the last and the turning updates, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_fuse.recipes import schedules


def factors(factory: Callable[..., dict[str, Any]], total: int, **settings: Any) -> list[float]:
    """The lr of every update, for a full lr of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    config = factory(optimizer, total, **settings)
    assert config["interval"] == "step"
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        config["scheduler"].step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_constant() -> None:
    assert factors(schedules.constant, 4) == [1.0] * 5
    assert factors(schedules.constant, 4, warmup=0.5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_warmup_cosine_rises_turns_and_ends_at_the_final_factor() -> None:
    seen = factors(schedules.warmup_cosine, 100, warmup=0.1, final=0.2)
    assert seen[0] == pytest.approx(1 / 11)
    assert seen[10] == max(seen) == 1.0
    assert seen[55] == pytest.approx(0.6)  # half way down
    assert seen[100] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(seen[10:]))


def test_warmup_linear_is_straight() -> None:
    seen = factors(schedules.warmup_linear, 10, warmup=0.0, final=0.5)
    assert seen == pytest.approx([1 - 0.05 * update for update in range(11)])


def test_plateau_waits_for_validations() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    config = schedules.plateau(optimizer, 10, monitor="val/loss", every=5, patience=0)
    assert (config["monitor"], config["interval"], config["frequency"]) == ("val/loss", "step", 5)
    for loss, lr in ((2.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
        config["scheduler"].step(loss)
        assert optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("factory", [schedules.constant, schedules.warmup_cosine, schedules.warmup_linear])
@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_a_warmup_outside_its_range_is_refused(factory: Callable[..., Any], warmup: float) -> None:
    with pytest.raises(ValueError, match=r"schedule\.warmup"):
        factors(factory, 4, warmup=warmup)


@pytest.mark.parametrize("factory", [schedules.warmup_cosine, schedules.warmup_linear])
def test_a_final_factor_outside_its_range_is_refused(factory: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"schedule\.final"):
        factors(factory, 4, final=1.5)
