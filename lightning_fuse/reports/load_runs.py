"""Runs as the comparison sees them, read with neither torch nor Lightning, in whatever state they are.

What is odd about a run becomes a note in plain words. Only a folder whose manifest names no configuration is left out,
with a note, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_fuse.reports.run import STATUSES, UNKNOWN, Run, Target
from lightning_fuse.reports.run_tables import Measurements, read_measurements, read_steps, token_counter
from lightning_fuse.reports.validation import Entries, group_word, number, read_object

MANIFEST = "manifest.json"
SUMMARY_NUMBERS: tuple[str, ...] = (
    *("updates", "global_step", "optimizer_share", "peak_memory_bytes", "checkpoint_ms"),
    *("train_seconds", "validation_seconds", "wall_seconds"),
)
MOST_CHECKPOINTS = 10_000  # files looked at for the size of one


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders that are meant by some paths.

    Args:
        paths: Run folders, or folders that hold some at any depth (a multirun).

    Returns:
        Run folders, each once, in the order of paths and names; numbers in names count as numbers.

    Raises:
        FileNotFoundError: A path does not exist, or holds no run.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            what = f"{path} is a file" if path.exists() else f"there is nothing at {path}"
            raise FileNotFoundError(f"{what}; give a run folder, the folder of a multirun, or a comparison.csv")
        inside = []
        for folder, folders, files in os.walk(path):  # does not follow links to folders
            if MANIFEST in files:
                inside.append(Path(folder))
                folders.clear()
        if not inside:
            raise FileNotFoundError(f"{path} holds no run (no {MANIFEST} below it); give a run folder or a multirun's")
        found += sorted(inside, key=_natural)
    return list({path.resolve(): path for path in found}.values())


def load_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Reads all runs that some paths mean.

    Args:
        paths: As for ``find_runs``.

    Returns:
        The runs, and a note for each folder that holds none.

    Raises:
        FileNotFoundError: A path does not exist, or holds no run.
    """
    runs, left_out = [], []
    for path in find_runs(paths):
        try:
            runs.append(load_run(path))
        except (ValueError, OSError) as error:
            left_out.append(f"{path.name}: left out: {error}")
    return runs, left_out


