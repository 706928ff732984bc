"""Files that are either the old version or the new one, never half of each.

A file that is replaced as a whole is written under a temporary name beside it, flushed, forced to disk and renamed over
the old one. A run that is killed at any point leaves one of the two versions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO


class FileWriteError(OSError):
    """A file could not be written; the one before it is untouched. The message says which and why."""


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Puts new text into a file in one step.

    Args:
        path: The file; its folder must exist. The temporary file is its neighbour, so the rename stays on one disk.
        lines: The pieces of the new contents, written one after the other as UTF-8, line ends as given.

    Raises:
        FileWriteError: The disk is full or the folder is not writable. The old file is untouched, nothing is left
            beside it.
    """

    def write(file: BinaryIO) -> None:
        for line in lines:
            file.write(line.encode())

    # The process id keeps two writers from sharing one half-written file.
    try:
        replace_through(path, path.with_name(f".{path.name}.{os.getpid()}.tmp"), write)
    except OSError as error:
        raise write_error(path, error) from error


def replace_through(path: Path, temporary: Path, write: Callable[[BinaryIO], None]) -> int:
    """Puts new contents into a file in one step.

    Args:
        path: The file.
        temporary: A neighbour of it, under which it is written.
        write: Writes the contents.

    Returns:
        The bytes of the new file.

    Raises:
        OSError: The file cannot be written. The old file is untouched, nothing is left beside it.
    """
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return size


def write_error(path: Path, error: OSError) -> FileWriteError:
    """One line that says what could not be written where, and how much room there is.

    Args:
        path: The file.
        error: The system's own.
    """
    if isinstance(error, FileWriteError):
        return error
    return FileWriteError(
        f"{path} cannot be written ({error.strerror or error}; {room(path.parent)}); what was there is untouched. "
        "Make room or the folder writable, then resume"
    )


def room(folder: Path) -> str:
    """How much room there is for a file, in words.

    Args:
        folder: Where it would lie.
    """
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free"
    except OSError:
        return "its folder cannot be read"


def _sync_folder(folder: Path) -> None:
    """Forces the rename itself to disk, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
