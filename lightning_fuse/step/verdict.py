"""The verdict on a step's gradients: their norm and whether all are finite, from one reduction.

Gradients may still carry the loss scale; the norm is in unscaled units. Nothing here reads a value from the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.kernels import sum_of_squares
from lightning_fuse.optim.group_names import parameter_names

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm
_GRAD, _IS_SPARSE, _PARAMS = attrgetter("grad"), attrgetter("is_sparse"), itemgetter("params")


@dataclass(frozen=True)
class Verdict:
    """What one reduction over the gradients tells.

    Attributes:
        grad_norm: float64, 0-dimensional: global L2 norm, unscaled.
        found_inf: float32, 0-dimensional: 1 where a gradient is not finite, else 0.
    """

    grad_norm: Tensor
    found_inf: Tensor

    def clip_coef(self, max_norm: float) -> Tensor:
        """What gradients are multiplied by so that their norm is at most ``max_norm``.

        Args:
            max_norm: The largest norm wanted, > 0.

        Returns:
            float32, 0-dimensional, in (0, 1]; 0 or NaN where a gradient is not finite.
        """
        return (max_norm / (self.grad_norm + CLIP_EPS)).clamp(max=1.0).to(torch.float32)


def judge(grads: Sequence[Tensor], factor: Tensor) -> Verdict:
    """Judges the gradients of one optimizer.

    Args:
        grads: At least one; as they are in memory.
        factor: float32, 0-dimensional: what unscales them.

    Returns:
        The verdict, on the gradients' device.
    """
    total = squares(grads)
    norm = total.sqrt() * factor.to(torch.float64)
    return Verdict(norm, (~torch.isfinite(total)).to(torch.float32))


def squares(grads: Sequence[Tensor]) -> Tensor:
    """The one reduction over gradients: the sum of their squares, float64, 0-dimensional, on their device."""
    return sum_of_squares(grads)


@cache
def one(device: torch.device) -> Tensor:
    """A factor of 1: float32, 0-dimensional; the same tensor every time, so not to be written to."""
    return torch.ones((), dtype=torch.float32, device=device)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a framework's wrapper (Fabric's, Lightning's), or the optimizer itself."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that the optimizer's parameters have, in the order of its groups; of sparse ones their values."""
    params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    found = [grad for grad in map(_GRAD, params) if grad is not None]
    if any(map(_IS_SPARSE, found)):
        return [_values(p) if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
    return found


def first_nonfinite(optimizer: Optimizer, names: Mapping[Tensor, str] | None = None) -> str:
    """Says which parameter has the first gradient that is not finite. Reads the device: for error messages only.

    Args:
        optimizer: Whose gradients to look at.
        names: Names of parameters where the optimizer was given none.

    Returns:
        For instance "layer.0.weight (3 of 40 elements)", or "no single parameter" where only their sum overflowed.
    """
    for p, name in _named(optimizer, names or {}):
        if p.grad is not None:
            bad = int((~torch.isfinite(p.grad)).sum())
            if bad:
                return f"{name} ({bad} of {p.grad.numel()} elements)"
    return "no single parameter"


def _values(p: Tensor) -> Tensor:
    """The values of a sparse gradient, in place; an index that is there twice counts once, with the sum."""
    if not p.grad.is_coalesced():  # type: ignore[union-attr]
        p.grad = p.grad.coalesce()  # type: ignore[union-attr]
    return p.grad._values()  # type: ignore[union-attr]


def _named(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterable[tuple[Tensor, str]]:
    for index, group in enumerate(optimizer.param_groups):
        for p, name in zip(group["params"], parameter_names(group, index), strict=True):
            yield p, names.get(p, name)


def check_max_norm(max_norm: float) -> float:
    """Refuses a clipping norm that cannot be one.

    Args:
        max_norm: The largest norm wanted.

    Returns:
        The same number.

    Raises:
        ValueError: It is not a finite number > 0.
    """
    if not (math.isfinite(max_norm) and max_norm > 0):
        raise ValueError(f"clip norm {max_norm!r}: must be a finite number > 0, or None for no clipping")
    return float(max_norm)
