"""RunColumns: what decides a run, in every logger that can sort and group runs by it.

W&B and TensorBoard show the hyperparameters of a run as columns of their tables. The names are the keys and words of
the command line (``optimizer``, ``state``, ``optimizer.lr``), so that a column can be typed as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class RunColumns(Callback):
    """Hands a run's settings to its loggers when the fit starts.

    Args:
        columns: Name to value; numbers, strings, lists, dicts and None.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = dict(columns)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes them; loggers do so on rank 0 only."""
        for logger in trainer.loggers:
            logger.log_hyperparams(self.columns)
