"""Training loaders that can continue in the middle of an epoch.

torch's ``DataLoader`` cannot. ``make_resumable`` turns one into torchdata's ``StatefulDataLoader`` over the same
dataset, sampler, workers and collation, which yields **the same batches as before**, and adds what that class does not
keep:

- the order of an epoch that a sampler draws from the global random streams or a generator: the state they had when the
  epoch began is kept, and on resume the sampler is run again from it and skipped to its place;
- the random streams of the workers, so that augmentation in them goes on where it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, MapDataPipe
from torch.utils.data import sampler as torch_samplers
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful import Stateful

from lightning_fuse.callbacks.loader_workers import LoaderHabits, LoaderPosition, position_in
from lightning_fuse.callbacks.random_state import capture_random_state, kept_random_state, restore_random_state

# Samplers of torch draw an epoch's whole order when it begins, so running them again gives the same order.
KNOWN_SAMPLERS = (
    torch_samplers.SequentialSampler,
    torch_samplers.RandomSampler,
    torch_samplers.SubsetRandomSampler,
    torch_samplers.WeightedRandomSampler,
    torch_samplers.BatchSampler,
    DistributedSampler,
)


class ResumableLoader(StatefulDataLoader):
    """A ``StatefulDataLoader`` that can replay any sampler; takes the same arguments.

    It also loads the state of one with another number of workers: the order of the samples goes on, what lives in a
    worker (its random streams, an iterable dataset) begins anew. The orders of later epochs are those of the first
    run's loader, too, because random numbers are drawn at the moments at which that one drew them.
    """

    _start: LoaderPosition | None = None  # where the next iterator begins, if the state was that of other workers
    _habits: LoaderHabits | None = None  # of the first run's loader, where they are not this one's
    _hidden: Generator | None = None  # the user's generator, while seeds of workers are drawn from another one

    @property
    def _index_sampler(self) -> Any:
        # The one place where a loader's iterator asks for its sampler. Wrapped here, and only here, `sampler` and
        # `batch_sampler` stay what the user and Lightning (which exchanges them) know.
        indices = super()._index_sampler
        if _is_endless(indices) or isinstance(indices, Stateful) or isinstance(self.sampler, Stateful):
            return indices
        start = None if self._start is None else self._start.order
        exhausts = None if self._habits is None else self._habits.prefetches
        return ReplayedIndices(indices, self._hidden or self.generator, start, exhausts)

    def state_dict(self) -> dict[str, Any]:
        """The state of a ``StatefulDataLoader``, and when the run draws random numbers."""
        return {**super().state_dict(), "habits": list(self._habits or self._own_habits())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at a saved place, in this number of workers."""
        position = position_in(state_dict)
        habits = None if position is None else position.habits
        self._habits = None if habits == self._own_habits() else habits
        if position is None or position.workers == self.num_workers:
            super().load_state_dict(state_dict)
            return
        super().load_state_dict({})
        self._start = position
        for part in (super()._index_sampler, self.sampler):
            if isinstance(part, Stateful) and position.indices is not None:
                part.load_state_dict(position.indices)
                break

    def __iter__(self) -> Any:
        resets = self._iterator is not None and not self._initial_iter_for_state_dict
        if self._habits is not None and self._habits.reseeds and not self._own_habits().reseeds and resets:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if self._habits is not None and not self._habits.reseeds and self._own_habits().reseeds:
            loader: Any = self
            mine, another = loader.generator, Generator()
            another.seed()
            self._hidden, loader.generator = mine, another
            try:
                iterator: Any = super()._get_iterator()
            finally:
                loader.generator, self._hidden = mine, None
        else:
            iterator = super()._get_iterator()
        start, self._start = self._start, None
        if start is not None and isinstance(iterator._sampler_iter, ReplayedIterator):
            iterator._sampler_iter.begin()
        elif start is not None:
            for _ in itertools.islice(iterator, start.yielded):
                pass
        return iterator

    def _own_habits(self) -> LoaderHabits:
        return LoaderHabits(self.num_workers > 0, not (self.persistent_workers and self.num_workers > 0))


class ReplayedIndices:
    """A sampler or batch sampler whose iterator can be continued.

    Args:
        indices: The sampler.
        generator: The loader's generator, if it has one.
        start: Where the first epoch begins: state of an iterator, None for its beginning.
        exhausts: Whether the sampler is asked once more after its last index, which may draw random numbers; None
            leaves it to the loader.
    """

    def __init__(
        self,
        indices: Any,
        generator: Generator | None,
        start: dict[str, Any] | None = None,
        exhausts: bool | None = None,
    ) -> None:
        self.indices = indices
        self.generator = generator
        self.start = start
        self.exhausts = exhausts

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> ReplayedIterator:
        return ReplayedIterator(self)

    def generators(self) -> list[Generator]:
        """Every generator that the order may be drawn from, each once."""
        parts = (self.indices, getattr(self.indices, "sampler", None))
        found = [self.generator, *(getattr(part, "generator", None) for part in parts)]
        return list({id(g): g for g in found if isinstance(g, Generator)}.values())

    def epoch(self) -> int | None:
        """The epoch that a distributed sampler was told, if there is one."""
        return next((e for part in self._with_epoch() if isinstance(e := getattr(part, "epoch", None), int)), None)

    def set_epoch(self, epoch: int) -> None:
        """Tells a distributed sampler its epoch."""
        for part in self._with_epoch():
            part.set_epoch(epoch)

    def _with_epoch(self) -> list[Any]:
        parts = (self.indices, getattr(self.indices, "sampler", None))
        return [part for part in parts if callable(getattr(part, "set_epoch", None))]


