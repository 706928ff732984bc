"""TimeToTarget: how long, and how many updates, until a validation metric reaches a target.

The result is recorded once, at the first validation that reaches the target, and kept over a resume: train seconds,
wall seconds and updates (see ``run_clocks`` for what each clock counts). It is logged as
``target/<metric>/train_seconds``, ``.../wall_seconds`` and ``.../updates``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fuse.callbacks.run_clocks import RunClocks
from lightning_fuse.callbacks.step_monitor import logger_step
from lightning_fuse.step import StepOutcome

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Reached:
    """The first validation that reached the target.

    Attributes:
        train_seconds: Time spent training until then.
        wall_seconds: Time inside ``fit`` until then, validation included, downtime not.
        updates: Applied optimizer steps until then.
        value: What the metric was.
    """

    train_seconds: float
    wall_seconds: float
    updates: int
    value: float


class TimeToTarget(Callback):
    """Records when a validation metric first reaches a target.

    Args:
        metric: A metric that validation logs, for instance "val/loss".
        target: The value to reach, in the metric's own unit.
        mode: "min" if smaller is better, "max" if larger is.
        stop: End the training there.

    Raises:
        ValueError: ``mode`` is unknown, ``metric`` is empty or ``target`` is not a finite number.
    """

    def __init__(self, metric: str = "val/loss", target: float = 2.0, mode: Mode = "min", stop: bool = False) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
        if not metric:
            raise ValueError("metric is empty; give the name of a metric that validation logs, for instance 'val/loss'")
        if not math.isfinite(target):
            raise ValueError(f"target={target!r} is not a finite number; give the value that {metric} should reach")
        self.metric = metric
        self.target = float(target)
        self.mode: Mode = mode
        self.stop = stop
        self.clocks = RunClocks()
        self.updates = 0
        self.reached: Reached | None = None
        self._warned = False

    @property
    def state_key(self) -> str:
        """One state per metric, mode and target, so that several of these callbacks can stand side by side."""
        return self._generate_state_key(metric=self.metric, mode=self.mode, target=self.target)

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

    def record(self) -> dict[str, Any]:
        """The result as a plain dict: metric, mode, target, reached, and the fields of ``Reached`` if it was."""
        result = {"metric": self.metric, "mode": self.mode, "target": self.target, "reached": self.reached is not None}
        return result if self.reached is None else {**result, **asdict(self.reached)}

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
        """Marks where a validation would begin."""
        self.clocks.batch_ends()

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
        number = float(value)
        hit = number <= self.target if self.mode == "min" else number >= self.target
        # NaN compares false both ways and reaches nothing.
        if self.reached is None and hit:
            # Without the step contract nobody reports updates; Lightning's own count is then all there is.
            updates = self.updates or trainer.global_step
            self.reached = Reached(self.train_seconds, self.wall_seconds, updates, number)
            self._tell(trainer, self.reached)
        if self.stop:
            # All ranks stop together, also where each has its own value of the metric.
            stop = trainer.strategy.reduce_boolean_decision(self.reached is not None, all=False)
            trainer.should_stop = trainer.should_stop or stop

    def _tell(self, trainer: pl.Trainer, reached: Reached) -> None:
        seconds = f"{reached.train_seconds:.1f} s of training ({reached.wall_seconds:.1f} s in all)"
        rank_zero_info(
            f"{self.metric} = {reached.value:.4g} reaches its target {self.target:g} after {seconds}, "
            f"{reached.updates} updates"
        )
        figures = {
            f"target/{self.metric}/{name}": float(getattr(reached, name))
            for name in ("train_seconds", "wall_seconds", "updates")
        }
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
        """The clocks as they stand, updates and the result."""
        reached = None if self.reached is None else asdict(self.reached)
        return {"clocks": self.clocks.state_dict(), "updates": self.updates, "reached": reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the clocks and keeps the result."""
        self.clocks.load_state_dict(state_dict["clocks"])
        self.updates = int(state_dict["updates"])
        reached = state_dict["reached"]
        self.reached = None if reached is None else Reached(**reached)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the clocks over from another target: whoever changes the target does not start time anew."""
        states: Mapping[str, Any] = checkpoint.get("callbacks", {})
        if self.state_key in states:
            return  # Lightning hands it to load_state_dict
        for key, state in states.items():
            if key.startswith(type(self).__qualname__ + "{"):
                self.clocks.load_state_dict(state["clocks"])
                self.updates = int(state["updates"])
                return


def _in_training(trainer: pl.Trainer) -> bool:
    """Whether this is a validation of a fit, neither the sanity check nor ``trainer.validate``."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
