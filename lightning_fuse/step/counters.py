"""What a run has counted: steps, updates, skips by reason, and the streaks of bad steps of each optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_fuse.step.outcome import REASONS, Reason


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


def too_many_skips(streak: Streak, limit: int, offender: str = "") -> str:
    """Words the error for a streak of nonfinite steps that is longer than allowed.

    Args:
        streak: The streak.
        limit: How many are allowed.
        offender: The parameter that the last one starts with, where it is known.

    Returns:
        One line of text.
    """
    return (
        f"{streak.length} steps in a row had gradients that are not finite, from {streak.first} to {streak.last}"
        f"{f', now first in {offender}' if offender else ''}. The weights are those before the first of them. "
        f"Lower the learning rate, look at these batches, or allow more with max_consecutive_skips (now {limit})"
    )
