"""Case 41 in blocks of other shapes: a few small gradients, many, and all sizes between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.optim import FusedOptimizer

LIVE, AFTER, LR = 300, 100, 1e-3


def spread(decades: float, offset: float = 0.0) -> Tensor:
    """32 rows of 128, sizes even on a logarithmic scale; one element is 1."""
    sizes = 10 ** (offset - decades * torch.rand(32, 128))
    sizes[0, 0] = 1.0
    return sizes


SHAPES = {
    "two": torch.tensor([[1.0, 1e-4]]),
    "five": torch.tensor([[1.0, 1e-2, 1e-3, 1e-4, 1e-5]]),
    "half": torch.cat([torch.ones(1), torch.full((64,), 0.1), torch.full((63,), 1e-3)])[None],
    "a fifth": torch.cat([torch.ones(1), torch.full((102,), 0.3), torch.full((25,), 1e-3)])[None],
    "fifteen": torch.cat([torch.ones(113), torch.full((15,), 1e-3)])[None],
    "at the end of the middle levels": torch.cat([torch.ones(1), torch.full((127,), 0.0055)])[None],
    "two blocks": torch.cat([torch.ones(1), torch.logspace(-2, -5, 255)])[None],
    "three decades": spread(3.0),
    "three decades below 1e-2": spread(3.0, -2.0),
}


def adamw(w: torch.nn.Parameter) -> FusedOptimizer:
    return FusedAdamW([("w", w)], lr=LR, weight_decay=0.0, state="int8")


def extremes(
    sizes: Tensor, make: Callable[[torch.nn.Parameter], FusedOptimizer] = adamw
) -> tuple[float, float, float, float]:
    """Largest live update, largest after the stop, smallest and largest for sizes of 1e-3 and more; in lr."""
    w = torch.nn.Parameter(torch.zeros_like(sizes))
    optimizer = make(w)
    live, stopped, lowest, highest = 0.0, 0.0, 9.0, 0.0
    for step in range(LIVE + AFTER):
        w.grad = sizes.clone() if step < LIVE else torch.where(sizes < 1.0, 0.0, sizes)
        before = w.detach().clone()
        optimizer.step()
        moved = (before - w.detach()) / LR
        if step < LIVE:
            middle = moved[sizes >= 1e-3]
            live, lowest = max(live, moved.max().item()), min(lowest, middle.min().item())
            highest = max(highest, middle.max().item())
        else:
            stopped = max(stopped, moved[sizes < 1.0].abs().max().item())
    return live, stopped, lowest, highest


@pytest.mark.parametrize("name", SHAPES)
def test_small_gradients_beside_large_ones(name: str) -> None:
    live, stopped, lowest, highest = extremes(SHAPES[name])
    assert live <= 1.5
    assert stopped <= 1.0
    assert 0.85 <= lowest <= highest <= 1.15


def test_another_rule_fails() -> None:
    """SGD moves by the gradient's size; a parameter that never moves fails, too."""
    _, _, lowest, _ = extremes(SHAPES["half"], lambda w: FusedSGD([("w", w)], lr=LR, momentum=0.9, state="int8"))
    assert lowest < 0.85
    assert extremes(SHAPES["half"], lambda w: FusedAdamW([("w", w)], lr=0.0, state="int8"))[2] < 0.85


@pytest.mark.parametrize("size", [1e-10, 1e-12])
@pytest.mark.parametrize("late", [False, True], ids=["always", "once"])
@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_a_gradient_far_below_eps_moves_nothing(kernel: str, late: bool, size: float) -> None:
    """eps = 1e-8 keeps its updates small. Its second moment stands at the block's last level: its first must not."""
    w = torch.nn.Parameter(torch.zeros(1, 128))
    largest = {}
    for state in ("fp32", "int8"):
        optimizer, found = FusedAdamW([("w", w)], lr=1.0, weight_decay=0.0, state=state, kernel=kernel), 0.0
        for step in range(1, 231):
            gradient = torch.randn(1, 128, generator=torch.Generator().manual_seed(step))
            gradient[0, 5] = size if not late or step == 200 else 0.0
            w.data.zero_()
            w.grad = gradient
            optimizer.step()
            found = max(found, w[0, 5].abs().item())
        largest[state] = found
    assert 0 < largest["fp32"] < 0.02
    assert largest["int8"] <= 1.1 * largest["fp32"]
