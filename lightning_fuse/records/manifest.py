"""``manifest.json``: everything needed to know what ran, written before the first step.

Keys: ``config`` (resolved), ``command``, ``seed``, ``started`` (UTC, ISO 8601), ``versions`` (package to version),
``hardware``, ``data_hash``, ``git`` (revision and whether files were changed, or null), and ``resumed_from``: one entry
per resume with the checkpoint, its step, the time, the command and what changed in the configuration.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_fuse.records.atomic_file import replace_file
from lightning_fuse.records.strict_json import decode, encode, plain

# Packages that can change a result or a speed. Those that are not installed are left out.
PACKAGES = (
    "bitsandbytes",
    "hydra-core",
    "lightning",
    "lightning_fuse",
    "numpy",
    "omegaconf",
    "torch",
    "torchdata",
    "torchmetrics",
    "triton",
    "wandb",
)


def build_manifest(
    *,
    config: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
    seed: int | None = None,
    data_hash: str | None = None,
    gpus: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> dict[str, Any]:
    """Collects the manifest of a run that starts now.

    Args:
        config: The resolved configuration.
        command: The command line; this process's own if None.
        seed: The seed of the run.
        data_hash: Hash of the data (see ``sha256_of``).
        gpus: Names of the GPUs, as this floor cannot ask torch.
        versions: More versions, added to those of ``PACKAGES`` (a git build of torch, CUDA).
        source: The folder whose git revision is recorded; the current one if None.

    Returns:
        The manifest, plain enough for JSON.
    """
    return plain(
        {
            "config": dict(config or {}),
            "command": list(sys.argv if command is None else command),
            "seed": seed,
            "started": now(),
            "versions": {**installed_versions(), **(versions or {})},
            "hardware": {**hardware(), "gpus": list(gpus)},
            "data_hash": data_hash,
            "git": git_state(source or Path.cwd()),
            "resumed_from": [],
        }
    )


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest in one step.

    Args:
        path: ``manifest.json`` in an existing folder.
        manifest: What ``build_manifest`` returned, or an earlier one with more in it.
    """
    replace_file(path, [encode(manifest, indent=2), "\n"])


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest.

    Args:
        path: A ``manifest.json``.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a manifest.
    """
    try:
        manifest = decode(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or "config" not in manifest:
        raise ValueError(
            f"{path} is not a manifest (a JSON object with config, versions, ...); name another run folder"
        )
    return manifest


def add_resume(
    path: Path,
    *,
    checkpoint: str | Path,
    global_step: int,
    config: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Adds one entry to ``resumed_from``.

    Args:
        path: The ``manifest.json`` of the run that goes on.
        checkpoint: What it goes on from.
        global_step: The step of that checkpoint.
        config: The resolved configuration of now; differences to the first one are recorded.
        command: The command line; this process's own if None.

    Returns:
        The manifest as it is now.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a manifest.
    """
    manifest = read_manifest(path)
    changes = {} if config is None else config_changes(plain(manifest["config"]), plain(dict(config)))
    entry = {
        "checkpoint": str(checkpoint),
        "global_step": global_step,
        "time": now(),
        "command": list(sys.argv if command is None else command),
        "versions": installed_versions(),
        "config_changes": changes,
    }
    manifest.setdefault("resumed_from", []).append(plain(entry))
    write_manifest(path, manifest)
    return manifest


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two configurations.

    Args:
        before: Nested dicts.
        after: Nested dicts.

    Returns:
        Dotted key to ``[before, after]``; a key that one side lacks has None there.
    """
    flat_before, flat_after = flattened(before), flattened(after)
    keys = sorted({*flat_before, *flat_after})
    return {k: [flat_before.get(k), flat_after.get(k)] for k in keys if flat_before.get(k) != flat_after.get(k)}


def installed_versions() -> dict[str, str]:
    """Python's version and those of the packages in ``PACKAGES`` that are installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions.setdefault("lightning_fuse", "a source tree that is not installed")
    return versions


def hardware() -> dict[str, Any]:
    """The machine: ``cpu`` model, ``cores`` it has, ``usable_cores`` for this process, ``memory_bytes``, ``system``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """``{"revision": ..., "changed": bool}`` of the repository a folder is in, or None without git or repository."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, as ``sha256:`` and 64 hexadecimal digits.

    Raises:
        FileNotFoundError: There is no such file.
    """
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names.

    Args:
        config: Nested settings.
        prefix: What stands before each name.

    Returns:
        One entry per leaf; an empty mapping is a leaf.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
