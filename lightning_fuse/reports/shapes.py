"""Whether what was read has the shape that a run writes: a file that was edited, or is of another program, is refused.

Every check takes what was read and returns it; a ValueError names the entry, and the run is taken for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fuse.records.summary import RunSummary

STEP_NUMBERS = ("optimizer_ms", "train_seconds", "window_size", "loss_scale_before", "loss_scale_after", "optimizer")
SUMMARY_SECONDS = ("train_seconds", "validation_seconds", "wall_seconds")
SUMMARY_NUMBERS = ("updates", "global_step", *SUMMARY_SECONDS, "optimizer_share", "peak_memory_bytes", "checkpoint_ms")
TARGET_NUMBERS = ("train_seconds", "wall_seconds", "updates", "tokens", "samples")


def manifest_shape(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    """A manifest whose configuration and hardware are tables.

    Raises:
        ValueError: One of them is not; without a configuration there is no run.
    """
    for key in ("config", "hardware", "versions", "git"):
        if not isinstance(manifest.get(key) or {}, Mapping):
            raise ValueError(f"{where}: {key} is {manifest[key]!r}, expected a JSON object; name another run folder")
    resumes = manifest.get("resumed_from") or []
    if not isinstance(resumes, list) or not all(isinstance(entry, Mapping) for entry in resumes):
        raise ValueError(f"{where}: resumed_from is {resumes!r}, expected a list of JSON objects")
    if not isinstance(manifest.get("seed"), int | None):
        raise ValueError(f"{where}: seed is {manifest['seed']!r}, expected a whole number")
    return manifest


def step_shapes(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Step rows whose figures are numbers.

    Raises:
        ValueError: One is not.
    """
    for number, row in enumerate(rows, start=1):
        _numbers(row, STEP_NUMBERS, f"row {number}")
        if not isinstance(row.get("global_step"), int):
            raise ValueError(f"row {number}: global_step is {row.get('global_step')!r}, expected a whole number")
    return rows


def metric_shapes(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Rows of the metrics table that say when they were measured.

    Raises:
        ValueError: One does not.
    """
    for number, row in enumerate(rows, start=2):
        for key in ("step", "update", "train_seconds"):
            if not isinstance(row.get(key), int | float):
                raise ValueError(f"row {number}: {key} is {row.get(key)!r}, expected a number")
    return rows


def summary_shape(summary: RunSummary) -> RunSummary:
    """A summary whose figures are numbers and whose targets are whole.

    Raises:
        ValueError: One is not.
    """
    _numbers(vars(summary), SUMMARY_NUMBERS, "summary")
    for optimizer in summary.optimizers:
        if not all(isinstance(count, int) for count in optimizer.state_bytes.values()):
            raise ValueError(f"state_bytes is {optimizer.state_bytes!r}, expected numbers of bytes")
        _numbers(vars(optimizer), ("parameters",), "optimizers")
    for target in (summary.target, *summary.targets):
        if target is None:
            continue
        if not isinstance(target, Mapping) or not {"metric", "mode", "target"} <= set(target):
            raise ValueError(f"target is {target!r}, expected metric, mode and target")
        _numbers(target, (*TARGET_NUMBERS, "target"), "target")
        lacking = [key for key in TARGET_NUMBERS[:3] if target.get("reached") and target.get(key) is None]
        if lacking or target["target"] is None:
            raise ValueError(f"target: {', '.join(lacking) or 'target'} is missing")
    return summary


def _numbers(entries: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if not isinstance(value := entries.get(name), int | float | None):
            raise ValueError(f"{where}: {name} is {value!r}, expected a number")
