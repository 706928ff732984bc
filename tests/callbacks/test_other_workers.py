"""A run that is resumed with another number of loader workers goes on with the same order of samples."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fuse import Fuse
from lightning_fuse.callbacks.exact_resume import ExactResume
from tests.callbacks.resume_runs import Net, SaveAt, fit


class Rows(Dataset):
    """Samples that name themselves; nothing is drawn in loading them."""

    def __init__(self) -> None:
        self.rows = torch.arange(80.0).view(20, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Lines(IterableDataset):
    """The same rows in the same order for every number of workers up to one."""

    def __iter__(self):
        return iter(torch.arange(80.0).view(20, 4))


class Seen(Net):
    """Keeps whole batches."""

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[:, 0].tolist())
        return self.net(batch).square().mean()


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, 21.0).tolist(), 20, generator=torch.Generator().manual_seed(5))


KINDS = {
    "shuffled": lambda n: DataLoader(Rows(), 4, shuffle=True, num_workers=n),
    "in order": lambda n: DataLoader(Rows(), 4, num_workers=n),
    "generator": lambda n: DataLoader(
        Rows(), 4, shuffle=True, num_workers=n, generator=torch.Generator().manual_seed(3)
    ),
    "weighted": lambda n: DataLoader(Rows(), 4, sampler=weighted(), num_workers=n),
    "batch sampler": lambda n: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 4, True), num_workers=n
    ),
    "torchdata's": lambda n: StatefulDataLoader(
        Rows(), 4, shuffle=True, drop_last=True, num_workers=n, persistent_workers=n > 0
    ),
    "torchdata's, snapshots": lambda n: StatefulDataLoader(
        Rows(), 4, shuffle=True, num_workers=n, persistent_workers=n > 0, snapshot_every_n_steps=2
    ),
    "persistent": lambda n: DataLoader(Rows(), 4, shuffle=True, num_workers=n, persistent_workers=n > 0),
}
PLACES = [("batch", 5), ("batch", 3), ("epoch", 1), ("batch", 8)]


def run(tmp_path: Path, loader, seed: int, resume: bool = False, place=None) -> list[list[float]]:
    module = Seen()
    callbacks = [ExactResume(), Fuse(), *([] if place is None else [SaveAt(tmp_path / "saved.ckpt", *place)])]
    fit(
        module, callbacks, loader, tmp_path, seed=seed, max_epochs=3,
        resume=tmp_path / "saved.ckpt" if resume else None,
    )  # fmt: skip
    return module.seen


@pytest.mark.filterwarnings("ignore:ExactResume. the loader has")
@pytest.mark.parametrize(("kind", "place"), [*product(KINDS, PLACES[1:3]), *product(["shuffled"], PLACES)], ids=str)
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
def test_the_order_of_samples_goes_on(tmp_path, kind, place, before, after):
    whole = run(tmp_path, KINDS[kind](before), 1, place=place)
    rest = run(tmp_path, KINDS[kind](after), 2, resume=True)
    assert rest == whole[len(whole) - len(rest) :]
    assert len(rest) == {("batch", 3): 12, ("batch", 5): 10, ("epoch", 1): 10, ("batch", 8): 7}[place]


@pytest.mark.filterwarnings("ignore:ExactResume. the loader has")
def test_from_resume_to_resume(tmp_path):
    make = KINDS["generator"]
    whole = run(tmp_path, make(0), 1, place=("batch", 2))
    seen = []
    for workers, more in ((2, 2), (0, 3), (1, 2), (1, 1)):
        seen = run(tmp_path, make(workers), 2, resume=True, place=("batch", more))
        assert seen == whole[len(whole) - len(seen) :]
    assert len(seen) == 15 - 2 - 2 - 3 - 2


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_what_cannot_be_the_same_is_said_in_one_warning(tmp_path, before, after):
    run(tmp_path, KINDS["shuffled"](before), 1, place=("batch", 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path, KINDS["shuffled"](after), 2, resume=True)
    said = [str(w.message) for w in caught if "ExactResume" in str(w.message)]
    assert said == [
        f"ExactResume: the loader has {after} workers, the checkpoint's had {before}: the order of samples goes on, "
        "random numbers drawn while samples are loaded are others"
    ]


def test_the_same_number_says_nothing(tmp_path):
    run(tmp_path, KINDS["shuffled"](2), 1, place=("batch", 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path, KINDS["shuffled"](2), 2, resume=True)
    assert not [w for w in caught if "ExactResume" in str(w.message)]


@pytest.mark.filterwarnings("ignore:ExactResume")
@pytest.mark.parametrize("place", PLACES[1:3], ids=str)
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_an_iterable_dataset_is_skipped_to_its_place(tmp_path, kind, place, before, after):
    whole = run(tmp_path, kind(Lines(), 4, num_workers=before), 1, place=place)
    rest = run(tmp_path, kind(Lines(), 4, num_workers=after), 2, resume=True)
    assert rest == whole[len(whole) - len(rest) :]
    assert len(rest) < len(whole)
