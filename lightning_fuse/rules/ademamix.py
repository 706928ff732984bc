"""AdEMAMix: AdamW with a second, slow average of the gradient. Pagliardini et al., 2024, https://arxiv.org/abs/2409.03137.

In this order, float32, each operation rounded once::

    p  = p * (1 - lr * weight_decay)
    m1 = m1 * beta1 + g * (1 - beta1)                          the fast average, bias-corrected as in Adam
    m2 = m2 * beta3(t) + g * (1 - beta3(t))                    the slow average, not bias-corrected
    v  = v * beta2 + (g * g) * (1 - beta2)
    d  = m1 * (1 / (1 - beta1^t)) + m2 * alpha(t)
    p  = p - (d / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)) * lr

Both schedules of the paper start with AdamW and end after ``t_alpha`` and ``t_beta3`` updates; without a length the
end value holds from the first update on. A decay ``beta`` is also a *time constant*, ``tau = -1 / log(beta)`` updates,
after which a gradient's share has fallen by e, and the paper's schedule of beta3 is linear in it::

    alpha(t) = alpha * t / t_alpha
    tau(t)   = tau(beta1) + (tau(beta3) - tau(beta1)) * (t / t_beta3)
    beta3(t) = min(exp(-1 / tau(t)), beta3)

Logarithm and exponential are series of IEEE operations in a written order: those of a C library differ between machines
in the last place, and a checkpoint would continue elsewhere with another beta3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from lightning_fuse.rules.adamw import EXP_AVG, EXP_AVG_SQ
from lightning_fuse.rules.rule import Moment, UpdateRule, power, sqrt

EXP_AVG_SLOW = Moment("exp_avg_slow", signed=True, normalizer="exp_avg_sq")

LOG_2 = 0.6931471805599453
LOG_TERMS = 18  # of the series of log: its argument is at most 1/3, so the rest is below 2^-57
EXP_TERMS = 14  # of the series of exp, for an argument of at most 1/4
EXP_SQUARINGS = 8  # the argument is divided by 2^8, and the result squared as often
FASTEST = 64.0  # 1 / tau beyond which exp(-1 / tau) counts as 0: it is below 2^-92


class AdEMAMix(UpdateRule):
    """The rule ``ademamix``; see the module for its formula."""

    name = "ademamix"
    moments: ClassVar[tuple[Moment, ...]] = (EXP_AVG, EXP_AVG_SLOW, EXP_AVG_SQ)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, betas, alpha, t_alpha, t_beta3, eps and weight_decay."""
        beta1, beta2, _ = group["betas"]
        beta3 = scheduled_beta3(group, step)
        return {
            "beta1": beta1,
            "one_minus_beta1": 1.0 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1.0 - beta2,
            "beta3": beta3,
            "one_minus_beta3": 1.0 - beta3,
            "alpha": scheduled_alpha(group, step),
            "eps": group["eps"],
            "inv_correction1": 1.0 / (1.0 - power(beta1, step)),
            "inv_sqrt_correction2": 1.0 / math.sqrt(1.0 - power(beta2, step)),
            "lr": group["lr"],
            "decay": 1.0 - group["lr"] * group["weight_decay"],
        }

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``."""
        fast, slow, square = moments
        param = param * scalars["decay"]
        fast = fast * scalars["beta1"] + grad * scalars["one_minus_beta1"]
        slow = slow * scalars["beta3"] + grad * scalars["one_minus_beta3"]
        square = square * scalars["beta2"] + (grad * grad) * scalars["one_minus_beta2"]
        direction = fast * scalars["inv_correction1"] + slow * scalars["alpha"]
        denominator = sqrt(square) * scalars["inv_sqrt_correction2"] + scalars["eps"]
        return param - (direction / denominator) * scalars["lr"], (fast, slow, square)


def scheduled_alpha(group: Mapping[str, Any], step: int) -> float:
    """What the slow average is multiplied by at an update.

    Args:
        group: alpha and t_alpha of a parameter group; a length of None or 0 is no schedule.
        step: The number of this update, from 1.

    Returns:
        float64.
    """
    length = group["t_alpha"] or 0
    return group["alpha"] if step >= length else group["alpha"] * (step / length)


def scheduled_beta3(group: Mapping[str, Any], step: int) -> float:
    """The decay of the slow average at an update.

    Args:
        group: betas and t_beta3 of a parameter group; a length of None or 0 is no schedule.
        step: The number of this update, from 1.

    Returns:
        float64, in [0, 1).
    """
    beta1, _, beta3 = group["betas"]
    length = group["t_beta3"] or 0
    if step >= length:
        return beta3
    first = time_constant(beta1)
    tau = first + (time_constant(beta3) - first) * (step / length)
    return min(decay_of(tau), beta3)


@cache
def time_constant(beta: float) -> float:
    """After how many updates a decayed average has lost all but 1/e of a gradient: ``-1 / log(beta)``.

    Args:
        beta: The decay, float64 in [0, 1).

    Returns:
        float64, 0 for a decay of 0.
    """
    if beta == 0.0:
        return 0.0
    mantissa, exponent = math.frexp(beta)
    y = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = y * y, 0.0
    for term in range(LOG_TERMS - 1, -1, -1):
        total = total * square + 1.0 / (2 * term + 1)
    return -1.0 / (exponent * LOG_2 + 2.0 * (y * total))


def decay_of(tau: float) -> float:
    """The decay with a given time constant: ``exp(-1 / tau)``; the twin of ``time_constant``.

    Args:
        tau: Updates, float64 >= 0.

    Returns:
        float64, in [0, 1).
    """
    if tau <= 1.0 / FASTEST:
        return 0.0
    x = (-1.0 / tau) / (1 << EXP_SQUARINGS)
    total = 1.0
    for term in range(EXP_TERMS, 0, -1):
        total = 1.0 + (x / term) * total
    for _ in range(EXP_SQUARINGS):
        total *= total
    return total
