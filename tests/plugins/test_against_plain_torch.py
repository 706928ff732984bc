"""The contract in a Trainer against plain torch, with the five acts written out by hand in the right order."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import half, train
from tests.tolerances import U, rule_bound

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS, WINDOW, CLIP, EPOCH = 200, 3, 4.0, 20
OVERFLOWS = {4, 5}  # of each epoch's batches, in one window
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Linear(LightningModule):
    """Its gradient does not depend on its weight, so that errors add up and are not amplified."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(11)
        self.weight = torch.nn.Parameter(torch.randn(6, 140))
        self.bias = torch.nn.Parameter(torch.zeros(6))
        self._make = make

    def training_step(self, batch):
        x, c = batch
        return (torch.nn.functional.linear(x, self.weight, self.bias) * c).sum()

    def configure_optimizers(self):
        return self._make(self.parameters())


def data():
    made = torch.Generator().manual_seed(5)
    rows = [(torch.randn(2, 140, generator=made), torch.randn(2, 6, generator=made)) for _ in range(EPOCH)]
    for index in OVERFLOWS:
        rows[index][1][0, 0] = float("inf")
    return DataLoader(rows, batch_size=None)


def by_hand(precision):
    """Plain torch: scale, accumulate, unscale, check, clip, step, move the scale."""
    module = Linear(lambda ps: torch.optim.AdamW(ps, foreach=False, **SETTINGS))
    optimizer = module.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=precision == "16-mixed")
    dtype = AUTOCAST.get(precision)
    steps = updates = 0
    while steps < STEPS:
        rows = list(data())
        for start in range(0, EPOCH, WINDOW):
            window = rows[start : start + WINDOW]
            optimizer.zero_grad()
            for batch in window:
                with nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False):
                    loss = module.training_step(batch) / WINDOW
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for p in module.parameters():
                p.grad *= WINDOW / len(window)
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            if precision == "16-mixed":
                scaler.step(optimizer)
                scaler.update()
            elif norm.isfinite():
                optimizer.step()
            steps, updates = steps + 1, updates + bool(norm.isfinite())
            if steps == STEPS:
                break
    return module, updates, scaler


KINDS = {
    "ours": (lambda ps: torch.optim.AdamW(ps, **SETTINGS), {}),
    "loop": (lambda ps: torch.optim.AdamW(ps, foreach=False, **SETTINGS), {"optimizer": None}),
    "foreach": (lambda ps: torch.optim.AdamW(ps, foreach=True, **SETTINGS), {"optimizer": None}),
    "fused": (lambda ps: torch.optim.AdamW(ps, fused=True, **SETTINGS), {"optimizer": None}),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_two_hundred_steps_with_windows_clipping_and_overflows(precision):
    expected, updates, scaler = by_hand(precision)
    size = max(float(p.detach().abs().max()) for p in expected.parameters()) + 1.0
    # Both sides err by the rule's bound. Their clip coefficients differ by less than 32 U (torch sums 846 float32
    # squares), and so m and sqrt(v); |g| / sqrt(v_hat) is at most 1 / sqrt(1 - beta2).
    ratio = (1 - SETTINGS["betas"][1]) ** -0.5
    bound = 2 * rule_bound(SETTINGS, STEPS, size, ratio) + STEPS * SETTINGS["lr"] * ratio * 2 * 32 * U
    assert bound < 2e-3  # of a way of 200 steps of 0.01
    for make, fuse in KINDS.values():
        module = Linear(make)
        trainer, outcomes = train(
            module,
            data(),
            Fuse(**fuse),
            precision=half(1024.0, growth_interval=5) if precision == "16-mixed" else precision,
            max_steps=STEPS,
            accumulate_grad_batches=WINDOW,
            gradient_clip_val=CLIP,
        )
        contract = contract_of(trainer)
        assert (contract.global_step, contract.updates) == (STEPS, updates)
        assert outcomes.of("clip_coef")[0] < 1.0
        if precision == "16-mixed":
            assert contract.loss_scale.value == scaler.get_scale()
            assert contract.loss_scale.growth_counter == scaler._get_growth_tracker()
        for p, q in zip(module.parameters(), expected.parameters(), strict=True):
            assert float((p - q).detach().abs().max()) <= bound
