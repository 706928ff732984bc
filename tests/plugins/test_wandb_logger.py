"""The logger of Weights & Biases: one id for all resumes, choices that are declared, the summary at the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_fuse.plugins.wandb_logger import ID_FILE, RunWandbLogger
from lightning_fuse.reports.wandb_log import find_logs, read_wandb
from lightning_fuse.run import train
from tests.composing import SMALL, composed

pytest.importorskip("wandb")
WORDS = (*SMALL, "logger=wandb", "seed=3", "logger.wandb.tags=[one]")


def test_one_run_has_one_id_its_seed_in_the_name_and_no_targets(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(composed(*WORDS, run_folder=folder), list(WORDS))
    (log,) = find_logs(folder)
    until = time.monotonic() + 30
    while (run := read_wandb(log)).exit_code is None and time.monotonic() < until:
        time.sleep(0.1)  # the end is written by a process of W&B's own
    assert run.run_id == (folder / ID_FILE).read_text().strip()
    assert run.name.endswith("_3")
    assert run.config["optimizer"]
    assert not [key for key in run.config if key.endswith(("_target_", "_partial_"))]
    assert RunWandbLogger(folder, offline=True).version == run.run_id  # as a resume would build it
    assert RunWandbLogger(tmp_path / "new", offline=True).version != run.run_id


@pytest.mark.parametrize("key", ["watch", "mode"])
def test_unknown_words_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown logger\.wandb\.{key} 'some'; known: "):
        RunWandbLogger(tmp_path, offline=True, **{key: "some"})
