"""Cases 16, 21, 22 and 23: stopping on updates, dropped and carried windows, token weights, validation on windows."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import BAD, NONE, Four, Validated, batches, half, one_bad, quiet_trainer, sgd, train
from tests.cases import Outcomes as Watch

FUSES = {"ours": {}, "kept": {"optimizer": None}}


@pytest.fixture(params=FUSES)
def settings(request):
    return FUSES[request.param]


def test_case_16_stopping_on_updates(settings):
    module = Four(sgd)
    trainer, outcomes = train(module, one_bad(20, 0, 2, 3), Fuse(max_updates=5, **settings), max_epochs=9)
    assert outcomes.of("update")[-1] == 5
    assert trainer.global_step == contract_of(trainer).global_step == 8
    assert module.w.tolist() == [-4.0] * 4


def test_case_16_stopping_on_updates_with_windows_and_over_epochs(settings):
    module = Four(sgd)
    trainer, _ = train(module, one_bad(10, 1), Fuse(max_updates=5, **settings), max_epochs=9, accumulate_grad_batches=4)
    assert contract_of(trainer).updates == 5
    assert trainer.global_step == 8  # three windows an epoch, the first of them bad


def test_case_16_max_updates_counts_over_a_resume(settings, tmp_path):
    first, _ = train(Four(sgd), one_bad(4, 1), Fuse(**settings))
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(Fuse(max_updates=5, **settings), max_epochs=9)
    second.fit(Four(sgd), one_bad(4, 1), ckpt_path=tmp_path / "a.ckpt")
    assert contract_of(second).updates == 5


def windows(loader, window, settings, epochs=1, accumulate=4, **more):
    module = Four(sgd)
    trainer, outcomes = train(
        module, loader, Fuse(window=window, **settings), max_epochs=epochs, accumulate_grad_batches=accumulate, **more
    )
    return 1.0 - module.w[0].item(), outcomes, trainer


def test_case_21_drop_leaves_a_short_window_out(settings):
    moved, outcomes, trainer = windows(one_bad(5), "drop", settings, epochs=2)
    assert moved == 2.0
    assert outcomes.of("window_size") == [4, 4]
    assert trainer.global_step == 2


def test_case_21_carry_fills_it_in_the_next_epoch(settings):
    moved, outcomes, trainer = windows(batches(1, 1, 1, 1, 5), "carry", settings, epochs=4)
    # 20 batches, 5 windows: 1; 5,1,1,1; 1,5,1,1; 1,1,5,1; 1,1,1,5.
    assert outcomes.of("window_size") == [4] * 5
    assert moved == pytest.approx(1.0 + 4 * 2.0)
    assert trainer.global_step == 5


@pytest.mark.parametrize("window", ["drop", "carry"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_case_21_with_overflows_and_batches_that_give_nothing(window, precision, settings):
    plugin = half() if precision == "16-mixed" else precision
    moved, outcomes, _ = windows(batches(1, BAD, 1, 1, NONE, 1, 1, 1, 1), window, settings, precision=plugin)
    assert outcomes.of("reason") == ["nonfinite", "ok"]
    assert outcomes.of("window_size") == [4, 3]
    assert moved == pytest.approx(1.0)


def test_case_21_carry_goes_on_over_a_resume(settings, tmp_path):
    values = batches(1, 2, 3, 4, 5, 6)
    whole, _, trainer = windows(values, "carry", settings, epochs=4)
    _, _, first = windows(values, "carry", settings, epochs=1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    module = Four(sgd)
    second = quiet_trainer(Fuse(window="carry", **settings), max_epochs=4, accumulate_grad_batches=4)
    second.fit(module, values, ckpt_path=tmp_path / "a.ckpt")
    assert 1.0 - module.w[0].item() == whole
    assert contract_of(second).state_dict() == contract_of(trainer).state_dict()


def test_case_21_an_epoch_that_never_fills_a_window_is_reported(settings):
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=4.*3 batches"):
        windows(one_bad(3), "drop", settings)
    moved, outcomes, _ = windows(one_bad(3), "carry", settings, epochs=4)
    assert outcomes.of("window_size") == [4, 4, 4]
    assert moved == 3.0


@pytest.mark.parametrize("window", ["mean", "sum", "drop"])
def test_case_23_validation_and_checkpoints_after_a_short_last_window_find_it_closed(window, settings, tmp_path):
    class Saved(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            saved.append(contract_of(trainer).contributions)
            super()._save_checkpoint(trainer, filepath)

    seen, saved = AtValidation(), []
    trainer = quiet_trainer(
        Fuse(window=window, **settings), seen, Saved(tmp_path), max_epochs=2, accumulate_grad_batches=3,
        enable_checkpointing=True, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Validated(sgd), one_bad(10), one_bad(1))
    steps = 3 if window == "drop" else 4
    assert seen.updates == [(steps, 0), (2 * steps, 0)]
    assert saved == [0, 0]


class Tokens(Four):
    """A batch is one gradient per token; the loss is their mean, and the module says how many there are."""

    report = True

    def training_step(self, batch):
        if self.report:
            contract_of(self.trainer).window.set_weight(len(batch))
        return (self.w * batch.mean()).sum()


def tokens(*rows):
    return DataLoader([torch.tensor(row) for row in rows], batch_size=None)


def test_case_22_uneven_micro_batches_are_one_batch_of_their_tokens(settings):
    for precision in ("32-true", half()):
        module = Tokens(sgd)
        train(module, tokens([4.0], [0.0, 0.0, 0.0]), Fuse(**settings), accumulate_grad_batches=2, precision=precision)
        assert module.w.tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def test_case_22_stock_applies_twice_that():
    module = Tokens(sgd)
    module.report = False
    train(module, tokens([4.0], [0.0, 0.0, 0.0]), accumulate_grad_batches=2)
    assert module.w.tolist() == [-1.0] * 4


def test_case_22_short_windows_and_clipping_go_by_tokens_too(settings):
    module = Tokens(sgd)
    rows = tokens([4.0], [0.0, 0.0, 0.0], [8.0, 0.0])
    _, outcomes = train(module, rows, Fuse(**settings), accumulate_grad_batches=2, gradient_clip_val=4.0)
    assert outcomes.of("grad_norm") == pytest.approx([2.0, 8.0])
    assert outcomes.of("clip_coef") == pytest.approx([1.0, 0.5])
    assert module.w.tolist() == pytest.approx([-2.0] * 4, abs=1e-5)


class AtValidation(Callback):
    def __init__(self):
        self.updates = []

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            contract = contract_of(trainer)
            self.updates.append((contract.updates, contract.contributions) if contract else trainer.global_step)


def validated(*callbacks, epochs=3):
    seen = AtValidation()
    trainer = quiet_trainer(
        *callbacks, seen, max_epochs=epochs, accumulate_grad_batches=3, val_check_interval=15,
        check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Validated(sgd), one_bad(20), one_bad(1))
    return seen.updates


def test_case_23_validation_falls_on_closed_windows(settings):
    assert validated(Fuse(**settings)) == [(5, 0), (10, 0), (15, 0), (20, 0)]


def test_case_23_stock_drifts():
    assert validated() != [5, 10, 15, 20]


def test_case_23_a_share_of_an_epoch_waits_for_its_window(settings):
    seen = AtValidation()
    trainer = quiet_trainer(
        Fuse(**settings), seen, Watch(), accumulate_grad_batches=4, val_check_interval=0.5, num_sanity_val_steps=0
    )
    trainer.fit(Validated(sgd), one_bad(12), one_bad(1))
    assert seen.updates == [(2, 0), (3, 0)]


def scheduled(loader, window, settings, plan, epochs, precision="32-true", **more):
    module = Four(sgd)
    schedule = GradientAccumulationScheduler(dict(plan))
    _, outcomes = train(
        module, loader, Fuse(window=window, **settings), schedule, max_epochs=epochs, precision=precision, **more
    )
    return 1.0 - module.w[0].item(), outcomes


# Window, what 5 batches (1, 1, 1, 1, 9) an epoch come to in windows of 4, then 2, and the sizes of the windows.
CHANGES = {
    "mean": (1 + 9 + 1 + 1 + 9, [4, 1, 2, 2, 1]),
    "sum": (1 + 9 / 4 + 1 + 1 + 9 / 2, [4, 1, 2, 2, 1]),
    "drop": (1 + 1 + 1, [4, 2, 2]),
    "carry": (1 + (9 + 1) / 2 + 1 + (1 + 9) / 2, [4, 2, 2, 2]),
}


@pytest.mark.parametrize("window", CHANGES)
@pytest.mark.parametrize("scaled", [False, True])
def test_case_21_a_size_that_falls_between_epochs(window, scaled, settings):
    plugin = half() if scaled else "32-true"
    moved, outcomes = scheduled(batches(1, 1, 1, 1, 9), window, settings, {0: 4, 1: 2}, 2, plugin)
    expected, sizes = CHANGES[window]
    assert outcomes.of("window_size") == sizes
    assert moved == pytest.approx(expected, abs=1e-5)


def test_case_21_a_carried_window_goes_on_whatever_becomes_of_its_size(settings):
    # Sizes 2, 4, 1: 1 | 9 carried into 4: 9,1,1,1 | 9 carried into 1: closes with the next batch, as the mean of both.
    plan, values = {0: 2, 1: 4, 2: 1}, batches(1, 1, 9)
    moved, outcomes = scheduled(values, "carry", settings, plan, 3)
    assert outcomes.of("window_size") == [2, 4, 1, 1, 1]
    assert moved == pytest.approx(1 + (9 + 1 + 1 + 9) / 4 + 1 + 1 + 9)


def test_case_21_a_window_that_is_fuller_than_its_new_size_closes_at_once(settings):
    moved, outcomes = scheduled(batches(1, 2, 3), "carry", settings, {0: 5, 1: 2}, 2)
    # 1, 2, 3 of five, then 1 closes them: mean of four. 2, 3 is a window of two.
    assert outcomes.of("window_size") == [4, 2]
    assert moved == pytest.approx((1 + 2 + 3 + 1) / 4 + 2.5)


def test_case_21_weights_of_a_carried_window_keep_their_meaning(settings):
    module = Tokens(sgd)
    rows = tokens([4.0], [0.0, 0.0, 0.0], [8.0])
    plan = GradientAccumulationScheduler({0: 2, 1: 4})
    train(module, rows, Fuse(window="carry", **settings), plan, max_epochs=2)
    # 4 and three 0: 1. Then 8 | 4, three 0, 8 are six tokens: 20 / 6.
    assert module.w.tolist() == pytest.approx([1 - 1 - 20 / 6] * 4, abs=1e-5)


def test_case_21_stock_weighs_every_window_by_its_own_size():
    module = Four(sgd)
    train(module, batches(1, 1, 1, 1, 9), GradientAccumulationScheduler({0: 4, 1: 2}), max_epochs=2)
    assert 1.0 - module.w[0].item() == pytest.approx(CHANGES["sum"][0])


def test_case_21_a_scheduled_size_that_no_epoch_fills_is_reported_at_the_start(settings):
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=9.*3 batches"):
        scheduled(one_bad(3), "drop", settings, {0: 4, 1: 9}, 2)
    with pytest.warns(UserWarning, match=r"accumulate_grad_batches=9.*no step is taken"):
        scheduled(one_bad(3), "drop", settings, {0: 2, 1: 9}, 2)
    with pytest.raises(ValueError, match=r"3 batches and there are 2 epochs"):
        scheduled(one_bad(3), "carry", settings, {0: 9}, 2)
    with pytest.warns(UserWarning, match="every window is short"):
        scheduled(one_bad(3), "mean", settings, {0: 1, 1: 9}, 2)


def test_case_21_carry_over_a_change_goes_on_over_a_resume(settings, tmp_path):
    values, plan = batches(1, 2, 3, 4, 5), {0: 4, 1: 3, 2: 2}
    whole, _ = scheduled(values, "carry", settings, plan, 4)
    first = quiet_trainer(Fuse(window="carry", **settings), GradientAccumulationScheduler(dict(plan)), max_epochs=1)
    first.fit(Four(sgd), values)
    first.save_checkpoint(tmp_path / "a.ckpt")
    module = Four(sgd)
    second = quiet_trainer(Fuse(window="carry", **settings), GradientAccumulationScheduler(dict(plan)), max_epochs=4)
    second.fit(module, values, ckpt_path=tmp_path / "a.ckpt")
    assert 1.0 - module.w[0].item() == whole


def test_case_23_validation_waits_for_its_window_under_a_schedule(settings):
    seen = AtValidation()
    trainer = quiet_trainer(
        Fuse(**settings), seen, GradientAccumulationScheduler({0: 1, 1: 4}), max_epochs=2,
        val_check_interval=5, check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Validated(sgd), one_bad(8), one_bad(1))
    assert seen.updates == [(5, 0), (9, 0), (10, 0)]
