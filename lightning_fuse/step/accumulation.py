"""The accumulation window: micro-batches whose gradients are summed before one step, and what becomes of the sum.

Each micro-batch contributes 1/planned of the gradient of its loss; where the planned size changes while a window is
open, those that come later are scaled to the share of the first. The window's factor makes of the sum:

``mean``   the mean over the micro-batches that are there, also in a window that is shorter than planned;
``sum``    what was summed, so a short window gives a smaller update (stock Lightning's arithmetic);
``drop``   nothing: a short last window of an epoch is no step;
``carry``  the mean, after the next epoch has filled the window.

Micro-batches may report a weight (tokens, for a loss that is a mean over tokens): the applied gradient is then the
weighted mean over all micro-batches of all ranks, as if they had been one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_fuse.registry import unknown_name

WindowPolicy: TypeAlias = Literal["mean", "sum", "drop", "carry"]
AllReduce: TypeAlias = Callable[[Tensor, str], Tensor]  # (tensor, "sum" or "max") -> the reduction over all ranks


class AccumulationWindow:
    """What the open window holds.

    Args:
        policy: See the module.

    Attributes:
        count: Micro-batches that have contributed.
        ranks: Number of processes whose gradients are averaged.
        all_reduce: Reduces a tensor over them; None in a single process.

    Raises:
        ValueError: The policy is unknown.
    """

    def __init__(self, policy: WindowPolicy) -> None:
        if policy not in get_args(WindowPolicy):
            raise ValueError(unknown_name("window", policy, get_args(WindowPolicy)))
        self.policy = policy
        self.count = 0
        self.ranks = 1
        self.all_reduce: AllReduce | None = None
        self._weighted = 0  # micro-batches that reported a weight
        self._total = 0.0  # their weights, in units
        self._unit: float | None = None  # a power of two near the weights, so that losses stay in range
        self._next: float | None = None  # weight of the micro-batch under way
        self._over = False  # the next contribution starts a new window
        self._planned: int | None = None  # of the open window's first micro-batch: each contributes 1/planned
        self._plan: int | None = None  # of the micro-batch under way

    def set_weight(self, weight: float) -> None:
        """Sets the weight of the micro-batch under way, before its backward.

        Args:
            weight: For instance its number of tokens; >= 0, the same unit on all ranks.

        Raises:
            ValueError: It is not a finite number >= 0, or the policy is "sum", under which it would have no effect.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight={weight!r} of a micro-batch: must be a finite number >= 0")
        if self.policy == "sum":
            raise ValueError('weights have no effect with window="sum": use "mean", "drop" or "carry"')
        self._next = float(weight)

    def loss_weight(self, device: torch.device, planned: int | None = None) -> float:
        """What the loss of the micro-batch under way is multiplied by: its weight, in units; 1 without weights.

        Args:
            device: Where the ranks meet.
            planned: Micro-batches of a full window as of now; the loss carries 1/planned. None where the size of
                windows never changes.
        """
        self._plan = planned
        # An open window goes on in the units of its first micro-batch.
        share = planned / self._planned if planned and self._planned and self.count and not self._over else 1.0
        if self._next is None:
            return share
        if self._unit is None:
            self._unit = self._agree_on_unit(self._next, device)
        return share * self._next / self._unit

    def end_soon(self) -> None:
        """Lets the next contribution start a new window: several optimizers may still step on this one."""
        self._over = True

    def accumulate(self) -> None:
        """Counts the micro-batch under way, after its backward.

        Raises:
            RuntimeError: Some micro-batches of the window reported a weight and some did not.
        """
        if self._over:
            self.close()
        if self.count == 0:
            self._planned = self._plan
        self.count += 1
        if self._next is not None:
            self._weighted += 1
            self._total += self._next / (self._unit or 1.0)
            self._next = None
        if self._weighted not in (0, self.count):
            raise RuntimeError(
                f"{self._weighted} of {self.count} micro-batches of a window reported a weight: "
                "report one for each of them, or for none"
            )

    def factor(self, planned: int | None, device: torch.device) -> Tensor | None:
        """What makes of the summed gradients the gradient to apply.

        Args:
            planned: Micro-batches of a full window, each of which contributed 1/planned, unless the window began with
                another plan; None where the caller has weighted them.
            device: Where the gradients live.

        Returns:
            float32, 0-dimensional; None for 1.
        """
        if planned is not None:
            planned = self._planned or planned
        if self._weighted:
            total = torch.tensor(self._total, dtype=torch.float64, device=device)
            if self.all_reduce is not None:
                total = self.all_reduce(total, "sum")
            # A window of weight 0 has gradients of 0 (of which nothing must become NaN).
            return ((planned or 1) * self.ranks / torch.where(total > 0, total, 1.0)).to(torch.float32)
        if planned is not None and self.policy != "sum" and self.count not in (0, planned):
            return torch.tensor(planned / self.count, dtype=torch.float32, device=device)
        return None

    def close(self) -> None:
        """Starts a new window; a weight reported for the micro-batch under way stays, it is the new window's first."""
        self.count, self._weighted, self._total, self._over, self._planned = 0, 0, 0.0, False, None

    def state_dict(self) -> dict[str, Any]:
        """The open window as plain data; its gradients are not part of it."""
        return {
            "count": self.count,
            "weighted": self._weighted,
            "total": self._total,
            "unit": self._unit,
            "planned": self._planned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the window that ``state_dict`` describes."""
        self.count, self._weighted, self._total = int(state["count"]), int(state["weighted"]), float(state["total"])
        self._unit, self._planned = state["unit"], state.get("planned")

    def _agree_on_unit(self, weight: float, device: torch.device) -> float:
        first = torch.tensor(weight, dtype=torch.float64, device=device)
        largest = float(first if self.all_reduce is None else self.all_reduce(first, "max"))
        return 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0
