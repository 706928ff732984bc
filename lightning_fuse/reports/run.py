"""A run as the comparison sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

UNKNOWN = "unknown"
STATUSES = ("running", "finished", "interrupted", "failed")
# What a run may have recorded as a number.
FIGURES: tuple[str, ...] = (
    *("skips", "updates", "global_step", "parameters", "state_bytes", "optimizer_ms", "optimizer_share"),
    *("training_step_ms", "train_seconds", "validation_seconds", "wall_seconds", "peak_memory_bytes"),
    *("checkpoint_bytes", "checkpoint_ms", "validation_gap"),
)


@dataclass(frozen=True)
class Target:
    """A goal of a run, and when the run first measured that it had reached it.

    Attributes:
        label: ``val/loss ≤ 2``.
        metric: Its metric.
        reached: True or False; None while that is open.
        train_seconds: Until then, without validation and downtime.
        wall_seconds: Until then, in all.
        updates: Applied updates until then.
        tokens: Tokens until then, or samples.
    """

    label: str
    metric: str
    reached: bool | None
    train_seconds: float | None = None
    wall_seconds: float | None = None
    updates: float | None = None
    tokens: float | None = None


@dataclass
class Run:
    """One run; what it did not record is None.

    Attributes:
        name: Of its folder.
        config: The configuration in force at its end: the first one with what resumes changed.
        label: Of its group where it is known beforehand (a CSV), else "".
        reason: Why it ended early.
        hardware: The machine, as far as times depend on it.
        provenance: Versions, machine, revision and start, for people.
        optimizer_ms: Median of an applied optimizer step.
        training_step_ms: Median time between two optimizer steps, on the train clock.
        validation_gap: Updates between two measurements of the target: it is known no more closely.
        targets: The main one first.
        finals: Metric to its last value.
        points: Metric to its measurements: columns ``step``, ``update``, ``tokens``, ``seconds``, ``value``.
        scales: Columns ``step``, ``scale``: the loss scale wherever it moved.
        skipped: Columns ``step``, ``reason``, ``scale``: skipped optimizer steps.
        notes: What is odd, one sentence each.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    seed: int | None = None
    status: str = UNKNOWN
    reason: str | None = None
    recipe: str = UNKNOWN
    data_hash: str | None = None
    hardware: str = ""
    provenance: dict[str, str] = field(default_factory=dict)
    skips: float | None = None
    updates: float | None = None
    global_step: float | None = None
    parameters: float | None = None
    state_bytes: float | None = None
    optimizer_ms: float | None = None
    optimizer_share: float | None = None
    training_step_ms: float | None = None
    train_seconds: float | None = None
    validation_seconds: float | None = None
    wall_seconds: float | None = None
    peak_memory_bytes: float | None = None
    checkpoint_bytes: float | None = None
    checkpoint_ms: float | None = None
    validation_gap: float | None = None
    targets: list[Target] = field(default_factory=list)
    finals: dict[str, float] = field(default_factory=dict)
    points: dict[str, pd.DataFrame] = field(default_factory=dict)
    scales: pd.DataFrame = field(default_factory=pd.DataFrame)
    skipped: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it came to its planned end."""
        return self.status == "finished"

    @property
    def target(self) -> Target | None:
        """The main target, or None."""
        return self.targets[0] if self.targets else None
