"""StepProgress: one bar over the optimizer steps of a run, with its newest figures.

Lightning's own bars count batches of an epoch, which says little of a run that is measured in steps. Where the output
is no terminal (a log file), a line per validation is printed instead.
"""

from __future__ import annotations

import math
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as RemainingColumn


class StepProgress(ProgressBar):
    """Shows optimizer steps, time spent and left, and every metric that is logged with ``prog_bar=True``.

    Args:
        refresh_per_second: How often the bar is drawn.

    Raises:
        ValueError: ``refresh_per_second`` is not above 0 (from rich).
    """

    def __init__(self, refresh_per_second: float = 4.0) -> None:
        super().__init__()
        self._rate = refresh_per_second
        self._console = Console()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._validation: TaskID | None = None
        self._enabled = True

    def enable(self) -> None:
        """Shows the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hides the bar; Lightning calls it on all ranks but the first."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draws the bar at the step that the run goes on from."""
        if not (self._enabled and self._console.is_terminal):
            return
        # On a narrow screen a short bar leaves room for the counts, and as many figures as fit are shown.
        bar = BarColumn(bar_width=min(40, max(5, self._console.width // 8)))
        columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn())
        figures = TextColumn("{task.fields[figures]}")
        self._bar = Progress(*columns, RemainingColumn(), figures, console=self._console, refresh_per_second=self._rate)
        total = trainer.max_steps if trainer.max_steps >= 0 else None
        self._task = self._bar.add_task("training", total=total, completed=trainer.global_step, figures="")
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the bar. Figures are read only as often as they are logged: reading one may wait for the GPU."""
        if self._bar is None:
            return
        self._bar.update(self._task, completed=trainer.global_step)
        if trainer.global_step % cast(Any, trainer).log_every_n_steps == 0:
            self._bar.update(self._task, figures=self._fitting(trainer, pl_module))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Adds a bar over the batches of the validation."""
        if self._bar is None:
            return
        batches = sum(trainer.num_val_batches)
        total = int(batches) if math.isfinite(batches) else None
        self._validation = self._bar.add_task("validating", total=total, figures="")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Moves that bar."""
        if self._bar is not None and self._validation is not None:
            self._bar.advance(self._validation)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes the bar away, and shows what came out."""
        if self._bar is not None:
            if self._validation is not None:
                self._bar.remove_task(self._validation)
                self._validation = None
            self._bar.update(self._task, figures=self._fitting(trainer, pl_module))
        elif self._enabled and trainer.is_global_zero and not trainer.sanity_checking:
            print(f"step {trainer.global_step:,}: {self._figures(trainer, pl_module)}", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the bar as it is."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the bar as it is, so that the error begins on a line of its own."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _figures(self, trainer: L.Trainer, pl_module: L.LightningModule, room: float = math.inf) -> str:
        metrics = self.get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # the logger's version: no figure
        line = ""
        for figure in (f"{name} {_short(value)}" for name, value in metrics.items()):
            if len(line) + len(figure) + 2 <= room:
                line += f"  {figure}" if line else figure
        return line

    def _fitting(self, trainer: L.Trainer, pl_module: L.LightningModule) -> str:
        """Figures for what the line has left beside description, bar, counts and two times."""
        bar = min(40, max(5, self._console.width // 8))
        counts = 2 * len(str(trainer.max_steps)) + 1
        return self._figures(trainer, pl_module, self._console.width - (len("validating") + bar + counts + 2 * 7 + 5))


def _short(value: Any) -> str:
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)  # a run that diverged goes on saying so
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"
