"""Weights & Biases as its users expect it: one run for all resumes, best values and the whole summary at the end.

The run's id is kept in the run folder's ``wandb_id``, so a resume goes on with the same run of W&B.
"""

from __future__ import annotations

import json
import secrets
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_fuse.registry import unknown_name

ID_FILE = "wandb_id"
WATCHED = ("gradients", "parameters", "all")
MODES = ("min", "max")


class RunWandbLogger(WandbLogger):
    """A WandbLogger that belongs to a run folder.

    Args:
        save_dir: The run folder.
        watch: "gradients", "parameters" or "all": histograms of them; None for none.
        watch_every: Batches between two of them.
        best: A metric whose best value is the run's summary of it; None for the last value of each.
        mode: "min" or "max", for ``best``.
        artifact: Whether the last checkpoint is an artifact of a finished run.
        settings: As of Lightning's WandbLogger; what is not named there goes to ``wandb.init``.

    Raises:
        ValueError: ``watch`` or ``mode`` is unknown.
    """

    def __init__(
        self,
        save_dir: str | Path,
        *,
        watch: str | None = None,
        watch_every: int = 100,
        best: str | None = None,
        mode: str = "min",
        artifact: bool = False,
        **settings: Any,
    ) -> None:
        if watch is not None and watch not in WATCHED:
            raise ValueError(unknown_name("logger.wandb.watch", watch, WATCHED))
        if mode not in MODES:
            raise ValueError(unknown_name("logger.wandb.mode", mode, MODES))
        self.folder = Path(save_dir)
        self.artifact = artifact
        self._watch, self._watch_every = watch, watch_every
        self._best, self._mode = best, mode
        kept = self.folder / ID_FILE
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
        settings.setdefault("id", known or secrets.token_hex(4))
        super().__init__(save_dir=save_dir, resume="allow", **settings)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """As of Lightning's; keeps the run's id, too.

        Args:
            params: What W&B shall show as the run's config.
        """
        super().log_hyperparams(params)
        (self.folder / ID_FILE).write_text(f"{self.version}\n", encoding="utf-8")
        if self._best is not None:
            self.experiment.define_metric(self._best, summary=self._mode)

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Begins to watch; Lightning calls this once at the start.

        Args:
            model: The module.
            input_array: Not used.
        """
        if self._watch is not None:
            self.watch(model, log=self._watch, log_freq=self._watch_every, log_graph=False)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes the run's summary, and the last checkpoint where that is wanted.

        Args:
            status: "success", or how it ended otherwise.
        """
        super().finalize(status)
        path = self.folder / "summary.json"
        if self._experiment is None or not path.is_file():
            return
        ended = json.loads(path.read_text(encoding="utf-8"))
        self.experiment.summary.update({f"run/{key}": value for key, value in _leaves(ended)})
        checkpoint = self.folder / "checkpoints" / "last.ckpt"
        if self.artifact and status == "success" and checkpoint.is_file():
            import wandb

            found = wandb.Artifact(f"{self.version}-last", type="model")
            found.add_file(str(checkpoint))
            self.experiment.log_artifact(found)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
