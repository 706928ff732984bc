"""W&B's watch under a loss scale: its gradient histograms are in unscaled units, and in them only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from lightning_fuse import Fuse
from lightning_fuse.plugins import FusePrecision, stock_precision
from tests.cases import BAD, Four, batches, half, quiet_trainer
from tests.cases.manual import Manual


@pytest.fixture
def logger(tmp_path: Path) -> Any:
    made = WandbLogger(save_dir=tmp_path, mode="offline")
    yield made
    wandb.finish()


def ends(logger: WandbLogger, module: Four, *callbacks: Any, loader: Any = None, **settings: Any) -> list[Any]:
    """(name, smallest and largest bin edge) of every histogram that W&B was given, in order."""
    seen: list[Any] = []
    run = logger.experiment
    stock = run._log

    def kept(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in data.items():
            if isinstance(value, wandb.Histogram):
                seen.append((name, float(value.bins[0]), float(value.bins[-1])))
        stock(data, *args, **kwargs)

    run._log = kept
    logger.watch(module, log="all", log_freq=1, log_graph=False)
    trainer = quiet_trainer(*callbacks, logger=logger, **settings)
    trainer.fit(module, batches(3, 5) if loader is None else loader)
    logger.experiment.unwatch(module)
    assert "log_tensor_stats" not in vars(run._torch)
    return seen


def gradients(seen: list[Any]) -> list[Any]:
    """Of the weight ``w``; W&B numbers the models that it watches, in their names."""
    return [(low, high) for name, low, high in seen if name.startswith("gradients/") and name.endswith("w")]


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_case_03_watched_gradients_are_unscaled(logger: WandbLogger, scale: float, fuse: dict[str, Any]) -> None:
    assert gradients(ends(logger, Four(), Fuse(**fuse), precision=half(scale))) == [(3.0, 3.0), (5.0, 5.0)]


def test_case_03_stock_shows_scaled_ones(logger: WandbLogger) -> None:
    scaled = [(3.0 * 2.0**16,) * 2, (5.0 * 2.0**16,) * 2]
    assert gradients(ends(logger, Four(), precision=half(2.0**16))) == scaled


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_without_a_loss_scale_nothing_is_changed(logger: WandbLogger, precision: str) -> None:
    assert gradients(ends(logger, Four(), Fuse(), precision=precision)) == [(3.0, 3.0), (5.0, 5.0)]


def test_parameters_are_no_gradients(logger: WandbLogger) -> None:
    class Recomputed(Four):
        """Shows a parameter during backward, as a forward that is computed again does."""

        def training_step(self, batch: Tensor) -> Tensor:
            loss = super().training_step(batch)
            loss.register_hook(lambda _: logger.experiment._torch.log_tensor_stats(self.w.data, "parameters/w"))
            return loss

    seen = ends(logger, Recomputed(), Fuse(), precision=half(2.0**10))
    assert ("parameters/w", 1.0, 1.0) in seen


def test_in_manual_optimization_and_true_float16(logger: WandbLogger) -> None:
    assert gradients(ends(logger, Manual(), Fuse(), precision=half(2.0**10))) == [(3.0, 3.0), (5.0, 5.0)]
    tiny = 2.0**-26  # no float16: the scaled gradient is one
    plugin = FusePrecision(stock_precision("16-true", "cpu"))
    seen = gradients(ends(logger, Small(tiny), loader=batches(1), precision=plugin))
    assert seen == [(tiny, tiny)]


class Small(Four):
    """A loss in float32 whose gradient float16 can only hold while it is scaled."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.w.float() * self.size).sum()


def test_a_failed_backward_leaves_wandb_as_it_was(logger: WandbLogger) -> None:
    class Failing(Four):
        def training_step(self, batch: Tensor) -> Tensor:
            loss = super().training_step(batch)
            loss.register_hook(self.fail)
            return loss

        def fail(self, gradient: Tensor) -> None:
            raise ValueError("backward failed")

    module = Failing()
    logger.watch(module, log_freq=1, log_graph=False)
    with pytest.raises(ValueError, match="backward failed"):
        quiet_trainer(Fuse(), logger=logger, precision=half()).fit(module, batches(1))
    assert "log_tensor_stats" not in vars(logger.experiment._torch)


def test_an_overflow_is_left_out_by_wandb_itself_and_the_step_skipped(logger: WandbLogger) -> None:
    module = Four()
    assert gradients(ends(logger, module, Fuse(), loader=batches(BAD, 3), precision=half())) == [(3.0, 3.0)]
    assert torch.isfinite(module.w).all()
