"""The face of a GradScaler, for module code that reaches for ``trainer.precision_plugin.scaler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.step import LossScale
from lightning_fuse.step.grad_stats import unwrapped


class GradScalerFacade:
    """What of GradScaler's methods makes sense while a contract owns the steps.

    Args:
        loss_scale: The contract's loss scale.
        unscale: Unscales an optimizer's gradients in memory.
    """

    def __init__(self, loss_scale: LossScale, unscale: Callable[[Optimizer], None]) -> None:
        self._loss_scale = loss_scale
        self._unscale = unscale

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return self._loss_scale.scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales an optimizer's gradients in memory; the step knows.

        Raises:
            RuntimeError: They are unscaled already.
        """
        self._unscale(unwrapped(optimizer))

    def get_scale(self) -> float:
        """The loss scale; reads it from the device."""
        return self._loss_scale.value

    def is_enabled(self) -> bool:
        """True: there is a loss scale."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Settings and state in GradScaler's format."""
        return self._loss_scale.state_dict()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the contract steps.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "scaler.step() would step past the contract: call optimizer.step(), which unscales and checks"
        )

    def update(self, new_scale: Any = None) -> NoReturn:
        """Refused: the contract moves the scale, once per training step.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the step contract moves the loss scale, once per training step: leave scaler.update() out")
