"""What a step is told about its gradients: whether they are finite, their norm, and what they are multiplied by.

The same numbers, computed where they are needed: ``judge_launched`` leaves all of them on the device and asks for no
value; ``judge_known`` is for gradients on the host, where a dozen operators on single numbers would cost more than the
numbers are worth. Both give the same bits: float64 for the norm, float32, rounded once, for each multiplier.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lightning_fuse.step.looks import Look
from lightning_fuse.step.verdict import CLIP_EPS, judge, one, squares


@dataclass(frozen=True)
class Judgement:
    """The numbers of one step of one optimizer.

    Attributes:
        found_inf: float32, 0-dimensional: other than 0 where a gradient is or was not finite.
        grad_norm: Global L2 norm, unscaled, before any clipping; 0-dimensional where it is a tensor.
        clip_coef: What clipping multiplies, or has multiplied, the gradients by; 1 where nothing was clipped.
        factor: float32, 0-dimensional: what the step multiplies gradients by; None stands for 1.
        bad: Whether a gradient is not finite; None where only the device knows.
    """

    found_inf: Tensor
    grad_norm: Tensor | float
    clip_coef: Tensor | float
    factor: Tensor | None
    bad: bool | None


def judge_launched(
    grads: Sequence[Tensor], unscale: Tensor | None, look: Look | None, clip_norm: float | None
) -> Judgement:
    """Judges gradients on any device without asking for a value.

    Args:
        grads: At least one; as they are in memory.
        unscale: float32, 0-dimensional: what unscales them; None stands for 1.
        look: What is known from before somebody looked at them; None where nobody has.
        clip_norm: The largest norm wanted, in unscaled units; None does not clip.

    Returns:
        The numbers, as tensors.
    """
    factor = neutral = one(grads[0].device)
    if unscale is not None:
        factor = unscale
    verdict = judge(grads, factor)
    found_inf, norm, coef = verdict.found_inf, verdict.grad_norm, None
    if look is not None:
        found_inf, norm, coef = torch.maximum(found_inf, look.found_inf), look.grad_norm, look.clip_coef
    if clip_norm is not None:
        now = verdict.clip_coef(clip_norm)
        factor = factor * now
        coef = now if coef is None else coef * now
    return Judgement(
        found_inf, norm, neutral if coef is None else coef, None if factor is neutral else factor, bad=None
    )


def judge_known(
    grads: Sequence[Tensor], unscale: Tensor | None, look: Look | None, clip_norm: float | None
) -> Judgement:
    """Judges gradients on the host; see ``judge_launched``.

    Returns:
        The numbers, as Python floats where nobody wants a tensor.
    """
    total = float(squares(grads))
    multiplier = 1.0 if unscale is None else float(unscale)
    bad, norm = not math.isfinite(total), math.sqrt(total) * multiplier
    found, coef, factor = norm, 1.0, unscale
    if look is not None:
        bad = bad or float(look.found_inf) != 0.0
        found, coef = float(look.grad_norm), 1.0 if look.clip_coef is None else float(look.clip_coef)
    if clip_norm is not None:
        now = _float32(min(clip_norm / (norm + CLIP_EPS), 1.0))  # in this order NaN stays NaN
        coef, multiplier = _float32(coef * now), _float32(multiplier * now)
        factor = None if multiplier == 1.0 else torch.tensor(multiplier, dtype=torch.float32)
    return Judgement(_flag(bad), found, coef, factor, bad)


def _float32(number: float) -> float:
    """Rounds once, to nearest even; the product of two float32 numbers is exact in float64 until then."""
    return array("f", (number,))[0]


@cache
def _flag(bad: bool) -> Tensor:
    return torch.tensor(float(bad), dtype=torch.float32)
