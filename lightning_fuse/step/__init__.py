"""The step contract, free of Lightning: verdict, loss scale, window, outcome."""

from lightning_fuse.step.contract import StepContract
from lightning_fuse.step.loss_scale import LossScale
from lightning_fuse.step.outcome import REASONS, StepOutcome
from lightning_fuse.step.policy import NonFiniteGradientError, OnNonfinite
from lightning_fuse.step.window import AccumulationWindow, WindowPolicy

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
