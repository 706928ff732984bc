"""Modules of manual optimization for the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from tests.cases import NONE, Four, sgd


class Manual(Four):
    """Four weights, stepped by hand, clipped by hand where wanted."""

    def __init__(self, optimizer: Callable[..., Any] = sgd, clip: float | None = None, algorithm: str = "norm") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.clip, self.algorithm = clip, algorithm

    def training_step(self, batch: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if float(batch) != NONE:
            self.manual_backward((self.w * batch).sum())
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm=self.algorithm)
        optimizer.step()


class Pair(LightningModule):
    """Two optimizers over a weight each; a batch is (gradient of a, gradient of b), and both backwards come first."""

    def __init__(self, optimizer: Callable[..., Any] = sgd) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = torch.nn.Parameter(torch.zeros(1))
        self.b = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = optimizer

    def training_step(self, batch: Tensor) -> None:
        both = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        for weight, gradient in ((self.a, batch[0]), (self.b, batch[1])):
            if float(gradient) != NONE:
                self.manual_backward((weight * gradient).sum())
        for optimizer in both:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self._optimizer([self.a]), self._optimizer([self.b])]
