"""A run that has had its ``max_updates`` gets not one more, however it is started again."""

from __future__ import annotations

import pytest
import torch

from lightning_fuse import Fuse
from lightning_fuse.callbacks.exact_resume import ExactResume
from lightning_fuse.plugins import contract_of
from tests.cases import Four, batches, one_bad, quiet_trainer
from tests.cases.manual import Manual

DATA = one_bad(7, 2)  # six updates an epoch


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("limit", [4, 6, 10])
@pytest.mark.parametrize(("make", "accumulate"), [(Four, 1), (Four, 2), (Manual, 1)])
def test_resumed_three_times(exact, limit, make, accumulate, tmp_path):
    weights = []
    for start in range(4):
        module = make()
        callbacks = [Fuse(max_updates=limit), *([ExactResume()] if exact else [])]
        trainer = quiet_trainer(*callbacks, max_epochs=-1, accumulate_grad_batches=accumulate)
        trainer.fit(module, DATA, ckpt_path=tmp_path / "a.ckpt" if start else None)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        weights.append(module.w.detach().clone())
        assert contract_of(trainer).updates == limit
    assert all(torch.equal(weights[0], other) for other in weights)


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_fitted_again_in_the_same_trainer(fuse):
    module = Four()
    trainer = quiet_trainer(Fuse(max_updates=4, **fuse), max_epochs=-1)
    for _ in range(3):
        trainer.fit(module, DATA)
        assert contract_of(trainer).updates == 4
    assert module.w.tolist() == pytest.approx([0.96] * 4)


def test_a_larger_limit_goes_on_to_it(tmp_path):
    for limit in (4, 9):
        module = Four()
        trainer = quiet_trainer(Fuse(max_updates=limit), ExactResume(), max_epochs=-1)
        trainer.fit(module, DATA, ckpt_path=tmp_path / "a.ckpt" if limit == 9 else None)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert module.w.tolist() == pytest.approx([0.91] * 4)


def test_a_smaller_limit_trains_no_more(tmp_path):
    for limit in (6, 3):
        module = Four()
        trainer = quiet_trainer(Fuse(max_updates=limit), max_epochs=-1)
        trainer.fit(module, DATA, ckpt_path=tmp_path / "a.ckpt" if limit == 3 else None)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert contract_of(trainer).updates == 6


def test_one_fuse_counts_anew_in_the_next_trainer():
    fuse = Fuse(max_updates=3)
    for _ in range(2):
        module = Four()
        quiet_trainer(fuse, max_epochs=-1).fit(module, batches(1, 1))
        assert module.w.tolist() == pytest.approx([0.97] * 4)
