"""Random runs of manual optimization with several optimizers, and a small model of them, which must agree.

Optimizers step at their own intervals, in turns or after all backwards, clipped by hand or not, vetoed now and then;
gradients that wait go along with a loss scale that moves.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import FusePrecision, OptimizerSpec, contract_of, loss_scale_for
from lightning_fuse.step import StepContract
from tests.cases import BAD, half, train

CLIP = 0.5
GRADIENTS = [1.0, 1.0, 0.5, -2.0, 0.0, BAD, None]
Step = tuple[int, int, str, int, float | None, float | None]


class Run(NamedTuple):
    """What a run is made of: ``plan`` has, for every batch and optimizer, a gradient or None, and whether to veto."""

    every: list[int]
    clips: list[str | None]
    in_turns: bool
    scale: float | None
    growth_interval: int
    momentum: float
    plan: list[list[tuple[float | None, bool]]]
    install: str
    looks: bool


def drawn(seed: int) -> Run:
    pick = random.Random(seed)
    count, length = pick.randint(1, 3), pick.randint(1, 9)
    return Run(
        every=[pick.choice([1, 1, 2, 3]) for _ in range(count)],
        clips=[pick.choice([None, "norm", "value"]) for _ in range(count)],
        in_turns=pick.random() < 0.5,
        scale=pick.choice([None, 8.0, 1024.0]),
        growth_interval=pick.randint(1, 3),
        momentum=pick.choice([0.0, 0.5]),
        plan=[[(pick.choice(GRADIENTS), pick.random() < 0.1) for _ in range(count)] for _ in range(length)],
        install=pick.choice(["fuse", "kept", "deferred"]),
        looks=pick.random() < 0.3,
    )


class Several(L.LightningModule):
    """A weight for each optimizer, starting at 0."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.run = run
        self.ws = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in run.every])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([w], lr=1.0, momentum=self.run.momentum) for w in self.ws]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        numbers = range(len(self.ws))
        if self.run.in_turns:
            for number in numbers:
                self.go_back(number, batch_idx)
                self.step(number, batch_idx)
            return
        for number in numbers:
            self.go_back(number, batch_idx)
        for number in numbers:
            self.step(number, batch_idx)

    def go_back(self, number: int, batch_idx: int) -> None:
        gradient = self.run.plan[batch_idx][number][0]
        if gradient is not None:
            self.manual_backward((self.ws[number] * gradient / self.run.every[number]).sum())

    def step(self, number: int, batch_idx: int) -> None:
        if (batch_idx + 1) % self.run.every[number]:
            return
        optimizers: Any = self.optimizers()
        optimizer = optimizers[number] if isinstance(optimizers, list) else optimizers
        if self.run.clips[number]:
            self.clip_gradients(optimizer, CLIP, self.run.clips[number])
        if self.run.plan[batch_idx][number][1]:
            contract_of(self.trainer).skip_next()
        optimizer.step()
        optimizer.zero_grad()


class Model:
    """The same run in plain Python: gradients are never scaled, so nothing can be forgotten to be unscaled."""

    def __init__(self, run: Run) -> None:
        self.run, count = run, len(run.every)
        self.weights, self.buffers, self.waiting = [0.0] * count, [None] * count, [None] * count
        self.scale, self.good, self.updates = run.scale, 0, 0
        self.steps: list[Step] = []

    def play(self) -> Model:
        numbers = range(len(self.weights))
        for batch, plan in enumerate(self.run.plan):
            taken: list[tuple[str, int, int]] = []
            for number in numbers:
                gradient = plan[number][0]
                if gradient is not None:
                    self.waiting[number] = (self.waiting[number] or 0.0) + gradient / self.run.every[number]
                if (batch + 1) % self.run.every[number] == 0:
                    reason = self.one(number, plan[number][1])
                    taken.append((reason, self.updates, number))
            before = self.scale
            self.move({reason for reason, _, _ in taken})
            for reason, update, number in taken:
                self.steps.append((len(self.steps) + 1, update, reason, number, before, self.scale))
        return self

    def one(self, number: int, veto: bool) -> str:
        gradient, self.waiting[number] = self.waiting[number], None
        if veto:
            return "user"
        if gradient is None:
            return "no_grad"
        if not math.isfinite(gradient):
            return "nonfinite"
        if self.run.clips[number] == "norm":
            gradient *= min(1.0, CLIP / (abs(gradient) + 1e-6))
        elif self.run.clips[number] == "value":
            gradient = max(-CLIP, min(CLIP, gradient))
        buffer = self.buffers[number]
        self.buffers[number] = gradient if buffer is None else self.run.momentum * buffer + gradient
        self.weights[number] -= self.buffers[number]
        self.updates += 1
        return "ok"

    def move(self, reasons: set[str]) -> None:
        if self.scale is None or not reasons & {"ok", "nonfinite"}:
            return
        self.good = 0 if "nonfinite" in reasons else self.good + 1
        if self.good == 0:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good == self.run.growth_interval:
            self.scale, self.good = self.scale * 2, 0


def check(seeds: range) -> None:
    for seed in seeds:
        run = drawn(seed)
        precision: Any = "32-true" if run.scale is None else half(run.scale, growth_interval=run.growth_interval)
        callbacks: list[Any] = []
        if run.install == "deferred":
            scale = None if run.scale is None else loss_scale_for(precision)
            precision = FusePrecision(precision, StepContract(loss_scale=scale, deferred=True), OptimizerSpec())
        else:
            callbacks.append(Fuse("auto" if run.install == "fuse" else None))
        if run.looks:
            callbacks.append(LambdaCallback(on_before_optimizer_step=lambda *_: None))
        module, model = Several(run), Model(run).play()
        loader = DataLoader([torch.zeros(1)] * len(run.plan), batch_size=None)
        trainer, outcomes = train(module, loader, *callbacks, precision=precision)
        seen = [
            (o.global_step, o.update, o.reason, o.optimizer, o.loss_scale_before, o.loss_scale_after)
            for o in outcomes.seen
        ]
        assert seen == model.steps, (seed, run)
        # A few dozen float32 roundings of numbers below a hundred.
        assert [float(w.detach()) for w in module.ws] == pytest.approx(model.weights, rel=1e-5, abs=1e-4), (seed, run)
        if run.scale is not None:
            loss_scale = contract_of(trainer).loss_scale
            assert (loss_scale.value, loss_scale.growth_counter) == (model.scale, model.good), (seed, run)


def test_random_runs_of_several_optimizers_are_what_the_model_says() -> None:
    reasons = {step[2] for seed in range(50) for step in Model(drawn(seed)).play().steps}
    assert reasons == {"ok", "nonfinite", "no_grad", "user"}
    check(range(50))


@pytest.mark.slow
def test_hundreds_of_random_runs_of_several_optimizers() -> None:
    check(range(1000, 1400))
