"""StepProfile: where the time of a training step goes, and what an optimizer could change about it.

A run is watched in a window of a few training steps, in two parts. First by the clock alone, undisturbed: forward,
backward, step contract, the rest, and what passes between two steps. Then as many steps under torch.profiler, which
slows down whatever calls many operators: launches, and the share of torch's own ``Optimizer.step`` ranges. At the end
of training a table is printed and ``profile.json`` written.

Advice is given where it is earned: the share of the optimizer is the most that any optimizer could save.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.profiler import record_function

from lightning_fuse.callbacks.profile_trace import AFTER_BACKWARD, STEP_RANGE, Digest, Trace, busy, digest
from lightning_fuse.callbacks.run_result import show_table
from lightning_fuse.callbacks.step_monitor import state_bytes
from lightning_fuse.callbacks.target_history import BatchCounter
from lightning_fuse.plugins.precision import contract_of
from lightning_fuse.records.atomic_file import replace_file
from lightning_fuse.records.strict_json import encode
from lightning_fuse.step import StepContract

PHASES = ("forward", "backward", "contract", "other", "between")
SMALL_SHARE = 0.05  # of a step: below it no optimizer is worth a change
LARGE_SHARE = 0.20  # above it a faster one is felt
MANY = 8  # parameter tensors: with fewer, calls are not what a step costs
WAITING = 0.20  # of the time: what may pass between two steps


class StepProfile(Callback):
    """Profiles a window of training steps.

    Args:
        folder: Where ``profile.json`` is written, an existing or a new folder.
        warmup: Training steps before the window.
        active: Training steps of each part of the window; rounded up to whole accumulation windows.
        table: Print a table at the end.

    Attributes:
        result: What ``profile.json`` holds, once training has ended; None where the run was too short.

    Raises:
        ValueError: A number is out of range; on fit, if Lightning's own profiler of torch runs already.
    """

    def __init__(self, folder: str | Path, *, warmup: int = 5, active: int = 10, table: bool = True) -> None:
        if warmup < 0 or active < 1:
            raise ValueError(f"warmup={warmup} active={active}: give at least 0 steps before and 1 step in the window")
        self.folder = Path(folder)
        self.warmup = warmup
        self.active = active
        self.table = table
        self.result: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._seen = 0  # training steps of this fit
        self._times = dict.fromkeys(PHASES, 0.0)  # seconds of the timed part
        self._mark = self._ended = 0.0
        self._timed = 0
        self._batches = BatchCounter()
        self._trace: Trace | None = None
        self._range: Any = None
        self._digest: Digest | None = None
        self._contract: StepContract | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts the profiler once, before the clocks of training run."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        if isinstance(getattr(trainer, "profiler", None), PyTorchProfiler):
            raise ValueError("the Trainer has profiler=PyTorchProfiler, and torch records once at a time; drop one")
        self._reset()
        self.result = None
        every = int(trainer.accumulate_grad_batches)
        self.active = -(-self.active // every) * every
        self.warmup = -(-self.warmup // every) * every
        Trace.warm_up()

    # The window.

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins a training step."""
        if not trainer.is_global_zero:
            return
        now = perf_counter()
        if self._timing and self._seen > self.warmup:
            self._times["between"] += now - self._ended
        if self._seen == self.warmup + self.active and self._trace is None and not busy():
            self._trace = Trace()
            self._trace.start()
        if self._timing:
            self._watch(contract_of(trainer))
        if self._trace is not None:
            self._range = record_function(STEP_RANGE)
            self._range.__enter__()
        self._mark = perf_counter()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Forward ends."""
        self._lap("forward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Backward ends."""
        self._lap("backward")
        if self._range is not None:
            with record_function(AFTER_BACKWARD):
                pass

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a training step."""
        if not trainer.is_global_zero:
            return
        if self._timing:
            self._lap("other")
            self._timed += 1
            self._batches.add(pl_module, batch, trainer.world_size)
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        self._seen += 1
        if not self._timing:
            self._unwatch()
        if self._trace is not None and self._seen >= self.warmup + 2 * self.active:
            self._stop_trace()
        self._ended = perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation is not what passes between two steps."""
        self._ended = perf_counter()

    @property
    def recording(self) -> bool:
        """Whether the window is open: others should not disturb it."""
        return self._digest is None and self.warmup <= self._seen <= self.warmup + 2 * self.active

    @property
    def _timing(self) -> bool:
        return self.warmup <= self._seen < self.warmup + self.active

    def _lap(self, phase: str) -> None:
        if self._timing:
            now = perf_counter()
            self._times[phase] += now - self._mark
            self._mark = now

    def _watch(self, contract: StepContract | None) -> None:
        """Puts a clock around the step contract, once per optimizer and step, until ``_unwatch``."""
        if contract is None or self._contract is not None:
            return
        run = contract.step

        def step(*args: Any, **kwargs: Any) -> None:
            self._lap("other")
            run(*args, **kwargs)
            self._lap("contract")

        contract.step = step  # type: ignore[method-assign]
        self._contract = contract

    def _unwatch(self) -> None:
        if self._contract is not None:
            del self._contract.step
            self._contract = None

    def _stop_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            self._digest = digest(trace.stop())
            # A recording is made once in a fit.
            self._seen = max(self._seen, self.warmup + self.active + 1)

    # The result.

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes and prints what was seen."""
        if not trainer.is_global_zero:
            return
        if self._trace is not None and self._seen > self.warmup + self.active:
            self._stop_trace()
        self._abandon()
        if self._digest is None:
            needed = self.warmup + self.active + 1
            rank_zero_info(f"no profile: the run had {self._seen} training steps, a window needs {needed}")
            return
        self.result = self._figures(trainer, pl_module, self._digest)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / "profile.json", [encode(self.result, indent=2), "\n"])
        if self.table:
            show_profile(self.result)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends a recording that is under way."""
        self._abandon()

    def _abandon(self) -> None:
        self._unwatch()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._trace is not None:
            self._trace.stop()
            self._trace = None

    def _figures(self, trainer: pl.Trainer, module: pl.LightningModule, seen: Digest) -> dict[str, Any]:
        steps = max(1, self._timed)
        phases = {phase: 1e3 * seconds / steps for phase, seconds in self._times.items()}
        step_ms = sum(phases[phase] for phase in PHASES if phase != "between")
        wall = sum(self._times.values())
        on_gpu = any(p.device.type == "cuda" for p in module.parameters())
        by_clock = contract_of(trainer) is not None and not on_gpu  # on a GPU the host only launches
        figures: dict[str, Any] = {
            "device": "cuda" if on_gpu else "cpu",
            "timed_steps": self._timed,
            "training_step_ms": step_ms,
            "phases_ms": phases,
            "contract_share": phases["contract"] / step_ms if by_clock and step_ms > 0 else None,
            "profiled_steps": seen.steps,
            "optimizers": list(seen.optimizers),
            "optimizer_steps": seen.optimizer_steps,
            "optimizer_ms": seen.optimizer_ms,
            "optimizer_share": seen.share,
            "profiled_step_ms": seen.step_ms,
            "host_ms": seen.host_ms,
            "gpu_ms": seen.gpu_ms,
            "operators": seen.operators,
            "optimizer_operators": seen.optimizer_operators,
            "kernels": seen.kernels,
            "optimizer_kernels": seen.optimizer_kernels,
            "parameter_tensors": sum(len(group["params"]) for o in trainer.optimizers for group in o.param_groups),
            "state_bytes": sum(sum(state_bytes(o).values()) for o in trainer.optimizers),
        }
        for unit, count in self._batches.state_dict().items():
            figures[f"{unit}_per_s"] = None if count is None or wall <= 0 else count / wall
        return {**figures, "advice": advice(figures)}


