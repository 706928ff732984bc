"""A replaced file is the old one or the new one, and leaves no litter."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fuse.records.atomic_file import FileWriteError, replace_file


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace_file(path, ["one\n"])
    replace_file(path, ["two\n", "lines\n"])
    assert path.read_text() == "two\nlines\n"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace_file(path, ["old"])

    def lines():
        yield "half of the ne"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, lines())
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_no_folder_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileWriteError, match=r"missing/f cannot be written \(No such file or directory; .*"):
        replace_file(tmp_path / "missing" / "f", ["x"])
