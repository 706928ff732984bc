"""The contract of an update rule: what one parameter becomes, given its gradient and its moments.

A rule is float32 arithmetic in a written order. It knows nothing of state formats, master weights, loss scales or
devices: the kernel decodes moments before and encodes them after. Everything a rule needs besides tensors are
*scalars*, pure functions of (hyperparameters, step) computed in float64 on the host and rounded to float32 once.

Plain torch operators are the definition because each of them rounds once: no expression here may be fused
(``torch.addcmul``, ``lerp`` and the like round differently on other devices, so they are not used).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moment:
    """One moment that a rule keeps per parameter.

    Attributes:
        name: The key in ``optimizer.state[p]``, torch's own where torch has one (``exp_avg``).
        signed: Whether values can be negative. State formats round the two kinds differently.
        unit: The name of another moment of the rule, a square whose root is this one's natural unit: the update divides
            by it, so that small numbers of units matter where small numbers do not. Empty where there is none.
    """

    name: str
    signed: bool
    normalizer: str = ""


class UpdateRule(ABC):
    """One optimizer's maths for one parameter.

    Attributes:
        name: The word it is registered under.
        moments: What is kept per parameter, in the order that ``update`` takes and returns.
    """

    name: ClassVar[str]
    moments: ClassVar[tuple[Moment, ...]]

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """Computes the scalars of one update.

        Args:
            group: The hyperparameters of a parameter group (``lr``, ``betas``, ...); plain numbers.
            step: The number of this update for the parameter; the first is 1.

        Returns:
            Scalars by name, float64; the kernel rounds each to float32 once.
        """

    @abstractmethod
    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the new parameter and moments. Pure: no argument is changed.

        Args:
            param: float32, any shape.
            grad: float32, the shape of ``param``; unscaled, clipped, negated where the group maximizes.
            moments: float32, the shape of ``param``, one for each of ``self.moments``.
            scalars: What ``scalars()`` returned, each already a float32 value.

        Returns:
            The new parameter and the new moments, float32.
        """


class LayerwiseRule(UpdateRule):
    """A rule that rescales each parameter's step by a *trust ratio* of two norms.

    A kernel runs it in two phases: it measures, then calls ``update`` with the ratio as the scalar ``trust``. Norms are
    over the whole, unsharded parameter, summed in float64.
    """

    @abstractmethod
    def measured(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """What to take norms of; arguments as of ``update``.

        Returns:
            The parameter, and the tensor that its norm is compared with.
        """

    @abstractmethod
    def trust(self, param_norm: float, other_norm: float, scalars: Mapping[str, float]) -> float:
        """The trust ratio.

        Args:
            param_norm: L2 norm of the first measured tensor, float64.
            other_norm: L2 norm of the second.
            scalars: As of ``update``.

        Returns:
            float64; the kernel rounds it to float32 once. 1 where a norm is 0, so that nothing is stuck there.
        """


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: IEEE multiplications only, so that every device can repeat it bit for bit.

    The C library's ``pow`` differs in the last place between machines; a checkpoint would then continue with other
    bias corrections elsewhere.

    Args:
        base: A finite float64, for instance beta2.
        exponent: A whole number >= 0, for instance the step.

    Returns:
        The float64 product, in the order of the bits of ``exponent`` from the lowest up.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded float32 square root.

    torch's own float32 square root on a CPU is one unit in the last place off for about a sixth of all inputs. The
    detour over float64 is exact: 53 bits are more than the 2 * 24 + 2 that make the second rounding harmless.

    Args:
        x: float32, any shape, >= 0 or NaN.

    Returns:
        float32, the shape of ``x``.
    """
    return x.double().sqrt().to(torch.float32)


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """A number divided by a tensor, correctly rounded.

    ``number / tensor`` is a reciprocal and a product in torch, two roundings, and on CUDA ``tensor / number`` is too.

    Args:
        numerator: A float32 value.
        denominator: float32, any shape.

    Returns:
        float32, the shape of ``denominator``.
    """
    return torch.full_like(denominator, numerator) / denominator
