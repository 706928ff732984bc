"""An offline W&B run as a run folder, so that it can be compared with others: manifest, metrics, steps, summary.

A run of ``train.py`` comes back whole, but for two things: W&B has a step's figures only where they were logged (every
``log_every_n_steps``, and every skip), and no checkpoints. Of any other run the config and all numbers are taken; steps
are Lightning's ``trainer/global_step``, counted from 1, or W&B's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from lightning_fuse.records import (
    MetricsTable,
    RunFolder,
    RunSummary,
    StepRows,
    write_manifest,
    write_summary,
)
from lightning_fuse.records.summary import OptimizerSummary
from lightning_fuse.reports.wandb_log import WandbRun

# What StepMonitor, TimeToTarget and the checkpoints log about a run; no metrics of what is trained.
ABOUT = ("step/", "target/", "checkpoint/")
TARGET = re.compile(r"target/(?P<metric>.+)/(?P<name>train_seconds|wall_seconds|updates|samples|tokens)")
COUNTS = ("updates", "samples", "tokens")  # of a target that was reached
# What a row says about its place; the rest is what was measured there.
PLACES = ("trainer/global_step", "epoch")


def import_run(run: WandbRun, folder: Path, source: str = "") -> Path:
    """Writes a run folder.

    Args:
        run: What ``read_wandb`` returned.
        folder: Where to; new, or without a run in it.
        source: Where the run was read from, for the manifest.

    Returns:
        The folder.

    Raises:
        ValueError: The folder holds a run already, or the W&B run has logged no number.
    """
    target = RunFolder(folder)
    if target.manifest.exists():
        raise ValueError(f"{folder} holds a run already; name another folder")
    rows = list(placed_rows(run))
    if not rows:
        raise ValueError(f"W&B run {run.run_id or source} has logged no number; there is nothing to compare")
    target.create()
    config, extra = nested_config(run.config)
    steps = list(step_rows(rows))
    # Last, as it is what makes a folder a run.
    _write_tables(target, rows, steps)
    write_summary(target.summary, _summary(run, config, extra, rows, steps, target))
    write_manifest(target.manifest, _manifest(run, config, extra, source))
    return target.path


def nested_config(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration from the columns of a run.

    Args:
        columns: Dotted key to value, and words under the names of their groups.

    Returns:
        The configuration, nested; and ``parameters`` and ``data_hash``, where they are there.
    """
    extra = {key: columns[key] for key in ("parameters", "data_hash") if key in columns}
    config: dict[str, Any] = {}
    for key, value in columns.items():
        parts = key.split(".")
        inside = any(other.startswith(f"{key}.") for other in columns)
        if key in extra or inside:  # a group's word is the name inside it
            continue
        place = config
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    return config, extra


def placed_rows(run: WandbRun) -> Iterator[dict[str, Any]]:
    """Every row that measured a number, with its place in the run, in the order of steps.

    Args:
        run: The run.

    Yields:
        ``{"step", "update", "epoch", "train_seconds", "values"}``. A row without a step of its own has that of
        Lightning's count, which begins at 0; update and seconds are then those of the last row that knew them.
    """
    found: list[dict[str, Any]] = []
    epoch = 0
    for row in run.history:
        values = {key: value for key, value in row.items() if not key.startswith("_") and key not in PLACES}
        values = {key: value for key, value in values.items() if _is_number(value)}
        epoch = int(row.get("epoch", epoch))
        if "step/global_step" in row:
            step = int(row["step/global_step"])
        elif "trainer/global_step" in row:
            step = int(row["trainer/global_step"]) + 1
        else:
            step = int(row.get("_step", len(found)))
        if values:
            found.append({"step": step, "epoch": epoch, "values": values, "runtime": row.get("_runtime", 0.0)})
    found.sort(key=lambda row: row["step"])
    ours = any("step/update" in row["values"] for row in found)
    update, seconds = 0, 0.0
    for row in found:
        values = row["values"]
        update = int(values.get("step/update", update)) if ours else row["step"]
        seconds = max(seconds, float(values.get("step/train_seconds", seconds) if ours else row["runtime"]))
        yield {**row, "update": update, "train_seconds": seconds}


