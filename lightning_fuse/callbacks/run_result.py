"""What a run came to, read off the trainer and the machine, and shown as a table."""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_fuse.callbacks.step_monitor import NO_METRICS, state_bytes
from lightning_fuse.callbacks.time_to_target import TimeToTarget
from lightning_fuse.optim.catalog import CATALOG
from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO
from lightning_fuse.records import OptimizerSummary, read_summary

# Class name to the word the user types.
WORDS = {entry.cls.__name__: entry.word for entry in CATALOG}


class BestValue:
    """The best value of one validation metric.

    Args:
        metric: Its name; None finds one, see ``watch``.
        mode: "min" or "max".

    Raises:
        ValueError: ``mode`` is unknown.
    """

    def __init__(self, metric: str | None, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"unknown mode {mode!r}; known: max, min")
        self.metric = metric
        self.mode = mode
        self.value: float | None = None
        self.step = 0

    def watch(self, trainer: pl.Trainer) -> None:
        """Takes the metric of the first checkpoint callback that monitors one, or TimeToTarget's, if none was named."""
        if self.metric is not None:
            return
        monitors: list[Any] = [c for c in trainer.checkpoint_callbacks if getattr(c, "monitor", None)]
        if monitors:
            self.metric, self.mode = monitors[0].monitor, monitors[0].mode
        elif (target := _first_target(trainer)) is not None:
            self.metric, self.mode = target.metric, target.mode

    def look(self, metrics: Mapping[str, float], step: int) -> None:
        """Keeps the metric's value if it is the best so far.

        Args:
            metrics: Those of one validation.
            step: Global step of that validation.
        """
        value = metrics.get(self.metric) if self.metric else None
        if value is None or math.isnan(value):
            return
        if self.value is None or (value < self.value if self.mode == "min" else value > self.value):
            self.value, self.step = value, step

    def record(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """``{metric, mode, value, step, checkpoint}``, or None where nothing is watched."""
        if self.metric is None:
            return None
        monitored = [c for c in trainer.checkpoint_callbacks if getattr(c, "monitor", None) == self.metric]
        # Without a checkpoint of the best there is still the last one to point at.
        paths = [getattr(c, "best_model_path", "") for c in (*monitored, *trainer.checkpoint_callbacks)]
        checkpoint = next((path for path in paths if path), None)
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": self.value,
            "step": self.step,
            "checkpoint": None if checkpoint is None else _from_here(checkpoint),
        }

    def state_dict(self) -> dict[str, Any]:
        """Metric, mode, value and step."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the value, if it is one of the same metric."""
        if self.metric in (None, state["metric"]) and (self.metric is None or self.mode == state["mode"]):
            self.metric, self.mode = state["metric"], state["mode"]
            self.value, self.step = state["value"], state["step"]


def summarize_optimizers(trainer: pl.Trainer, word: str | None) -> list[OptimizerSummary]:
    """One entry per optimizer.

    Args:
        trainer: Whose.
        word: The configured word of the optimizer; counts where there is one.

    Returns:
        Names, kernels, formats, masters and bytes.
    """
    single = word if len(trainer.optimizers) == 1 else None
    return [_summarize(optimizer, single) for optimizer in trainer.optimizers]


def _summarize(optimizer: Optimizer, word: str | None) -> OptimizerSummary:
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    formats = getattr(optimizer, "formats", None)
    elements: dict[str, int] = {}
    if callable(formats):  # in the order of the parameters
        for word_of_format, p in zip(formats().values(), parameters, strict=False):
            elements[word_of_format] = elements.get(word_of_format, 0) + p.numel()
    return OptimizerSummary(
        name=WORDS.get(name) or word or name,
        kernel=getattr(optimizer, "kernel_name", None),
        formats=elements,
        master=getattr(optimizer, "master", None),
        parameters=sum(p.numel() for p in parameters),
        state_bytes=state_bytes(optimizer),
    )


def target_record(trainer: pl.Trainer) -> dict[str, Any] | None:
    """What the first TimeToTarget of a trainer says, or None without one."""
    first = _first_target(trainer)
    return None if first is None else first.record()


