"""What the cases from the field share: four weights, batches of one number, a quiet trainer.

``w`` is four ones and the loss is ``sum(w * x)``, so that a batch ``x`` gives every weight the gradient ``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_fuse.step import StepOutcome

BAD = inf  # a batch with an infinite loss
NONE = -1000.0  # a batch for which training_step returns None
UNUSED = -2000.0  # a batch whose loss reaches no weight


def adamw(params: Any, **settings: Any) -> Optimizer:
    """AdamW whose updates are lr in size under a constant gradient: no decay."""
    return AdamW(params, **{"lr": 0.01, "weight_decay": 0.0, **settings})


def sgd(params: Any, **settings: Any) -> Optimizer:
    """SGD that moves a weight by exactly its gradient."""
    return torch.optim.SGD(params, **{"lr": 1.0, **settings})


class Four(LightningModule):
    """Four weights, and whatever optimizer and scheduler a case needs."""

    def __init__(
        self,
        optimizer: Callable[..., Optimizer] = adamw,
        scheduler: Callable[[Optimizer], Any] | None = None,
        **scheduler_config: Any,
    ) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))
        self.idle = torch.nn.Parameter(torch.ones(1), requires_grad=True)
        self._optimizer, self._scheduler, self._config = optimizer, scheduler, scheduler_config
        self.lrs: list[float] = []  # at the end of every batch

    def training_step(self, batch: Tensor) -> Tensor | None:
        x = float(batch)
        if x == NONE:
            return None
        if x == UNUSED:
            return (self.idle * 0.0).sum()
        return (self.w * batch).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.optimizers:
            self.lrs.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer([self.w])
        if self._scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._scheduler(optimizer), "interval": "step", **self._config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Validated(Four):
    """Four weights, validated, tested and predicted too."""

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", (self.w * batch).sum())

    test_step = validation_step

    def predict_step(self, batch: Tensor) -> Tensor:
        return (self.w * batch).sum()


class Outcomes(Callback):
    """Keeps every outcome."""

    def __init__(self) -> None:
        self.seen: list[StepOutcome] = []

    def on_step_outcome(self, trainer: Trainer, pl_module: LightningModule, outcome: StepOutcome) -> None:
        self.seen.append(outcome)

    def of(self, key: str) -> list[Any]:
        return [getattr(outcome, key) for outcome in self.seen]


def batches(*values: float) -> DataLoader:
    """One batch for each number."""
    return DataLoader([torch.tensor(float(x)) for x in values], batch_size=None)


def one_bad(count: int, *bad: int) -> DataLoader:
    """Batches of 1, infinite at the given places."""
    return batches(*[BAD if index in bad else 1.0 for index in range(count)])


def half(scale: float = 1024.0, **settings: Any) -> MixedPrecision:
    """Real float16 on the CPU: the word alone becomes bfloat16 there."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, **settings))


def quiet_trainer(*callbacks: Callback, precision: Any = "32-true", **settings: Any) -> Trainer:
    """A Trainer on one CPU that prints and writes nothing."""
    by_word = {"precision": precision} if isinstance(precision, str) else {"plugins": [precision]}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits = {} if "max_steps" in settings else {"max_epochs": 1}
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "callbacks": list(callbacks),
            "enable_model_summary": False,
            **quiet,
            **by_word,
            **limits,
            **settings,
        }
    )


def train(module: LightningModule, loader: Any, *callbacks: Callback, **settings: Any) -> tuple[Trainer, Outcomes]:
    """Fits once with the given callbacks and keeps the outcomes."""
    outcomes = Outcomes()
    trainer = quiet_trainer(*callbacks, outcomes, **settings)
    trainer.fit(module, loader)
    return trainer, outcomes
