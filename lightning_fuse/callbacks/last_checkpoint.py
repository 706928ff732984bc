"""LastCheckpoint: the newest states of a run, of which ``resume=FOLDER`` goes on from the newest that is whole.

The newest is always ``last.ckpt``, the one before it ``last-1.ckpt``, and so on. With ``AtomicCheckpointIO`` a new file
is complete before any older one is touched, so a kill at any moment leaves one or more; with ``ExactResume`` it holds
all that an exact resume needs.

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the run at the next closed window with such a checkpoint, see
``stop_signals.py``. A validation may be long: the state before it is saved, so that a signal can end it at its next
batch, and a resume begins with it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from lightning_fuse.callbacks.step_monitor import logger_step
from lightning_fuse.callbacks.stop_signals import StopSignals
from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO

NAME = "last.ckpt"


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt`` up to date.

    Args:
        folder: Where the files lie.
        every: Optimizer steps between two checkpoints; the end of a run always gets one.
        keep: How many of the newest stay: with 2 there is one before ``last.ckpt``, should that be damaged.
        on_signals: Whether signals wait for the next closed window and save there; a second one does not.

    Raises:
        ValueError: ``every`` or ``keep`` is below 1.
    """

    def __init__(self, folder: str | Path, every: int, keep: int = 2, on_signals: bool = True) -> None:
        if every < 1:
            raise ValueError(f"callbacks.last.every={every}: give optimizer steps between two checkpoints, at least 1")
        if keep < 1:
            raise ValueError(f"keep_last={keep}: at least 1 checkpoint stays; callbacks.last=null writes none")
        self.path = Path(folder) / NAME
        self.every = every
        self.keep = keep
        self._saved_at = -1  # the optimizer step of the newest checkpoint
        self._signals = StopSignals() if on_signals else None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keeps signals to the process group from the workers of loaders, the first of which start soon."""
        if stage == "fit" and self._signals is not None:
            self._signals.shield_workers()

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hears signals from now on."""
        if self._signals is not None:
            self._signals.install(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The point that the run starts from needs no checkpoint."""
        self._saved_at = trainer.global_step
        if self._signals is not None:
            self._signals.install(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after every ``every``-th optimizer step, before a validation, and where a signal asked to stop."""
        if 0 <= trainer.max_steps <= trainer.global_step:
            return  # saved by on_train_end, with the validation that comes first: one that is killed is done again
        stop = self._signals is not None and self._signals.due(trainer)
        if stop or trainer.global_step % self.every == 0 or (self._signals and _validation_may_follow(trainer)):
            self.save(trainer)
        if stop and self._signals is not None:
            self._signals.stop(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Ends a validation, or a sanity check, that a signal has come into: what was before it is saved."""
        signals = self._signals
        # Several ranks agree after a training batch.
        if signals is None or signals.wanted is None or trainer.world_size > 1:
            return
        at_end = 0 <= trainer.max_steps <= trainer.global_step
        if trainer.sanity_checking or self._saved_at == trainer.global_step or at_end:
            signals.stop(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the end of the run."""
        self.save(trainer)
        self._listen_no_more()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the signals to others again."""
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        if self._signals is not None:
            self._signals.restore()

    def save(self, trainer: L.Trainer) -> None:
        """Saves the run as it is, unless that has been done; every rank takes part.

        Args:
            trainer: Its callbacks, loops and optimizers are saved.
        """
        # The batches of an accumulation window after its first see the same step again.
        if trainer.global_step == self._saved_at:
            return
        new = self.path.with_name(f"next-{NAME}")
        trainer.save_checkpoint(new)
        self._saved_at = trainer.global_step
        if trainer.is_global_zero and new.is_file():
            self._take_in(new)
            _log(trainer)

    def _take_in(self, new: Path) -> None:
        """Moves every checkpoint one place on; each step of it leaves all but the oldest under some name."""
        for age in range(self.keep - 1, 1, -1):
            if self._aged(age - 1).exists():
                self._aged(age - 1).replace(self._aged(age))
        if self.keep > 1 and self.path.exists():
            _second_name(self.path, self._aged(1))
        new.replace(self.path)

    def _aged(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{age}{self.path.suffix}")


def _validation_may_follow(trainer: L.Trainer) -> bool:
    """Whether this batch, or one of the window that it lies in, is followed by a validation; asking changes nothing."""
    loop, every = trainer.fit_loop.epoch_loop, trainer.val_check_batch
    if not trainer.enable_validation or every is None or math.isinf(every):
        return False
    count = loop.batch_idx if trainer.check_val_every_n_epoch is not None else loop.total_batch_idx
    return (count + 1) % max(1, round(every)) < trainer.accumulate_grad_batches


def _second_name(path: Path, other: Path) -> None:
    """Hard-links a file under another name, so that it is never missing; renames it where links fail."""
    link = other.with_name(f"{other.name}.part")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
        link.replace(other)
        # Where both names were of one file already, the rename has done nothing.
        link.unlink(missing_ok=True)
    except OSError:
        path.replace(other)


def _log(trainer: L.Trainer) -> None:
    """Tells the loggers what the checkpoint has cost."""
    writer = trainer.strategy.checkpoint_io
    if isinstance(writer, AtomicCheckpointIO):
        figures = {"checkpoint/bytes": float(writer.saved.bytes), "checkpoint/save_seconds": writer.saved.seconds}
        loggers: list[Logger] = trainer.loggers
        for logger in loggers:
            logger.log_metrics(figures, step=logger_step(trainer))