def step_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of ``steps.jsonl`` that W&B has figures of.

    Args:
        rows: What ``placed_rows`` gave.

    Yields:
        One dict per logged optimizer step. Every skip was logged, so ``applied`` and ``reason`` are exact.
    """
    skips: dict[str, float] = {}
    scale: float | None = None
    for row in rows:
        values = row["values"]
        coefficient = next((key for key in values if key.startswith("step/clip_coef")), None)
        if coefficient is None:
            continue
        own = coefficient.removeprefix("step/clip_coef")
        now = {key.removeprefix("step/skipped/"): n for key, n in values.items() if key.startswith("step/skipped/")}
        reason = next((word for word, count in now.items() if count > skips.get(word, 0)), "ok")
        skips.update(now)
        after = values.get("step/loss_scale")
        if scale is None and after is not None:  # of a first step that was skipped: an overflow halves it
            scale = after if reason == "ok" else after / 0.5
        yield {
            "global_step": row["step"],
            "update": row["update"],
            "applied": reason == "ok",
            "reason": reason,
            "grad_norm": values.get(f"step/grad_norm{own}"),
            "clip_coef": values[coefficient],
            "loss_scale_before": scale,
            "loss_scale_after": after,
            "optimizer": int(own.removeprefix("/optimizer") or 0),
            "optimizer_ms": values.get(f"step/optimizer_ms{own}"),
            "train_seconds": row["train_seconds"],
        }
        scale = after


def _write_tables(folder: RunFolder, rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    table = MetricsTable(folder.metrics, keep_through=0)
    for row in rows:
        metrics = {key: float(value) for key, value in row["values"].items() if not key.startswith(ABOUT)}
        if metrics:
            place = {key: row[key] for key in ("step", "update", "epoch", "train_seconds")}
            table.record(**place, metrics=metrics)
    written = StepRows(folder.steps, keep_through=0)
    for step in steps:
        written.append(step)
    written.close()


def _manifest(run: WandbRun, config: dict[str, Any], extra: dict[str, Any], source: str) -> dict[str, Any]:
    return {
        "config": config,
        "command": [run.program, *run.arguments] if run.program else run.arguments,
        "seed": config.get("seed"),
        "started": run.started,
        "versions": {"python": run.python} if run.python else {},
        "hardware": run.hardware,
        "data_hash": extra.get("data_hash"),
        "git": None if run.revision is None else {"revision": run.revision, "changed": None},
        "resumed_from": [],
        "imported_from": {"wandb_run": run.run_id, "name": run.name, "project": run.project, "file": source},
    }


def _summary(
    run: WandbRun,
    config: dict[str, Any],
    extra: dict[str, Any],
    rows: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    folder: RunFolder,
) -> RunSummary:
    # Of a checkpoint the logger's x is that of the step after it.
    last = next(
        (row for row in reversed(rows) if not all(key.startswith("checkpoint/") for key in row["values"])), rows[-1]
    )
    skips: dict[str, int] = {}
    for step in steps:
        if not step["applied"]:
            skips[step["reason"]] = skips.get(step["reason"], 0) + 1
    return RunSummary(
        status="running" if run.exit_code is None else "finished" if run.exit_code == 0 else "failed",
        reason=None if not run.exit_code else f"exit code {run.exit_code}",
        global_step=last["step"],
        updates=last["update"],
        skips=skips,
        epochs=last["epoch"],
        loss_scale=steps[-1]["loss_scale_after"] if steps else None,
        optimizers=_optimizers(config, extra, rows),
        tokens_per_s=_median(rows, "train/tokens_per_s"),
        optimizer_ms=_median(rows, "step/optimizer_ms"),
        train_seconds=last["train_seconds"],
        target=_target(config, rows),
        best=_best(config, rows),
        run_folder=str(folder.path),
    )


def _optimizers(config: dict[str, Any], extra: dict[str, Any], rows: list[dict[str, Any]]) -> list[OptimizerSummary]:
    sizes = [row["values"]["step/state_bytes"] for row in rows if "step/state_bytes" in row["values"]]
    name = config.get("optimizer")
    name = name.get("name") if isinstance(name, dict) else name
    if not sizes or not isinstance(name, str):
        return []
    return [
        OptimizerSummary(
            name=name,
            master=config.get("master"),
            parameters=int(extra.get("parameters") or 0),
            state_bytes={"all": int(sizes[-1])},
        )
    ]


def _target(config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    settings = _section(config, "callbacks", "target")
    if "metric" not in settings or settings.get("target") is None:
        return None
    found = {
        match["name"]: value
        for row in rows
        for key, value in row["values"].items()
        if (match := TARGET.fullmatch(key)) and match["metric"] == settings["metric"]
    }
    record = {key: settings[key] for key in ("metric", "mode", "target")}
    if not found:
        return {**record, "reached": False}
    sign = 1 if settings["mode"] == "min" else -1
    seen = (row["values"][settings["metric"]] for row in rows if settings["metric"] in row["values"])
    value = next((value for value in seen if sign * value <= sign * settings["target"]), None)
    counts = {name: int(found[name]) if name in found else None for name in COUNTS}
    return {**record, "reached": True, **found, **counts, "value": value}


def _best(config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    recipe = _section(config, "recipe")
    metric, mode = recipe.get("monitor"), recipe.get("mode", "min")
    seen = [(row["values"][metric], row["step"]) for row in rows if metric in row["values"]]
    seen = [pair for pair in seen if pair[0] == pair[0]]  # a NaN is no best value
    if not seen:
        return None
    value, step = min(seen) if mode == "min" else max(seen, key=lambda pair: (pair[0], -pair[1]))
    return {"metric": metric, "mode": mode, "value": value, "step": step, "checkpoint": None}


def _section(config: dict[str, Any], *path: str) -> dict[str, Any]:
    place: Any = config
    for key in path:
        place = place.get(key) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else {}


def _median(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [row["values"][name] for row in rows if name in row["values"]]
    return float(median(values)) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
