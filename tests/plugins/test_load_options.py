"""What a run's settings mean for a load: a run that steps on NaN gradients goes on with its NaN moments (case 43)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_fuse import Fuse
from lightning_fuse.callbacks import ExactResume


class OneBad(L.LightningModule):
    """A bad second batch: its gradient is NaN in one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = torch.ones(2, 4)
        factor[0, 1] = float("nan") if int(batch[0]) == 1 else 1.0
        return (self.weight * factor).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8)))


def fit(folder: Path, steps: int, on_nonfinite: str, resume: str | None = None, **load: Any) -> OneBad:
    module = OneBad()
    callbacks = [Fuse(optimizer="adamw_fused", on_nonfinite=on_nonfinite), ExactResume(load=load or None)]
    trainer = L.Trainer(
        max_steps=steps, callbacks=callbacks, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module


@pytest.mark.parametrize("load", [{}, {"formats": "convert"}], ids=str)
def test_a_run_that_steps_on_nan_goes_on(load: dict[str, Any], tmp_path: Path) -> None:
    whole = fit(tmp_path, 6, "step")
    fit(tmp_path, 3, "step")
    resumed = fit(tmp_path, 6, "step", str(tmp_path / "3.ckpt"), **load)
    assert torch.equal(whole.weight.view(torch.int32), resumed.weight.view(torch.int32))
    assert resumed.weight.isnan().sum() == 1


def test_one_that_skips_them_refuses_such_a_state(tmp_path: Path) -> None:
    """The control: there a NaN moment is a fault."""
    fit(tmp_path, 3, "step")
    with pytest.raises(ValueError, match="NaN or infinite values in exp_avg of weight"):
        fit(tmp_path, 6, "skip", str(tmp_path / "3.ckpt"))
