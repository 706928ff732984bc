"""LARS: momentum SGD whose gradient is rescaled layer by layer. You et al., 2017, https://arxiv.org/abs/1708.03888.

``|x|`` is the L2 norm over the whole, unsharded parameter::

    trust = min(100, trust_coefficient * |p| / (|g| + weight_decay * |p| + eps))     1 where |p| or |g| is 0
    g = (g + p * weight_decay) * trust
    b = b * momentum + g
    p = p - b * lr                         momentum
    p = p - (g + b * momentum) * lr        Nesterov

Vectors and scalars (biases, norm parameters) take plain momentum: their norms say nothing about a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_fuse.rules.rule import LayerwiseRule
from lightning_fuse.rules.sgd import MOMENTUM_BUFFER

TRUST_LIMIT = 100.0


class LARS(LayerwiseRule):
    """The rule ``lars``; see the module for its formula."""

    name = "lars"
    moments = (MOMENTUM_BUFFER,)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, momentum, weight_decay, trust_coefficient and eps."""
        return {key: group[key] for key in ("lr", "weight_decay", "momentum", "trust_coefficient", "eps")}

    def measured(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """See ``LayerwiseRule.measured``: the parameter and its gradient."""
        return param, grad

    def trust(self, param_norm: float, other_norm: float, scalars: Mapping[str, float]) -> float:
        """See ``LayerwiseRule.trust``."""
        if not (param_norm > 0.0 and other_norm > 0.0):
            return 1.0
        below = other_norm + scalars["weight_decay"] * param_norm + scalars["eps"]
        return min(TRUST_LIMIT, scalars["trust_coefficient"] * param_norm / below)

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``; ``scalars`` holds the trust ratio, too."""
        grad = (grad + param * scalars["weight_decay"]) * scalars["trust"]
        buffer = moments[0] * scalars["momentum"] + grad
        return param - self.direction(grad, buffer, scalars) * scalars["lr"], (buffer,)

    def direction(self, grad: Tensor, buffer: Tensor, scalars: Mapping[str, float]) -> Tensor:
        """What is subtracted, before the learning rate: here the buffer itself."""
        return buffer


class LARSNesterov(LARS):
    """The rule ``lars_nesterov``: the gradient plus the momentum that the next step would add."""

    name = "lars_nesterov"

    def direction(self, grad: Tensor, buffer: Tensor, scalars: Mapping[str, float]) -> Tensor:
        """What is subtracted, before the learning rate."""
        return grad + buffer * scalars["momentum"]
