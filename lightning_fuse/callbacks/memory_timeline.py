"""MemoryTimeline: how much memory training holds over a run, and where in a step the peak is.

Every so many training steps one is looked at. ``memory.csv`` gets a row::

    memory/forward_peak, backward_peak, step_peak    most bytes of tensors in each phase of that step
    memory/held                                      bytes of tensors at its end
    memory/transient                                 most bytes beside parameters, buffers and state, before the step
    memory/resident                                  resident memory of the process
    memory/allocated, reserved, fragmentation        of the GPU's allocator at the end of the step

``memory.json`` holds the largest of each and the bytes of parameters, buffers, gradients and state; ``memory.png`` the
curves, where matplotlib is installed. ``transient`` is what the ledger (``activations=``) cannot know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.profiler import record_function

from lightning_fuse.callbacks.memory_phases import (
    PHASE_RANGE,
    PHASES,
    CudaMemory,
    Curve,
    DeviceMemory,
    Held,
    curve_of,
    fragmentation,
    gradient_bytes,
    held_bytes,
    resident_bytes,
)
from lightning_fuse.callbacks.profile_trace import Trace, busy
from lightning_fuse.callbacks.run_clocks import Stopwatch
from lightning_fuse.records import MetricsTable, read_metrics
from lightning_fuse.records.atomic_file import replace_file
from lightning_fuse.records.strict_json import encode
from lightning_fuse.step import StepOutcome

# Of memory.png: a title for each panel, and of each column what it is called; looks that all eyes tell apart.
PANELS = {
    "tensors": {**{f"memory/{phase}_peak": f"peak in {phase}" for phase in PHASES}, "memory/held": "held after a step"},
    "device": {"memory/allocated": "allocated", "memory/reserved": "reserved"},
    "process": {"memory/resident": "resident"},
}
LOOKS = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#3b3f46", "x", ":"))


class MemoryTimeline(Callback):
    """Looks at the memory of a training step now and then.

    Args:
        folder: Where its files are written, an existing or a new folder.
        every: Training steps between two that are looked at; the first is always one.
        memory: The device's allocator; None takes that of the module's GPU, or records tensors on a CPU.

    Attributes:
        result: What ``memory.json`` holds, once training has ended.
        gpu_watermark: The most bytes allocated on the GPU so far; looking at a step resets torch's own count.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(self, folder: str | Path, *, every: int = 50, memory: DeviceMemory | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give training steps between two that are looked at, at least 1")
        self.folder = Path(folder)
        self.every = every
        self.result: dict[str, Any] | None = None
        self.gpu_watermark = 0
        self._given = memory
        self._memory: DeviceMemory | None = None
        self._watch = Stopwatch()
        self._place = {"step": 0, "update": 0}
        self._table: MetricsTable | None = None
        self._held: Held | None = None
        self._phase: Any = None
        self._name = ""
        self._trace: Trace | None = None
        self._peaks: dict[str, int] = {}
        self._freed: dict[str, int] = {}
        self._seen = 0
        self._due = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts the profiler once, before the clocks of training run."""
        if stage == "fit" and trainer.is_global_zero:
            Trace.warm_up()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the table at the step that the run goes on from."""
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        step = trainer.global_step
        self._place = {"step": step, "update": step}
        self._table = MetricsTable(self.folder / "memory.csv", keep_through=step)
        device = next((p.device for p in pl_module.parameters()), torch.device("cpu"))
        self._memory = self._given or (CudaMemory(device) if device.type == "cuda" else None)
        self._seen, self._due = 0, False
        self._watch.start()

    # One step that is looked at.

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to look, if it is this step's turn; while others profile, their turn comes first."""
        self._seen += 1
        self._due = self._due or (self._seen - 1) % self.every == 0
        others = (getattr(callback, "recording", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if self._table is None or not self._due or any(others) or (self._memory is None and busy()):
            return
        self._due = False
        self._held = held_bytes(pl_module, trainer.optimizers)
        self._peaks, self._freed = dict.fromkeys(PHASES, 0), {}
        if self._memory is None:
            self._trace = Trace(memory=True)
            self._trace.start()
        else:
            self.gpu_watermark = max(self.gpu_watermark, self._memory.peak())
        self._enter("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Forward ends; gradients of the last step have just been dropped, or not."""
        if self._held is not None and not self._freed:
            self._freed = {"backward": self._held.gradients - gradient_bytes(pl_module)}
        self._enter("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Backward ends; what follows is the step."""
        self._enter("step")

    def on_step_outcome(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outcome: StepOutcome) -> None:
        """Follows the place in the run."""
        self._place = {"step": outcome.global_step, "update": outcome.update}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes what was seen."""
        held, self._held = self._held, None
        if held is None or self._table is None:
            return
        self._leave()
        curve = self._curve(held)
        beside = held.total - held.gradients
        row: dict[str, float] = {f"memory/{phase}_peak": curve.peaks[phase] for phase in PHASES}
        row["memory/held"] = curve.end
        # What else was there when the step began is not of the step.
        row["memory/transient"] = max(0, max(curve.peaks["forward"], curve.peaks["backward"]) - beside)
        resident = resident_bytes()
        if resident is not None:
            row["memory/resident"] = resident
        if self._memory is not None:
            row["memory/allocated"] = self._memory.allocated()
            row["memory/reserved"] = self._memory.reserved()
            row["memory/fragmentation"] = fragmentation(self._memory)
        step = max(self._place["step"], trainer.global_step)
        seconds = self._watch.seconds
        place = {"step": step, "update": self._place["update"] or step}
        self._table.record(**place, epoch=trainer.current_epoch, train_seconds=seconds, metrics=row)

    def _enter(self, phase: str) -> None:
        if self._held is None:
            return
        self._leave()
        self._name = phase
        if self._memory is not None:
            self._memory.reset_peak()
        else:
            self._phase = record_function(PHASE_RANGE + phase)
            self._phase.__enter__()

    def _leave(self) -> None:
        if self._memory is not None and self._name:
            peak = self._memory.peak()
            self._peaks[self._name] = max(self._peaks[self._name], peak)
            self.gpu_watermark = max(self.gpu_watermark, peak)
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase, self._name = None, ""

    def _curve(self, held: Held) -> Curve:
        if self._memory is not None:
            return Curve(dict(self._peaks), self._memory.allocated())
        trace, self._trace = self._trace, None
        assert trace is not None
        return curve_of(trace.stop(), held.total, self._freed)

    # The result.

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the summary and the picture."""
        self._watch.stop()
        self._abandon()
        if self._table is None:
            return
        rows = read_metrics(self._table.path)
        self._table = None
        if rows:
            self.result = summarize(rows, held_bytes(pl_module, trainer.optimizers))
            replace_file(self.folder / "memory.json", [encode(self.result, indent=2), "\n"])
            draw(rows, self.folder / "memory.png")
            rank_zero_info(describe(self.result))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends a recording that is under way."""
        self._abandon()

    def _abandon(self) -> None:
        self._leave()
        self._held = None
        if self._trace is not None:
            self._trace.stop()
            self._trace = None


def summarize(rows: list[dict[str, float]], held: Held) -> dict[str, Any]:
    """The largest figures of a run.

    Args:
        rows: Of ``memory.csv``.
        held: What is held at the end.

    Returns:
        Plain numbers, in bytes; ``peak_phase`` is where the peak was.
    """
    largest = {
        name.removeprefix("memory/"): max(row[name] for row in rows if name in row)
        for name in sorted({name for row in rows for name in row if name.startswith("memory/")})
    }
    peaks = {phase: largest[f"{phase}_peak"] for phase in PHASES}
    phase = max(peaks, key=lambda name: peaks[name])
    return {
        "looks": len(rows),
        "parameter_bytes": held.parameters,
        "buffer_bytes": held.buffers,
        "gradient_bytes": held.gradients,
        "state_bytes": held.state,
        "transient_bytes": largest["transient"],
        "peak_bytes": peaks[phase],
        "peak_phase": phase,
        "peaks": peaks,
        **{f"largest_{name}": value for name, value in largest.items() if not name.endswith(("_peak", "transient"))},
    }


def describe(result: dict[str, Any]) -> str:
    """The summary in one line."""
    mega = {phase: f"{value / 1e6:,.1f}" for phase, value in result["peaks"].items()}
    phases = ", ".join(f"{phase} {value}" for phase, value in mega.items())
    peak = f"{result['peak_bytes'] / 1e6:,.1f} MB of tensors in {result['peak_phase']} ({phases})"
    return f"memory: peak {peak}; for scripts/ledger.py: activations={result['transient_bytes']:.0f}"


def draw(rows: list[dict[str, float]], path: Path) -> bool:
    """Draws the curves over the steps.

    Args:
        rows: Of ``memory.csv``.
        path: The picture.

    Returns:
        Whether matplotlib is there to draw it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    # Tensors are small beside a process that holds libraries, so each has a scale of its own.
    shown = [(title, names) for title, names in PANELS.items() if any(name in row for row in rows for name in names)]
    for axes, (title, names) in zip(figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0], shown, strict=True):
        for (name, label), (colour, marker, dash) in zip(names.items(), LOOKS, strict=False):
            points = [(row["step"], row[name] / 1e6) for row in rows if name in row]
            if points:
                axes.plot(
                    *zip(*points, strict=True), color=colour, marker=marker, linestyle=dash, markersize=4, label=label
                )
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylabel("MB")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_xlabel("optimizer step")
    figure.savefig(path, dpi=120)
    return True
