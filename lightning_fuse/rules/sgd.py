"""SGD: plain, with momentum, with Nesterov's momentum; coupled decay, as in torch.optim.SGD.

In this order, float32, each operation rounded once::

    g = g + p * weight_decay
    b = b * momentum + g * gain            gain is 1 at step 1 and 1 - dampening afterwards
    d = b                                  momentum
    d = g + b * momentum                   Nesterov (Sutskever et al., 2013, torch's form)
    p = p - d * lr

The momentum buffer starts at zero, so the gain of 1 at a parameter's first applied update is the whole of torch's
"the first buffer is the gradient": there is no uninitialised buffer that a skipped first step could leave behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_fuse.rules.rule import Moment, UpdateRule

MOMENTUM_BUFFER = Moment("momentum_buffer", signed=True)


class SGD(UpdateRule):
    """The rule ``sgd``: no momentum and so no state."""

    name = "sgd"
    moments = ()

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr and weight_decay."""
        return {"lr": group["lr"], "weight_decay": group["weight_decay"]}

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``."""
        grad = grad + param * scalars["weight_decay"]
        return param - grad * scalars["lr"], ()


class SGDMomentum(UpdateRule):
    """The rule ``sgd_momentum``."""

    name = "sgd_momentum"
    moments = (MOMENTUM_BUFFER,)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """See ``UpdateRule.scalars``; reads lr, weight_decay, momentum and dampening."""
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
            "gain": 1.0 if step == 1 else 1.0 - group["dampening"],
        }

    def update(
        self, param: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``UpdateRule.update``."""
        grad = grad + param * scalars["weight_decay"]
        buffer = moments[0] * scalars["momentum"] + grad * scalars["gain"]
        return param - self.direction(grad, buffer, scalars) * scalars["lr"], (buffer,)

    def direction(self, grad: Tensor, buffer: Tensor, scalars: Mapping[str, float]) -> Tensor:
        """What is subtracted, before the learning rate: here the buffer itself."""
        return buffer


class SGDNesterov(SGDMomentum):
    """The rule ``sgd_nesterov``: the gradient plus the momentum that the next step would add."""

    name = "sgd_nesterov"

    def direction(self, grad: Tensor, buffer: Tensor, scalars: Mapping[str, float]) -> Tensor:
        """What is subtracted, before the learning rate."""
        return grad + buffer * scalars["momentum"]
