"""What one optimizer step did: its outcome, the counts of a run, and what becomes of gradients that are not finite.

A step is pending from its launch until its outcome is read: at once on a CPU, one step later on a GPU. Waiting for a
number would stall the device, so a GPU's numbers are copied to pinned memory behind the step, and read when the next
step is about to be launched: by then the device has long computed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.registry import unknown_name
from lightning_fuse.step.grad_stats import GradStats, first_nonfinite

Reason: TypeAlias = Literal["ok", "nonfinite", "no_grad", "user"]
REASONS: tuple[Reason, ...] = get_args(Reason)
OnNonfinite: TypeAlias = Literal["skip", "raise", "step"]


@dataclass(frozen=True)
class StepOutcome:
    """One optimizer step, applied or skipped.

    Attributes:
        global_step: Optimizer steps of the run up to and with this one, skipped ones included; the first is 1.
        update: Applied steps of the run up to and with this one.
        applied: Whether parameters were updated.
        reason: "ok"; "nonfinite": a gradient was infinite or NaN (applied all the same under
            ``on_nonfinite="step"``); "no_grad": there was no gradient; "user": skipped by hand.
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


class Streak(NamedTuple):
    """Nonfinite steps in a row.

    Attributes:
        length: How many.
        first: Where the first one was.
        last: Where the last one was.
    """

    length: int = 0
    first: str = ""
    last: str = ""

    def with_one(self, where: str) -> Streak:
        """The streak with one step more."""
        return Streak(self.length + 1, self.first or where, where)


class RunCounters:
    """Counts of one run; they go into its checkpoints.

    Attributes:
        global_step: Optimizer steps, skipped ones included.
        updates: Applied ones.
        skips: Skipped ones by reason.
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.updates = 0
        self.skips: dict[str, int] = {reason: 0 for reason in REASONS if reason != "ok"}
        self._streaks: dict[int, Streak] = {}  # by optimizer

    def count(self, reason: Reason, applied: bool, optimizer: int, where: str) -> None:
        """Counts one step.

        Args:
            reason: Its outcome.
            applied: Whether parameters were updated.
            optimizer: The optimizer's index.
            where: Where in the run it was.
        """
        self.global_step += 1
        if applied:
            self.updates += 1
            self._streaks.pop(optimizer, None)
        else:
            self.skips[reason] += 1
            if reason == "nonfinite":
                self._streaks[optimizer] = self.streak(optimizer).with_one(where or f"step {self.global_step}")

    def streak(self, optimizer: int) -> Streak:
        """The nonfinite steps of an optimizer since its last applied one."""
        return self._streaks.get(optimizer, Streak())

    def state_dict(self) -> dict[str, Any]:
        """The counts as plain data."""
        return {
            "global_step": self.global_step,
            "updates": self.updates,
            "skips": dict(self.skips),
            "streaks": {optimizer: tuple(streak) for optimizer, streak in self._streaks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from counts that ``state_dict`` gave."""
        self.global_step, self.updates = int(state["global_step"]), int(state["updates"])
        self.skips.update({reason: int(count) for reason, count in state["skips"].items()})
        self._streaks = {int(optimizer): Streak(*streak) for optimizer, streak in state["streaks"].items()}


