"""Fuse: the one-line installer, for a module and a Trainer that people already have."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from lightning_fuse.callbacks.step_monitor import StepMonitor, described, show_on_bar
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.plugins import AUTO, FusePrecision, OptimizerSpec, loss_scale_for
from lightning_fuse.step import OnNonfinite, StepContract, StepOutcome, WindowPolicy

WRAPPED = (Precision, MixedPrecision, HalfPrecision)


class Fuse(Callback):
    """Runs the step contract, and our optimizers, in a stock Trainer: ``Trainer(callbacks=[Fuse(state="int8")])``.

    What the module's ``configure_optimizers`` returns is taken over: groups, learning rates, decay, names, hooks and
    state; schedulers, nested ones too, go on driving the optimizer and follow applied updates.

    Args:
        optimizer: "auto" for our optimizer of the rule that the module uses; "adamw_fused", "adam_fused", "sgd_fused",
            "lion_fused", "lars_fused" or "lamb_fused" to change the rule; None to keep the module's optimizer and run
            only the step contract.
        state: State format or list of (pattern, format); see ``FusedAdamW``.
        master: Master weights of 16-bit parameters; see ``FusedAdamW``.
        kernel: "auto" or a kernel's name.
        on_nonfinite: "skip" a step with an infinite or NaN gradient, "raise", or "step" all the same.
        window: What a last accumulation window with fewer batches stands for: the "mean" of those that are there, the
            "sum" of their shares, as stock Lightning has it, nothing ("drop"), or the start of the next epoch's first
            window ("carry").
        max_updates: Stop after so many applied updates; ``Trainer(max_steps=...)`` counts skipped steps, too.
        max_consecutive_skips: Longest run of nonfinite steps; one more raises. None for no limit.
        min_loss_scale: Floor of the loss scale, in 16-mixed and 16-true; None for 1, or for a smaller first scale.
        init_loss_scale: First loss scale; None leaves it to the scaler of Lightning's plugin, or 65536.
        growth_interval: Applied steps in a row after which the loss scale grows; None likewise, or 2000.

    Raises:
        ValueError: A choice is unknown or would have no effect.
    """

    def __init__(
        self,
        optimizer: str | None = AUTO,
        state: StateSpec | None = None,
        master: str | None = None,
        kernel: str | None = None,
        on_nonfinite: OnNonfinite = "skip",
        window: WindowPolicy = "mean",
        max_updates: int | None = None,
        max_consecutive_skips: int | None = 50,
        min_loss_scale: float | None = None,
        init_loss_scale: float | None = None,
        growth_interval: int | None = None,
    ) -> None:
        self.spec = OptimizerSpec(optimizer, state, master, kernel)
        self._policy: dict[str, Any] = {
            "on_nonfinite": on_nonfinite,
            "window": window,
            "max_consecutive_skips": max_consecutive_skips,
        }
        self._scale: dict[str, Any] = {
            "floor": min_loss_scale,
            "init_scale": init_loss_scale,
            "growth_interval": growth_interval,
        }
        if max_updates is not None and (not isinstance(max_updates, int) or max_updates < 1):
            raise ValueError(f"max_updates={max_updates!r}: must be a whole number >= 1, or None for no limit")
        self._max_updates = max_updates
        StepContract(**self._policy)  # refuses what is unknown now, not at the first fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the plugin in place, before the strategy makes the optimizers.

        Raises:
            ValueError: The trainer's precision plugin is not one that the contract can wrap, or a loss scale setting
                has no effect in this precision.
        """
        if stage != "fit":
            return
        stock = trainer.precision_plugin
        if isinstance(stock, FusePrecision):
            if stock.spec is not self.spec:
                raise ValueError("the step contract is installed twice: use Fuse or the FusePrecision plugin, once")
            return
        if type(stock) not in WRAPPED:
            known = ", ".join(cls.__name__ for cls in WRAPPED)
            raise ValueError(f"Fuse cannot run the step contract under {type(stock).__name__}; possible: {known}")
        loss_scale = loss_scale_for(stock, **self._scale)
        if loss_scale is None and any(value is not None for value in self._scale.values()):
            raise ValueError(
                f"precision {stock.precision} has no loss scale: "
                "leave min_loss_scale, init_loss_scale and growth_interval out"
            )
        contract = StepContract(loss_scale=loss_scale, **self._policy)
        trainer.strategy.precision_plugin = FusePrecision(stock, contract, self.spec)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says once what runs; a run that has had its ``max_updates`` gets no more."""
        plugin = trainer.precision_plugin
        if self._max_updates is not None and isinstance(plugin, FusePrecision):
            trainer.should_stop = trainer.should_stop or plugin.contract.updates >= self._max_updates
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, FusedOptimizer):
                rank_zero_info(f"lightning_fuse: {optimizer.describe()}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows skips and loss scale on the progress bar; reads what may be the last outcomes that are wanted."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, FusePrecision):
            return
        if trainer.progress_bar_callback is not None and not _has_monitor(trainer):
            show_on_bar(pl_module, plugin.contract.skips, _loss_scale(plugin.contract))
        if self._max_updates is None:
            return
        if plugin.contract.updates + plugin.contract.in_flight >= self._max_updates:
            plugin.catch_up()

    def on_step_outcome(self, trainer: Trainer, pl_module: LightningModule, outcome: StepOutcome) -> None:
        """Ends training after ``max_updates`` applied updates."""
        if self._max_updates is not None and outcome.update >= self._max_updates:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says in one line what the steps came to."""
        plugin = trainer.precision_plugin
        if isinstance(plugin, FusePrecision) and not _has_monitor(trainer):
            contract = plugin.contract
            rank_zero_info(described(contract.updates, contract.global_step, contract.skips, _loss_scale(contract)))


def _has_monitor(trainer: Trainer) -> bool:
    """Whether a StepMonitor shows the same, and more."""
    return any(isinstance(callback, StepMonitor) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _loss_scale(contract: StepContract) -> float | None:
    """The newest loss scale that is known without asking the device."""
    return None if contract.last is None else contract.last.loss_scale_after
