"""Who listens to a training run: callbacks and the module, to outcomes and to gradients before a step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lightning_fuse.step import StepOutcome

OUTCOME_HOOK = "on_step_outcome"
GRADIENT_HOOK = "on_before_optimizer_step"
_LOOKS = partial(is_overridden, GRADIENT_HOOK, parent=Callback)


def looks_at_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether anybody looks at gradients between backward and step."""
    return (
        is_overridden(GRADIENT_HOOK, module)
        or is_overridden("configure_gradient_clipping", module)
        or any(map(_LOOKS, getattr(trainer, "callbacks", [])))
    )


def tell_outcomes(trainer: Trainer, module: LightningModule, outcomes: Iterable[StepOutcome]) -> None:
    """Calls ``on_step_outcome`` of every callback and of the module that has one, once per outcome."""
    for outcome in outcomes:
        for listener in [*getattr(trainer, "callbacks", []), module]:
            hook = getattr(listener, OUTCOME_HOOK, None)
            if hook is not None:
                hook(trainer, module, outcome)


def module_inside(model: Module) -> LightningModule | None:
    """The LightningModule inside what a strategy made of it; None where there is none."""
    inner: Any = model
    while inner is not None and not isinstance(inner, LightningModule):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
    return inner
