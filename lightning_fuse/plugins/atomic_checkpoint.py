"""Checkpoint files that are complete or not there.

Lightning writes through a temporary file, but in the system's temporary folder: where that is another file system, the
last step is a copy, and a kill in the middle of it leaves half a file under the final name. Here the temporary file
lies beside the final one, is on the disk before it is renamed, and replaces the previous checkpoint in one act.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

PART_SUFFIX = ".part"  # of a file that is being written


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint reader and writer, with a write that survives a kill at any moment.

    Attributes:
        save_ms: Milliseconds of every write, until it was on the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.save_ms: list[float] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; ``path`` holds the old one until the new one is complete.

        Args:
            checkpoint: What Lightning dumped.
            path: Where it shall be; remote addresses are left to Lightning.
            storage_options: None; there are none for local files.

        Raises:
            OSError: The file cannot be written; the old one is still there.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        begun = perf_counter()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + PART_SUFFIX)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
        self.save_ms.append(1000 * (perf_counter() - begun))


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a loss of power, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
