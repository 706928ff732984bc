"""The state of a loader of torchdata's kind under another number of workers.

torchdata refuses it: the state of a loader without workers looks different from that of one with workers, and names
their number. The place in the order of samples means the same everywhere, so it is carried over; what lives in a worker
(random streams, an iterable dataset) begins anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


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
    if _reads_a_stream(loader):
        return f"{changed}: its data are read again from the start and skipped, in the order that {now} workers give"
    said = f"{changed}: the order of samples goes on, random numbers drawn while samples are loaded are others"
    if is_resumable_loader(loader) or (persists(loader) and position.workers == 0) or now == 0:
        return said
    return f"{said}, and so may be the order of later epochs: give it persistent_workers=True"


def load_position(loader: Any, state: Any) -> None:
    """Loads a saved state into a loader, whatever its number of workers.

    Args:
        loader: Has ``load_state_dict``.
        state: What its ``state_dict`` returned, or that of one with other workers.
    """
    position = position_in(state)
    now = getattr(loader, "num_workers", None)
    if position is None or now is None or position.workers == now or is_resumable_loader(loader):
        loader.load_state_dict(state)
        return
    loader.load_state_dict({} if _reads_a_stream(loader) else _converted(state, now))
    skipped = position.yielded if _reads_a_stream(loader) else int(state.get("_steps_since_snapshot", 0)) * (now == 0)
    if skipped:
        loader.state_dict()  # makes the iterator that the next `iter` hands out
        for _ in itertools.islice(loader._iterator, skipped):
            pass


def is_resumable_loader(loader: Any) -> bool:
    """Whether a loader is one that ``resumable_loader`` made, which loads such states itself."""
    return type(loader).__name__ == "ResumableLoader"


def persists(loader: Any) -> bool:
    """Whether a loader keeps its workers from epoch to epoch."""
    return bool(getattr(loader, "persistent_workers", False))


def _reads_a_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)


def _converted(state: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """A state as a loader with so many workers would have saved it at the same place."""
    snapshot = state.get("_snapshot")
    main = state if snapshot is None else snapshot["_main_snapshot"]
    yielded = state["_num_yielded"] if snapshot is None else snapshot["_snapshot_step"]
    keys = ("_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded", "_IterableDataset_len_called")
    shared = {**{key: main.get(key) for key in keys}, "_shared_seed": main.get("_shared_seed")}
    finished = {"_iterator_finished": state["_iterator_finished"]}
    if workers == 0:
        return {**shared, **finished, "_num_yielded": yielded, "fetcher_state": None, "dataset_state": None}
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return {
        **finished,
        "_steps_since_snapshot": state.get("_steps_since_snapshot", 0),
        "_snapshot": {
            "_snapshot_step": yielded,
            "_last_yielded_worker_id": workers - 1,
            "_main_snapshot": {**shared, "_num_workers": workers, "_base_seed": seed},
            "_worker_snapshots": {},
        },
    }
