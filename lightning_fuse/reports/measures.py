"""What a run cost and when it reached its target, as plain numbers per run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from lightning_fuse.reports.reading import Point, Run

HARDWARE = ("cpu", "usable_cores", "gpus")


@dataclass(frozen=True)
class Target:
    """When a run first measured that it had reached its target.

    Attributes:
        label: ``val/loss <= 2``.
        reached: Whether it did.
        seconds: Train seconds until then.
        wall: Wall seconds until then; None where the summary is missing.
        updates: Applied updates until then.
        tokens: Tokens until then.
    """

    label: str
    reached: bool
    seconds: float | None = None
    wall: float | None = None
    updates: int | None = None
    tokens: float | None = None


def targets_of(run: Run) -> list[Target]:
    """All targets of a run whose summary has several, the easiest first; else its only one, or none."""
    records = [] if run.summary is None else run.summary.targets
    if not records:
        only = target_of(run)
        return [] if only is None else [only]
    return [_target(run, record) for record in records]


def target_of(run: Run) -> Target | None:
    """A run's target, from its summary, or found among its validations where the summary is missing.

    Args:
        run: A run.

    Returns:
        The target; None where the run has none.
    """
    record = _record(run)
    return None if record is None else _target(run, record)


def _target(run: Run, record: Mapping[str, Any]) -> Target:
    metric, least = str(record["metric"]), record["mode"] == "min"
    goal = float(record["target"])
    label = f"{metric} {'≤' if least else '≥'} {goal:g}"
    points = run.metrics.get(metric, ())
    hit = next((p for p in points if (p.value <= goal if least else p.value >= goal)), None)
    if record.get("reached"):
        updates = int(record["updates"])
        seen = next((p.tokens for p in points if p.update == updates), None)
        counted = record.get("tokens") or record.get("samples")  # runs of before these were recorded have neither
        tokens = seen if counted is None else float(counted)
        return Target(label, True, record["train_seconds"], record["wall_seconds"], updates, tokens)
    if hit is None or record.get("reached") is False:
        return Target(label, False)
    return _from_point(label, hit)


def validation_gap(run: Run) -> float:
    """Updates between two validations of the target's metric: no time to target is known more closely; 0 if unknown."""
    record = _record(run)
    points = [] if record is None else run.metrics.get(str(record["metric"]), [])
    gaps = [after.update - before.update for before, after in pairwise(points)]
    return float(median(gaps)) if gaps else 0.0


def hardware_of(run: Run) -> tuple[str, ...]:
    """The machine, as far as times depend on it."""
    hardware = run.manifest.get("hardware") or {}
    return tuple(str(hardware.get(key)) for key in HARDWARE)


def tokens_name(run: Run) -> str:
    """What the tokens of a run are: bytes or words with a context, else samples."""
    data = run.config.get("data")
    return "tokens" if isinstance(data, Mapping) and data.get("context") else "samples"


def better(metric: str, run: Run) -> str:
    """Which way a metric gets better, "min" or "max": from the recipe where it says so, else from the name."""
    recipe = run.config.get("recipe")
    if isinstance(recipe, Mapping) and recipe.get("monitor") == metric and recipe.get("mode") in ("min", "max"):
        return str(recipe["mode"])
    return "max" if any(word in metric for word in ("accuracy", "f1", "auc", "bleu")) else "min"


def _record(run: Run) -> Mapping[str, Any] | None:
    """The summary's record where it is final, else what the configuration set as the target."""
    if run.summary is not None and run.summary.target is not None:
        record = dict(run.summary.target)
        if run.summary.status in ("running", "unknown") and not record.get("reached"):
            record.pop("reached", None)  # written at the start
        return record
    settings = (run.config.get("callbacks") or {}).get("target")
    if isinstance(settings, Mapping) and {"metric", "target", "mode"} <= set(settings):
        return {key: settings[key] for key in ("metric", "target", "mode")}
    return None


def _from_point(label: str, point: Point) -> Target:
    return Target(label, True, point.seconds, None, point.update, point.tokens)
