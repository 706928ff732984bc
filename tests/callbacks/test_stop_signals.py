"""SIGTERM and SIGINT end a run at the next closed window with a complete checkpoint, whatever it was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_fuse.callbacks import ExactResume, Fuse
from lightning_fuse.callbacks.last_checkpoint import LastCheckpoint
from lightning_fuse.records import find_checkpoint
from tests.callbacks.resume_runs import Net, differences, fingerprint, fit, loader

SETTINGS: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3}
pytestmark = pytest.mark.usefixtures("interruptible")
ENDS = {
    signal.SIGTERM: SIGTERMException,
    signal.SIGINT: SystemExit,
    signal.SIGHUP: SIGTERMException,
    signal.SIGUSR1: SIGTERMException,
}


class Struck(Net):
    """Sends a signal to its own process at some moment."""

    def __init__(self, where: str, call: int, number: int, times: int = 1) -> None:
        super().__init__()
        self.where, self.left, self.number, self.times = where, call, number, times

    def _at(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left == 0:
                for _ in range(self.times):
                    os.kill(os.getpid(), self.number)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._at("batch")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._at("validation")
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._at("save")


def callbacks(folder: Path) -> list[Any]:
    return [ExactResume(), Fuse(state="int8"), LastCheckpoint(folder, every=2)]


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Net, dict[str, Any]]:
    """The run that no signal comes to."""
    net = Net()
    trainer = fit(net, callbacks(tmp_path / "whole"), loader(), tmp_path, seed=1, val=loader(shuffle=False), **SETTINGS)
    return net, fingerprint(net, trainer)


@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize(
    ("where", "call"), [("batch", 1), ("batch", 3), ("batch", 4), ("validation", 2), ("save", 1)], ids=str
)
def test_it_stops_at_the_next_closed_window(
    tmp_path: Path, whole: tuple[Net, dict[str, Any]], where: str, call: int, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    net = Struck(where, call, number)
    settings = {**SETTINGS, "val": loader(shuffle=False)}
    with pytest.raises(ENDS[number]):
        fit(net, callbacks(folder), loader(), tmp_path, seed=1, **settings)
    assert signal.getsignal(number) == before or number == signal.SIGINT  # which Lightning ignores from then on
    signal.signal(number, before)
    found = find_checkpoint(folder / "last.ckpt")
    window = torch.load(found.path, weights_only=True)["FusePrecision"]["window"]
    assert window["count"] == 0  # closed
    assert len(net.seen) % 5 in (0, 2, 4)
    rest = Net()
    trainer = fit(rest, callbacks(folder), loader(), tmp_path, seed=2, resume=found.path, **settings)
    expected, end = whole
    assert net.seen + rest.seen == expected.seen
    assert differences(end, fingerprint(rest, trainer)) == []


@pytest.mark.parametrize("number", ENDS)
def test_a_second_signal_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    net = Struck("batch", 6, number, times=2)
    with pytest.raises(ENDS[number]):
        fit(net, callbacks(tmp_path / "run"), loader(), tmp_path, seed=1, val=loader(shuffle=False), **SETTINGS)
    signal.signal(number, before)
    assert len(net.seen) == 5  # the sixth batch was not trained on
    assert find_checkpoint(tmp_path / "run" / "last.ckpt").global_step == 2


def test_the_signals_of_others_are_left_alone(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        net = Struck("batch", 2, signal.SIGTERM)
        with pytest.raises(SIGTERMException):  # Lightning's answer, at once
            fit(net, callbacks(tmp_path / "run"), loader(), tmp_path, seed=1, **SETTINGS)
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_off(tmp_path: Path) -> None:
    net = Struck("batch", 3, signal.SIGTERM)
    last = LastCheckpoint(tmp_path / "run", every=100, on_signals=False)
    with pytest.raises(SIGTERMException):
        fit(net, [ExactResume(), last], loader(), tmp_path, seed=1, **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_a_validation_ends_at_its_next_batch_and_runs_again_on_resume(
    tmp_path: Path, whole: tuple[Net, dict[str, Any]]
) -> None:
    folder, settings = tmp_path / "run", {**SETTINGS, "val": loader(shuffle=False)}
    net = Struck("validation", 2, signal.SIGTERM)
    seen: list[int] = []
    net.on_validation_batch_end = lambda *_: seen.append(1)  # type: ignore[method-assign]
    with pytest.raises(SIGTERMException):
        fit(net, callbacks(folder), loader(), tmp_path, seed=1, **settings)
    assert len(seen) <= 2  # of more batches
    assert find_checkpoint(folder / "last.ckpt").global_step > 0
    rest = Net()
    trainer = fit(rest, callbacks(folder), loader(), tmp_path, seed=2, resume=folder / "last.ckpt", **settings)
    assert net.seen + rest.seen == whole[0].seen
    assert differences(whole[1], fingerprint(rest, trainer)) == []


def test_a_signal_to_the_group_leaves_the_loaders_workers_alone(tmp_path: Path) -> None:
    """What a terminal does at Ctrl-C and a scheduler at the end of a job's time."""
    script = tmp_path / "group.py"
    script.write_text(GROUP.format(folder=tmp_path / "run"), encoding="utf-8")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([sys.executable, script], start_new_session=True, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "training" in line:
                break
        os.killpg(process.pid, number)
        rest = process.stdout.read()
        process.wait(timeout=60)
        assert "stopping after this window" in rest
        assert "ended by SystemExit" in rest or "ended by SIGTERMException" in rest, rest
        assert find_checkpoint(tmp_path / "run" / "last.ckpt").global_step >= 2


GROUP = """
import time, sys
import lightning as L, torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_fuse import Fuse
from lightning_fuse.callbacks.last_checkpoint import LastCheckpoint

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            print("training", flush=True)
        time.sleep(0.02)
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

loader = torch.utils.data.DataLoader(torch.randn(4000, 4), batch_size=4, num_workers=2)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[Fuse(), LastCheckpoint("{folder}", every=1000)],
)
try:
    trainer.fit(Net(), loader)
except (SystemExit, SIGTERMException) as error:
    print("ended by", type(error).__name__, flush=True)
"""
