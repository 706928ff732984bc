"""AdamW: Adam with decoupled weight decay. Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101.

In this order, float32, each operation rounded once::

    p = p * (1 - lr * weight_decay)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    p = p - (m / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)) * (lr / (1 - beta1^t))

Factors in brackets that hold no tensor are scalars. ``amsgrad`` divides by the largest v so far instead
(Reddi et al., 2018, https://arxiv.org/abs/1904.09237).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fuse.rules.rule import Moment, UpdateRule, power, sqrt

EXP_AVG = Moment("exp_avg", signed=True, normalizer="exp_avg_sq")
EXP_AVG_SQ = Moment("exp_avg_sq", signed=False)
MAX_EXP_AVG_SQ = Moment("max_exp_avg_sq", signed=False)


class AdamW(UpdateRule):
    """The rule ``adamw``; see the module for its formula."""

    name = "adamw"
    moments: ClassVar[tuple[Moment, ...]] = (EXP_AVG, EXP_AVG_SQ)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, betas, eps and weight_decay."""
        return {**adam_scalars(group, step), "decay": 1.0 - group["lr"] * group["weight_decay"]}

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``."""
        return adam_update(param * scalars["decay"], grad, moments, scalars)


class AdamWAmsgrad(AdamW):
    """The rule ``adamw_amsgrad``: AdamW over the largest second moment so far."""

    name = "adamw_amsgrad"
    moments = (EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ)


def adam_scalars(group: Mapping[str, Any], step: int) -> dict[str, float]:
    """The scalars that Adam and AdamW share.

    Args:
        group: lr, betas, eps of a parameter group.
        step: The number of this update, from 1.

    Returns:
        beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_correction2; float64.
    """
    beta1, beta2, *_ = group["betas"]
    return {
        "beta1": beta1,
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1.0 - beta2,
        "eps": group["eps"],
        "step_size": group["lr"] / (1.0 - power(beta1, step)),
        "inv_sqrt_correction2": 1.0 / math.sqrt(1.0 - power(beta2, step)),
    }


def adam_update(
    param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One Adam step on a parameter whose decay, of either kind, has already been applied.

    Args:
        param: float32, any shape.
        grad: float32, the shape of ``param``.
        moments: exp_avg, exp_avg_sq and, for amsgrad, max_exp_avg_sq; float32.
        scalars: See ``adam_scalars``.

    Returns:
        The new parameter and the new moments.
    """
    exp_avg, exp_avg_sq = average(grad, moments[:2], scalars)
    largest = list(moments[2:])
    largest = [torch.maximum(seen, exp_avg_sq) for seen in largest]
    under_root = largest[0] if largest else exp_avg_sq
    denominator = sqrt(under_root) * scalars["inv_sqrt_correction2"] + scalars["eps"]
    param = param - (exp_avg / denominator) * scalars["step_size"]
    return param, (exp_avg, exp_avg_sq, *largest)


def average(grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Moves both running averages.

    Args:
        grad: float32, any shape.
        moments: exp_avg and exp_avg_sq; float32.
        scalars: See ``adam_scalars``.

    Returns:
        The new exp_avg and exp_avg_sq.
    """
    exp_avg, exp_avg_sq = moments
    exp_avg = exp_avg * scalars["beta1"] + grad * scalars["one_minus_beta1"]
    exp_avg_sq = exp_avg_sq * scalars["beta2"] + (grad * grad) * scalars["one_minus_beta2"]
    return exp_avg, exp_avg_sq
