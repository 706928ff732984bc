"""Runs that end in their last validation, in their summary, or while they begin: what is pending is done on resume."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import lightning_fuse.callbacks.run_recorder as recorder_module
from lightning_fuse.config import ConfigError
from lightning_fuse.records import FileWriteError, FolderLock, read_metrics, read_summary
from lightning_fuse.resume import find_start
from lightning_fuse.run import Run
from tests.composing import SMALL, composed
from tests.resuming import checkpoint, compose_here, equal, go_on, rows

WORDS = (*SMALL, "+trainer.limit_train_batches=1.0", "trainer.max_steps=4", "callbacks.last.every=1", "resume=auto")
RESULT = ("state_dict", "optimizer_states", "lr_schedulers", "loops")


class KilledError(Exception):
    """Stands for a kill."""


def begin(folder: Path, *more: str) -> Run:
    words = [*WORDS, *more]
    begun = find_start(composed(*words, run_folder=folder), words, compose_here(folder))
    return go_on(begun, tuple(words), folder)


def killed(*args: Any, **kwargs: Any) -> None:
    raise KilledError


def timeless(folder: Path) -> list[dict[str, Any]]:
    table = read_metrics(folder / "metrics.csv")
    return [{key: value for key, value in row.items() if "sec" not in key and "per_s" not in key} for row in table]


def check_same_end(one: Path, two: Path) -> None:
    first, second = checkpoint(one), checkpoint(two)
    assert first["global_step"] == second["global_step"] == 4
    for key in RESULT:
        assert equal(first[key], second[key]), key
    assert rows(one) == rows(two)
    assert timeless(one) == timeless(two)
    ends = [read_summary(folder / "summary.json") for folder in (one, two)]
    assert [end.status for end in ends] == ["finished", "finished"]
    assert ends[0].best["value"] == ends[1].best["value"]
    assert ends[0].updates == ends[1].updates
    assert (one / "checkpoints" / "best.ckpt").exists() == (two / "checkpoints" / "best.ckpt").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_killed_in_the_last_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    begin(whole, f"keep_last={keep}")
    with monkeypatch.context() as patch:
        recorded = recorder_module.RunRecorder.on_validation_end

        def dies(self: Any, trainer: Any, module: Any) -> None:
            if trainer.global_step == 4:
                raise KilledError
            recorded(self, trainer, module)

        patch.setattr(recorder_module.RunRecorder, "on_validation_end", dies)
        patch.setattr(recorder_module.RunRecorder, "_write_end", lambda *args: None)  # a kill writes no summary
        with pytest.raises(KilledError):
            begin(folder, f"keep_last={keep}")
    assert read_summary(folder / "summary.json").status == "running"
    begin(folder, f"keep_last={keep}")
    check_same_end(whole, folder)


def test_killed_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    begin(whole)
    with monkeypatch.context() as patch:
        patch.setattr(recorder_module.RunRecorder, "_write_end", killed)
        with pytest.raises(KilledError):
            begin(folder)
    begin(folder)
    check_same_end(whole, folder)
    with pytest.raises(ConfigError, match="the run is finished, step 4 of 4"):
        begin(folder)


def test_a_full_disk_while_a_resume_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    begin(folder)
    kept = {path.name: path.read_bytes() for path in (folder / ".hydra").iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileWriteError, match=r"config\.yaml cannot be written \(No space left on device; .* MiB"):
            begin(folder, "trainer.max_steps=6")
    assert {path.name: path.read_bytes() for path in (folder / ".hydra").iterdir()} == kept
    begin(folder, "trainer.max_steps=6")
    assert read_summary(folder / "summary.json").global_step == 6


def test_the_loser_of_two_starts_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder)
    assert lock.take()
    with pytest.raises(RuntimeError, match="another process is training in it now; wait for its end"):
        begin(folder)
    assert sorted(path.name for path in folder.rglob("*")) == [".lock", "checkpoints"]
    lock.release()
    begin(folder)
    assert read_summary(folder / "summary.json").status == "finished"
