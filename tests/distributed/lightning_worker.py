"""One rank of a Lightning run under FSDP2; run as a program by the tests.

python -m tests.distributed.lightning_worker RANK WORLD PORT FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_fuse import Fuse


class Net(L.LightningModule):
    """A module that shards itself; batch 2 of rank 1 has an infinite loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(150, 37), nn.GELU(), nn.Linear(37, 5))
        self.outcomes: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        """Shards both layers and the whole."""
        from torch.distributed.fsdp import fully_shard

        if not isinstance(next(self.parameters()), DTensor) and self.device_mesh is not None:
            for layer in (self.body[0], self.body[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A loss of the rank's own part of the data."""
        loss = self.body(batch).square().mean()
        return loss * torch.inf if batch_idx == 2 and self.global_rank == 1 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that Fuse takes over."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    def on_step_outcome(self, trainer: L.Trainer, pl_module: L.LightningModule, outcome: Any) -> None:
        """Keeps what each step did."""
        self.outcomes.append(outcome.record())


def main(rank: int, world: int, port: str, folder: Path) -> None:
    """Trains, saves, resumes, and writes what this rank saw."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank)}
    torch.set_num_threads(1)
    data = torch.randn(48, 150, generator=torch.Generator().manual_seed(1))
    mine = data.view(world, -1, 150)[rank]
    found = {}
    for name, max_epochs, resume in (("whole", 2, None), ("half", 1, None), ("rest", 2, folder / "half.ckpt")):
        net = Net()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
            max_epochs=max_epochs,
            callbacks=[Fuse(state="int8")],
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(net, torch.utils.data.DataLoader(mine, batch_size=4), ckpt_path=resume)
        if name == "half":
            trainer.save_checkpoint(folder / "half.ckpt")
        weights = {key: p.to_local().detach().clone() for key, p in net.named_parameters()}
        found[name] = {"weights": weights, "outcomes": net.outcomes, "optimizer": type(trainer.optimizers[0]).__name__}
    torch.save(found, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
