"""Lion: the sign of an interpolated momentum. Chen et al., 2023, https://arxiv.org/abs/2302.06675.

In this order, float32, each operation rounded once::

    c = m * beta1 + g * (1 - beta1)
    p = p * (1 - lr * weight_decay)
    p = p - sign(c) * lr                   sign(0) = 0, and a NaN stays one
    m = m * beta2 + g * (1 - beta2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.rules.rule import Moment, UpdateRule


class Lion(UpdateRule):
    """The rule ``lion``; see the module for its formula."""

    name = "lion"
    moments = (Moment("exp_avg", signed=True),)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, betas and weight_decay. The step plays no part."""
        beta1, beta2, *_ = group["betas"]
        return {
            "beta1": beta1,
            "one_minus_beta1": 1.0 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1.0 - beta2,
            "lr": group["lr"],
            "decay": 1.0 - group["lr"] * group["weight_decay"],
        }

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``."""
        (exp_avg,) = moments
        direction = exp_avg * scalars["beta1"] + grad * scalars["one_minus_beta1"]
        param = param * scalars["decay"] - sign(direction) * scalars["lr"]
        return param, (exp_avg * scalars["beta2"] + grad * scalars["one_minus_beta2"],)


def sign(x: Tensor) -> Tensor:
    """1, -1, or 0 for either zero; a NaN stays a NaN, where ``torch.sign`` makes a zero of it.

    Args:
        x: float32, any shape.

    Returns:
        float32, the shape of ``x``.
    """
    one = torch.ones_like(x)
    return torch.where(x > 0, one, torch.where(x < 0, -one, x))
