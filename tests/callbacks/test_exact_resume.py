"""Case 29: a resumed run equals the uninterrupted one, bit for bit, from every place in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fuse.callbacks import ExactResume, Fuse
from tests.callbacks.resume_runs import (
    Augmented,
    Net,
    SaveAt,
    differences,
    fingerprint,
    fit,
    loader,
    resumed_equals_uninterrupted,
)
from tests.cases import half

VAL = {"val": True}
EVERY_2 = {"val": True, "val_check_interval": 2}

# Five batches an epoch.
PLACES = [
    *(("batch", call) for call in (1, 2, 4, 5, 6, 7, 10, 11)),
    *(("epoch", call) for call in (1, 2)),
    ("start", 1),
    ("start", 2),
]


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 13}], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_place_without_validation(tmp_path: Path, place: tuple[str, int], limit: dict) -> None:
    resumed_equals_uninterrupted(tmp_path, place, **limit)


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 13}], ids=str)
@pytest.mark.parametrize("place", [*PLACES, ("validation", 1), ("validation", 2)], ids=str)
def test_every_place_with_validation(tmp_path: Path, place: tuple[str, int], limit: dict) -> None:
    resumed_equals_uninterrupted(tmp_path, place, **VAL, **limit)


@pytest.mark.parametrize("place", [*PLACES, *(("validation", call) for call in (1, 2, 3, 4))], ids=str)
def test_every_place_with_validation_inside_epochs(tmp_path: Path, place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, **EVERY_2)


@pytest.mark.parametrize("place", [("batch", call) for call in (1, 2, 3, 4, 5, 6, 7, 8)], ids=str)
@pytest.mark.parametrize("accumulate", [2, 3])
def test_inside_and_between_accumulation_windows(tmp_path: Path, place: tuple[str, int], accumulate: int) -> None:
    resumed_equals_uninterrupted(tmp_path, place, accumulate_grad_batches=accumulate, **EVERY_2)


AFTER_FIT = [
    ({"max_steps": 7}, {"max_steps": 13}),  # inside an epoch
    ({"max_steps": 5}, {"max_steps": 13}),  # at an epoch's end
    ({"max_epochs": 1}, {"max_epochs": 3}),
    ({"max_epochs": 2}, {"max_epochs": 3}),
]


@pytest.mark.parametrize("settings", [{}, VAL, EVERY_2], ids=str)
@pytest.mark.parametrize(("first", "whole"), AFTER_FIT, ids=str)
def test_saved_after_a_fit_that_stopped_earlier(tmp_path: Path, first: dict, whole: dict, settings: dict) -> None:
    resumed_equals_uninterrupted(tmp_path, ("after", 0), first=first, **whole, **settings)


@pytest.mark.parametrize("place", [("batch", 7), ("epoch", 2), ("validation", 3)], ids=str)
def test_a_run_that_max_steps_stopped_inside_an_epoch_saved_before(tmp_path: Path, place: tuple[str, int]) -> None:
    """Lightning ends the epoch that max_steps cuts short; what is saved there must go on with the rest of it."""
    resumed_equals_uninterrupted(tmp_path, place, first={"max_steps": 7}, max_steps=13, **EVERY_2)


@pytest.mark.parametrize("place", [("batch", 5), ("validation", 1), ("epoch", 1), ("batch", 7), ("epoch", 2)], ids=str)
def test_plateau_schedulers(tmp_path: Path, place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, make_module=lambda: Net(plateau=True), **VAL)


@pytest.mark.parametrize("place", [("batch", 2), ("batch", 3), ("epoch", 1), ("batch", 4)], ids=str)
def test_limited_epochs(tmp_path: Path, place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, limit_train_batches=3, **VAL)


def test_without_it_a_resume_is_another_run(tmp_path: Path) -> None:
    """The control: stock Lightning, even with a loader that can be continued, fails what the tests above demand."""

    def run(callbacks: list[Any], seed: int, resume: Path | None = None):
        net = Net()
        stateful = StatefulDataLoader(Augmented(), batch_size=4, shuffle=True)
        return net, fit(net, callbacks, stateful, tmp_path, seed=seed, resume=resume, max_epochs=2)

    whole, trainer = run([], 1)
    path = tmp_path / "saved.ckpt"
    run([SaveAt(path, "batch", 5)], 1)
    rest, rest_trainer = run([], 2, path)
    assert len(rest.seen) == 0  # the empty epoch
    assert {"weights", "streams"} <= set(differences(fingerprint(whole, trainer), fingerprint(rest, rest_trainer)))


FUSED = [
    {"more": lambda: [Fuse(state="int8")]},
    {"more": lambda: [Fuse(state="int8")], "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    {"more": lambda: [Fuse(window="carry")], "accumulate_grad_batches": 3},
    {"more": lambda: [Fuse(window="drop")], "accumulate_grad_batches": 2},
    {"more": lambda: [Fuse(growth_interval=3)], "plugins": lambda: [half(2.0**18)], "accumulate_grad_batches": 2},
]


@pytest.mark.parametrize("place", [("batch", 3), ("batch", 5), ("batch", 8), ("validation", 2), ("epoch", 1)], ids=str)
@pytest.mark.parametrize("settings", FUSED, ids=["int8", "clipped", "carry", "drop", "float16"])
def test_with_the_step_contract(tmp_path: Path, settings: dict[str, Any], place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, **VAL, **settings)


class Striking(Net):
    """Stops in the middle of a batch, once."""

    strikes = True

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.strikes and self.trainer.global_step == 6:
            raise RuntimeError("lightning struck")
        return super().training_step(batch, batch_idx)


def test_a_batch_in_which_an_exception_struck_is_left_out(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    whole = Net()
    fit(whole, [ExactResume()], loader(), tmp_path, seed=1, max_epochs=2)
    saver = ModelCheckpoint(tmp_path, filename="struck", save_on_exception=True)
    with pytest.raises(RuntimeError, match="lightning struck"):
        fit(Striking(), [ExactResume(), saver], loader(), tmp_path, seed=1, max_epochs=2)
    rest = Striking()
    rest.strikes = False
    path = next(tmp_path.glob("struck*.ckpt"))
    with pytest.warns(UserWarning, match="ExactResume: the checkpoint was saved inside a batch"):
        trainer = fit(rest, [ExactResume()], loader(), tmp_path, seed=2, max_epochs=2, resume=path)
    assert len(rest.seen) == 3
    assert (trainer.global_step, trainer.current_epoch) == (9, 2)
    assert rest.seen[0] != whole.seen[6]  # that batch is gone


class Manual(Net):
    """Two optimizer steps in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(float(batch.sum()))
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()


