"""StepProgress: a bar over steps in a terminal, a line per validation in a log file."""

from __future__ import annotations

import io
import re

import lightning as L
import pytest
import torch
from rich.console import Console

from lightning_fuse.callbacks.step_progress import StepProgress


class Module(L.LightningModule):
    def __init__(self, loss: float) -> None:
        super().__init__()
        self.loss = loss
        self.weight = torch.nn.Parameter(torch.ones(4))

    def training_step(self, batch, batch_idx):
        loss = (self.weight * batch[0]).sum()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(progress: StepProgress, loss: float = 1.25, after: L.Callback | None = None) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 4)), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[progress, *([after] if after else [])],
        max_steps=10, max_epochs=-1, val_check_interval=5, check_val_every_n_epoch=None, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Module(loss), data, data)


def test_a_log_file_gets_a_line_per_validation(capsys: pytest.CaptureFixture[str]) -> None:
    fit(StepProgress())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 5", "step 10"]
    assert all("val/loss 1.25" in line for line in lines)


def test_a_terminal_gets_a_bar_over_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    progress, screen = StepProgress(), io.StringIO()
    progress._console = Console(file=screen, force_terminal=True, width=150)
    fit(progress)
    assert "10/10" in screen.getvalue()
    assert "val/loss 1.25" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_a_rank_that_is_not_the_first_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress()
    progress.disable()
    fit(progress)
    assert capsys.readouterr().out == ""


def test_a_run_that_diverged_is_shown_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    fit(StepProgress(), loss=float("nan"))
    assert ["val/loss nan" in line for line in capsys.readouterr().out.splitlines()] == [True, True]
    fit(StepProgress(), loss=float("inf"))
    assert ["val/loss inf" in line for line in capsys.readouterr().out.splitlines()] == [True, True]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_fits_its_screen(width: int) -> None:
    progress, screen = StepProgress(refresh_per_second=1000.0), io.StringIO()
    progress._console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    fit(progress)
    lines = [line for part in screen.getvalue().split("\n") for line in part.split("\r")]
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in lines]
    assert max(map(len, shown)) <= width
    assert not any("…" in line for line in shown)
    assert any("10/10" in line and "train/loss 0.8" not in line for line in shown)
    assert any("val/loss 1.25" in line for line in shown) or width == 60


def test_a_validation_has_a_bar_of_its_own() -> None:
    progress, screen = StepProgress(), io.StringIO()
    progress._console = Console(file=screen, force_terminal=True, width=150)
    seen = []

    class Look(L.Callback):
        def on_validation_batch_end(self, *args, **kwargs):
            if progress._bar is None:
                return  # sanity checking
            (task,) = [task for task in progress._bar.tasks if task.description == "validating"]
            seen.append((task.completed, task.total))

    fit(progress, after=Look())
    assert seen == [(float(done), 12) for done in range(1, 13)] * 2
