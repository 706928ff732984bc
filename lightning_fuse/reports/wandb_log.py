"""What an offline W&B run holds, read without W&B's server: ``offline-run-*/run-ID.wandb``.

The file is a log in LevelDB's framing (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header
of seven bytes, ``:W&B``, a magic number and a version. Blocks of 32 KiB hold chunks: a checksum (CRC-32 of type and
data), a length and a type, then the data. A record is one whole chunk, or a first, any number of middle and a last one.
Each is a ``Record`` of W&B's protobuf definitions, which the wandb package brings along.

A run that was killed leaves a torn chunk at the end; everything before it is read.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<4sHB")  # identifier, magic number, version
IDENTIFIER, MAGIC, VERSION = b":W&B", 0xBEE1, 0
BLOCK = 32 * 1024  # bytes
CHUNK = struct.Struct("<IHB")  # checksum, bytes of data, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbRun:
    """One run as W&B recorded it.

    Attributes:
        run_id: W&B's id.
        name: Its display name.
        project: The project it belongs to.
        config: Its config, without W&B's own entries.
        history: One dict per logged row, in order; values as they were logged, nested keys joined with dots.
        exit_code: 0 if it ended well; None if it never ended (killed, or still running).
        started: UTC, ISO 8601.
        arguments: Of the command line.
        program: The script.
        python: Version of the interpreter.
        hardware: ``cpu``, ``cores``, ``memory_bytes``, ``system``, ``gpus``; what was not recorded is missing.
        revision: The git commit, or None.
    """

    run_id: str = ""
    name: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    started: str = ""
    arguments: list[str] = field(default_factory=list)
    program: str = ""
    python: str | None = None
    hardware: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None


def find_logs(path: Path) -> list[Path]:
    """The ``.wandb`` files at a path.

    Args:
        path: A file, or a folder that holds some at any depth.

    Returns:
        The files in order.

    Raises:
        FileNotFoundError: There is none.
    """
    path = Path(path)
    found = [path] if path.is_file() else sorted(path.rglob("run-*.wandb"))
    if not found:
        raise FileNotFoundError(f"no offline W&B run at {path}: give a run-*.wandb file, or a folder that holds some")
    return found


def read_wandb(path: Path) -> WandbRun:
    """Reads one run.

    Args:
        path: A ``.wandb`` file.

    Returns:
        The run, up to a torn end.

    Raises:
        ValueError: The file is not such a log, or is damaged before its end.
        ImportError: The wandb package is not installed.
    """
    from wandb.proto import wandb_internal_pb2

    kind: Any = vars(wandb_internal_pb2)["Record"]  # chosen at import by the version of protobuf, so it has no type
    run = WandbRun()
    for data in log_records(Path(path).read_bytes(), str(path)):
        _take(run, kind.FromString(data))
    return run


def log_records(data: bytes, name: str = "this file") -> Iterator[bytes]:
    """The records of a log.

    Args:
        data: The whole file.
        name: What it is called in an error.

    Yields:
        Each whole record's bytes; a torn end is passed over.

    Raises:
        ValueError: It does not begin as a W&B log, or a chunk before the last one is damaged.
    """
    if len(data) < HEADER.size or HEADER.unpack_from(data) != (IDENTIFIER, MAGIC, VERSION):
        raise ValueError(
            f"{name} begins with {data[: HEADER.size]!r}: not a W&B log of version 0; give a run-*.wandb file"
        )
    place, parts = HEADER.size, b""
    while place + CHUNK.size <= len(data):
        room = BLOCK - place % BLOCK
        if room < CHUNK.size:  # a block's last bytes are empty where no chunk fits
            place += room
            continue
        checksum, length, kind = CHUNK.unpack_from(data, place)
        body = data[place + CHUNK.size : place + CHUNK.size + length]
        whole = len(body) == length and kind in (FULL, FIRST, MIDDLE, LAST) and CHUNK.size + length <= room
        if not whole or zlib.crc32(bytes([kind]) + body) != checksum:
            if place + CHUNK.size + length >= len(data) or not any(data[place:]):
                return  # torn, or space that was reserved and never written
            raise ValueError(
                f"{name} is damaged at byte {place} of {len(data)}; copy it again from where it was written"
            )
        place += CHUNK.size + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts


def _take(run: WandbRun, record: Any) -> None:
    """Adds one record to a run; kinds that are of no use here are passed over."""
    kind = record.WhichOneof("record_type")
    if kind == "run":
        begun = record.run
        run.run_id, run.name, run.project = begun.run_id, begun.display_name, begun.project
        run.started = datetime.fromtimestamp(begun.start_time.seconds, timezone.utc).isoformat(timespec="seconds")
        run.revision = begun.git.commit or run.revision
        _update_config(run.config, begun.config)
    elif kind == "config":
        _update_config(run.config, record.config)
    elif kind == "history":
        run.history.append({_key(item): _value(item.value_json) for item in record.history.item})
    elif kind == "exit":
        run.exit_code = int(record.exit.exit_code)
    elif kind == "environment":
        _take_environment(run, record.environment)


def _take_environment(run: WandbRun, seen: Any) -> None:
    """W&B tells of the machine in several records, each with a part of it."""
    run.arguments = list(seen.args) or run.arguments
    run.program = seen.program or run.program
    run.python = seen.python.removeprefix("CPython ") or run.python
    run.revision = seen.git.commit or run.revision
    gpus = [gpu.name for gpu in (*seen.gpu_nvidia, *seen.gpu_amd) if getattr(gpu, "name", "")]
    found = {
        "cpu": seen.cpu.model,
        "cores": seen.cpu_count_logical or seen.cpu_count,
        "memory_bytes": seen.memory.total,
        "system": seen.os,
        "gpus": gpus or ([seen.gpu_type] * max(1, seen.gpu_count) if seen.gpu_type else []),
    }
    run.hardware.update({key: value for key, value in found.items() if value})


def _update_config(config: dict[str, Any], change: Any) -> None:
    for item in change.update:
        if not _key(item).startswith("_wandb"):
            config[_key(item)] = _value(item.value_json)
    for item in change.remove:
        config.pop(_key(item), None)


def _key(item: Any) -> str:
    return ".".join(item.nested_key) or item.key


def _value(text: str) -> Any:
    """A value; W&B writes numbers that JSON lacks as words."""
    value = json.loads(text)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
