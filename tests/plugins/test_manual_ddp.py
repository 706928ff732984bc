"""Two processes over gloo: gradients averaged once per step (case 24), weights across ranks (case 22)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fuse.callbacks import Fuse
from lightning_fuse.plugins import contract_of


class OneWeight(L.LightningModule):
    """One weight, gradient = the batch's value, SGD with lr 1: the weight is minus the sum of applied gradients."""

    def __init__(self, report: Path) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.unused = torch.nn.Parameter(torch.zeros(2))
        self.report = report
        self.reduced = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_start(self) -> None:
        stock = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.reduced += 1
            return stock(*args, **kwargs)

        dist.all_reduce = counted

    def on_train_end(self) -> None:
        found = {"w": self.w.item(), "reduced": self.reduced, "steps": self.trainer.global_step}
        (self.report / f"rank{self.global_rank}.json").write_text(json.dumps(found))


class Manual(OneWeight):
    """Four backwards per step; clipping before the step wants averaged gradients."""

    def __init__(self, report: Path) -> None:
        super().__init__(report)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward((self.w * batch[0]).sum() / 4)
        if batch_idx % 4 == 3:
            if batch_idx == 7:
                self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Weighted(OneWeight):
    """Rank 0 has one token of gradient 4, rank 1 three tokens of gradient 0: the mean over tokens is 1."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        contract = contract_of(self.trainer)
        assert contract is not None
        contract.window.set_weight(1 if self.global_rank == 0 else 3)
        return (self.w * (4.0 if self.global_rank == 0 else 0.0)).sum() + 0.0 * self.unused.sum()


def run(module: OneWeight, batches: int) -> list[dict[str, float]]:
    # A sampler gives every rank every second value: rank 0 sees 1, 1, ..., rank 1 sees 3, 3, ...
    values = torch.tensor([1.0, 3.0] * batches)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Fuse()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(values), batch_size=1, shuffle=False))
    return [json.loads((module.report / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_manual_optimization_averages_once_per_step(tmp_path: Path) -> None:
    ranks = run(Manual(tmp_path), 8)
    for found in ranks:
        # Mean gradient (1 + 3) / 2 = 2, clipped to 0.5 in the second of two steps.
        assert found["w"] == pytest.approx(-2.5, abs=1e-5)
        assert (found["reduced"], found["steps"]) == (2, 2)


@pytest.mark.slow
def test_weights_count_across_ranks(tmp_path: Path) -> None:
    ranks = run(Weighted(tmp_path), 1)
    assert [found["w"] for found in ranks] == [-1.0, -1.0]
