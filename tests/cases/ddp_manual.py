"""Two ranks for ``test_case_24_ranks.py``, started as a process of its own; prints what rank 0 saw as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import BAD, Four, half, quiet_trainer, sgd


class ByHand(Four):
    """Four backwards for every step, and each rank its own gradients."""

    def __init__(self):
        super().__init__(sgd)
        self.automatic_optimization = False

    def training_step(self, batch):
        self.manual_backward((self.w * batch * (1 + 2 * self.global_rank)).sum() / 4)
        if self.trainer.fit_loop.epoch_loop.batch_idx % 4 == 3:
            self.clip_gradients(self.optimizers(), gradient_clip_val=2.0, gradient_clip_algorithm="norm")
            self.optimizers().step()
            self.optimizers().zero_grad()


class Tokens(Four):
    """Rank 0 has one token with gradient 4 in all, rank 1 three with gradient 0."""

    def __init__(self):
        super().__init__(sgd)

    def training_step(self, batch):
        contract = contract_of(self.trainer)
        if contract is not None:
            contract.window.set_weight(1 + 2 * self.global_rank)
        return (self.w * (4.0 - 4.0 * self.global_rank)).sum()


class Overflow(Four):
    """Gradients 1 and 3 on the ranks; the second batch overflows on rank 1 alone."""

    def __init__(self):
        super().__init__(sgd)

    def training_step(self, batch, batch_idx):
        bad = self.global_rank == 1 and batch_idx == 1
        return (self.w * (BAD if bad else batch * (1 + 2 * self.global_rank))).sum()


class OverflowByHand(Overflow):
    """The same, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


KINDS = {"manual": ByHand, "tokens": Tokens, "overflow": Overflow, "overflow by hand": OverflowByHand}


def main(kind, fused):
    module = KINDS[kind]()
    scaled = {"precision": half(1024.0)} if kind.startswith("overflow") else {}
    trainer = quiet_trainer(
        *([Fuse()] if fused else []),
        devices=2,
        strategy="ddp_find_unused_parameters_true",
        use_distributed_sampler=False,
        **scaled,
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.fit(module, DataLoader([torch.tensor(1.0)] * 8, batch_size=None))
    reduced = sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_reduce")
    if trainer.global_rank == 0:
        contract = contract_of(trainer)
        skips = contract.skips["nonfinite"] if contract else None
        print(json.dumps({"w": module.w.tolist(), "reduced": reduced, "steps": trainer.global_step, "skips": skips}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "fused")
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # all is written; the process group's threads now and then abort an interpreter that ends with them
