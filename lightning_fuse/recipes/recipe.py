"""What every recipe shares: a model and the two factories that the configuration chose.

A recipe is a ``Recipe`` with the steps of its task, a ``LightningDataModule``, and a file in ``conf/recipe`` that names
its metric, its target and its budget. It knows neither state formats nor kernels nor precisions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer

from lightning_fuse.optim import param_groups

ScheduleFactory = Callable[[Optimizer, int], dict[str, Any]]


class Recipe(L.LightningModule):
    """A task: a model, an optimizer and a schedule.

    Args:
        model: What is trained.
        optimizer: Builds the optimizer from parameter groups. A ``weight_decay`` among its keywords is for the weights
            only; biases and norms get none.
        schedule: Builds a Lightning scheduler configuration from the optimizer and the run's length in updates.
    """

    def __init__(self, model: nn.Module, optimizer: partial[Optimizer], schedule: ScheduleFactory) -> None:
        super().__init__()
        self.model = model
        self.optimizer_factory = optimizer
        self.schedule_factory = schedule

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Named parameter groups: weights with the optimizer's decay, biases and norms with none."""
        return param_groups(self, weight_decay=self.optimizer_factory.keywords.get("weight_decay", 0.0))

    def groups_of_optimizers(self) -> list[list[dict[str, Any]]]:
        """The groups of each optimizer, for who wants to count them before they are built; one here."""
        return [self.optimizer_groups()]

    def configure_optimizers(self) -> Any:
        """Lightning's hook: the optimizer and the schedule that drives it."""
        optimizer = self.optimizer_factory(self.optimizer_groups())
        total = int(self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule_factory(optimizer, total)}
