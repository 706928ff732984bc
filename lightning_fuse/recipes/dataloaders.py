"""Data loaders that a run can resume in the middle of an epoch, with each rank's own share under data parallelism."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def train_loader(
    dataset: Dataset[Any], batch_size: int, num_workers: int, trainer: L.Trainer | None
) -> StatefulDataLoader:
    """Shuffled, full batches; the position in the epoch is part of a checkpoint.

    Args:
        dataset: Map-style, at least ``batch_size`` items per rank.
        batch_size: Items per batch and rank.
        num_workers: Loading processes; 0 loads in the training process.
        trainer: Says how many ranks there are; None means one.

    Returns:
        A loader with ``state_dict`` and ``load_state_dict``.
    """
    sampler = None
    if trainer is not None and trainer.world_size > 1:
        sampler = StatefulDistributedSampler(
            dataset, trainer.world_size, trainer.global_rank, shuffle=True, drop_last=True
        )
    # No generator is passed: one of its own would not be restored with the global random state at a resume.
    return StatefulDataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def validation_loader(
    dataset: Dataset[Any], batch_size: int, num_workers: int, trainer: L.Trainer | None
) -> StatefulDataLoader:
    """All items in order; under data parallelism every rank gets its share and no item comes twice.

    Args:
        dataset: Map-style.
        batch_size: Items per batch and rank.
        num_workers: Loading processes; 0 loads in the training process.
        trainer: Says how many ranks there are; None means one.

    Returns:
        A loader.
    """
    if trainer is not None and trainer.world_size > 1:
        dataset = Subset(dataset, range(trainer.global_rank, len(dataset), trainer.world_size))  # type: ignore[arg-type]
    return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=num_workers)
