"""Random sequences of windows through the contract and through a small model of it, which must agree in everything."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fuse.optim import FusedSGD
from lightning_fuse.step import LossScale, NonFiniteGradientError, StepContract
from tests.step.contract_model import BAD, Model, Plan, Settings, Stop

GRADIENTS = st.sampled_from([1.0, -1.0, 0.5, 2.0, 0.0, 64.0])
LOOKS = st.sampled_from(["none", "unscale", "clip"])


@st.composite
def runs(draw):
    count, window = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    chosen = Settings(
        optimizers=count,
        window=window,
        policy=draw(st.sampled_from(["skip", "skip", "skip", "raise", "step"])),
        short=draw(st.sampled_from(["mean", "sum"])),
        scale=draw(st.sampled_from([None, 1.0, 8.0, 1024.0, 65536.0])),
        growth_interval=draw(st.integers(1, 4)),
        floor=draw(st.sampled_from([0.25, 1.0])),
        clip=draw(st.sampled_from([None, None, 0.5, 3.0])),
        limit=draw(st.sampled_from([None, 1, 2, 4])),
        momentum=draw(st.sampled_from([0.0, 0.5])),
    )
    one = st.lists(st.one_of(GRADIENTS, st.just(BAD)), min_size=count, max_size=count)
    good = st.lists(GRADIENTS, min_size=count, max_size=count)
    micros = st.lists(st.one_of(good, good, one, st.none()), min_size=1, max_size=window)
    absent = st.sets(st.integers(0, count - 1), max_size=count)
    plan = st.builds(Plan, micros, absent, st.sampled_from([False] * 4 + [True]))
    return chosen, draw(st.lists(plan, min_size=1, max_size=12))


def play(contract, optimizers, weights, plan, chosen, look):
    """One window through the contract; gradients as autograd would leave them."""
    for w in weights:
        w.grad = None
    for micro in plan.micros:
        if micro is None:
            continue
        loss = sum(w.sum() * g / chosen.window for w, g in zip(weights, micro, strict=True))
        contract.scale(loss).backward()
        contract.accumulate()
    if plan.veto:
        contract.skip_next()
    for index, (w, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
        if index in plan.absent:
            w.grad = None
        clip = chosen.clip
        if look == "unscale":
            contract.unscale_(optimizer, chosen.window)
        if look == "clip" and clip is not None:
            contract.clip_norm_(optimizer, clip, chosen.window)
            clip = None
        contract.step(optimizer, clip_norm=clip, window=chosen.window, index=index)
    return contract.update()


def built(make, chosen):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(chosen.optimizers)]
    optimizers = [make([w], lr=1.0, momentum=chosen.momentum) for w in weights]
    scale = None if chosen.scale is None else LossScale(
        chosen.scale, growth_interval=chosen.growth_interval, floor=min(chosen.floor, chosen.scale)
    )  # fmt: skip
    contract = StepContract(
        loss_scale=scale,
        on_nonfinite=chosen.policy,
        window=chosen.short,
        max_consecutive_skips=chosen.limit,
    )
    return contract, optimizers, weights


def near(ours, model):
    if model is None or not math.isfinite(model):
        return ours is None if model is None else not math.isfinite(ours)
    # A handful of float32 roundings, of numbers up to a few hundred.
    return ours == pytest.approx(model, rel=1e-5, abs=1e-4)


def agree(contract, weights, seen, model, chosen):
    for w, expected in zip(weights, model.weights, strict=True):
        assert near(float(w.detach()), expected)
    for outcome, expected in zip(seen, model.outcomes, strict=True):
        step, update, applied, reason, norm, coef, size, index, before, after = expected
        got = (outcome.global_step, outcome.update, outcome.reason, outcome.window_size, outcome.optimizer)
        assert got == (step, update, reason, size, index)
        assert outcome.applied == applied
        assert (outcome.loss_scale_before, outcome.loss_scale_after) == (before, after)
        assert near(outcome.grad_norm, norm)
        if norm is None or math.isfinite(norm):
            assert near(outcome.clip_coef, coef)
    if len(seen) == len(model.outcomes) and not model.stopped:
        skipped = [one[3] for one in model.outcomes if not one[2]]
        assert contract.skips == {reason: skipped.count(reason) for reason in ("nonfinite", "no_grad", "user")}


def check(run, make, look):
    chosen, plans = run
    contract, optimizers, weights = built(make, chosen)
    model, seen = Model(chosen), []
    for plan in plans:
        try:
            model.run(plan)
        except Stop:
            with pytest.raises(NonFiniteGradientError):
                play(contract, optimizers, weights, plan, chosen, look)
            break
        seen += play(contract, optimizers, weights, plan, chosen, look)
        assert contract.contributions == 0
        assert (contract.global_step, contract.updates) == (model.steps, model.updates)
        if chosen.scale is not None:
            assert (contract.loss_scale.value, contract.loss_scale.growth_counter) == (model.scale, model.growth)
    agree(contract, weights, seen, model, chosen)


def check_deferred(run, look):
    """Outcomes that come one training step later, as on a GPU, are the same ones, and so is everything else."""
    chosen, plans = run
    chosen = replace(chosen, policy="step" if chosen.policy == "step" else "skip", limit=None)
    contract, optimizers, weights = built(FusedSGD, chosen)
    contract.deferred = True
    model, seen = Model(chosen), []
    for number, plan in enumerate(plans):
        model.run(plan)
        seen += play(contract, optimizers, weights, plan, chosen, look)
        assert len(seen) == number * chosen.optimizers
        assert contract.in_flight == chosen.optimizers
    seen += contract.flush()
    assert contract.in_flight == 0
    agree(contract, weights, seen, model, chosen)


MAKES = {"ours": FusedSGD, "torch": torch.optim.SGD}
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("make", MAKES)
@settings(max_examples=250, **QUIET)
@given(run=runs(), look=LOOKS)
def test_every_sequence_is_what_the_model_says(make, run, look):
    check(run, MAKES[make], look)


@settings(max_examples=150, **QUIET)
@given(run=runs(), look=LOOKS)
def test_reading_one_step_later_changes_nothing(run, look):
    check_deferred(run, look)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
@settings(max_examples=4000, **QUIET)
@given(run=runs(), look=LOOKS)
def test_thousands_of_sequences(make, run, look):
    check(run, MAKES[make], look)
