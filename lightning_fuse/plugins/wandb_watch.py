"""W&B's gradient histograms in unscaled units.

``wandb.watch(model)`` puts hooks on the parameters that look at gradients during backward, long before the step
unscales them. Stock, its histograms so show the loss scale more than the gradients. While a backward of ours runs, the
tensors that W&B is about to count are unscaled first; the gradients stay as they are, and W&B is left as it was.

What is counted is the gradient of one micro-batch with its share of the window, as without a loss scale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

GRADIENTS = "gradients/"  # what W&B's names of them begin with
HOOK = "log_tensor_stats"  # the method of W&B's TorchHistory that all of its tensor hooks call


class UnscaledWatch:
    """Unscales what W&B watches, between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._histories: list[Any] = []

    def begin(self, loggers: list[Any], inverse: Callable[[torch.device], Tensor]) -> None:
        """A backward with a loss scale begins.

        Args:
            loggers: Of the trainer.
            inverse: What unscales gradients on a device: float32, 0-dimensional.
        """
        if "wandb" not in sys.modules:
            return
        self.end()
        self._histories = _histories(loggers)
        for history in self._histories:
            setattr(history, HOOK, partial(_log_unscaled, getattr(history, HOOK), inverse))

    def end(self) -> None:
        """It has ended, or failed."""
        for history in self._histories:
            vars(history).pop(HOOK, None)
        self._histories = []


def _log_unscaled(
    stock: Callable[[Any, str], None], inverse: Callable[[torch.device], Tensor], tensor: Any, name: str
) -> None:
    if isinstance(tensor, Tensor) and name.startswith(GRADIENTS):
        # In float32: an unscaled gradient may be too small for float16, which is why there is a scale.
        tensor = tensor.detach().float() * inverse(tensor.device)
    stock(tensor, name)


def _histories(loggers: list[Any]) -> list[Any]:
    """The TorchHistory of every W&B run at hand that has watched something; none is started by asking."""
    wandb = sys.modules["wandb"]
    runs = [getattr(wandb, "run", None), *(getattr(logger, "_experiment", None) for logger in loggers)]
    found: dict[int, Any] = {}
    for run in runs:
        history = getattr(run, "_torch_history", None)
        if history is not None and getattr(history, "_hook_handles", None) and HOOK not in vars(history):
            found[id(history)] = history
    return list(found.values())