def advice(figures: Mapping[str, Any]) -> list[str]:
    """What the figures are worth saying aloud.

    Args:
        figures: device, contract_share, optimizer_share, optimizer_operators, parameter_tensors, phases_ms.

    Returns:
        Sentences; none where nothing stands out.
    """
    said = []
    # Undisturbed by the profiler, and with clipping and checks in it, where there is a contract on a CPU.
    share = figures["contract_share"] or figures["optimizer_share"]
    percent = f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"
    if share < SMALL_SHARE:
        said.append(f"the optimizer is {percent} of your step: no optimizer can give you more than that")
    elif share >= LARGE_SHARE:
        said.append(
            f"the optimizer is {percent} of your step: one that is twice as fast makes the step "
            f"{1 / (1 - share / 2):.2f} times as fast, none more than {1 / (1 - share):.2f} times"
        )
        tensors, calls = figures["parameter_tensors"], figures["optimizer_operators"] + figures["optimizer_kernels"]
        ours = any(name.startswith("Fused") for name in figures["optimizers"])
        if calls > tensors > MANY and not ours:
            made = f"it makes {calls:,.0f} calls for {tensors:,} parameter tensors"
            said.append(f"{made}; a fused one (optimizer=adamw_fused) makes one for all")
    phases = figures["phases_ms"]
    waiting = phases["between"] / max(1e-9, sum(phases.values()))
    if waiting >= WAITING:
        said.append(
            f"{100 * waiting:.0f} % of the time passes between two steps: loader (data.num_workers gives it workers), "
            "checkpoints, logging"
        )
    return said


def profile_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures as lines for people: (what, value)."""
    phases, tokens = figures["phases_ms"], figures["tokens_per_s"]
    rows = [
        ("training step", f"{figures['training_step_ms']:.2f} ms, by the clock over {figures['timed_steps']} steps")
    ]
    names = {"contract": "step contract", "other": "hooks and the rest", "between": "between two steps"}
    for phase in PHASES:
        part = 100 * phases[phase] / max(1e-9, figures["training_step_ms"])
        rows.append((f"  {names.get(phase, phase)}", f"{phases[phase]:.2f} ms, {part:.1f} %"))
    whose = ", ".join(figures["optimizers"]) or "none"
    of_step = f"{100 * figures['optimizer_share']:.1f} % of {figures['profiled_step_ms']:.2f} ms"
    rows.append(("Optimizer.step", f"{figures['optimizer_ms']:.2f} ms, {of_step} under torch.profiler ({whose})"))
    rows.append(
        ("operator calls", f"{figures['operators']:,.0f} per step, {figures['optimizer_operators']:,.0f} in it")
    )
    if figures["device"] == "cuda":
        rows.append(("kernels", f"{figures['kernels']:,.0f} per step, {figures['optimizer_kernels']:,.0f} in it"))
        rows.append(("host, GPU", f"{figures['host_ms']:.2f} ms, {figures['gpu_ms']:.2f} ms per step"))
    if tokens is not None:
        rows.append(("tokens/s", f"{tokens:,.0f}"))
    elif figures["samples_per_s"] is not None:
        rows.append(("samples/s", f"{figures['samples_per_s']:,.0f}"))
    return [*rows, *(("advice", sentence) for sentence in figures["advice"])]


def show_profile(figures: Mapping[str, Any]) -> None:
    """Prints the figures as a table."""
    show_table("where the time goes", profile_rows(figures))
