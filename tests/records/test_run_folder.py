"""A run folder knows its newest complete checkpoint, whatever a kill left beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_fuse.records import RunFolder, StepRows, find_checkpoint


def save(path: Path, step: int, *, date: int | None = None) -> Path:
    """A checkpoint with the order of keys that Lightning's have, and a second global_step further in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {"w": torch.full((64,), float(step))}
    torch.save({"epoch": 7, "global_step": step, "state_dict": weights, "callbacks": {"X": {"global_step": 1}}}, path)
    if date is not None:
        os.utime(path, (date, date))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def tear(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("step", [0, 1, 255, 256, 70_000, 2**31, 2**40])
def test_the_step_is_read_without_running_the_pickle(folder: RunFolder, step: int) -> None:
    save(folder.checkpoints / "a.ckpt", step)
    assert folder.newest_checkpoint().global_step == step


def test_the_largest_step_wins_over_dates(folder: RunFolder) -> None:
    save(folder.checkpoints / "old.ckpt", 20, date=1_000)
    save(folder.checkpoints / "copied-late.ckpt", 10, date=2_000)
    assert folder.newest_checkpoint().path.name == "old.ckpt"


def test_a_torn_checkpoint_is_passed_over(folder: RunFolder) -> None:
    save(folder.checkpoints / "a.ckpt", 10)
    tear(save(folder.checkpoints / "b.ckpt", 20))
    (folder.checkpoints / "c.ckpt").write_bytes(b"")
    (folder.checkpoints / "d.ckpt").write_text("not a checkpoint")
    found = find_checkpoint(folder.path)
    assert (found.path.name, found.global_step, found.run_folder) == ("a.ckpt", 10, folder.path)


def test_a_given_up_branch_is_passed_over(folder: RunFolder) -> None:
    save(folder.checkpoints / "a.ckpt", 10)
    save(folder.checkpoints / "b.ckpt", 20)
    rows = StepRows(folder.steps)  # resumed from step 10, killed at 15
    for step in range(1, 16):
        rows.append({"global_step": step})
    assert folder.newest_checkpoint().global_step == 10
    StepRows(folder.steps, keep_through=5).close()  # rows older than any checkpoint: better some than none
    assert folder.newest_checkpoint().global_step == 20


def test_links_and_nested_folders(folder: RunFolder) -> None:
    target = save(folder.checkpoints / "deep" / "a.ckpt", 10)
    (folder.checkpoints / "last.ckpt").symlink_to(target)
    assert folder.newest_checkpoint().path == target


def test_a_sharded_checkpoint_is_a_folder(folder: RunFolder) -> None:
    sharded = folder.checkpoints / "s.ckpt"
    save(sharded / "meta.pt", 30)
    save(folder.checkpoints / "a.ckpt", 10)
    assert folder.newest_checkpoint().global_step == 10  # .metadata is written last
    (sharded / ".metadata").write_bytes(b"x")
    assert folder.newest_checkpoint().path == sharded
    assert find_checkpoint(sharded).global_step == 30


def test_a_checkpoint_file_finds_its_run_folder(folder: RunFolder, tmp_path: Path) -> None:
    path = save(folder.checkpoints / "a.ckpt", 10)
    assert find_checkpoint(path).run_folder is None
    folder.manifest.write_text("{}")
    assert find_checkpoint(path).run_folder == folder.path
    assert find_checkpoint(save(tmp_path / "alone.ckpt", 3)).run_folder is None


def test_errors_say_what_to_do(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing to resume at .*; give a run folder or a checkpoint file"):
        find_checkpoint(tmp_path / "nothing")
    torn = save(folder.checkpoints / "torn.ckpt", 3)
    tear(torn)
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint \(incomplete ones: torn.ckpt\)"):
        find_checkpoint(folder.path)
    with pytest.raises(ValueError, match="is not a complete checkpoint; give another one"):
        find_checkpoint(torn)
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        RunFolder(in_the_way).create()
    assert folder.create().newest_checkpoint() is None
