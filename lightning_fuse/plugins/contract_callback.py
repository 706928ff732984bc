"""The moments of Lightning's training loop at which the contract has something to do, as a callback of its own.

The precision plugin puts it first among the trainer's callbacks, so that the laws hold with the plugin alone, and other
callbacks find settled outcomes.
"""

from __future__ import annotations

from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_fuse.step import StepContract


class ContractRunner(Protocol):
    """What the hooks ask of the precision plugin."""

    contract: StepContract

    def start_training(self) -> None:
        """Checks that windows can close, and restores a resumed open one."""

    def start_batch(self) -> None:
        """Begins a batch."""

    def end_batch(self, trainer: Trainer, model: LightningModule) -> None:
        """Ends a batch of automatic optimization."""

    def end_training_step(self, trainer: Trainer, model: LightningModule) -> None:
        """Moves the loss scale and tells outcomes."""

    def end_epoch(self) -> None:
        """Ends an epoch."""

    def catch_up(self) -> None:
        """Tells outcomes that were left on a GPU."""

    def give_up(self) -> None:
        """Leaves nothing behind of a backward that failed."""


class ContractCallback(Callback):
    """Opens, carries and settles windows; holds no state of its own.

    Args:
        plugin: The precision plugin that runs the contract.
    """

    def __init__(self, plugin: ContractRunner) -> None:
        self.plugin = plugin

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that windows can close, and restores a resumed open one."""
        self.plugin.start_training()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """A window starts where Lightning clears the gradients for it."""
        if pl_module.automatic_optimization:
            self.plugin.contract.window.close()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keeps gradients of manual optimization local until they are wanted."""
        self.plugin.start_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the training step of manual optimization: the loss scale moves once, after all optimizers."""
        if pl_module.automatic_optimization:
            self.plugin.end_batch(trainer, pl_module)
        else:
            self.plugin.end_training_step(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation sees the counts of all steps before it."""
        self.plugin.catch_up()

    def state_dict(self) -> dict[str, Any]:
        """Nothing; but asked first when a checkpoint is made, so that the rest of it holds the counts of all steps."""
        self.plugin.catch_up()
        return {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The end of training sees the counts of all steps."""
        self.plugin.catch_up()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A backward may have failed half-way."""
        self.plugin.give_up()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Carries an open window into the next epoch, where the policy says so."""
        self.plugin.end_epoch()
