"""The best checkpoints of a run by a validation metric: Lightning's ModelCheckpoint with plain names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


def best_checkpoint(folder: str | Path, monitor: str, mode: str, keep: int = 1, **more: Any) -> ModelCheckpoint:
    """Keeps the best checkpoints: ``best.ckpt``, or ``best-STEP.ckpt`` of several.

    Args:
        folder: Where the files lie.
        monitor: The validation metric.
        mode: "min" if less is better, "max" if more is.
        keep: How many stay.
        **more: Further arguments of ``ModelCheckpoint``.

    Returns:
        The callback.

    Raises:
        ValueError: ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep_best={keep}: at least 1 checkpoint stays; callbacks.best=null keeps none")
    return ModelCheckpoint(
        dirpath=folder,
        filename="best" if keep == 1 else "best-{step}",
        auto_insert_metric_name=False,
        monitor=monitor,
        mode=mode,
        save_top_k=keep,
        enable_version_counter=False,
        **more,
    )
