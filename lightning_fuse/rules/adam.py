"""Adam, with the L2 (coupled) weight decay of the paper. Kingma & Ba, 2015, https://arxiv.org/abs/1412.6980.

The decay is part of the gradient, and so of both moments::

    g = g + p * weight_decay

and then as in ``adamw``, without its first line. Every parameter keeps its own step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightning_fuse.rules.adamw import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, adam_scalars, adam_update
from lightning_fuse.rules.rule import Moment, UpdateRule


class Adam(UpdateRule):
    """The rule ``adam``; see the module for its formula."""

    name = "adam"
    moments: ClassVar[tuple[Moment, ...]] = (EXP_AVG, EXP_AVG_SQ)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, betas, eps and weight_decay."""
        return {**adam_scalars(group, step), "weight_decay": group["weight_decay"]}

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``."""
        return adam_update(param, grad + param * scalars["weight_decay"], moments, scalars)


class AdamAmsgrad(Adam):
    """The rule ``adam_amsgrad``: Adam over the largest second moment so far."""

    name = "adam_amsgrad"
    moments = (EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ)
