"""What becomes of a step whose gradients are not finite: skip it, stop the run, or step all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.registry import unknown_name
from lightning_fuse.step.counters import Streak, too_many_skips
from lightning_fuse.step.outcome import Reason
from lightning_fuse.step.verdict import first_nonfinite

OnNonfinite: TypeAlias = Literal["skip", "raise", "step"]


class NonFiniteGradientError(RuntimeError):
    """A gradient is infinite or NaN and the policy is to stop; raised before anything is written."""


class SkipPolicy:
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

    def applies(self, reason: Reason) -> bool:
        """Whether a step that ended for this reason was applied."""
        return reason == "ok" or (reason == "nonfinite" and self.on_nonfinite == "step")

    def check(self, streak: Streak) -> None:
        """Holds a streak of skips that are known afterwards to the limit.

        Raises:
            NonFiniteGradientError: It is longer than allowed.
        """
        if self.limit is not None and streak.length > self.limit:
            raise NonFiniteGradientError(too_many_skips(streak, self.limit))

    def refusal(
        self, optimizer: Optimizer, streak: Streak, where: str, names: Mapping[Tensor, str]
    ) -> NonFiniteGradientError | None:
        """What to raise for a step whose gradients are known to be not finite, before anything is written.

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
            return NonFiniteGradientError(too_many_skips(streak.with_one(where), self.limit, offender))
        return None
