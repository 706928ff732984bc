"""One writer per run folder: a lock that ends with the process that holds it, however that ends, and leaves no file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such lock; two runs in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

_held: set[int] = set()  # descriptors of this process


class FolderLock:
    """A lock on a folder.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Takes the lock, or keeps it.

        Returns:
            False if another process, or another run of this one, has it.
        """
        if fcntl is None or self._descriptor is not None:
            return True
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:  # a file system without locks
            os.close(descriptor)
            return True
        self._descriptor = descriptor
        _held.add(descriptor)
        return True

    def release(self) -> None:
        """Gives the lock back; more than once is fine."""
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(folder: Path) -> bool:
    """Whether somebody is writing into a run folder now.

    Args:
        folder: An existing folder.
    """
    lock = FolderLock(folder)
    if not lock.take():
        return True
    lock.release()
    return False


def _let_go() -> None:
    """A worker that is forked must not keep the lock of a run that was killed."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
