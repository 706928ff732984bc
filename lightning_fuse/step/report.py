"""What a step did, while it may still lie on the device: read at once on a CPU, one step later on a GPU.

Waiting for a number would stall the device, so a GPU's numbers are copied to pinned memory behind the step, and read
when the next step is about to be launched: by then the device has long computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fuse.step.counters import RunCounters
from lightning_fuse.step.outcome import Reason, StepOutcome

Number: TypeAlias = Tensor | float  # a tensor while only its device knows it


@dataclass(frozen=True)
class Reading:
    """The numbers of a step, on the host.

    Attributes:
        bad: Whether a gradient was not finite.
        grad_norm: See ``StepOutcome``.
        clip_coef: See ``StepOutcome``.
        loss_scale_before: See ``StepOutcome``.
        loss_scale_after: See ``StepOutcome``.
    """

    bad: bool
    grad_norm: float | None
    clip_coef: float
    loss_scale_before: float | None
    loss_scale_after: float | None


@dataclass
class StepReport:
    """One step of one optimizer, launched and perhaps not yet known.

    Attributes:
        optimizer: Its index.
        where: Where in the run it is.
        window_size: Micro-batches that contributed.
        reason: Why it was skipped, where that is known without looking at gradients; else None.
        verdict: found_inf, grad_norm and clip_coef, 0-dimensional where they are tensors; None where nobody looked
            at a gradient.
        scale_before: The loss scale that the gradients carried, float32, 0-dimensional; None without one.
    """

    optimizer: int
    where: str
    window_size: int
    reason: Reason | None
    verdict: tuple[Tensor, Number, Number] | None
    scale_before: Tensor | None
    _numbers: Sequence[Number] | Tensor = field(default=(), repr=False)
    _copied: torch.cuda.Event | None = field(default=None, repr=False)

    def seal(self, scale_after: Tensor | None) -> None:
        """Starts the copy to the host, when the loss scale has moved.

        Args:
            scale_after: The loss scale of the next step; None without one.
        """
        numbers: list[Number] = [] if self.verdict is None else list(self.verdict)
        if self.scale_before is not None and scale_after is not None:
            numbers += [self.scale_before, scale_after]
        if not numbers:
            return
        first = numbers[0]
        if isinstance(first, Tensor) and first.device.type == "cuda":
            packed = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=first.device) for n in numbers])
            self._numbers = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
            self._numbers.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._numbers = numbers

    def read(self) -> Reading:
        """The numbers; waits for the device where it has not come so far."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers = [float(number) for number in self._numbers]
        found_inf, grad_norm, clip_coef = (numbers.pop(0) for _ in range(3)) if self.verdict else (0.0, None, 1.0)
        before, after = numbers or (None, None)
        return Reading(found_inf != 0.0, grad_norm, clip_coef, before, after)

    def outcome(self, numbers: Reading, reason: Reason, applied: bool, counters: RunCounters) -> StepOutcome:
        """The record of the step, once it is counted.

        Args:
            numbers: What was read.
            reason: Why it was skipped, or "ok".
            applied: Whether parameters were updated.
            counters: The run's counts up to and with this step.

        Returns:
            The outcome.
        """
        return StepOutcome(
            global_step=counters.global_step,
            update=counters.updates,
            applied=applied,
            reason=reason,
            grad_norm=numbers.grad_norm,
            clip_coef=numbers.clip_coef,
            loss_scale_before=numbers.loss_scale_before,
            loss_scale_after=numbers.loss_scale_after,
            window_size=self.window_size,
            optimizer=self.optimizer,
        )
