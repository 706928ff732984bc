"""TimeToTarget: how long, how many updates, samples and tokens until a validation metric reaches a target, or several.

A result is that of the first validation that reaches the target, nothing is interpolated, and it is kept over a resume:
train seconds, wall seconds (see ``run_clocks`` for what each clock counts), updates, samples and tokens. It is logged
as ``target/<metric>/train_seconds``, ``.../wall_seconds``, ``.../updates``, ``.../samples`` and ``.../tokens``; for the
further targets the value stands behind the metric: ``target/val/loss/2.5/updates``.

A module that trains on tokens says how many: ``def count_tokens(self, batch) -> int``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fuse.callbacks.run_clocks import RunClocks
from lightning_fuse.callbacks.step_monitor import logger_step
from lightning_fuse.callbacks.target_history import BatchCounter, Mode, Reached, TargetHistory
from lightning_fuse.step import StepOutcome

FIGURES = ("train_seconds", "wall_seconds", "updates", "samples", "tokens")


class TimeToTarget(Callback):
    """Records when a validation metric first reaches a target.

    Args:
        metric: A metric that validation logs, for instance "val/loss".
        target: The value to reach, in the metric's own unit.
        mode: "min" if smaller is better, "max" if larger is.
        stop: End the training at ``target``.
        targets: Further values whose times are recorded, too.

    Raises:
        ValueError: ``mode`` is unknown, ``metric`` is empty, or a target is no finite number or there twice.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        target: float = 2.0,
        mode: Mode = "min",
        stop: bool = False,
        targets: Sequence[float] | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
        if not metric:
            raise ValueError("metric is empty; give the name of a metric that validation logs, for instance 'val/loss'")
        for value in (target, *(targets or ())):
            if not math.isfinite(value):
                raise ValueError(f"target={value!r} is not a finite number; give the value that {metric} should reach")
        self.metric = metric
        self.target = float(target)
        self.mode: Mode = mode
        self.stop = stop
        self.targets = self._in_order(target, targets or ())
        self.clocks = RunClocks()
        self.batches = BatchCounter()
        self.history = TargetHistory(mode)
        self.updates = 0
        self._warned = False

    def _in_order(self, target: float, further: Sequence[float]) -> list[float]:
        """All targets, the easiest first; ``target`` may be named among the further ones again."""
        values = [float(value) for value in further]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"targets={list(further)!r}: {twice:g} is there twice; name it once")
        return sorted({float(target), *values}, reverse=self.mode == "min")

    @property
    def state_key(self) -> str:
        """One state per metric, mode and target, so that several of these callbacks can stand side by side."""
        return self._generate_state_key(metric=self.metric, mode=self.mode, target=self.target)

    @property
    def reached(self) -> Reached | None:
        """The validation that first reached ``target``, or None."""
        return self.history.first(self.target)

    @property
    def train_seconds(self) -> float:
        """Time spent training, validation left out."""
        return self.clocks.train.seconds

    @property
    def validation_seconds(self) -> float:
        """Time spent in validation."""
        return self.clocks.validation.seconds

    @property
    def wall_seconds(self) -> float:
        """Time inside ``fit``."""
        return self.clocks.wall.seconds

    def record(self, target: float | None = None) -> dict[str, Any]:
        """The result as a plain dict: metric, mode, target, reached, and the fields of ``Reached`` if it was.

        Args:
            target: One of ``targets``; None takes ``target``.
        """
        value = self.target if target is None else target
        first = self.history.first(value)
        result = {"metric": self.metric, "mode": self.mode, "target": value, "reached": first is not None}
        return result if first is None else {**result, **asdict(first)}

    def records(self) -> list[dict[str, Any]]:
        """The results of all targets, the easiest first."""
        return [self.record(target) for target in self.targets]

    # The clocks.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts the wall clock of a fit."""
        if stage == "fit":
            self.clocks.fit_begins()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the train clock."""
        self.clocks.train_begins()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, and marks where a validation would begin."""
        self.clocks.batch_ends()
        self.batches.add(pl_module, batch, trainer.world_size)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hands over to the validation clock."""
        if _in_training(trainer):
            self.clocks.validation_begins()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks at the metric and hands back to the train clock."""
        if _in_training(trainer):
            self._look(trainer)
            self.clocks.validation_ends()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops train and validation clock."""
        self.clocks.train_ends()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops all clocks."""
        self.clocks.fit_ends()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stops all clocks."""
        self.clocks.fit_ends()

    # The target.

    def on_step_outcome(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outcome: StepOutcome) -> None:
        """Follows the applied updates."""
        self.updates = outcome.update

    def _look(self, trainer: pl.Trainer) -> None:
        value = trainer.callback_metrics.get(self.metric)
        if value is None:
            self._warn_missing(trainer)
            return
        # Without the step contract nobody reports updates; Lightning's own count is then all there is.
        now = Reached(
            self.train_seconds,
            self.wall_seconds,
            self.updates or trainer.global_step,
            float(value),
            **self.batches.state_dict(),
        )
        before = [self.history.first(target) for target in self.targets]
        self.history.look(now)
        for target, earlier in zip(self.targets, before, strict=True):
            if earlier is None and self.history.first(target) is not None:
                self._tell(trainer, target, now)
        if self.stop:
            # All ranks stop together, also where each has its own value of the metric.
            stop = trainer.strategy.reduce_boolean_decision(self.reached is not None, all=False)
            trainer.should_stop = trainer.should_stop or stop

    def _tell(self, trainer: pl.Trainer, target: float, reached: Reached) -> None:
        seconds = f"{reached.train_seconds:.1f} s of training ({reached.wall_seconds:.1f} s in all)"
        rank_zero_info(
            f"{self.metric} = {reached.value:.4g} reaches its target {target:g} after {seconds}, "
            f"{reached.updates} updates"
        )
        name = self.metric if target == self.target else f"{self.metric}/{target:g}"
        values = {figure: getattr(reached, figure) for figure in FIGURES}
        figures = {f"target/{name}/{figure}": float(value) for figure, value in values.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=logger_step(trainer))

    def _warn_missing(self, trainer: pl.Trainer) -> None:
        if not self._warned:
            self._warned = True
            known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            rank_zero_warn(
                f"validation logs no metric {self.metric!r}; it logs {known}. "
                "TimeToTarget(metric=...) with one of these names can be reached"
            )

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The clocks as they stand, the counts, and what validations have shown."""
        return {
            "clocks": self.clocks.state_dict(),
            "updates": self.updates,
            "batches": self.batches.state_dict(),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the clocks and keeps the results."""
        self.clocks.load_state_dict(state_dict["clocks"])
        self.updates = int(state_dict["updates"])
        if "history" in state_dict:
            self.history.load_state_dict(state_dict["history"])
            self.batches.load_state_dict(state_dict["batches"])
        else:  # of a version that kept one result and counted no batches
            reached = state_dict["reached"]
            self.history.load_state_dict([] if reached is None else [reached])
            self.batches.samples = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes everything over from another target of the metric, and the clocks from one of any other.

        Whoever changes the target does not start time anew, and what validations have shown so far still counts.
        """
        states: Mapping[str, Any] = checkpoint.get("callbacks", {})
        if self.state_key in states:
            return  # Lightning hands it to load_state_dict
        mine = self._generate_state_key(metric=self.metric, mode=self.mode).rstrip("}")
        found = [key for key in states if key.startswith(type(self).__qualname__ + "{")]
        for key in sorted(found, key=lambda key: not key.startswith(mine)):
            self.load_state_dict(states[key])
            if not key.startswith(mine):
                self.history = TargetHistory(self.mode)
            return


def _in_training(trainer: pl.Trainer) -> bool:
    """Whether this is a validation of a fit, neither the sanity check nor ``trainer.validate``."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
