"""Learning-rate schedules over the updates of a run, as Lightning wants them from ``configure_optimizers``.

Each factory takes the optimizer and the run's length in updates, and returns a scheduler configuration. The factor that
it multiplies every group's lr with is a pure function of the update's number, from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_fuse.recipes.ranges import Count, Factor, Natural, Probability, Share


def constant(optimizer: Optimizer, total: int, *, warmup: Probability = 0.0) -> dict[str, Any]:
    """The full lr after a linear warm-up.

    Args:
        optimizer: Whose lr it drives.
        total: Updates of the run.
        warmup: Share of them in which the lr rises from its first step to full, in [0, 1).

    Returns:
        A Lightning scheduler configuration with interval "step".

    Raises:
        ValueError: ``warmup`` is outside its range.
    """
    return _by_update(optimizer, _with_warmup(total, warmup, lambda done: 1.0))


def warmup_cosine(
    optimizer: Optimizer, total: int, *, warmup: Probability = 0.05, final: Factor = 0.1
) -> dict[str, Any]:
    """Linear warm-up, then half a cosine down to ``final`` times the full lr.

    Args:
        optimizer: Whose lr it drives.
        total: Updates of the run.
        warmup: Share of them in which the lr rises, in [0, 1).
        final: Factor at the end, in [0, 1].

    Returns:
        A Lightning scheduler configuration with interval "step".

    Raises:
        ValueError: A share is outside its range.
    """
    _check_share("final", final, 1.0)
    return _by_update(
        optimizer, _with_warmup(total, warmup, lambda done: final + (1 - final) * 0.5 * (1 + cos(pi * done)))
    )


def warmup_linear(
    optimizer: Optimizer, total: int, *, warmup: Probability = 0.05, final: Factor = 0.0
) -> dict[str, Any]:
    """Linear warm-up, then a straight line down to ``final`` times the full lr.

    Args:
        optimizer: Whose lr it drives.
        total: Updates of the run.
        warmup: Share of them in which the lr rises, in [0, 1).
        final: Factor at the end, in [0, 1].

    Returns:
        A Lightning scheduler configuration with interval "step".

    Raises:
        ValueError: A share is outside its range.
    """
    _check_share("final", final, 1.0)
    return _by_update(optimizer, _with_warmup(total, warmup, lambda done: 1 - (1 - final) * done))


def plateau(
    optimizer: Optimizer,
    total: int,
    *,
    monitor: str,
    every: Count,
    mode: Literal["min", "max"] = "min",
    factor: Share = 0.5,
    patience: Natural = 1,
) -> dict[str, Any]:
    """Full lr, multiplied by ``factor`` whenever ``patience`` validations in a row brought nothing better.

    Args:
        optimizer: Whose lr it drives.
        total: Updates of the run; not needed here.
        monitor: The validation metric to watch.
        every: Updates between two validations.
        mode: Whether less or more of it is better.
        factor: What the lr is multiplied with, in (0, 1).
        patience: Validations without progress that are forgiven.

    Returns:
        A Lightning scheduler configuration with interval "step" and the frequency of the validations.

    Raises:
        ValueError: ``factor`` is not below 1 (from torch).
    """
    scheduler = ReduceLROnPlateau(optimizer, mode=mode, factor=factor, patience=patience)
    # A skipped update moves the count away from the validations; the last value known then serves.
    return {"scheduler": scheduler, "interval": "step", "frequency": every, "monitor": monitor, "strict": False}


def _by_update(optimizer: Optimizer, factor: Callable[[int], float]) -> dict[str, Any]:
    return {"scheduler": LambdaLR(optimizer, factor), "interval": "step", "frequency": 1}


def _with_warmup(total: int, warmup: float, after: Callable[[float], float]) -> Callable[[int], float]:
    """Warm-up in front of a curve that is given the share of the remaining updates done, in [0, 1]."""
    if not 0 <= warmup < 1:
        raise ValueError(f"schedule.warmup={warmup}; give the share of the updates in which the lr rises, in [0, 1)")
    rising = round(total * warmup)

    def factor(update: int) -> float:
        if update < rising:
            return (update + 1) / (rising + 1)
        return after(min(1.0, (update - rising) / max(1, total - rising)))

    return factor


def _check_share(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"schedule.{name}={value}; give a factor of the full lr, in [0, {most:g}]")