class ReplayedIterator(Iterator[Any]):
    """One epoch's order, from its beginning or from a saved place."""

    def __init__(self, source: ReplayedIndices) -> None:
        self._source = source
        self._order: Iterator[Any] | None = None
        self._yielded = 0
        self._origin: dict[str, Any] = {}

    def __next__(self) -> Any:
        self.begin()
        order: Any = self._order
        if self._source.exhausts is False and self._at_end():
            raise StopIteration
        index = next(order)
        self._yielded += 1
        self._end()
        return index

    def _at_end(self) -> bool:
        try:
            return self._yielded == len(self._source)
        except (TypeError, NotImplementedError):
            return False  # a sampler without a length

    def _end(self) -> None:
        if self._source.exhausts and self._at_end():
            next(self._order or iter(()), None)

    def begin(self) -> None:
        """Draws the order, or goes to where the source says that the epoch begins; only the first time."""
        start, self._source.start = self._source.start, None
        if self._order is None and start is not None:
            self.load_state_dict(start)
        if self._order is None:
            self._begin()

    def _begin(self) -> None:
        # Only now, at the first batch: torch's own loader draws the order as late as this, and so the batches of a
        # converted loader are those of the original.
        self._origin = {
            "random": capture_random_state(gpus=False),
            "generators": [g.get_state() for g in self._source.generators()],
            "epoch": self._source.epoch(),
        }
        self._order = iter(self._source.indices)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch began and how far it is; plain data."""
        if self._order is None and self._source.start is not None:
            return dict(self._source.start)
        if self._order is None:
            return {"yielded": 0, "generators": [g.get_state() for g in self._source.generators()]}
        return {"yielded": self._yielded, **self._origin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Runs the sampler again to the saved place.

        Args:
            state: What ``state_dict`` returned.
        """
        for generator, saved in zip(self._source.generators(), state["generators"], strict=False):
            generator.set_state(saved)
        if "random" not in state:
            return
        if state["epoch"] is not None:
            self._source.set_epoch(state["epoch"])
        with kept_random_state(gpus=False):
            restore_random_state(state["random"])
            self._begin()
            for _ in itertools.islice(self._order or (), state["yielded"]):
                pass
            self._yielded = state["yielded"]
            self._end()


class WorkerStreams(Dataset):
    """A map-style dataset that also keeps the random streams of the worker it lives in.

    A loader asks the datasets in its workers for their state after each batch and hands it back on resume.

    Args:
        dataset: The user's dataset; everything is passed on to it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or (name.startswith("__") and name != "__getitems__"):
            raise AttributeError(name)  # not there yet while this object is being unpickled
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn that opens a file for `get_worker_info().dataset` means the user's dataset.
        if name == "dataset":
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)

    def state_dict(self) -> dict[str, Any]:
        """The random streams of this process, without those of GPUs."""
        return capture_random_state(gpus=False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the random streams of this process back."""
        restore_random_state(state)


def make_resumable(loader: Any) -> tuple[Any, str | None]:
    """A loader that can continue mid-epoch in place of one that cannot, where that is safe.

    Args:
        loader: A training loader.

    Returns:
        The loader to use (the same one where nothing is needed or possible), and in one sentence what will not continue
        exactly, or None.
    """
    if isinstance(loader, Stateful):
        return loader, None
    refused = _why_not(loader)
    if refused is not None:
        return loader, refused
    dataset = loader.dataset
    if loader.num_workers and not isinstance(dataset, (Stateful, IterableDataset)):
        dataset = WorkerStreams(dataset)
    return ResumableLoader(dataset, **_arguments(loader)), _doubts(loader)


def _why_not(loader: Any) -> str | None:
    """Why a loader is left as it is, or None."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{name} has no state_dict/load_state_dict"
    if type(loader) is not DataLoader:
        return f"{name} is a DataLoader of its own kind; derive it from torchdata's StatefulDataLoader instead"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its dataset is a DataPipe; use a Dataset"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "in_order=False lets the workers decide the order; use in_order=True"
    return None


def _doubts(loader: DataLoader) -> str | None:
    """What a converted loader still cannot promise, or None."""
    if isinstance(loader.dataset, IterableDataset):
        if isinstance(loader.dataset, Stateful):
            return None
        return (
            f"{type(loader.dataset).__name__} has no state_dict/load_state_dict and is read again from its start; "
            "that is exact only if it yields the same every time"
        )
    for sampler in (loader.batch_sampler, loader.sampler):
        if sampler is not None and not isinstance(sampler, (*KNOWN_SAMPLERS, Stateful)):
            return (
                f"{type(sampler).__name__} is run again from the start of its epoch; that is exact only if it draws "
                "its order from the global random streams there. Otherwise give it state_dict/load_state_dict"
            )
    return None


def _arguments(loader: DataLoader) -> dict[str, Any]:
    """The arguments that make the same loader again."""
    arguments: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": getattr(loader, "pin_memory_device", ""),  # torch means to drop it
    }
    if isinstance(loader.dataset, IterableDataset):
        return {**arguments, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:  # the user's own batch sampler
        return {**arguments, "batch_sampler": loader.batch_sampler}
    return {
        **arguments, "batch_size": loader.batch_size, "drop_last": loader.drop_last, "sampler": loader.sampler
    }  # fmt: skip


def _is_endless(indices: Iterable[Any]) -> bool:
    """Whether this is the dummy sampler of an iterable dataset."""
    inner = getattr(indices, "sampler", indices)
    return "InfiniteConstantSampler" in type(inner).__name__
