"""Checkpoint files that are complete or not there, and are read only if they are whole.

Lightning writes through a temporary file, but in the system's temporary folder: where that is another file system, the
last step is a copy, and a kill in the middle of it leaves half a file under the final name. Here the temporary file
lies beside the final one, ends with a checksum, is on the disk before it is renamed, and replaces the previous
checkpoint in one act.

Reading checks the checksum first, takes only tensors and plain data (a file from elsewhere cannot run code), and maps
the file instead of copying it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lightning_fuse.plugins.mapped_tensors import own_mappings
from lightning_fuse.records.atomic_file import FileWriteError, replace_through, room
from lightning_fuse.records.checkpoint_file import DamagedCheckpointError, SealedWriter, remember_whole, verify

PART_SUFFIX = ".part"  # of a file that is being written
PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)


class CheckpointWriteError(FileWriteError):
    """A checkpoint could not be written; the one before it is untouched."""


class UnsafeCheckpointError(ValueError):
    """A checkpoint holds more than tensors and plain data, which could run code. Nothing of it has been loaded."""


@dataclass
class Transfers:
    """What reading or writing checkpoints has cost.

    Attributes:
        bytes: Size of the last file.
        seconds: Time of the last one, checksum and waiting for the disk included.
        count: Files.
        total_seconds: Time of all of them.
    """

    bytes: int = 0
    seconds: float = 0.0
    count: int = 0
    total_seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Counts one more."""
        self.bytes, self.seconds = size, seconds
        self.count += 1
        self.total_seconds += seconds


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint reader and writer, with a write that survives a kill and a read that trusts nothing.

    Attributes:
        saved: Cost of writing.
        loaded: Cost of reading.
        save_ms: Milliseconds of every write, until it was on the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved = Transfers()
        self.loaded = Transfers()
        self.save_ms: list[float] = []
        self._warned = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; ``path`` holds the old one until the new one is complete.

        Args:
            checkpoint: What Lightning dumped.
            path: Where it shall be; remote addresses are left to Lightning.
            storage_options: None; there are none for local files.

        Raises:
            CheckpointWriteError: The file cannot be written (an OSError); the old one is still there.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        begun = perf_counter()
        self._warn_of_objects(checkpoint)
        target = Path(path)
        part = target.with_name(target.name + PART_SUFFIX)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            size = replace_through(target, part, lambda file: _write(checkpoint, file))
        except OSError as error:
            raise _write_error(target, error) from error
        remember_whole(target)
        self.saved.add(size, perf_counter() - begun)
        self.save_ms.append(1000 * self.saved.seconds)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint, if it is whole.

        Args:
            path: The file; remote addresses and folders are left to Lightning.
            map_location: Where tensors go; None leaves them in the mapped file, from where they are copied one by one.
            weights_only: False takes any object, for a file that you trust as you trust a program.

        Returns:
            Its contents.

        Raises:
            FileNotFoundError: There is no such file.
            DamagedCheckpointError: It is not whole (a ValueError).
            UnsafeCheckpointError: It holds more than tensors and plain data (a ValueError).
        """
        if "://" in str(path) or Path(path).is_dir():
            found: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return found
        begun = perf_counter()
        contents = read_checkpoint(path, map_location, trusted=weights_only is False)
        self.loaded.add(Path(path).stat().st_size, perf_counter() - begun)
        return contents

    def _warn_of_objects(self, checkpoint: Mapping[str, Any]) -> None:
        where = None if self._warned else _first_object(checkpoint, "checkpoint")
        if where is not None:
            self._warned = True
            warnings.warn(
                f"{where}: a checkpoint with more than tensors and plain data is only read where it is trusted, with "
                "trainer.fit(..., weights_only=False); keep numbers, strings, lists and dicts there",
                stacklevel=2,
            )


def read_checkpoint(path: str | Path, map_location: Any | None = None, *, trusted: bool = False) -> dict[str, Any]:
    """Reads a checkpoint file, if it is whole and holds only tensors and plain data.

    Args:
        path: The file.
        map_location: As in ``torch.load``; None is the CPU.
        trusted: Take any object, as ``torch.load(weights_only=False)`` does.

    Returns:
        Its contents. Large tensors lie in the mapped file, each in a mapping of its own: they use memory when they are
        read and give it back when they are let go.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedCheckpointError: It is not whole, or not a checkpoint.
        UnsafeCheckpointError: It holds more than tensors and plain data, and is not trusted.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; give a file that exists")
    verify(path)
    try:
        contents = torch.load(path, map_location=map_location or "cpu", weights_only=not trusted, mmap=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path} holds more than tensors and plain data ({_gist(error)}), which could run code: it is not loaded. "
            "If you trust whoever made it, load it with trainer.fit(..., weights_only=False) or save it anew without "
            "that object"
        ) from error
    except Exception as error:  # torch raises half a dozen kinds for a file that is not one of its own
        raise DamagedCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {_gist(error)}); give another checkpoint"
        ) from error
    if not isinstance(contents, dict):
        raise DamagedCheckpointError(f"{path} holds {type(contents).__name__}, expected a dict; give a checkpoint")
    own_mappings(path, contents)
    return contents


def _write(checkpoint: Mapping[str, Any], file: BinaryIO) -> None:
    writer = SealedWriter(file)
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]  # it only writes and flushes
    except RuntimeError as error:
        # torch reports a failed write in its own words, and keeps the system's as the cause or not at all.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, OSError):
            raise cause from error
        if "write" in str(error):
            raise OSError(_gist(error)) from error
        raise
    writer.seal()


def _write_error(target: Path, error: OSError) -> CheckpointWriteError:
    try:
        earlier = any(path.suffix == target.suffix for path in target.parent.iterdir())
    except OSError:
        earlier = False
    kept = "the one before it is untouched" if earlier else "there is none before it"
    return CheckpointWriteError(
        f"the checkpoint {target} cannot be written ({error.strerror or error}; {room(target.parent)}); {kept}. "
        "Make room or the folder writable, then resume"
    )


def _first_object(value: Any, where: str) -> str | None:
    """Where the first object is that only a trusting reader takes, in words; None if there is none."""
    if isinstance(value, dict):
        items = ((f"{where}[{key!r}]", item) for key, item in value.items())
    elif type(value) in (list, tuple):
        items = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, PLAIN):
        return None
    else:
        return f"{where} is of type {type(value).__module__}.{type(value).__qualname__}"
    return next((found for place, item in items if (found := _first_object(item, place)) is not None), None)


def _gist(error: BaseException) -> str:
    """What an error of torch's says, without its advice on how to do it all the same."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), None)
    return (named or (lines[0] if lines else type(error).__name__))[:200]
