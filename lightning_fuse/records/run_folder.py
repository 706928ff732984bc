"""The run folder: where each record of a run lies, and which checkpoint a killed run continues from.

Layout::

    manifest.json   what ran: resolved configuration, versions, hardware, data, revision, seed   (manifest.py)
    steps.jsonl     every optimizer step                                                         (step_rows.py)
    metrics.csv     every measurement                                                            (metrics_table.py)
    summary.json    how it ended                                                                 (summary.py)
    checkpoints/    *.ckpt, files or sharded folders

A checkpoint is **complete** when its zip directory can be read (it stands at the end of the file, so a torn file has
none) and it tells its ``global_step``; a sharded one when its ``.metadata``, which is written last, is there.
"""

from __future__ import annotations

import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

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

    def newest_checkpoint(self) -> Checkpoint | None:
        """The complete checkpoint that a resumed run should continue from, or None.

        The one with the largest step wins, a copy's dates being worth nothing. Steps beyond the last step row belong to
        a branch that was given up (the run was resumed from an earlier checkpoint) and only count if nothing else is
        there.
        """
        found = [checkpoint for path in self._candidates() if (checkpoint := _checkpoint(path))]
        if not found:
            return None
        reached = last_step(self.steps)
        of_this_branch = [c for c in found if reached is None or c.global_step <= reached]
        best = max(of_this_branch or found, key=lambda c: (c.global_step, c.path.stat().st_mtime_ns))
        return Checkpoint(best.path, best.global_step, self.path)

    def _candidates(self) -> list[Path]:
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
        ValueError: The file is no complete checkpoint.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"nothing to resume at {path}; give a run folder or a checkpoint file")
    if path.is_file() or _is_sharded(path):
        checkpoint = _checkpoint(path)
        if checkpoint is None:
            raise ValueError(
                f"{path} is not a complete checkpoint; give another one, or its run folder to use the newest that is"
            )
        return Checkpoint(path, checkpoint.global_step, _run_folder_of(path))
    newest = RunFolder(path).newest_checkpoint()
    if newest is None:
        broken = ", ".join(p.name for p in RunFolder(path)._candidates()) or "none"
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


def _checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at a path, or None if it is torn or foreign."""
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
            if name is None or members.testzip() is not None:
                return None  # no checkpoint of torch's, or a member whose checksum is wrong
            seen = False
            for opcode, argument, _ in pickletools.genops(members.read(name)):
                if seen and opcode.name in INTEGER_OPCODES:
                    return argument
                seen = seen or argument == "global_step"
    except (zipfile.BadZipFile, OSError, ValueError, EOFError):
        return None
    return None
