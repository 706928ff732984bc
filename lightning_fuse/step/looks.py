"""Gradients that somebody looks at before the step: unscaled, and perhaps clipped, in memory.

What is known from before anybody touched them is kept until the step: a gradient that was not finite then skips it even
if it has been repaired since, and the outcome reports the norm from before clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.step.verdict import gradients, judge, one


@dataclass
class Look:
    """What is known of one optimizer's gradients from before they were touched.

    Attributes:
        found_inf: See ``Verdict``.
        grad_norm: See ``Verdict``.
        clip_coef: What clipping has multiplied them by since; None where nothing has.
    """

    found_inf: Tensor
    grad_norm: Tensor
    clip_coef: Tensor | None = None


class Looks:
    """The optimizers whose gradients are unscaled in memory since their last step."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Optimizer, Look] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Looks], tuple[()]]:
        return Looks, ()  # a copy has looked at no gradients

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._of

    def take(self, optimizer: Optimizer) -> Look | None:
        """What is known of an optimizer's gradients; forgotten here, because the step comes now."""
        return self._of.pop(optimizer, None)

    def unscale(self, optimizer: Optimizer, factor: Tensor | None) -> None:
        """Unscales in memory.

        Args:
            optimizer: Whose gradients; it has some.
            factor: What unscales them, float32, 0-dimensional; None stands for 1.

        Raises:
            RuntimeError: They have been unscaled since the last step.
        """
        if optimizer in self._of:
            raise RuntimeError(
                "the gradients of this optimizer are unscaled already: unscale once per step, "
                "before the first look at them"
            )
        grads = gradients(optimizer)
        verdict = judge(grads, one(grads[0].device) if factor is None else factor)
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        self._of[optimizer] = Look(verdict.found_inf, verdict.grad_norm)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clips in memory.

        Args:
            optimizer: Whose gradients; they are unscaled.
            max_norm: The largest global L2 norm wanted.
        """
        grads = gradients(optimizer)
        coef = judge(grads, one(grads[0].device)).clip_coef(max_norm)
        torch._foreach_mul_(grads, coef)
        look = self._of[optimizer]
        look.clip_coef = coef if look.clip_coef is None else look.clip_coef * coef
