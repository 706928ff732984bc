"""A checkpoint's file is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO


class Unpicklable:
    def __reduce__(self):
        raise OSError("the disk is full")


def test_it_writes_what_torch_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.arange(3)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["weight"], torch.arange(3))
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    with pytest.raises(OSError, match="disk is full"):
        AtomicCheckpointIO().save_checkpoint({"step": 2, "more": Unpicklable()}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_final_name_only_ever_holds_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    during = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda part, target: during.append(torch.load(path)["step"]) or replace(part, target)
    )
    AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert during == [1]
    assert torch.load(path)["step"] == 2


def test_every_write_is_timed(tmp_path: Path) -> None:
    files = AtomicCheckpointIO()
    files.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    files.save_checkpoint({"a": 2}, tmp_path / "a.ckpt")
    assert len(files.save_ms) == 2
    assert all(milliseconds > 0 for milliseconds in files.save_ms)
