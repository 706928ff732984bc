"""Where the training loaders of a trainer stand: their states for a checkpoint, and putting them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful

from lightning_fuse.callbacks.loop_position import BETWEEN, LoopPosition
from lightning_fuse.callbacks.random_state import kept_random_state


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders that a trainer trains on, in order; none before they are made."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def is_resumable_loader(loader: Any) -> bool:
    """Whether a loader is one that ``resumable_loader`` made."""
    return type(loader).__name__ == "ResumableLoader"


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
    fit_loop: Any = trainer.fit_loop
    between = place in BETWEEN
    for loader, state in zip(training_loaders(trainer), states, strict=False):
        if state is None or not hasattr(loader, "load_state_dict"):
            continue
        # Lightning tells a distributed sampler its epoch only after it has made the iterator.
        _set_sampler_epoch(loader, fit_loop.epoch_progress.current.ready - 1)
        if between and _is_torchdata(loader):
            # At its epoch's last batch, so that the samplers' generators stand where the next epoch begins. Marked as
            # not finished, or the loader would begin that epoch itself, and then Lightning another one.
            loader.load_state_dict({**state, "_iterator_finished": False})
            iter(loader)
        else:
            loader.load_state_dict(state)
    if between or not any(state is not None for state in states):
        return
    fetcher = fit_loop._data_fetcher
    ahead = getattr(fetcher, "prefetch_batches", 0)
    fetcher.prefetch_batches = 0
    iter(fetcher)
    fetcher.prefetch_batches = ahead
    if fetched:
        fetcher.batches = fetched


class LoaderHabits(NamedTuple):
    """When a loader draws random numbers, besides for an epoch's order.

    Attributes:
        prefetches: Its workers run ahead, and so ask the sampler once more after its last index.
        reseeds: It draws a seed for workers in every epoch; persistent ones need only the first.
    """

    prefetches: bool
    reseeds: bool


class LoaderPosition(NamedTuple):
    """Where a loader stands, whatever its number of workers.

    Attributes:
        workers: How many it had.
        yielded: Batches since its iterator began.
        order: State of the order of samples, None where it is the sampler's own affair.
        indices: State of a sampler that has one.
        habits: When the run draws random numbers.
    """

    workers: int
    yielded: int
    order: dict[str, Any] | None
    indices: Any
    habits: LoaderHabits


def position_in(state: Any) -> LoaderPosition | None:
    """Reads the state of a ``StatefulDataLoader``.

    Args:
        state: What its ``state_dict`` returned.

    Returns:
        The position, or None where it is of another kind.
    """
    if not isinstance(state, Mapping) or not ("_snapshot" in state or "_num_yielded" in state):
        return None
    ahead, workers, main, yielded = 0, 0, state, state.get("_num_yielded", 0)
    if "_snapshot" in state:
        snapshot, ahead = state["_snapshot"], state["_steps_since_snapshot"]
        main, yielded = snapshot["_main_snapshot"], snapshot["_snapshot_step"] + ahead
        workers = main["_num_workers"]
    order = main.get("_sampler_iter_state")
    if isinstance(order, Mapping) and "yielded" in order:
        order = {**order, "yielded": order["yielded"] + ahead}
    else:
        order = None
    habits = LoaderHabits(*state.get("habits", (workers > 0, True)))
    return LoaderPosition(workers, yielded, order, main.get("_index_sampler_state"), habits)


def other_workers(loader: Any, state: Any) -> str | None:
    """Says what cannot continue exactly because a loader has another number of workers than when it was saved.

    Args:
        loader: A loader.
        state: Its saved state.

    Returns:
        One sentence, or None where nothing has changed.
    """
    position, now = position_in(state), getattr(loader, "num_workers", None)
    if position is None or now is None or position.workers == now:
        return None
    changed = f"the loader has {now} workers, the checkpoint's had {position.workers}"
    if position.order is None and position.indices is None:
        return f"{changed}: its data are read again from the start and skipped, in the order that {now} workers give"
    return f"{changed}: the order of samples goes on, random numbers drawn while samples are loaded are others"


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
