"""Random runs of a Trainer through the contract and through a small model of it, which must agree in everything.

What ``tests/step/test_contract_model.py`` does for the contract alone, with Lightning's loop around it: windows over
batches and epochs under every policy, batches that return None or reach no weight, schedulers, hooks that look.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim.lr_scheduler import LambdaLR

from lightning_fuse import Fuse
from lightning_fuse.plugins import FusePrecision, OptimizerSpec, loss_scale_for
from lightning_fuse.step import StepContract
from tests.cases import BAD, NONE, UNUSED, Four, batches, half, sgd, train

pytestmark = pytest.mark.filterwarnings("ignore:.*(returned `None`|every window is short)")

BATCHES = [1.0, 1.0, 0.5, -2.0, BAD, NONE, UNUSED]


class Run(NamedTuple):
    """What a run is made of; ``values`` are the batches of every epoch."""

    values: list[float]
    window: int
    epochs: int
    policy: Any
    scale: float | None
    growth_interval: int
    frequency: int
    clip: float | None
    deferred: bool
    install: str
    looks: bool


def drawn(seed: int) -> Run:
    """A run that can close a window at all."""
    pick = random.Random(seed)
    while True:
        count = pick.randint(1, 9)
        run = Run(
            [pick.choice(BATCHES) for _ in range(count)],
            pick.randint(1, 4),
            pick.randint(1, 3),
            pick.choice(["mean", "sum", "drop", "carry"]),
            pick.choice([None, 8.0, 1024.0]),
            pick.randint(1, 3),
            pick.randint(1, 3),
            pick.choice([None, 0.5, 3.0]),
            pick.random() < 0.5,
            pick.choice(["fuse", "kept", "plugin"]),
            pick.random() < 0.3,
        )
        fillable = {"drop": count, "carry": count * run.epochs}.get(run.policy, run.window)
        if fillable >= run.window:
            return run


def windows(run: Run) -> list[list[float]]:
    """The batches of every window that closes with a step."""
    found, held = [], []
    for _ in range(run.epochs):
        for place, value in enumerate(run.values):
            held = [*held, value]
            short_end = place == len(run.values) - 1 and run.policy in ("mean", "sum")
            if len(held) == run.window or short_end:
                found.append(held)
                held = []
        held = held if run.policy == "carry" else []
    return found


def modelled(run: Run) -> tuple[float, list[tuple[Any, ...]]]:
    """The weight, and (global_step, update, reason, window_size, loss scale before and after) of every step."""
    weight, scale, good, updates, steps = 1.0, run.scale, 0, 0, []
    for held in windows(run):
        there = [value for value in held if value != NONE]
        gradients = [value for value in there if value != UNUSED]
        total, before = sum(gradients) / run.window, scale
        if run.policy != "sum" and there:
            total *= run.window / len(there)
        reason = "no_grad" if not gradients else "ok" if math.isfinite(total) else "nonfinite"
        if scale is not None and reason == "nonfinite":
            scale, good = max(scale / 2, 1.0), 0
        if reason == "ok":
            clip_coef = 1.0 if run.clip is None else min(1.0, run.clip / (2 * abs(total) + 1e-6))
            weight -= 0.5 ** (updates // run.frequency) * total * clip_coef
            updates, good = updates + 1, good + 1
            if scale is not None and good == run.growth_interval:
                scale, good = scale * 2, 0
        steps.append((len(steps) + 1, updates, reason, len(there), before, scale))
    return weight, steps


def trained(run: Run) -> tuple[float, list[tuple[Any, ...]], int]:
    module = Four(sgd, lambda optimizer: LambdaLR(optimizer, lambda n: 0.5**n), frequency=run.frequency)

    def plugin() -> Any:
        return "32-true" if run.scale is None else half(run.scale, growth_interval=run.growth_interval)

    precision, callbacks = plugin(), []
    if run.install == "plugin":
        scale = None if run.scale is None else loss_scale_for(plugin())
        precision = FusePrecision(
            precision, StepContract(loss_scale=scale, window=run.policy, deferred=run.deferred), OptimizerSpec()
        )
    else:
        callbacks.append(Fuse("auto" if run.install == "fuse" else None, window=run.policy))
    if run.looks:
        callbacks.append(LambdaCallback(on_before_optimizer_step=lambda *_: None))
    trainer, outcomes = train(
        module, batches(*run.values), *callbacks, precision=precision, accumulate_grad_batches=run.window,
        max_epochs=run.epochs, gradient_clip_val=run.clip,
    )  # fmt: skip
    seen = [
        (o.global_step, o.update, o.reason, o.window_size, o.loss_scale_before, o.loss_scale_after)
        for o in outcomes.seen
    ]
    return float(module.w[0].detach()), seen, trainer.global_step


def check(seeds: range) -> None:
    for seed in seeds:
        run = drawn(seed)
        weight, steps = modelled(run)
        ours, seen, global_step = trained(run)
        assert seen == steps, (seed, run)
        assert global_step == len(steps), (seed, run)
        # A few dozen float32 roundings of numbers below a hundred.
        assert ours == pytest.approx(weight, rel=1e-5, abs=1e-4), (seed, run)


def test_random_runs_are_what_the_model_says() -> None:
    runs = [drawn(seed) for seed in range(60)]
    assert {run.policy for run in runs} == {"mean", "sum", "drop", "carry"}
    assert {step[2] for run in runs for step in modelled(run)[1]} == {"ok", "nonfinite", "no_grad"}
    check(range(60))


@pytest.mark.slow
def test_hundreds_of_random_runs() -> None:
    check(range(1000, 1500))


def test_the_model_is_not_stock_lightnings_arithmetic() -> None:
    """The negative control: stock, with the same batches, ends elsewhere."""
    run = drawn(0)._replace(values=[1.0, NONE, 1.0, 1.0, 0.5], window=4, epochs=1, policy="mean", scale=8.0, clip=None)
    module = Four(sgd)
    train(module, batches(*run.values), precision=half(8.0), accumulate_grad_batches=4)
    assert float(module.w[0].detach()) != pytest.approx(modelled(run)[0], abs=0.1)
