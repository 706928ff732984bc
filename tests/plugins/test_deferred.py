"""Outcomes that are read one step later, as on a GPU, in a Trainer: nothing that follows them may notice."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lightning_fuse.plugins import FusePrecision, OptimizerSpec, contract_of, loss_scale_for
from lightning_fuse.step import NonFiniteGradientError, StepContract
from tests.cases import BAD, NONE, Four, adamw, batches, half, quiet_trainer, train
from tests.cases.manual import Manual

MIXED = (BAD, 1, 1, NONE, 1, BAD, BAD, 1, 1, BAD)


def installed(deferred, **settings):
    plugin = half(1024.0, growth_interval=2)
    contract = StepContract(loss_scale=loss_scale_for(plugin), deferred=deferred, **settings)
    return FusePrecision(plugin, contract, OptimizerSpec())


def scheduled():
    return Four(
        lambda ps: adamw(ps, lr=0.12), lambda optimizer: LambdaLR(optimizer, lambda n: 1 / (1 + n)), frequency=2
    )


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [scheduled, lambda: Manual(adamw, clip=0.5)])
def test_weights_schedules_outcomes_and_counts_are_the_same(make, accumulate):
    ended = []
    for deferred in (False, True):
        module = make()
        more = {"accumulate_grad_batches": accumulate} if module.automatic_optimization else {}
        trainer, outcomes = train(module, batches(*MIXED), precision=installed(deferred), max_epochs=3, **more)
        contract = contract_of(trainer)
        assert contract.in_flight == 0
        ended.append((module.w.tolist(), module.lrs[-1], [o.record() for o in outcomes.seen], contract.state_dict()))
    assert str(ended[0]) == str(ended[1])  # as words: NaN is equal to itself there


def test_a_checkpoint_holds_the_counts_of_all_steps(tmp_path):
    first, _ = train(scheduled(), batches(*MIXED), precision=installed(True))
    first.save_checkpoint(tmp_path / "a.ckpt")
    second, whole = quiet_trainer(precision=installed(True), max_epochs=2), scheduled()
    resumed = scheduled()
    second.fit(resumed, batches(*MIXED), ckpt_path=tmp_path / "a.ckpt")
    trainer, _ = train(whole, batches(*MIXED), precision=installed(False), max_epochs=2)
    assert torch.equal(resumed.w, whole.w)
    assert contract_of(second).state_dict() == contract_of(trainer).state_dict()


def test_a_streak_beyond_the_limit_still_raises_and_leaves_the_weights():
    module = Four()
    with pytest.raises(NonFiniteGradientError, match="4 steps in a row"):
        train(module, batches(1, *[BAD] * 30), precision=installed(True, max_consecutive_skips=3))
    assert module.w.tolist() == pytest.approx([0.99] * 4)
