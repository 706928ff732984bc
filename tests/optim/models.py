"""Parameters, gradients and bits that the tests of optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# A matrix of more than one block per row, one with a short block, a vector, a scalar.
SHAPES: dict[str, tuple[int, ...]] = {"wide": (3, 200), "deep.kernel": (4, 3, 5), "bias": (7,), "gain": ()}


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Parameter]:
    """Named parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def give_gradients(params: dict[str, Parameter], step: int, scale: float = 1.0) -> None:
    """Gradients that depend on name, shape and step alone."""
    for number, (name, p) in enumerate(sorted(params.items())):
        generator = torch.Generator().manual_seed(1000 * step + number)
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        assert p.grad.shape == SHAPES.get(name, p.shape)


def train(optimizer: torch.optim.Optimizer, params: dict[str, Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def bits(optimizer: torch.optim.Optimizer, params: dict[str, Parameter]) -> dict[str, Tensor]:
    """Copies of every parameter and every tensor of its state, by name."""
    found = {}
    for name, p in params.items():
        found[name] = p.detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name}:{key}"] = value.clone() if isinstance(value, Tensor) else torch.tensor(value)
    return found


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal keys, dtypes, shapes and bits; NaN equals the same NaN."""
    return sorted(a) == sorted(b) and all(_same(a[key], b[key]) for key in a)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def as_version_3(saved: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a state dict in place as version 3 wrote it, which listed what the states are; returns the lists."""
    words = [bytes(held.pop("format").tolist()).decode().split() for _, held in sorted(saved["state"].items())]
    kinds = zip(("rules", "formats", "masters"), zip(*(entry[1:] for entry in words), strict=True), strict=True)
    saved["lightning_fuse"] = {"format_version": 3, **{kind: list(column) for kind, column in kinds}}
    return saved["lightning_fuse"]


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of every group, tensors as numbers."""
    plain: Callable[[Any], Any] = lambda v: v.item() if isinstance(v, Tensor) else v  # noqa: E731
    return [{k: plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def updates(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Takes one step and returns what was subtracted from each parameter, float64."""
    before = [p.detach().double().clone() for p in params]
    optimizer.step()
    return [b - p.detach().double() for b, p in zip(before, params, strict=True)]
