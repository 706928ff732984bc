"""Which bytes of a checkpoint a mapped tensor is: always those of its own storage."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fuse.plugins.mapped_tensors import SMALL, _base, _storage_records, own_mappings


def saved(path: Path, contents: dict[str, Any]) -> dict[str, Any]:
    torch.save(contents, path)
    loaded: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    return loaded


@pytest.mark.parametrize("padding", range(0, 4200, 64))
def test_a_file_with_one_large_storage_is_read_as_its_own(tmp_path: Path, padding: int) -> None:
    """The storage and the pickle begin at multiples of 64; for one padding both lie alike to pages."""
    values = torch.arange(SMALL // 4 + 3, dtype=torch.float32)
    loaded = saved(tmp_path / "one.ckpt", {"note": "x" * padding, "weights": values})
    assert own_mappings(tmp_path / "one.ckpt", loaded) == 1
    assert torch.equal(loaded["weights"], values)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_storages_of_one_size_are_not_mixed_up(tmp_path: Path, count: int) -> None:
    values = [torch.full((SMALL // 4,), float(n)) for n in range(count)]
    loaded = saved(tmp_path / "same.ckpt", {"all": list(values), "small": torch.ones(3), "empty": torch.empty(0)})
    assert own_mappings(tmp_path / "same.ckpt", loaded) == count
    assert all(torch.equal(a, b) for a, b in zip(loaded["all"], values, strict=True))


def test_a_storage_that_was_not_read_leaves_all_as_they_are(tmp_path: Path) -> None:
    values = torch.arange(SMALL, dtype=torch.float32)
    loaded = saved(tmp_path / "two.ckpt", {"a": values, "b": values + 1})
    hidden = loaded.pop("b")
    assert own_mappings(tmp_path / "two.ckpt", loaded) == 0
    assert torch.equal(loaded["a"], values)
    assert torch.equal(hidden, values + 1)


def test_only_storages_are_records(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5), "b": torch.ones(SMALL)}, tmp_path / "file.ckpt")
    assert sorted(_storage_records(tmp_path / "file.ckpt").values()) == [20, 4 * SMALL]
    page = mmap.PAGESIZE
    assert _base({7 * page + 64: 20}, {64: 20, 128: 20}) is None
    assert _base({7 * page + 64: 20}, {64: 24}) is None
    assert _base({7 * page + 64: 20}, {64: 20}) == 7 * page
    assert _base({7 * page + 65: 20}, {64: 20}) is None
