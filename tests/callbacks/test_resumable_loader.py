"""Every kind of training loader continues mid-epoch, or says why it does not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fuse.callbacks.exact_resume import ExactResume
from tests.callbacks.resume_runs import (
    Augmented,
    Net,
    differences,
    fingerprint,
    fit,
    loader,
    resumed_equals_uninterrupted,
)


class Shuffled(Sampler):
    """An order that Python's random draws at the start of each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(random.sample(range(self.size), self.size))


class Pairs(Sampler):
    """Batches of neighbours, in a random order of batches."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        for batch in torch.randperm(5).tolist():
            yield list(range(4 * batch, 4 * batch + 4))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda: loader(shuffle=False),
    "drop last": lambda: DataLoader(Augmented(22), batch_size=4, shuffle=True, drop_last=True),
    "uneven": lambda: DataLoader(Augmented(18), batch_size=4, shuffle=True),
    "generator": lambda: loader(generator=generator()),
    "sampler with generator": lambda: loader(shuffle=None, sampler=RandomSampler(range(20), generator=generator())),
    "replacement": lambda: loader(shuffle=None, sampler=RandomSampler(range(20), replacement=True, num_samples=20)),
    "weighted": lambda: loader(shuffle=None, sampler=WeightedRandomSampler([1.0, 2.0] * 10, num_samples=20)),
    "subset": lambda: loader(shuffle=None, sampler=SubsetRandomSampler(range(20))),
    "of one's own": lambda: loader(shuffle=None, sampler=Shuffled(20)),
    "batch sampler": lambda: DataLoader(Augmented(), batch_sampler=Pairs()),
    "torch's batch sampler": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(Shuffled(20), 4, drop_last=False)
    ),
    "no batches": lambda: DataLoader(Augmented(6), batch_size=None, shuffle=True),
    "stateful": lambda: StatefulDataLoader(Augmented(), batch_size=4, shuffle=True),
    "workers": lambda: loader(num_workers=2),
    "persistent workers": lambda: loader(num_workers=2, persistent_workers=True),
    "workers with generator": lambda: loader(num_workers=1, generator=generator(), prefetch_factor=3),
    "stateful workers": lambda: StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1),
    "several": lambda: {"a": loader(), "b": DataLoader(Augmented(8), batch_size=2, shuffle=True)},
}
KINDS_AND_PLACES = [
    (kind, place)
    for kind in LOADERS
    for place in (("batch", 8), ("epoch", 1))
    # torchdata's own loader does not keep the streams of its workers, and it stays as the user made it.
    if kind != "stateful workers" or place == ("epoch", 1)
]


class Summing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = torch.cat([batch["a"], batch["b"]])
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:ExactResume. training data may not")
@pytest.mark.parametrize(("kind", "place"), KINDS_AND_PLACES, ids=str)
def test_every_kind_of_loader(tmp_path: Path, kind: str, place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, make_loader=LOADERS[kind], make_module=Summing, val=True)


class Stream(IterableDataset):
    """Samples of no known number that knows where it is, blurred by a random stream."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Stream:
        if self.at == 20:
            self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == 20:
            raise StopIteration
        self.at += 1
        return torch.full((4,), self.at / 10) + torch.rand(4)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Lines(IterableDataset):
    """Samples of known number and fixed order, without a state."""

    def __len__(self) -> int:
        return 20

    def __iter__(self):
        return (torch.full((4,), i / 10) for i in range(20))


@pytest.mark.filterwarnings("ignore:ExactResume. training data may not")
@pytest.mark.parametrize("place", [("batch", 3), ("batch", 5), ("epoch", 1), ("batch", 8)], ids=str)
@pytest.mark.parametrize("dataset", [Stream, Lines])
def test_iterable_datasets(tmp_path: Path, dataset: type, place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, make_loader=lambda: DataLoader(dataset(), batch_size=4), val=True)


@pytest.mark.parametrize("kind", ["in order", "generator", "weighted", "batch sampler", "workers"])
def test_a_converted_loader_yields_the_same_batches(tmp_path: Path, kind: str) -> None:
    runs = []
    for callbacks in ([], [ExactResume()]):
        net = Net()
        trainer = fit(net, callbacks, LOADERS[kind](), tmp_path, seed=1, max_epochs=2)
        runs.append((net.seen, fingerprint(net, trainer)))
    assert runs[0][0] == runs[1][0]
    assert differences(runs[0][1], runs[1][1]) == []


class Own(DataLoader):
    pass


CANNOT = [
    (lambda: Own(Augmented(), batch_size=4), "Own is a DataLoader of its own kind; derive it from"),
    (lambda: Bare(), "Bare has no state_dict/load_state_dict"),
    (lambda: DataLoader(Augmented(), 4, num_workers=1, in_order=False), "in_order=False lets the workers decide"),
    (lambda: DataLoader(Lines(), batch_size=4), "Lines has no state_dict/load_state_dict and is read again"),
    (lambda: loader(shuffle=None, sampler=Shuffled(20)), "Shuffled is run again from the start of its epoch"),
]


class Bare:
    """A train loader that is no DataLoader."""

    def __iter__(self):
        return iter([torch.ones(4, 4)] * 5)

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(("make", "why"), CANNOT, ids=[why.split()[0] for _, why in CANNOT])
def test_what_may_not_be_exact_is_said_once(
    tmp_path: Path, make: Any, why: str, recwarn: pytest.WarningsRecorder
) -> None:
    net = Net()
    fit(net, [ExactResume()], make(), tmp_path, seed=1, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    said = [str(w.message) for w in recwarn if "ExactResume" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("ExactResume: training data may not continue exactly mid-epoch: ")
    assert why in said[0]
    assert len(net.seen) == 10


def test_ordinary_loaders_are_no_reason_for_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for kind in ("in order", "weighted", "stateful", "generator", "several"):
        fit(Summing(), [ExactResume()], LOADERS[kind](), tmp_path, seed=1, max_steps=2)
    assert [str(w.message) for w in recwarn if "ExactResume" in str(w.message)] == []
