"""The step contract, free of Lightning: the numbers of a step, loss scale, accumulation window, outcome."""

from lightning_fuse.step.accumulation import AccumulationWindow, WindowPolicy
from lightning_fuse.step.contract import StepContract
from lightning_fuse.step.loss_scale import LossScale
from lightning_fuse.step.outcome import REASONS, NonFiniteGradientError, OnNonfinite, StepOutcome

__all__ = [
    "REASONS",
    "AccumulationWindow",
    "LossScale",
    "NonFiniteGradientError",
    "OnNonfinite",
    "StepContract",
    "StepOutcome",
    "WindowPolicy",
]