@dataclass
class PendingStep:
    """One step of one optimizer, launched and perhaps not known yet.

    Attributes:
        optimizer: Its index.
        where: Where in the run it is.
        window_size: Micro-batches that contributed.
        stats: Its numbers; None where nobody looked at a gradient.
        reason: Why it was skipped, where that is known without looking at gradients; else None.
        scale_before: The loss scale that the gradients carried, float32, 0-dimensional; None without one.
        scale_after: That of the next step, once it has moved.
    """

    optimizer: int
    where: str
    window_size: int
    stats: GradStats | None
    reason: Reason | None
    scale_before: Tensor | None
    scale_after: Tensor | None = None
    _numbers: Tensor | None = field(default=None, repr=False)
    _copied: torch.cuda.Event | None = field(default=None, repr=False)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU knows the numbers first."""
        return self.stats is not None and self.stats.found_inf.device.type == "cuda"

    def start_copy(self) -> None:
        """Starts the copy of a GPU's numbers to the host; called when the loss scale has moved."""
        stats, device = self.stats, None if self.stats is None else self.stats.found_inf.device
        if stats is None or device is None or device.type != "cuda":
            return
        numbers = [stats.found_inf, stats.grad_norm, stats.clip_coef]
        numbers += [0.0 if scale is None else scale for scale in (self.scale_before, self.scale_after)]
        packed = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers])
        self._numbers = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
        self._numbers.copy_(packed, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def outcome(self, counters: RunCounters, policy: NonFinitePolicy) -> StepOutcome:
        """Reads the numbers, waiting for a device that has not come so far, and counts the step.

        Args:
            counters: The run's; they count this step.
            policy: Whether a step on gradients that are not finite was applied.

        Returns:
            What the step did.
        """
        bad, norm, coef, before, after = self._read()
        reason: Reason = self.reason or ("nonfinite" if bad else "ok")
        applied = reason == "ok" or (reason == "nonfinite" and policy.on_nonfinite == "step")
        counters.count(reason, applied, self.optimizer, self.where)
        return StepOutcome(
            global_step=counters.global_step,
            update=counters.updates,
            applied=applied,
            reason=reason,
            grad_norm=norm,
            clip_coef=coef,
            loss_scale_before=before,
            loss_scale_after=after,
            window_size=self.window_size,
            optimizer=self.optimizer,
        )

    def _read(self) -> tuple[bool, float | None, float, float | None, float | None]:
        scales = self.scale_before, self.scale_after
        if self.stats is None:
            before, after = (None if scale is None else float(scale) for scale in scales)
            return False, None, 1.0, before, after
        if self._copied is not None and self._numbers is not None:
            self._copied.synchronize()
            bad, norm, coef, *held = self._numbers.tolist()
        else:
            stats = self.stats
            bad = float(stats.found_inf) if stats.finite is None else not stats.finite
            norm, coef = float(stats.grad_norm), float(stats.clip_coef)
            held = [0.0 if scale is None else float(scale) for scale in scales]
        before, after = (None if scale is None else number for scale, number in zip(scales, held, strict=True))
        return bool(bad), norm, coef, before, after


class NonFiniteGradientError(RuntimeError):
    """A gradient is infinite or NaN and the policy is to stop; raised before anything is written."""


class NonFinitePolicy:
    """The user's choice, and the limit on skips in a row.

    Args:
        on_nonfinite: "skip" the step, "raise", or "step" all the same.
        limit: Longest run of nonfinite steps of one optimizer; one more raises. None for no limit.

    Raises:
        ValueError: A choice is unknown.
    """

    def __init__(self, on_nonfinite: OnNonfinite, limit: int | None) -> None:
        if on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(unknown_name("on_nonfinite", on_nonfinite, get_args(OnNonfinite)))
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_consecutive_skips={limit!r}: must be a whole number >= 1, or None for no limit")
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.limit = limit

    def check(self, streak: Streak) -> None:
        """Holds a streak of skips that are known afterwards to the limit.

        Raises:
            NonFiniteGradientError: It is longer than allowed.
        """
        if self.limit is not None and streak.length > self.limit:
            raise NonFiniteGradientError(_too_many_skips(streak, self.limit))

    def error(
        self, optimizer: Optimizer, streak: Streak, where: str, names: Mapping[Tensor, str]
    ) -> NonFiniteGradientError | None:
        """The error for a step whose gradients are known to be not finite, before anything is written.

        Args:
            optimizer: Whose step it is.
            streak: Its nonfinite steps before this one.
            where: Where in the run this one is.
            names: Names of parameters where the optimizer was given none.

        Returns:
            The error; None where the policy goes on.
        """
        if self.on_nonfinite == "raise":
            return NonFiniteGradientError(
                f"a gradient is not finite at {where}: first in {first_nonfinite(optimizer, names)}; "
                'nothing was written. Use on_nonfinite="skip" to leave such steps out'
            )
        if self.on_nonfinite == "skip" and self.limit is not None and streak.length >= self.limit:
            offender = first_nonfinite(optimizer, names)
            return NonFiniteGradientError(_too_many_skips(streak.with_one(where), self.limit, offender))
        return None


def _too_many_skips(streak: Streak, limit: int, offender: str = "") -> str:
    return (
        f"{streak.length} steps in a row had gradients that are not finite, from {streak.first} to {streak.last}"
        f"{f', now first in {offender}' if offender else ''}. The weights are those before the first of them. "
        f"Lower the learning rate, look at these batches, or allow more with max_consecutive_skips (now {limit})"
    )
