"""What validations of a run have shown: enough to say when any target was first reached, also one that is named later.

Nothing is interpolated: a target counts as reached at the first validation whose value reaches it. So only validations
that beat all before them are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Reached:
    """The validation that first reached a target.

    Attributes:
        train_seconds: Time spent training until then.
        wall_seconds: Time inside ``fit`` until then, validation included, downtime not.
        updates: Applied optimizer steps until then.
        value: What the metric was.
        samples: Training samples until then, of all ranks; None where they were not counted.
        tokens: Tokens until then, of all ranks; None where the module does not count them.
    """

    train_seconds: float
    wall_seconds: float
    updates: int
    value: float
    samples: int | None = None
    tokens: int | None = None


class TargetHistory:
    """Validations that were better than all before them.

    Args:
        mode: "min" if smaller is better, "max" if larger is.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.best: list[Reached] = []

    def look(self, now: Reached) -> None:
        """Takes a validation; NaN beats nothing."""
        if now.value == now.value and (not self.best or self._reaches(now.value, self.best[-1].value, strictly=True)):
            self.best.append(now)

    def first(self, target: float) -> Reached | None:
        """The first validation that reached a target, or None."""
        return next((seen for seen in self.best if self._reaches(seen.value, target)), None)

    def state_dict(self) -> list[dict[str, Any]]:
        """Plain numbers."""
        return [asdict(seen) for seen in self.best]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from them."""
        self.best = [Reached(**seen) for seen in state]

    def _reaches(self, value: float, target: float, strictly: bool = False) -> bool:
        if strictly and value == target:
            return False
        return value <= target if self.mode == "min" else value >= target


class BatchCounter:
    """Samples and tokens that training has seen.

    Samples are the first dimension of a batch's first tensor. Tokens are what the module says: it may define
    ``count_tokens(batch) -> int``.
    """

    def __init__(self) -> None:
        self.samples: int | None = 0
        self.tokens: int | None = None

    def add(self, module: Any, batch: Any, ranks: int) -> None:
        """Counts one batch of this rank for all of them.

        Args:
            module: The module that trains on it.
            batch: The batch.
            ranks: Processes that train on as much.
        """
        size = _batch_size(batch)
        self.samples = None if size is None or self.samples is None else self.samples + size * ranks
        count = getattr(module, "count_tokens", None)
        if callable(count):
            self.tokens = (self.tokens or 0) + int(count(batch)) * ranks

    def state_dict(self) -> dict[str, int | None]:
        """The counts."""
        return {"samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Goes on from them."""
        self.samples, self.tokens = state["samples"], state["tokens"]


def _batch_size(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in inner if (size := _batch_size(part)) is not None), None)