def load_run(folder: str | Path) -> Run:
    """Reads one run, whatever state it is in.

    Args:
        folder: A run folder.

    Returns:
        The run; what is missing or odd is in its notes.

    Raises:
        OSError: The manifest cannot be read.
        ValueError: The manifest names no configuration.
    """
    folder = Path(folder)
    notes: list[str] = []
    try:
        manifest = Entries(read_object(folder / MANIFEST), MANIFEST, notes)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    config = _final_config(manifest)
    if not config:
        raise ValueError(f"{MANIFEST} names no configuration")
    run = Run(folder.name, config, notes=notes)
    run.seed, run.data_hash = manifest.whole("seed"), manifest.text("data_hash")
    run.recipe = group_word(config.get("recipe"), "name")
    _read_provenance(run, manifest)
    steps = _tolerant(run, folder / "steps.jsonl", read_steps, "no step rows")
    table = _tolerant(run, folder / "metrics.csv", read_measurements, "no metrics")
    _read_summary(run, folder / "summary.json")
    if steps is not None:
        run.optimizer_ms, run.training_step_ms = steps.optimizer_ms, steps.training_step_ms
        run.global_step, run.scales, run.skipped = steps.last_step, steps.scales, steps.skipped
        run.skips = len(steps.skipped)
        run.notes += steps.notes
    if table is not None:
        _take_measurements(run, table, token_counter(config, None if steps is None else steps.windows))
    _complete_targets(run)
    run.checkpoint_bytes = _checkpoint_bytes(folder / "checkpoints")
    run.notes += _remarks(run, len(manifest.tables("resumed_from")))
    return run


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts 2_x before 10_x."""
    keys = []
    for part in path.parts:
        digits = part[: len(part) - len(part.lstrip("0123456789"))][:18]
        keys.append((int(digits) if digits.isascii() and digits else -1, part))
    return keys


def _tolerant(run: Run, path: Path, read: Callable[[Path], Any], missing: str) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        run.notes.append(missing)
    except (ValueError, OSError) as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
    return None


def _final_config(manifest: Entries) -> dict[str, Any]:
    """The first configuration with what resumes changed; changes of another shape than a run writes are left out."""

    def copied(value: Any) -> Any:
        return {str(key): copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value

    try:
        config: dict[str, Any] = copied(manifest.table("config").values)
    except RecursionError:
        raise ValueError(f"{MANIFEST} is nested too deeply") from None
    for entry in manifest.tables("resumed_from"):
        for dotted, change in entry.table("config_changes").values.items():
            *path, last = dotted.split(".")
            place: Any = config
            for key in path:
                place = place.setdefault(key, {}) if isinstance(place, dict) else None
            if isinstance(place, dict) and isinstance(change, list) and len(change) == 2:
                place[last] = change[1]
    return config


def _read_provenance(run: Run, manifest: Entries) -> None:
    hardware, versions = manifest.table("hardware").values, manifest.table("versions").values
    run.hardware = " · ".join(str(hardware.get(key))[:200] for key in ("cpu", "usable_cores", "gpus"))
    known = {"CPU": hardware.get("cpu"), "usable cores": hardware.get("usable_cores"), "system": hardware.get("system")}
    gpus = hardware.get("gpus")
    known["GPUs"] = ", ".join(map(str, gpus)) if isinstance(gpus, list) else gpus
    known |= {str(name): versions[name] for name in sorted(versions)[:40]}
    known["revision"] = str(manifest.table("git").values.get("revision") or "")[:12]
    known["started"] = manifest.text("started")
    run.provenance = {name: str(value)[:200] for name, value in known.items() if value}


def _read_summary(run: Run, path: Path) -> None:
    values = _tolerant(run, path, read_object, "no summary: it has not got far, or was removed")
    if values is None:
        return
    summary = Entries(values, path.name, run.notes)
    status = summary.text("status")
    if status not in STATUSES:
        run.notes.append(f"{path.name}: status is {status!r}, expected one of {', '.join(STATUSES)}")
    else:
        run.status = status
    run.reason = summary.text("reason")
    for name in SUMMARY_NUMBERS:
        setattr(run, name, summary.number(name))
    optimizers = summary.tables("optimizers")
    sizes = [entry.table("state_bytes") for entry in optimizers]
    counts = [table.number(key) for table in sizes for key in table.values]
    if None in counts:
        run.notes.append(f"{path.name}: state_bytes is not known whole; it is left out")
    elif counts:
        run.state_bytes = sum(count for count in counts if count is not None)
    run.parameters = sum(entry.number("parameters") or 0 for entry in optimizers) or None
    main = [summary.table("target")] if summary.values.get("target") else []
    records = [*main, *summary.tables("targets")]
    found = [target for record in records if (target := _target(run, record)) is not None]
    run.targets = list({target.label: target for target in reversed(found)}.values())[::-1]


def _target(run: Run, record: Entries) -> Target | None:
    metric, goal, mode = record.text("metric"), record.number("target"), record.text("mode")
    if metric is None or goal is None or mode not in ("min", "max"):
        run.notes.append(f"{record.where} lacks metric, mode or target")
        return None
    label = f"{metric} {'≤' if mode == 'min' else '≥'} {goal:g}"
    open_still = run.status in ("running", UNKNOWN)
    if not record.values.get("reached"):
        return Target(label, metric, None if open_still else False)
    seconds, wall, updates = (record.number(key) for key in ("train_seconds", "wall_seconds", "updates"))
    if seconds is None or updates is None:
        run.notes.append(f"{record.where} says reached, but not when")
        return None
    return Target(label, metric, True, seconds, wall, updates, record.number("tokens") or record.number("samples"))


def _take_measurements(run: Run, table: Measurements, tokens: Callable[[pd.Series], pd.Series | None]) -> None:
    run.notes += table.notes
    for metric, points in table.points.items():
        run.points[metric] = points.assign(tokens=tokens(points["step"]))
        run.finals[metric] = float(points["value"].iloc[-1])
    ends = [points.iloc[-1] for points in run.points.values()]
    if ends and (run.updates is None or not run.finished):
        run.updates = max(float(end["update"]) for end in ends)
    if ends and (run.train_seconds is None or not run.finished):
        run.train_seconds = max(float(end["seconds"]) for end in ends)


def _complete_targets(run: Run) -> None:
    """Takes the target of the configuration where the summary has none, and looks for it among the measurements."""
    settings = run.config.get("callbacks")
    wanted = settings.get("target") if isinstance(settings, Mapping) else None
    if not run.targets and isinstance(wanted, Mapping) and number(wanted.get("target")) is not None:
        found = _target(run, Entries({**wanted, "reached": False}, "the configuration's target", run.notes))
        run.targets = [] if found is None else [found]
    goals = run.points.get(run.target.metric) if run.target is not None else None
    run.validation_gap = None if goals is None or len(goals) < 2 else float(goals["update"].diff().median())
    for index, target in enumerate(run.targets):
        points = run.points.get(target.metric)
        if points is None or target.reached is False or target.tokens is not None:
            continue
        if target.reached:
            hits = points[points["update"] == target.updates]
            seen = None if hits.empty else number(hits["tokens"].iloc[0])
            run.targets[index] = Target(**{**vars(target), "tokens": seen})
            continue
        goal = float(target.label.rsplit(" ", 1)[1])
        hits = points[points["value"] <= goal] if "≤" in target.label else points[points["value"] >= goal]
        if not hits.empty:
            first = hits.iloc[0]
            cells = first["seconds"], None, first["update"], number(first["tokens"])
            run.targets[index] = Target(target.label, target.metric, True, *cells)


def _checkpoint_bytes(folder: Path) -> int | None:
    """Size of the checkpoint that a resume would read: ``last.ckpt``, or the newest file or sharded folder."""
    sizes: dict[Path, tuple[int, float]] = {}
    seen = 0
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = Path(place) / name
            whole = next((p for p in (path, *path.parents) if p.suffix == ".ckpt" and folder in p.parents), None)
            seen += 1
            if whole is None or path.is_symlink() or seen > MOST_CHECKPOINTS:
                continue
            status = path.stat()
            size, newest = sizes.get(whole, (0, 0.0))
            sizes[whole] = size + status.st_size, max(newest, status.st_mtime)
    if not sizes:
        return None
    last = folder / "last.ckpt"
    return sizes[last][0] if last in sizes else max(sizes.values(), key=lambda entry: entry[1])[0]


def _remarks(run: Run, resumes: int) -> list[str]:
    notes = []
    steps = f"{run.global_step or 0:,.0f} steps"
    if run.status == "running":
        notes.append(f"still running, or killed: {steps} so far")
    elif run.status in ("interrupted", "failed"):
        notes.append(f"{run.status}{f' ({run.reason})' if run.reason else ''} after {steps}")
    if resumes:
        notes.append(f"resumed {resumes} time{'s' if resumes > 1 else ''}; downtime is in no clock")
    if run.skips:
        reasons = ", ".join(sorted(set(run.skipped["reason"].astype(str)))[:5])
        notes.append(f"{run.skips:,.0f} skipped step{'s' if run.skips > 1 else ''} ({reasons})")
    for name, points in run.points.items():
        bad = points.loc[~points["value"].map(math.isfinite), "step"]
        if not bad.empty:
            notes.append(f"{name} is not finite, first at step {bad.iloc[0]:,.0f}")
    if run.data_hash is None:
        notes.append("no data hash was recorded")
    return notes
