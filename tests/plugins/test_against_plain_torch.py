"""The contract in a Trainer against plain torch, with the five acts written out by hand in the right order."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import half, train
from tests.tolerances import contract_bound

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS, WINDOW, EPOCH = 200, 3, 20
CLIP = 23.0  # clips some windows and not others: with all of them clipped nobody would see the factor of a short one
OVERFLOWS = {4, 5}  # of each epoch's batches, in one window
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {"bf16-true": torch.bfloat16}


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


def data(precision):
    made, dtype = torch.Generator().manual_seed(5), TRUE.get(precision, torch.float32)
    draws = [(torch.randn(2, 140, generator=made), torch.randn(2, 6, generator=made)) for _ in range(EPOCH)]
    rows = [(x.to(dtype), c.to(dtype)) for x, c in draws]
    for index in OVERFLOWS:
        rows[index][1][0, 0] = float("inf")
    return DataLoader(rows, batch_size=None)


@cache
def by_hand(precision):
    """Plain torch: scale, accumulate, unscale, check, clip, step, move the scale.

    In bf16-true the module computes in bfloat16, and the five acts work on float32 copies of its weights and gradients,
    rounded back into it: torch's own loop over bfloat16 parameters would round every product of the update.
    """
    module = Linear(None)
    module.to(TRUE.get(precision, torch.float32))
    weights = [torch.nn.Parameter(p.detach().float()) for p in module.parameters()]
    optimizer = torch.optim.AdamW(weights, foreach=False, **SETTINGS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=precision == "16-mixed")
    dtype = AUTOCAST.get(precision)
    steps = updates = 0
    while steps < STEPS:
        rows = list(data(precision))
        for start in range(0, EPOCH, WINDOW):
            window = rows[start : start + WINDOW]
            module.zero_grad()
            for batch in window:
                with nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False):
                    loss = module.training_step(batch) / WINDOW
                scaler.scale(loss).backward()
            for w, p in zip(weights, module.parameters(), strict=True):
                w.grad = p.grad.float()
            scaler.unscale_(optimizer)
            for w in weights:
                w.grad *= WINDOW / len(window)
            norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
            if precision == "16-mixed":
                scaler.step(optimizer)
                scaler.update()
            elif norm.isfinite():
                optimizer.step()
            for w, p in zip(weights, module.parameters(), strict=True):
                p.data.copy_(w.data)
            steps, updates = steps + 1, updates + bool(norm.isfinite())
            if steps == STEPS:
                break
    return weights, updates, scaler


def trained(precision, make, fuse):
    """The same through a Trainer: the float32 weights, and what the contract counted."""
    module = Linear(make)
    trainer, outcomes = train(
        module,
        data(precision),
        Fuse(**fuse),
        precision=half(1024.0, growth_interval=5) if precision == "16-mixed" else precision,
        max_steps=STEPS,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=CLIP,
    )
    (optimizer,) = trainer.optimizers
    return [weight_of(optimizer, p) for p in module.parameters()], contract_of(trainer), outcomes


def weight_of(optimizer, p):
    """A parameter in float32: itself, or its master."""
    state = optimizer.state[p]
    if "master" in state:
        return state["master"]
    return join(p.detach(), state["remainder"]) if "remainder" in state else p.detach()


def join(p, remainder):
    """The float32 weight whose upper half, rounded to nearest, is the parameter, and whose lower half is kept."""
    return ((p.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def distance(weights, expected):
    return max(float((p - q).detach().abs().max()) for p, q in zip(weights, expected, strict=True))


KINDS = {
    "ours": (lambda ps: torch.optim.AdamW(ps, **SETTINGS), {}),
    "loop": (lambda ps: torch.optim.AdamW(ps, foreach=False, **SETTINGS), {"optimizer": None}),
    "foreach": (lambda ps: torch.optim.AdamW(ps, foreach=True, **SETTINGS), {"optimizer": None}),
    "fused": (lambda ps: torch.optim.AdamW(ps, fused=True, **SETTINGS), {"optimizer": None}),
}
# torch's loops over bfloat16 parameters keep no float32 weight that could be compared.
MASTERS = {
    "fp32": (KINDS["ours"][0], {"master": "fp32"}),
    "split": (KINDS["ours"][0], {"master": "split"}),
}
PRECISIONS = {"32-true": KINDS, "bf16-mixed": KINDS, "16-mixed": KINDS, "bf16-true": MASTERS}


def bound(expected):
    size = max(float(p.detach().abs().max()) for p in expected) + 1.0
    return contract_bound(SETTINGS, STEPS, size)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_hundred_steps_with_windows_clipping_and_overflows(precision):
    expected, updates, scaler = by_hand(precision)
    assert bound(expected) < 2e-3  # of a way of 200 steps of 0.01
    for make, fuse in PRECISIONS[precision].values():
        weights, contract, outcomes = trained(precision, make, fuse)
        assert (contract.global_step, contract.updates) == (STEPS, updates)
        assert updates < STEPS
        assert 1.0 in outcomes.of("clip_coef")
        assert outcomes.of("clip_coef")[0] < 1.0
        if precision == "16-mixed":
            assert contract.loss_scale.value == scaler.get_scale()
            assert contract.loss_scale.growth_counter == scaler._get_growth_tracker()
        assert distance(weights, expected) <= bound(expected)


WRONG = {
    "short windows as their sum": {"window": "sum"},
    "overflows applied": {"on_nonfinite": "step"},
    "another rule": {"optimizer": "adam_fused"},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bound_sees_what_is_done_wrong(precision):
    expected, _, _ = by_hand(precision)
    master = {"master": "fp32"} if precision == "bf16-true" else {}
    for wrong in WRONG.values():
        weights, _, _ = trained(precision, KINDS["ours"][0], {**master, **wrong})
        assert not distance(weights, expected) <= 5 * bound(expected)


def test_bf16_true_without_masters_strays_in_torch_and_loses_its_decay():
    """Why the comparison in bf16-true is by float32 weights: plain torch's bfloat16 loop is not what it says."""
    expected, _, _ = by_hand("bf16-true")
    weights, _, _ = trained("bf16-true", *KINDS["loop"])
    assert distance([w.float() for w in weights], expected) > 50 * bound(expected)