def target_records(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """What all TimeToTargets of a trainer say, where they have more than one target together."""
    records = [r for callback in trainer.callbacks if isinstance(callback, TimeToTarget) for r in callback.records()]  # type: ignore[attr-defined]
    return records if len(records) > 1 else []


def _first_target(trainer: Any) -> TimeToTarget | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, TimeToTarget)), None)


def checkpoint_cost(trainer: pl.Trainer) -> dict[str, Any] | None:
    """What reading and writing checkpoints has cost, or None where somebody else than this package does it.

    Args:
        trainer: Whose.
    """
    files = trainer.strategy.checkpoint_io
    if not isinstance(files, AtomicCheckpointIO) or not (files.saved.count or files.loaded.count):
        return None
    loaded = files.loaded if files.loaded.count else None
    return {
        "bytes": files.saved.bytes,
        "saves": files.saved.count,
        "save_seconds": files.saved.total_seconds,
        "load_bytes": None if loaded is None else loaded.bytes,
        "load_seconds": None if loaded is None else loaded.seconds,
    }


def peak_memory_bytes() -> int | None:
    """The most memory this process has had resident, or None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_gpu_bytes(trainer: pl.Trainer) -> int | None:
    """The most memory that torch has held on one GPU, or None without one in use.

    Args:
        trainer: Whose; a callback that resets torch's own count keeps what it was.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    kept = [getattr(callback, "gpu_watermark", 0) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return max(*kept, *(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())))


def median(values: Sequence[float]) -> float | None:
    """The middle value, or None of nothing."""
    return statistics.median(values) if values else None


def checkpoint_ms(trainer: pl.Trainer) -> float | None:
    """Median milliseconds of a checkpoint's write in this process, or None where nobody measures it."""
    return median(getattr(trainer.strategy.checkpoint_io, "save_ms", ()))


def optimizer_share(trainer: pl.Trainer, step_ms: Sequence[float], train_seconds: float) -> float | None:
    """The share of training that optimizer steps took, or None where their host time is not their time.

    Args:
        trainer: Whose.
        step_ms: Milliseconds of every optimizer step.
        train_seconds: Time spent training.

    Returns:
        From 0 to 1.
    """
    parameters = (p for o in trainer.optimizers for group in o.param_groups for p in group["params"])
    if not step_ms or train_seconds <= 0 or any(p.device.type != "cpu" for p in parameters):
        return None
    return min(1.0, sum(step_ms) / 1e3 / train_seconds)


def show_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Prints labels and texts as a table; plain text where rich is missing.

    Args:
        title: Stands above it.
        rows: Label and text of each line.
    """
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        width = max(len(label) for label, _ in rows)
        print("\n".join(f"{label:<{width}}  {text}" for label, text in rows))
        return
    console = Console()
    room = console.width - max(len(label) for label, _ in rows) - len("│  │  │")
    # A path that the table would break stands below it, whole, so that it can be copied.
    wide = [(label, text) for label, text in rows if max(map(len, text.split(" "))) > room and "/" in text]
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        if (label, text) not in wide:
            table.add_row(label, Text(text))  # Text: brackets in a path are no markup
    console.print(table)
    for label, text in wide:
        console.print(Text(f"{label}: {text}"), soft_wrap=True)


def _from_here(path: str) -> str:
    """A path below the working folder as it is written there; one that is elsewhere is whole."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith(os.pardir) else relative


def is_finished(summary: Path) -> bool:
    """Whether a summary tells of a run that came to its end.

    Args:
        summary: The file.
    """
    return summary.exists() and read_summary(summary).status == "finished"


def logged_names(loop: Any, *, on_step: bool) -> set[str]:
    """What a loop's own steps and hooks log; the trainer's metrics hold those of all loops, however old.

    Args:
        loop: Of the trainer.
        on_step: Those of steps, or those of epochs.
    """
    return set(loop._results.metrics(on_step)["callback"])


def logged_numbers(metrics: Mapping[str, Any], of: set[str]) -> dict[str, float]:
    """Metrics as numbers.

    Args:
        metrics: Those of the trainer.
        of: The names that are wanted.
    """
    return {name: float(metrics[name]) for name in metrics if name in of and name not in NO_METRICS}


def column(rows: Any, name: str) -> list[float]:
    """The numbers of one column.

    Args:
        rows: Dicts.
        name: The key.
    """
    return [float(row[name]) for row in rows if row.get(name) is not None]
