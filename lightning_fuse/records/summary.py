"""``summary.json``: how a run ended, and the same as a table that a person reads.

While the run is going the file says ``"status": "running"``; a run that is killed outright leaves it that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_fuse.records.atomic_file import replace_file
from lightning_fuse.records.strict_json import decode, encode

STATUSES = ("running", "finished", "interrupted", "failed")


@dataclass
class OptimizerSummary:
    """One optimizer at the end of a run.

    Attributes:
        name: The word of the optimizer (``adamw_fused``), or its class name.
        kernel: How its step was executed (``reference``, ...), or None for optimizers of others.
        formats: State format to number of parameter elements kept in it; empty for optimizers of others.
        master: The kind of master weights (``none``, ``fp32``, ...), or None for optimizers of others.
        parameters: Number of elements that it optimizes.
        state_bytes: Bytes of its state by kind (``exp_avg.codes``, ...).
    """

    name: str
    kernel: str | None = None
    formats: dict[str, int] = field(default_factory=dict)
    master: str | None = None
    parameters: int = 0
    state_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of its state in all."""
        return sum(self.state_bytes.values())

    def describe(self) -> str:
        """Optimizer and kernel in one line: ``adamw_fused, int8 state (1.2 % in fp32), reference kernel``."""
        parts = [self.name]
        if self.formats:
            main, *others = sorted(self.formats, key=lambda name: -self.formats[name])
            percent = 100 / max(1, sum(self.formats.values()))
            also = f" ({', '.join(f'{self.formats[o] * percent:.1f} % in {o}' for o in others)})" if others else ""
            parts.append(f"{main} state{also}")
        if self.kernel:
            parts.append(f"{self.kernel} kernel")
        return ", ".join(parts)


@dataclass
class RunSummary:
    """A run's result. What was not measured is None.

    Attributes:
        status: ``running``, ``finished``, ``interrupted`` or ``failed``.
        reason: Why it was interrupted or failed.
        global_step: Optimizer steps, skips included.
        planned_steps: Those that the run was to make; None without ``max_steps``.
        updates: Applied optimizer steps.
        skips: Reason to number of skipped steps.
        epochs: Epochs that were completed.
        loss_scale: The last loss scale; None where the precision has none.
        optimizers: One entry per optimizer.
        peak_memory_bytes: The most resident memory of the process.
        peak_gpu_bytes: The most memory that torch held on a GPU.
        tokens_per_s: Median of the metric ``train/tokens_per_s``.
        optimizer_ms: Median milliseconds of an optimizer step.
        checkpoint_ms: Median milliseconds of writing a checkpoint to the disk.
        optimizer_share: Share of ``train_seconds`` that optimizer steps took, from 0 to 1; None on a GPU, where the
            host's time is not the step's (``callbacks=profile`` says it there).
        train_seconds: Time spent training, validation and downtime left out.
        validation_seconds: Time spent in validation.
        wall_seconds: Time inside ``fit``, all of the run's processes together, downtime left out.
        target: ``{metric, mode, target, reached, train_seconds, wall_seconds, updates, value, samples, tokens}`` of
            TimeToTarget.
        targets: The same for each of its targets, the easiest first; empty where there is one alone.
        best: ``{metric, mode, value, step, checkpoint}``.
        checkpoints: Their cost in this process: ``{bytes, saves, save_seconds, load_bytes, load_seconds}``; ``bytes``
            of the last one, ``save_seconds`` of all of them, the loaded ones None where nothing was resumed.
        last_checkpoint: The checkpoint that a resume goes on from.
        run_folder: Where the records are.
    """

    status: str
    reason: str | None = None
    global_step: int = 0
    planned_steps: int | None = None
    updates: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    epochs: int = 0
    loss_scale: float | None = None
    optimizers: list[OptimizerSummary] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    tokens_per_s: float | None = None
    optimizer_ms: float | None = None
    checkpoint_ms: float | None = None
    optimizer_share: float | None = None
    train_seconds: float | None = None
    validation_seconds: float | None = None
    wall_seconds: float | None = None
    target: dict[str, Any] | None = None
    targets: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    checkpoints: dict[str, Any] | None = None
    last_checkpoint: str | None = None
    run_folder: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}; known: {', '.join(STATUSES)}")


def write_summary(path: Path, summary: RunSummary) -> None:
    """Writes the summary in one step.

    Args:
        path: ``summary.json`` in an existing folder.
        summary: The summary.
    """
    replace_file(path, [encode(summary, indent=2), "\n"])


def read_summary(path: Path) -> RunSummary:
    """Reads a summary.

    Args:
        path: A ``summary.json``.

    Returns:
        The summary; keys that a later version may have added are ignored.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a summary.
    """
    try:
        values = decode(Path(path).read_text(encoding="utf-8"))
        optimizers = [OptimizerSummary(**_known(OptimizerSummary, o)) for o in values.get("optimizers", [])]
        return RunSummary(**{**_known(RunSummary, values), "optimizers": optimizers})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a run summary ({error}); choose another run folder") from error


