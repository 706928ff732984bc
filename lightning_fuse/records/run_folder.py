"""The run folder: where each record of a run lies, and which checkpoint a killed run continues from.

Layout::

    manifest.json   what ran: resolved configuration, versions, hardware, data, revision, seed   (manifest.py)
    steps.jsonl     every optimizer step                                                         (step_rows.py)
    metrics.csv     every measurement                                                            (metrics_table.py)
    summary.json    how it ended                                                                 (summary.py)
    checkpoints/    *.ckpt, files or sharded folders

A checkpoint is **complete** when its checksum holds (see ``checkpoint_file.py``) and it tells its ``global_step``; a
sharded one when its ``.metadata``, which is written last, is there. Where the newest one is not complete, the one
before it is used, with one warning.
"""

from __future__ import annotations

import pickletools
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from lightning_fuse.records.checkpoint_file import DamagedCheckpointError, is_whole, verify
from lightning_fuse.records.step_rows import last_step

CHECKPOINT_SUFFIX = ".ckpt"

# Pickle's ways to say a whole number; other instructions carry integers too, as places in its memo.
INTEGER_OPCODES = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: The file, or the folder of a sharded one.
        global_step: Optimizer steps of the run when it was saved, skips included.
        run_folder: The run folder it lies in, or None if it lies in none.
    """

    path: Path
    global_step: int
    run_folder: Path | None = None


class RunFolder:
    """The paths of one run.

    Args:
        path: The folder; ``create`` makes it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def manifest(self) -> Path:
        """``manifest.json``."""
        return self.path / "manifest.json"

    @property
    def steps(self) -> Path:
        """``steps.jsonl``."""
        return self.path / "steps.jsonl"

    @property
    def metrics(self) -> Path:
        """``metrics.csv``."""
        return self.path / "metrics.csv"

    @property
    def summary(self) -> Path:
        """``summary.json``."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def create(self) -> RunFolder:
        """Makes the folder and that of its checkpoints; both may be there already.

        Returns:
            Itself.

        Raises:
            NotADirectoryError: A file is in the way.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run folder {self.path} is a file; name a folder, new or of an earlier run")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        return self

    def newest_checkpoint(self, *, warn: bool = False) -> Checkpoint | None:
        """The complete checkpoint that a resumed run should continue from, or None.

        The one with the largest step wins, a copy's dates being worth nothing. Steps beyond the last step row belong to
        a branch that was given up (the run was resumed from an earlier checkpoint) and only count if nothing else is
        there.

        Args:
            warn: Say in one warning which newer checkpoints were passed over because they are damaged.
        """
        candidates = {path: _checkpoint(path) for path in self.checkpoint_files()}
        found = [checkpoint for checkpoint in candidates.values() if checkpoint is not None]
        reached = last_step(self.steps)
        # Those of this branch first, the newest of them first; only as many are read to the end as it takes.
        found.sort(key=lambda c: (reached is None or c.global_step <= reached, *_age(c)), reverse=True)
        broken = [path for path, checkpoint in candidates.items() if checkpoint is None]
        for checkpoint in found:
            if _is_complete(checkpoint.path):
                if warn:
                    self._warn_of_damage(broken, checkpoint)
                return Checkpoint(checkpoint.path, checkpoint.global_step, self.path)
            broken.append(checkpoint.path)
        return None

    def _warn_of_damage(self, broken: list[Path], used: Checkpoint) -> None:
        # A damaged file that is older than the one that is used is no news.
        written = used.path.stat().st_mtime_ns
        newer = sorted(path.name for path in broken if path.stat().st_mtime_ns >= written)
        if newer:
            warnings.warn(
                f"damaged and passed over in {self.checkpoints}: {', '.join(newer)}; "
                f"{used.path.name} of step {used.global_step} is used",
                stacklevel=4,
            )

    def checkpoint_files(self) -> list[Path]:
        """Everything that is named like a checkpoint, complete or not."""
        # A link (save_last="link") only leads to what is found anyway.
        return sorted(path for path in self.checkpoints.rglob(f"*{CHECKPOINT_SUFFIX}") if not path.is_symlink())


def find_checkpoint(path: str | Path) -> Checkpoint:
    """What ``resume=PATH`` means.

    Args:
        path: A run folder, or one checkpoint.

    Returns:
        The checkpoint to load; for a run folder its newest complete one.

    Raises:
        FileNotFoundError: There is nothing at that path, or the run folder holds no complete checkpoint.
        DamagedCheckpointError: The file is no complete checkpoint (a ValueError).
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"nothing to resume at {path}; give a run folder or a checkpoint file")
    if path.is_file() or _is_sharded(path):
        if path.is_file():
            verify(path)
        checkpoint = _checkpoint(path)
        if checkpoint is None:
            raise DamagedCheckpointError(
                f"{path} is not a complete checkpoint; give another one, or its run folder to use the newest that is "
                "(it tells no global_step)"
            )
        return Checkpoint(path, checkpoint.global_step, _run_folder_of(path))
    newest = RunFolder(path).newest_checkpoint(warn=True)
    if newest is None:
        broken = ", ".join(p.name for p in RunFolder(path).checkpoint_files()) or "none"
        raise FileNotFoundError(
            f"{path} holds no complete checkpoint (incomplete ones: {broken}); "
            "give a folder with checkpoints/, or a checkpoint file"
        )
    return newest


def _run_folder_of(path: Path) -> Path | None:
    for folder in path.absolute().parents:
        if RunFolder(folder).manifest.is_file():
            return folder
    return None


def _is_sharded(path: Path) -> bool:
    return path.is_dir() and (path / ".metadata").is_file()


def _age(checkpoint: Checkpoint) -> tuple[int, int]:
    return checkpoint.global_step, checkpoint.path.stat().st_mtime_ns


def _is_complete(path: Path) -> bool:
    return is_whole(path / "meta.pt" if _is_sharded(path) else path)


def _checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at a path, or None if its directory is torn or foreign; its contents are not read here."""
    archive = path / "meta.pt" if _is_sharded(path) else path
    step = _saved_step(archive) if archive.is_file() else None
    return None if step is None else Checkpoint(path, step)


def _saved_step(archive: Path) -> int | None:
    """``global_step`` as the checkpoint has it.

    The archive's pickle is read as a list of instructions and never run: the first string "global_step" is the key of
    the checkpoint itself (it stands before the states of models and callbacks), and the next integer is its value.
    """
    try:
        with zipfile.ZipFile(archive) as members:
            name = next((name for name in members.namelist() if name.endswith("data.pkl")), None)
            if name is None:
                return None  # no checkpoint of torch's
            seen = False
            for opcode, argument, _ in pickletools.genops(members.read(name)):
                if seen and opcode.name in INTEGER_OPCODES:
                    return argument
                seen = seen or argument == "global_step"
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, RuntimeError, zlib.error):
        return None
    return None
