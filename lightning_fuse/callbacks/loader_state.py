"""Where the training loaders of a trainer stand: their states for a checkpoint, and putting them back."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful

from lightning_fuse.callbacks.loader_workers import load_position
from lightning_fuse.callbacks.loop_position import BETWEEN, LoopPosition
from lightning_fuse.callbacks.random_state import kept_random_state
from lightning_fuse.plugins.lightning_compat import data_fetcher, training_loaders


def loader_states(trainer: pl.Trainer) -> list[Any]:
    """The state of each training loader, None of one that has none."""
    # A loader that was not iterated yet begins to be when it is asked, and draws its seeds.
    with kept_random_state():
        return [loader.state_dict() if isinstance(loader, _Stateful) else None for loader in training_loaders(trainer)]


def restore_loaders(trainer: pl.Trainer, states: list[Any], fetched: list[Any], place: LoopPosition) -> None:
    """Positions the training loaders; what is drawn meanwhile is for the caller to undo.

    Args:
        trainer: Its loaders are made, and its loops restored.
        states: What ``loader_states`` returned.
        fetched: Batches that had been taken ahead.
        place: Where in the run that was.
    """
    between = place in BETWEEN
    for loader, state in zip(training_loaders(trainer), states, strict=False):
        if state is None or not hasattr(loader, "load_state_dict"):
            continue
        # Lightning tells a distributed sampler its epoch only after it has made the iterator.
        _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.ready - 1)
        if between and _is_torchdata(loader):
            # At its epoch's last batch, so that the samplers' generators stand where the next epoch begins. Marked as
            # not finished, or the loader would begin that epoch itself, and then Lightning another one.
            load_position(loader, {**state, "_iterator_finished": False})
            iter(loader)
        else:
            load_position(loader, state)
    if between or not any(state is not None for state in states):
        return
    fetcher = data_fetcher(trainer)
    ahead = getattr(fetcher, "prefetch_batches", 0)
    fetcher.prefetch_batches = 0
    iter(fetcher)
    fetcher.prefetch_batches = ahead
    if fetched:
        fetcher.batches = fetched


def loader_shape(loader: Any) -> dict[str, Any]:
    """What must be the same for a loader's place to mean the same.

    Args:
        loader: Any loader.

    Returns:
        Words to numbers; None where the loader does not say.
    """
    shape: dict[str, Any] = {"batch size": getattr(loader, "batch_size", None)}
    for key, counted in (("number of samples", getattr(loader, "dataset", None)), ("number of batches", loader)):
        try:
            shape[key] = len(counted)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            shape[key] = None
    return shape


def _is_torchdata(loader: Any) -> bool:
    return any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__)