def summary_table(summary: RunSummary) -> list[tuple[str, str]]:
    """The summary as lines for people: (what, value).

    Args:
        summary: The summary.

    Returns:
        Label and text per line; lines about what was not measured are left out.
    """
    rows = [("status", _status(summary))]
    rows.append(("updates", f"{summary.updates:,} of {summary.global_step:,} steps, {_skips(summary.skips)}"))
    rows.append(("loss scale", "none (not needed)" if summary.loss_scale is None else f"{summary.loss_scale:g}"))
    for optimizer in summary.optimizers:
        rows += _optimizer_rows(optimizer)
    rows += _cost_rows(summary)
    rows += _quality_rows(summary)
    if summary.last_checkpoint is not None:
        rows.append(("resume goes on from", summary.last_checkpoint))
    rows.append(("run folder", summary.run_folder))
    return rows


def _status(summary: RunSummary) -> str:
    """How it ended, in words: "interrupted at 27 of 2,000: KeyboardInterrupt"."""
    words = summary.status
    if summary.status != "finished" and summary.planned_steps is not None:
        words += f" at {summary.global_step:,} of {summary.planned_steps:,}"
    return words if summary.reason is None else f"{words}: {summary.reason}"


def _optimizer_rows(optimizer: OptimizerSummary) -> list[tuple[str, str]]:
    rows = [("optimizer", optimizer.describe())]
    total, parameters = optimizer.total_bytes, optimizer.parameters
    each = total / max(1, parameters)
    rows.append(("state bytes", f"{each:.2f} per parameter, {size(total)} for {parameters:,} parameters"))
    if optimizer.master is not None:
        rows.append(("master weights", optimizer.master))
    return rows


def _cost_rows(summary: RunSummary) -> list[tuple[str, str]]:
    rows = []
    if summary.peak_memory_bytes is not None:
        rows.append(("peak memory", f"{size(summary.peak_memory_bytes)} of the process"))
    if summary.peak_gpu_bytes is not None:
        rows.append(("peak GPU memory", size(summary.peak_gpu_bytes)))
    if summary.tokens_per_s is not None:
        rows.append(("tokens/s", f"{summary.tokens_per_s:,.0f}"))
    if summary.optimizer_ms is not None:
        share = summary.optimizer_share
        of_all = "" if share is None else f", {100 * share:.1f} % of the training time"
        rows.append(("ms per optimizer step", f"{summary.optimizer_ms:.2f} (median){of_all}"))
    if summary.train_seconds is not None and summary.wall_seconds is not None:
        train, validation, wall = summary.train_seconds, summary.validation_seconds or 0.0, summary.wall_seconds
        rows.append(("seconds", f"{train:.1f} training, {validation:.1f} validation, {wall:.1f} in all"))
    if summary.checkpoints is not None:
        rows += _checkpoint_rows(summary.checkpoints)
    return rows


def _checkpoint_rows(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if cost["saves"]:
        each = f"{cost['save_seconds'] / cost['saves']:.2f} s each"
        rows.append(("checkpoints", f"{size(cost['bytes'])}, {cost['saves']:,} saved, {each}"))
    if cost["load_bytes"]:
        rows.append(("resumed", f"from {size(cost['load_bytes'])} in {cost['load_seconds']:.2f} s"))
    return rows


def _quality_rows(summary: RunSummary) -> list[tuple[str, str]]:
    rows = []
    only = [] if summary.target is None else [summary.target]
    rows += [("to target", _target(target)) for target in summary.targets or only]
    if summary.best is not None:
        best = summary.best
        if best.get("value") is not None:
            rows.append(("best", f"{best['metric']} {best['value']:.4f} at step {best['step']:,}"))
        if best.get("checkpoint"):
            rows.append(("best checkpoint", best["checkpoint"]))
    return rows


def _target(target: Mapping[str, Any]) -> str:
    label = f"{target['metric']} {'<=' if target['mode'] == 'min' else '>='} {target['target']:g}"
    if not target["reached"]:
        return f"{label} was not reached"
    seconds = f"{target['train_seconds']:.1f} s of training ({target['wall_seconds']:.1f} s in all)"
    seen = next((f", {target[unit]:,} {unit}" for unit in ("tokens", "samples") if target.get(unit)), "")
    return f"{label} after {seconds}, {target['updates']:,} updates{seen}"


def _skips(skips: Mapping[str, int]) -> str:
    total = sum(skips.values())
    if not total:
        return "none skipped"
    return f"{total:,} skipped ({', '.join(f'{reason} {count:,}' for reason, count in sorted(skips.items()))})"


def size(count: float) -> str:
    """Bytes in the unit that leaves a number below 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in values.items() if key in names}