@pytest.mark.parametrize("place", [("batch", 5), ("batch", 7), ("epoch", 1), ("validation", 3)], ids=str)
def test_manual_optimization(tmp_path: Path, place: tuple[str, int]) -> None:
    resumed_equals_uninterrupted(tmp_path, place, make_module=Manual, **EVERY_2)


def test_in_another_process(tmp_path: Path, run_python: Any) -> None:
    settings: dict[str, Any] = {"val": loader(shuffle=False), "val_check_interval": 2}
    ends = {}
    for steps in (8, 4):
        net = Net()
        trainer = fit(net, [ExactResume()], loader(), tmp_path, seed=1, max_steps=steps, **settings)
        ends[steps] = fingerprint(net, trainer)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
    script = tmp_path / "go_on.py"
    script.write_text(
        "import torch\n"
        "from pathlib import Path\n"
        "from lightning_fuse.callbacks.exact_resume import ExactResume\n"
        "from tests.callbacks.resume_runs import *\n"
        "torch.set_num_threads(1)\n"
        "net = Net()\n"
        "trainer = fit(net, [ExactResume()], loader(), Path('.'), seed=2, resume='4.ckpt', max_steps=8,\n"
        "              val=loader(shuffle=False), val_check_interval=2)\n"
        "torch.save(fingerprint(net, trainer), 'end')\n"
    )
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
    assert differences(ends[8], torch.load(tmp_path / "end", weights_only=False)) == []


