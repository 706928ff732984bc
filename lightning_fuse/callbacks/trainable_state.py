"""Which parameters a run trains at the moment: a callback may freeze and unfreeze them as the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module


def capture_trainable(module: Module) -> dict[str, Any]:
    """Copies what a finetuning callback switches.

    Args:
        module: The module.

    Returns:
        ``parameters`` (name to ``requires_grad``) and ``statistics`` (name of a normalisation layer to
        ``track_running_stats``).
    """
    return {
        "parameters": {name: p.requires_grad for name, p in module.named_parameters()},
        "statistics": {name: layer.track_running_stats for name, layer in _tracking(module).items()},
    }


def restore_trainable(module: Module, state: Mapping[str, Any]) -> list[str]:
    """Puts the switches back; what the checkpoint does not know stays as it is.

    Args:
        module: The module.
        state: What ``capture_trainable`` returned.

    Returns:
        Names of the parameters that were switched.
    """
    switched = []
    for name, p in module.named_parameters():
        wanted = state["parameters"].get(name, p.requires_grad)
        if wanted != p.requires_grad:
            p.requires_grad_(wanted)
            switched.append(name)
    for name, layer in _tracking(module).items():
        layer.track_running_stats = state["statistics"].get(name, layer.track_running_stats)
    return switched


def _tracking(module: Module) -> dict[str, Any]:
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "track_running_stats")}
