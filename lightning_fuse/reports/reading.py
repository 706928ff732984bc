"""A run folder as the comparison sees it: read without torch or Lightning, and tolerant of how a run may end.

What is odd about a run does not stop the reading; it becomes a note in plain words. Only a folder without a manifest is
no run. The files are those of ``lightning_fuse.records``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_fuse.records import (
    RunFolder,
    RunSummary,
    read_manifest,
    read_metrics,
    read_step_rows,
    read_summary,
)
from lightning_fuse.reports.shapes import manifest_shape, metric_shapes, step_shapes, summary_shape

MANIFEST = "manifest.json"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Point:
    """One value of a metric, and where in the run it was measured.

    Attributes:
        step: Optimizer steps, skips included.
        update: Applied ones.
        tokens: Seen until then (samples where the recipe has no context); None where the manifest does not say.
        seconds: Train seconds, validation left out.
        value: The metric; NaN where the run diverged.
    """

    step: int
    update: int
    tokens: float | None
    seconds: float
    value: float


@dataclass(frozen=True)
class Skip:
    """One skipped optimizer step: its place, its reason, and the loss scale before it (None without one)."""

    step: int
    reason: str
    scale: float | None


@dataclass
class Run:
    """One run.

    Attributes:
        folder: Where it was read.
        manifest: What ran.
        config: The configuration in force at its end: the first one with what resumes changed.
        summary: How it ended; None where the file is missing or broken.
        metrics: Metric to its points, in order.
        skips: Skipped steps, in order.
        scales: ``(step, loss scale)`` at the first step and wherever the scale moved.
        optimizer_ms: Median milliseconds of an applied optimizer step; None where nothing was timed.
        step_ms: Median milliseconds from one optimizer step to the next, on the train clock.
        last_step: The last recorded optimizer step.
        checkpoint_bytes: Size of the newest checkpoint; None without one.
        notes: What is odd, one sentence each.
    """

    folder: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    summary: RunSummary | None = None
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    skips: list[Skip] = field(default_factory=list)
    scales: list[tuple[int, float]] = field(default_factory=list)
    optimizer_ms: float | None = None
    step_ms: float | None = None
    last_step: int = 0
    checkpoint_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int | None:
        """The seed, or None where the manifest has none."""
        seed = self.manifest.get("seed")
        return None if seed is None else int(seed)

    @property
    def status(self) -> str:
        """``finished``, ``running``, ``interrupted`` or ``failed``; ``unknown`` without a summary."""
        return UNKNOWN if self.summary is None else self.summary.status

    @property
    def finished(self) -> bool:
        """Whether it came to its planned end."""
        return self.status == "finished"

    @property
    def recipe(self) -> str:
        """The recipe's word."""
        return word(self.config.get("recipe"), "name")

    @property
    def data_hash(self) -> str | None:
        """Hash of the data, or None where none was recorded."""
        return self.manifest.get("data_hash")

    @property
    def resumes(self) -> int:
        """How often it was resumed."""
        return len(self.manifest.get("resumed_from") or [])

    @property
    def state_bytes(self) -> int | None:
        """Bytes of all optimizer state, masters included."""
        if self.summary is None or not self.summary.optimizers:
            return None
        return sum(optimizer.total_bytes for optimizer in self.summary.optimizers)

    @property
    def parameters(self) -> int:
        """Number of optimized elements; 0 where unknown."""
        return 0 if self.summary is None else sum(optimizer.parameters for optimizer in self.summary.optimizers)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.folder.name


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders that are meant by some paths.

    Args:
        paths: Run folders, or folders that hold some at any depth (a multirun).

    Returns:
        Run folders, each once, in the order of the paths and of their names; numbers in names count as numbers.

    Raises:
        FileNotFoundError: A path does not exist, or holds no run.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"there is nothing at {path}; give a run folder or the folder of a multirun")
        if path.is_file():
            raise FileNotFoundError(f"{path} is a file; give a run folder or the folder of a multirun")
        inside = (
            [path] if (path / MANIFEST).exists() else [m.parent for m in sorted(path.rglob(MANIFEST), key=_natural)]
        )
        if not inside:
            raise FileNotFoundError(f"{path} holds no run (no {MANIFEST} below it); give a run folder or a multirun's")
        found += inside
    return list({path.resolve(): path for path in found}.values())


def read_run(folder: str | Path) -> Run:
    """Reads one run, whatever state it is in.

    Args:
        folder: A run folder.

    Returns:
        The run; what is missing or broken is in its notes.

    Raises:
        FileNotFoundError: There is no manifest.
        ValueError: The manifest is not one.
    """
    files = RunFolder(folder)
    manifest = manifest_shape(read_manifest(files.manifest), str(files.manifest))
    run = Run(files.path, manifest, _final_config(manifest))
    nothing = "no summary: it has not got far, or was removed"
    run.summary = _tolerant(run, files.summary, lambda path: summary_shape(read_summary(path)), nothing)
    rows = _tolerant(run, files.steps, lambda path: step_shapes(list(read_step_rows(path))), "no step rows") or []
    _read_steps(run, rows)
    table = _tolerant(run, files.metrics, lambda path: metric_shapes(read_metrics(path)), "no metrics") or []
    _read_metrics(run, table, rows)
    run.checkpoint_bytes = _checkpoint_bytes(files)
    run.notes += _notes(run)
    return run


