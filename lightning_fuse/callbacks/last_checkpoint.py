"""LastCheckpoint: one checkpoint of the newest state, which ``resume=FOLDER`` goes on from.

It has the same name each time. With ``AtomicCheckpointIO`` the new file replaces the old one in one act, so a kill at
any moment leaves one of the two; with ``ExactResume`` it holds all that an exact resume needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

NAME = "last.ckpt"


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt`` up to date.

    Args:
        folder: Where the file lies.
        every: Optimizer steps between two checkpoints; the end of a run always gets one.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(self, folder: str | Path, every: int) -> None:
        if every < 1:
            raise ValueError(f"callbacks.last.every={every}: give optimizer steps between two checkpoints, at least 1")
        self.path = Path(folder) / NAME
        self.every = every
        self._saved_at = -1  # the optimizer step of the newest checkpoint

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The point that the run starts from needs no checkpoint."""
        self._saved_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after every ``every``-th optimizer step."""
        if trainer.global_step % self.every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the end of the run."""
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        # The batches of an accumulation window after its first see the same step again.
        if trainer.global_step != self._saved_at:
            self._saved_at = trainer.global_step
            trainer.save_checkpoint(self.path)
