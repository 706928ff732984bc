"""StepMonitor: what the optimizer steps did, in every logger and on the progress bar.

Names, logged at the loggers' x of the batch, like the module's own training metrics:

==========================  ==================================================================================
``step/update``             applied optimizer steps of the run
``step/skipped``            skipped ones, in all; ``step/skipped/<reason>`` for each reason that occurred
``step/loss_scale``         after the step; missing where the precision has none
``step/grad_norm``          global L2, unscaled, before clipping; missing where there was no gradient
``step/grad_norm_clipped``  after clipping
``step/clip_coef``          what clipping multiplied by; 1 where nothing was clipped
``step/lr/<group>``         learning rate of this step, per parameter group (its name, or its number)
``step/optimizer_ms``       host milliseconds of the step, verdict included
``step/state_bytes``        bytes of all optimizer state, once, after the first update
``step/global_step``        optimizer steps of the run, skips included
``step/train_seconds``      time spent training, validation left out
==========================  ==================================================================================

With several optimizers, those after the first add ``/optimizer<index>`` to the names of what is their own. Every
``log_every_n_steps`` steps are logged, and every skip; everything is counted. ``step/update``, ``step/global_step``
and ``step/train_seconds`` are logged with every validation, too, so that a logger can draw its metrics over any of
them. The progress bar shows ``fuse/skips`` and ``fuse/loss_scale``: nobody else logs these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_fuse.callbacks.run_clocks import RunClocks
from lightning_fuse.plugins.lightning_compat import logger_x
from lightning_fuse.step import StepOutcome

# Where in the run something was measured.
PLACE_NAMES = ("step/update", "step/global_step", "step/train_seconds")
# What goes through Lightning's own log and is no metric of the run: what the progress bar shows, and places.
NO_METRICS = ("fuse/skips", "fuse/loss_scale", *PLACE_NAMES)


class StepMonitor(Callback):
    """Logs every optimizer step; see the module for the names.

    Attributes:
        updates: Applied optimizer steps of the run.
        global_step: Optimizer steps of the run, skips included.
        skips: Reason to number of skipped steps; counted over resumes.
        loss_scale: The last loss scale, or None.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.global_step = 0
        self.skips: dict[str, int] = {}
        self.loss_scale: float | None = None
        self.clocks = RunClocks()
        self._state_bytes_logged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts the clocks."""
        if stage == "fit":
            self.clocks.fit_begins()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """State may have been allocated anew, so its bytes are logged once more."""
        self._state_bytes_logged = False
        self.clocks.train_begins()

    def on_step_outcome(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outcome: StepOutcome) -> None:
        """Counts the step, and logs it if it is its turn or if it was skipped."""
        self.updates = outcome.update
        self.global_step = outcome.global_step
        self.loss_scale = outcome.loss_scale_after
        if not outcome.applied:
            self.skips[outcome.reason] = self.skips.get(outcome.reason, 0) + 1
        if not trainer.loggers:
            return
        figures = {} if outcome.applied and not is_turn(trainer, outcome) else self._figures(trainer, outcome)
        if outcome.applied and not self._state_bytes_logged:
            self._state_bytes_logged = True
            figures["step/state_bytes"] = sum(sum(state_bytes(o).values()) for o in trainer.optimizers)
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=logger_step(trainer, outcome))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows skips and loss scale on the progress bar."""
        self.clocks.batch_ends()
        # Here and not in on_step_outcome: what is logged inside the optimizer step files under whichever hook happens
        # to be running, and manual optimization has none.
        show_on_bar(pl_module, self.skips, self.loss_scale)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The clock of training stands still."""
        if in_training(trainer):
            self.clocks.validation_begins()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the place of a validation beside its metrics."""
        if in_training(trainer) and trainer.loggers:
            for name, value in zip(
                PLACE_NAMES, (self.updates, self.global_step, self.clocks.train.seconds), strict=True
            ):
                pl_module.log(name, float(value), prog_bar=False, logger=True, batch_size=1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The clock of training goes on."""
        if in_training(trainer):
            self.clocks.validation_ends()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says in one line what the steps came to."""
        self.clocks.train_ends()
        rank_zero_info(self.describe())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clocks."""
        self.clocks.fit_ends()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stops the clocks."""
        self.clocks.fit_ends()

    def describe(self) -> str:
        """Updates, skips by reason and the last loss scale in one line."""
        return described(self.updates, self.global_step, self.skips, self.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {
            "updates": self.updates,
            "global_step": self.global_step,
            "skips": dict(self.skips),
            "loss_scale": self.loss_scale,
            "clocks": self.clocks.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the counts."""
        self.updates = int(state_dict["updates"])
        self.global_step = int(state_dict["global_step"])
        self.skips = {str(reason): int(count) for reason, count in state_dict["skips"].items()}
        self.loss_scale = state_dict["loss_scale"]
        if "clocks" in state_dict:  # checkpoints of earlier versions have none
            self.clocks.load_state_dict(state_dict["clocks"])

    def _figures(self, trainer: pl.Trainer, outcome: StepOutcome) -> dict[str, float]:
        own = f"/optimizer{outcome.optimizer}" if outcome.optimizer else ""
        figures: dict[str, float] = {
            "step/update": outcome.update,
            "step/global_step": outcome.global_step,
            "step/train_seconds": self.clocks.train.seconds,
            "step/skipped": sum(self.skips.values()),
            **{f"step/skipped/{reason}": count for reason, count in self.skips.items()},
            f"step/clip_coef{own}": outcome.clip_coef,
        }
        if outcome.loss_scale_after is not None:
            figures["step/loss_scale"] = outcome.loss_scale_after
        if outcome.grad_norm is not None:
            figures[f"step/grad_norm{own}"] = outcome.grad_norm
            figures[f"step/grad_norm_clipped{own}"] = outcome.grad_norm * outcome.clip_coef
        milliseconds = getattr(trainer.precision_plugin, "last_step_ms", None)
        if milliseconds is not None:
            figures[f"step/optimizer_ms{own}"] = float(milliseconds)
        if outcome.optimizer < len(trainer.optimizers):
            rates = learning_rates(trainer.optimizers[outcome.optimizer])
            figures.update({f"step/lr/{group}{own}": rate for group, rate in rates.items()})
        return figures


def show_on_bar(pl_module: pl.LightningModule, skips: Mapping[str, int], loss_scale: float | None) -> None:
    """Shows skips and loss scale on whatever progress bar there is; inside a hook that may log."""
    # A batch size, because Lightning finds none where a step takes the iterator of the loader.
    pl_module.log("fuse/skips", float(sum(skips.values())), prog_bar=True, logger=False, batch_size=1)
    if loss_scale is not None:
        pl_module.log("fuse/loss_scale", float(loss_scale), prog_bar=True, logger=False, batch_size=1)


def described(updates: int, steps: int, skips: Mapping[str, int], loss_scale: float | None) -> str:
    """What the steps of a run came to, in one line.

    Args:
        updates: Applied ones.
        steps: All of them.
        skips: Reason to number.
        loss_scale: The last one; None without.

    Returns:
        The line.
    """
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(skips.items()) if count) or "none"
    scale = "no loss scale" if loss_scale is None else f"loss scale {loss_scale:g}"
    return f"{updates} updates in {steps} optimizer steps; skipped: {skipped}; {scale}"


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The learning rate of each parameter group, under its name or, without one, its number.

    Args:
        optimizer: Any torch optimizer.

    Returns:
        Group to learning rate.
    """
    groups = optimizer.param_groups
    names = [str(group.get("name", index)) for index, group in enumerate(groups)]
    if len(set(names)) < len(names):  # two groups of one name would hide one another
        names = [f"{name}.{index}" for index, name in enumerate(names)]
    return {name: float(group["lr"]) for name, group in zip(names, groups, strict=True) if "lr" in group}


def state_bytes(optimizer: Optimizer) -> dict[str, int]:
    """The bytes of an optimizer's state on this device.

    Args:
        optimizer: One of ours, asked itself, or any other: then every tensor in its state counts, under its key.

    Returns:
        Kind of state to bytes.
    """
    ours = getattr(optimizer, "state_bytes", None)
    if callable(ours):
        return dict(ours())
    sizes: dict[str, int] = {}
    for state in optimizer.state.values():
        _add_sizes(state, sizes, "")
    return sizes


def logger_step(trainer: pl.Trainer, outcome: StepOutcome | None = None) -> int:
    """The x at which Lightning logs what belongs to a batch: optimizer steps before the one of that batch.

    Args:
        trainer: The trainer.
        outcome: That of the batch, which may be told later than the batch itself; None for the running batch.

    Returns:
        The x.
    """
    if outcome is not None and trainer.lightning_module.automatic_optimization:
        return outcome.global_step - 1
    return logger_x(trainer)


def in_training(trainer: pl.Trainer) -> bool:
    """Whether this is a fit: a validation is then neither the sanity check nor ``trainer.validate``."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def is_turn(trainer: pl.Trainer, outcome: StepOutcome) -> bool:
    """Whether an outcome belongs to a batch that ``log_every_n_steps`` wants logged."""
    every = int(getattr(trainer, "log_every_n_steps", 0))
    return bool(every) and (logger_step(trainer, outcome) + 1) % every == 0


def _add_sizes(state: Any, sizes: dict[str, int], prefix: str) -> None:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            sizes[name] = sizes.get(name, 0) + local.numel() * local.element_size()
        elif isinstance(value, Mapping):
            _add_sizes(value, sizes, f"{name}.")
