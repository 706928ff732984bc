"""One rank of ``test_ddp.py``, started by Lightning as a process of its own: trains and writes what it ended with."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of

BATCHES, ROWS = 7, 4


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 160), torch.nn.Tanh(), torch.nn.Linear(160, 4))
        self.outcomes = []

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def on_step_outcome(self, trainer, pl_module, outcome):
        self.outcomes.append([outcome.reason, outcome.window_size, outcome.grad_norm])


def rows(ranks):
    """Batches of one rank of ``ranks``; rank 0's third has an infinity."""
    made = torch.Generator().manual_seed(3)
    whole = [torch.randn(ROWS, 8, generator=made) for _ in range(BATCHES)]
    whole[2][0, 0] = float("inf")
    return whole if ranks is None else [batch.chunk(2)[ranks] for batch in whole]


class Split(Net):
    """Takes its rank's half where there are two."""

    def train_dataloader(self):
        rank = self.trainer.global_rank if self.trainer.world_size > 1 else None
        return DataLoader(rows(rank), batch_size=None)


def main(target, devices, state):
    module = Split()
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        callbacks=[Fuse(state=[("layers.0.*", state), "fp32"])],
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        **settings,
    )
    trainer.fit(module)
    trainer.save_checkpoint(f"{target}.ckpt")
    contract = contract_of(trainer)
    record = {
        "weights": {name: p.tolist() for name, p in module.named_parameters()},
        "outcomes": module.outcomes,
        "updates": contract.updates,
        "formats": trainer.optimizers[0].formats(),
    }
    with open(f"{target}.{trainer.global_rank}.json", "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # all is written; the process group's threads now and then abort an interpreter that ends with them
