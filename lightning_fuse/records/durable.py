"""Files that are either the old version or the new one, never half of each.

A file that is replaced as a whole is written under a temporary name beside it, flushed, forced to disk and renamed over
the old one. A run that is killed at any point leaves one of the two versions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Puts new contents into a file in one step.

    Args:
        path: The file; its folder must exist. The temporary file is its neighbour, so the rename stays on one disk.
        lines: The pieces of the new contents, written one after the other as UTF-8, line ends as given.

    Raises:
        OSError: The disk is full or the folder is not writable. The old file is untouched, nothing is left beside it.
    """
    # The process id keeps two writers from sharing one half-written file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Forces the rename itself to disk, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
