"""The contract once more, in plain Python numbers and nothing else: the oracle of ``test_contract_model.py``.

One weight per optimizer, SGD with lr 1 and a momentum. A micro-batch is None, or one gradient per optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CLIP_EPS = 1e-6
BAD = math.inf


@dataclass
class Plan:
    """What one window holds."""

    micros: list[list[float] | None]  # one gradient per optimizer, or None where training_step returned None
    absent: set[int] = field(default_factory=set)  # optimizers none of whose parameters got a gradient
    veto: bool = False


@dataclass
class Settings:
    optimizers: int
    window: int
    policy: str
    short: str  # what a short window stands for: mean or sum
    scale: float | None
    growth_interval: int
    floor: float
    clip: float | None
    limit: int | None
    momentum: float


class Stop(Exception):
    """The contract raises here."""


class Model:
    def __init__(self, settings: Settings) -> None:
        self.s = settings
        self.weights = [1.0] * settings.optimizers
        self.buffers: list[float | None] = [None] * settings.optimizers
        self.scale, self.growth = settings.scale, 0
        self.steps = self.updates = 0
        self.streaks = [0] * settings.optimizers
        self.outcomes: list[tuple] = []
        self.stopped = False

    def run(self, plan: Plan) -> None:
        present = [micro for micro in plan.micros if micro is not None]
        before, overflowed, judged, veto, filed = self.scale, False, False, plan.veto, []
        for i in range(self.s.optimizers):
            norm, coef, updates = None, 1.0, self.updates
            if veto:
                reason, veto = "user", False
            elif i in plan.absent or not present:
                reason = "no_grad"
            else:
                judged = True
                grad = sum(micro[i] / self.s.window for micro in present)
                if self.s.short == "mean":
                    grad *= self.s.window / len(present)
                norm = abs(grad)
                if self.s.clip is not None:
                    coef = min(1.0, self.s.clip / (norm + CLIP_EPS))
                bad = not math.isfinite(grad)
                reason = self._finish(i, grad * coef, bad)
                overflowed |= bad
            self.steps += 1
            filed.append((self.steps, self.updates, self.updates > updates, reason, norm, coef, len(present), i))
        if self.scale is not None and judged:
            self._move(overflowed)
        self.outcomes += [(*one, before, self.scale) for one in filed]

    def _finish(self, i: int, grad: float, bad: bool) -> str:
        if bad and self.s.policy == "raise":
            self._stop()
        if bad and self.s.policy == "skip":
            self.streaks[i] += 1
            if self.s.limit is not None and self.streaks[i] > self.s.limit:
                self._stop()
            return "nonfinite"
        self.streaks[i] = 0
        old = self.buffers[i]
        self.buffers[i] = grad if old is None else self.s.momentum * old + grad
        self.weights[i] -= self.buffers[i] if self.s.momentum else grad
        self.updates += 1
        return "nonfinite" if bad else "ok"

    def _stop(self) -> None:
        self.stopped = True
        raise Stop

    def _move(self, overflowed: bool) -> None:
        assert self.scale is not None
        if overflowed:
            self.scale, self.growth = max(self.scale * 0.5, self.s.floor), 0
            return
        self.growth += 1
        if self.growth == self.s.growth_interval:
            self.scale, self.growth = self.scale * 2.0, 0
