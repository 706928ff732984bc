"""What one optimizer step did: the record that monitors, schedulers, averages and counters follow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

Reason: TypeAlias = Literal["ok", "nonfinite", "no_grad", "user"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class StepOutcome:
    """One optimizer step, applied or skipped.

    Attributes:
        global_step: Optimizer steps of the run up to and with this one, skipped ones included; the first is 1.
        update: Applied steps of the run up to and with this one.
        applied: Whether parameters were updated.
        reason: "ok"; "nonfinite": a gradient was infinite or NaN (applied all the same under
            ``on_nonfinite="step"``); "no_grad": there was no gradient; "user": vetoed.
        grad_norm: Global L2 norm of the unscaled gradients before clipping; None without gradients. Infinite or NaN
            where a gradient was.
        clip_coef: What clipping multiplied the gradients by; 1 where nothing was clipped.
        loss_scale_before: Loss scale the gradients carried; None where the precision has none.
        loss_scale_after: Loss scale of the next step.
        window_size: Micro-batches that contributed gradients.
        optimizer: Index of the optimizer.
    """

    global_step: int
    update: int
    applied: bool
    reason: Reason
    grad_norm: float | None
    clip_coef: float
    loss_scale_before: float | None
    loss_scale_after: float | None
    window_size: int
    optimizer: int = 0

    def record(self) -> dict[str, Any]:
        """The outcome as a plain dict of numbers and strings."""
        return asdict(self)
