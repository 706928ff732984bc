"""Training metrics of an epoch that is not over: what they have gathered, for a checkpoint, and back.

Lightning keeps none of it, and an average over an epoch then covers the part since a resume. There are two kinds: what
``self.log`` averages itself, and torchmetrics' objects that the module owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric


def capture_epoch_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """What the open epoch has gathered.

    Args:
        trainer: Inside ``fit``.

    Returns:
        ``logged`` and ``modules``, plain data. Values are those of this rank.
    """
    results: Mapping[str, Any] = trainer.fit_loop.epoch_loop._results
    logged = {
        key: {"value": held.value.detach().clone(), "count": _count(held)}
        for key, held in results.items()
        if held.is_tensor and held.meta.on_epoch and not held.has_reset
    }
    # At a validation's end its metrics are not reset yet; they are none of the epoch's.
    validation: Mapping[str, Any] = trainer.fit_loop.epoch_loop.val_loop._results
    others = {id(held.value) for held in validation.values() if not held.is_tensor}
    modules = {
        name: {
            "states": {key: _copied(getattr(module, key)) for key in module._defaults},
            "updates": module._update_count,
        }
        for name, module in trainer.lightning_module.named_modules()
        if isinstance(module, Metric) and module._update_count and id(module) not in others
    }
    return {"logged": logged, "modules": modules}


class EpochMetricsRestorer:
    """Puts back what an epoch had gathered: objects at once, logged averages when their first value has come.

    Args:
        saved: What ``capture_epoch_metrics`` returned.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._logged: dict[str, Any] = dict(saved.get("logged", {}))
        self._modules: dict[str, Any] = dict(saved.get("modules", {}))

    def restore_modules(self, module: pl.LightningModule) -> None:
        """Puts back the states of the module's torchmetrics; once, before the first batch.

        Args:
            module: Metrics are found in it by name; one that has another kind of state is left as it is.
        """
        metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        for name, saved in self._modules.items():
            metric = metrics.get(name)
            if metric is None or set(metric._defaults) != set(saved["states"]):
                continue
            for key, value in saved["states"].items():
                setattr(metric, key, _moved(value, metric.device))
            metric._update_count, metric._computed = int(saved["updates"]), None
        self._modules = {}

    def merge_logged(self, trainer: pl.Trainer) -> None:
        """Adds what was gathered before to averages that have been logged again since; called around every batch.

        Lightning knows of a logged value only when it comes, so this waits for each. What was gathered first stands
        first in the sum: added up like this, an average is the uninterrupted run's to the last bit.

        Args:
            trainer: Inside ``fit``.
        """
        results: Mapping[str, Any] = trainer.fit_loop.epoch_loop._results
        for key in [key for key in self._logged if key in results and not results[key].has_reset]:
            saved, held = self._logged.pop(key), results[key]
            if not held.is_tensor:
                continue
            before = saved["value"].to(held.value.device)
            if held.meta.is_max_reduction:
                held.value = torch.maximum(before, held.value)
            elif held.meta.is_min_reduction:
                held.value = torch.minimum(before, held.value)
            else:
                held.value = before + held.value
            if held.meta.is_mean_reduction:
                held.cumulated_batch_size = held.cumulated_batch_size + saved["count"]


def _count(held: Any) -> int:
    return int(held.cumulated_batch_size) if held.meta.is_mean_reduction else 0


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [item.detach().clone() for item in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [item.to(device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value