def test_stock_lightning_resumes_ours_and_ours_resumes_stock(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(Net(), [ExactResume(), SaveAt(path, "batch", 7)], loader(), tmp_path, seed=1, max_epochs=2)
    net = Net()
    with pytest.warns(UserWarning, match="ExactResume"):  # Lightning: a callback of the checkpoint is missing
        fit(net, [], loader(), tmp_path, seed=2, max_epochs=2, resume=path)
    assert len(net.seen) == 3
    fit(Net(), [SaveAt(path, "batch", 7)], loader(), tmp_path, seed=1, max_epochs=2)
    net = Net()
    with pytest.warns(UserWarning, match="ExactResume: the checkpoint was saved without ExactResume"):
        fit(net, [ExactResume()], loader(), tmp_path, seed=2, max_epochs=2, resume=path)
    assert len(net.seen) == 3


def test_a_users_stateful_loader_resumes_under_stock_lightning(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    whole = Net()
    callbacks = [ExactResume(), SaveAt(path, "batch", 7)]
    fit(whole, callbacks, StatefulDataLoader(Augmented(), batch_size=4), tmp_path, seed=1, max_epochs=2)
    assert len(torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]) == 1
    net = Net()
    stateful = StatefulDataLoader(Augmented(), batch_size=4)
    with pytest.warns(UserWarning, match="ExactResume"):
        fit(net, [], stateful, tmp_path, seed=2, max_epochs=2, resume=path)
    assert len(net.seen) == 3


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(Net(), [ExactResume(), SaveAt(path, "batch", 7)], loader(), tmp_path, seed=1, max_epochs=2)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["ExactResume"]["format"] = 99
    torch.save(checkpoint, path)
    with pytest.raises(
        ValueError, match="ExactResume state of format 99, this version reads formats up to 1; resume with"
    ):
        fit(Net(), [ExactResume()], loader(), tmp_path, seed=2, max_epochs=2, resume=path)


def test_another_number_of_ranks_is_said(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(Net(), [ExactResume(), SaveAt(path, "batch", 7)], loader(), tmp_path, seed=1, max_epochs=2)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["ExactResume"]["ranks"] *= 2
    torch.save(checkpoint, path)
    net = Net()
    with pytest.warns(UserWarning, match="saved by 2 ranks, this run has 1; data and random streams start anew"):
        fit(net, [ExactResume()], loader(), tmp_path, seed=2, max_epochs=2, resume=path)
    assert len(net.seen) == 3


TWO_RANKS = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from lightning_fuse.callbacks import ExactResume, Fuse
from tests.cases import half
from tests.callbacks.resume_runs import *

save, resume, out, seed = sys.argv[1], sys.argv[2] or None, sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
net = Net()
callbacks = [ExactResume()] + ([SaveAt(Path(out), "batch", int(save))] if save else [])
trainer = fit(net, callbacks, loader(), Path("."), seed=seed, resume=resume, max_epochs=3, strategy="ddp",
              devices=2, accumulate_grad_batches=2)
seen = [None, None]
dist.all_gather_object(seen, net.seen)
end = {**fingerprint(net, trainer), "seen": [rows[-4:] for rows in seen]}
if trainer.is_global_zero:
    torch.save(end, out + ".end")
dist.barrier()
os._exit(0)  # all is written; the process group's threads now and then abort an interpreter that ends with them
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, run_python: Any) -> None:
    """Three batches an epoch and rank, saved in the second epoch inside a window, each rank with its own gradients."""
    script = tmp_path / "train.py"
    script.write_text(TWO_RANKS)
    for save, resume, out, seed in (("4", "", "whole", "1"), ("", "whole", "rest", "2")):
        done = run_python(str(script), save, resume, out, seed)
        assert done.returncode == 0, done.stderr
    whole, rest = (torch.load(tmp_path / f"{name}.end", weights_only=False) for name in ("whole", "rest"))
    assert len(torch.load(tmp_path / "whole", weights_only=True)["callbacks"]["ExactResume"]["ranks"]) == 2
    assert whole["seen"][0] != whole["seen"][1]
    assert differences(whole, rest) == []
