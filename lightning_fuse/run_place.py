"""Where a run lies, and the command that goes on with it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from hydra.core.hydra_config import HydraConfig

COMMAND = "lightning-fuse"
PLAIN = re.compile(r"[A-Za-z0-9_./:%+@~-]+")  # what Hydra's grammar takes as it is
OTHER_MEANING = re.compile(r"(?i)null|true|false|nan|[+-]?(inf|[\d_.]+(e[+-]?\d+)?)")  # where it is no text


def short_path(path: Path) -> Path:
    """A path as people would type it: relative, where it lies below the working directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and here in path.parents else path


def check_writable(key: str, folder: Path) -> None:
    """Finds out whether a folder can be made and written, and leaves nothing behind.

    Args:
        key: Of the configuration, for the error.
        folder: What is to be written into later.

    Raises:
        ValueError: It cannot.
    """
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                made.append(path)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # a null byte is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{key}={folder}: nothing can be written there ({reason}); give another folder") from error
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()


def forget_folder(folder: Path) -> None:
    """Removes the folder that Hydra made for a run that does not use it, and its parents, where they are empty."""
    for path in (folder, folder.parent, folder.parent.parent):
        with suppress(OSError):
            path.rmdir()


def resume_command(folder: str | Path) -> str:
    """The command that goes on with a run, to be typed from anywhere.

    It changes to the directory that this run was started in, so that relative paths and modules of one's own are found
    again, and names the same program and folder of configurations.

    Args:
        folder: The run folder, as seen from the working directory.

    Returns:
        A line for a shell.
    """
    here, options = Path.cwd(), []
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        here = Path(hydra.runtime.cwd)
        for source in hydra.runtime.config_sources:
            if source.provider == "command-line":
                options += ["--config-dir", str(short_path(Path(source.path.removeprefix("file://"))))]
        if hydra.job.config_name != "config":
            options += ["--config-name", str(hydra.job.config_name)]
        options += [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    words = [*_program(), *options, f"resume={hydra_quoted(str(folder))}"]
    return f"cd {shlex.quote(str(here))} && {shlex.join(words)}"


def hydra_quoted(text: str) -> str:
    """Text as a value of one of Hydra's words: as it is, or in quotes that its grammar reads back as the same text."""
    if PLAIN.fullmatch(text) and not OTHER_MEANING.fullmatch(text):
        return text
    # A backslash counts as one, unless it stands before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (r"\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _program() -> list[str]:
    """How this process was started: the installed command, or a Python with a file."""
    started = Path(sys.argv[0])
    if started.suffix != ".py":
        found = shutil.which(COMMAND)
        known = found is not None and os.path.abspath(found) == os.path.abspath(started)
        return [str(started.absolute()) if started.stem == COMMAND and not known else COMMAND, "train"]
    found = shutil.which("python")
    python = "python" if found is not None and os.path.abspath(found) == sys.executable else sys.executable
    if started.parent.name == "cli":  # python -m lightning_fuse.cli.main train
        return [python, "-m", "lightning_fuse.cli.main", "train"]
    return [python, str(started)]