def word(entry: Any, key: str) -> str:
    """The word of a configuration group: the entry itself, or one key of it; ``unknown`` where there is none."""
    value = entry.get(key) if isinstance(entry, Mapping) else entry
    return UNKNOWN if value is None else str(value)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts 2_x before 10_x."""
    keys = []
    for part in path.parts:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        keys.append((int(digits) if digits else -1, part))
    return keys


def _tolerant(run: Run, path: Path, read: Callable[[Path], Any], missing: str) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        run.notes.append(missing)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
    return None


def _final_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    config = _copy(manifest["config"])
    for entry in manifest.get("resumed_from") or []:
        for dotted, (_, after) in (entry.get("config_changes") or {}).items():
            *path, last = dotted.split(".")
            place = config
            for key in path:
                place = place.setdefault(key, {})
                if not isinstance(place, dict):
                    break
            else:
                place[last] = after
    return config


def _copy(config: Any) -> Any:
    return {key: _copy(value) for key, value in config.items()} if isinstance(config, Mapping) else config


def _read_steps(run: Run, rows: Sequence[Mapping[str, Any]]) -> None:
    times = [float(row["optimizer_ms"]) for row in rows if row.get("applied") and row.get("optimizer_ms") is not None]
    run.optimizer_ms = statistics.median(times) if times else None
    # Rows of one step (several optimizers) stand together; only the clock between steps counts.
    clock = {row["global_step"]: row["train_seconds"] for row in rows if row.get("train_seconds") is not None}
    # An imported run has only the rows that were logged, so a gap may be several steps.
    marks = list(clock.items())
    gaps = [1000 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks) if b[1] > a[1]]
    run.step_ms = statistics.median(gaps) if gaps else None
    run.last_step = rows[-1]["global_step"] if rows else (run.summary.global_step if run.summary else 0)
    for row in rows:
        if not row.get("applied", True):
            run.skips.append(Skip(row["global_step"], str(row.get("reason")), row.get("loss_scale_before")))
    _read_scales(run, rows)


def _read_scales(run: Run, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        before, after = row.get("loss_scale_before"), row.get("loss_scale_after")
        if before is None or after is None:
            continue
        if not run.scales:
            run.scales.append((row["global_step"], float(before)))
        if after != run.scales[-1][1]:
            run.scales.append((row["global_step"], float(after)))


def _read_metrics(run: Run, rows: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> None:
    tokens = _token_counter(run.config, steps)
    for row in rows:
        step, place = int(row["step"]), (int(row["update"]), float(row["train_seconds"]))
        for name, value in row.items():
            if name in ("step", "update", "epoch", "train_seconds") or not isinstance(value, float):
                continue
            point = Point(step, place[0], tokens(step), place[1], value)
            run.metrics.setdefault(name, []).append(point)


def _token_counter(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Callable[[int], float | None]:
    """Step to tokens seen: every micro-batch of every window counts, of skipped steps too."""
    batch = _whole(config, "data", "batch_size", 0)
    if not batch:
        return lambda step: None
    ranks = _whole(config, "trainer", "devices", 1) * _whole(config, "trainer", "num_nodes", 1)
    each = batch * _whole(config, "data", "context", 1) * ranks
    window = _whole(config, "trainer", "accumulate_grad_batches", 1)
    seen, total, last = {0: 0}, 0, 0
    for row in rows:
        if row.get("optimizer", 0) == 0:
            # An imported run has only the rows that were logged; the steps between had full windows.
            total += window * max(0, row["global_step"] - last - 1) + int(row.get("window_size") or window)
            seen[row["global_step"]], last = total, row["global_step"]
    return lambda step: float(each * seen.get(step, step * window))


def _whole(config: Mapping[str, Any], group: str, key: str, other: int) -> int:
    """A whole number from 1 of the configuration; ``other`` where it has none ("auto", a file of another program)."""
    settings = config.get(group)
    value = settings.get(key) if isinstance(settings, Mapping) else None
    return value if isinstance(value, int) and value > 0 else other


def _checkpoint_bytes(files: RunFolder) -> int | None:
    """Size of the file that a resume would read, or of the newest sharded folder."""
    found = sorted(files.checkpoints.rglob("*.ckpt")) if files.checkpoints.is_dir() else []
    if not found:
        return None
    last = files.checkpoints / "last.ckpt"
    path = last if last in found else max(found, key=lambda p: p.stat().st_mtime)
    if path.is_file():
        return path.stat().st_size
    return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())


def _notes(run: Run) -> list[str]:
    notes = []
    if run.status == "running":
        notes.append(f"still running, or killed: {run.last_step:,} steps so far")
    elif run.status in ("interrupted", "failed"):
        reason = f" ({run.summary.reason})" if run.summary and run.summary.reason else ""
        notes.append(f"{run.status}{reason} after {run.last_step:,} steps")
    if run.resumes:
        notes.append(f"resumed {run.resumes} time{'s' if run.resumes > 1 else ''}; downtime is in no clock")
    if run.skips:
        reasons = sorted({skip.reason for skip in run.skips})
        notes.append(f"{len(run.skips):,} skipped step{'s' if len(run.skips) > 1 else ''} ({', '.join(reasons)})")
    bad = {
        name: next((p.step for p in points if not math.isfinite(p.value)), None) for name, points in run.metrics.items()
    }
    for name, step in bad.items():
        if step is not None:
            notes.append(f"{name} is not finite, first at step {step:,}")
    return notes
