"""LAMB: AdamW whose step is rescaled layer by layer. You et al., 2020, https://arxiv.org/abs/1904.00962.

``|x|`` is the L2 norm over the whole, unsharded parameter. Moments as in ``adamw``, then::

    u = (m * (1 / (1 - beta1^t))) / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps) + p * weight_decay
    trust = |p| / |u|                      1 where either is 0
    p = p - (u * trust) * lr
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_fuse.rules.adamw import EXP_AVG, EXP_AVG_SQ, adam_scalars, average
from lightning_fuse.rules.rule import LayerwiseRule, power, sqrt


class LAMB(LayerwiseRule):
    """The rule ``lamb``; see the module for its formula."""

    name = "lamb"
    moments = (EXP_AVG, EXP_AVG_SQ)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, betas, eps and weight_decay."""
        shared = adam_scalars(group, step)
        del shared["step_size"]
        inverse = 1.0 / (1.0 - power(group["betas"][0], step))
        return {**shared, "lr": group["lr"], "weight_decay": group["weight_decay"], "inv_correction1": inverse}

    def measured(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """See ``LayerwiseRule.measured``: the parameter and what would be subtracted from it."""
        return param, self._direction(param, average(grad, moments, scalars), scalars)

    def trust(self, param_norm: float, other_norm: float, scalars: Mapping[str, float]) -> float:
        """See ``LayerwiseRule.trust``."""
        return param_norm / other_norm if param_norm > 0.0 and other_norm > 0.0 else 1.0

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``; ``scalars`` holds the trust ratio, too."""
        moments = average(grad, moments, scalars)
        return param - (self._direction(param, moments, scalars) * scalars["trust"]) * scalars["lr"], moments

    def _direction(self, param: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]) -> Tensor:
        exp_avg, exp_avg_sq = moments
        denominator = sqrt(exp_avg_sq) * scalars["inv_sqrt_correction2"] + scalars["eps"]
        return (exp_avg * scalars["inv_correction1"]) / denominator + param * scalars["weight_decay"]
