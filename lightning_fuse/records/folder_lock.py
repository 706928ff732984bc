"""One writer per run folder: a lock on its file ``.lock`` that ends with the process that holds it, however that ends.

The file stays, for whoever removes it might remove another one's lock. Processes that are forked do not keep the lock.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"


class FolderLock:
    """A lock on a folder.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._lock = FileLock(self.folder / LOCK_FILE, timeout=0, thread_local=False)

    def take(self) -> bool:
        """Takes the lock, or keeps it.

        Returns:
            False if another process, or another run of this one, has it.
        """
        if self._lock.is_locked:
            return True
        try:
            self._lock.acquire()
        except (Timeout, RuntimeError):  # another process's; another one of this process's
            return False
        except NotImplementedError:  # a file system without locks
            return True
        return True

    def release(self) -> None:
        """Gives the lock back; more than once is fine."""
        self._lock.release()


def is_locked(folder: Path) -> bool:
    """Whether somebody is writing into a run folder now.

    Args:
        folder: An existing folder.
    """
    if not (Path(folder) / LOCK_FILE).exists():
        return False
    lock = FolderLock(folder)
    if not lock.take():
        return True
    lock.release()
    return False
