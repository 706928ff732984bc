"""Cases 7 and 21: accumulation windows, with batches that give nothing and windows that fall short."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_fuse import Fuse
from tests.cases import BAD, NONE, Four, batches, half, one_bad, quiet_trainer, sgd, train
from tests.cases import Outcomes as Watch

FUSES = {"ours": {}, "kept": {"optimizer": None}}
PRECISIONS = {"32-true": lambda: "32-true", "bf16-mixed": lambda: "bf16-mixed", "16-mixed": half}


@pytest.fixture(params=PRECISIONS)
def precision(request):
    return PRECISIONS[request.param]()


@pytest.fixture(params=FUSES)
def settings(request):
    return FUSES[request.param]


def moved(loader, *callbacks, accumulate=4, **trainer):
    module = Four(sgd)
    _, outcomes = train(module, loader, *callbacks, accumulate_grad_batches=accumulate, **trainer)
    return 1.0 - float(module.w[0].detach()), outcomes


@pytest.mark.parametrize("place", range(4))
def test_case_07_the_gradients_beside_a_none_batch_are_applied(place, precision, settings):
    values = [1.0] * 4
    values[place] = NONE
    moved_by, outcomes = moved(batches(*values), Fuse(**settings), precision=precision)
    assert moved_by == pytest.approx(1.0, abs=1e-6)
    assert outcomes.of("window_size") == [3]
    assert outcomes.of("reason") == ["ok"]


def test_case_07_stock_throws_them_away():
    assert moved(batches(1, 1, 1, NONE), precision=half())[0] == 0.0


def test_case_07_a_window_with_no_contribution_is_no_step(precision, settings):
    moved_by, outcomes = moved(batches(*[1] * 4, *[NONE] * 4, *[1] * 4), Fuse(**settings), precision=precision)
    assert moved_by == pytest.approx(2.0, abs=1e-6)
    assert outcomes.of("reason") == ["ok", "no_grad", "ok"]
    assert outcomes.of("window_size") == [4, 0, 4]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_case_07_stale_gradients_are_not_applied_again(accumulate, settings):
    values = [1] * accumulate + [NONE] * accumulate
    moved_by, outcomes = moved(batches(*values), Fuse(**settings), accumulate=accumulate)
    assert moved_by == 1.0
    assert outcomes.of("applied") == [True, False]


def test_an_overflow_anywhere_in_a_window_skips_the_window(precision, settings):
    moved_by, outcomes = moved(batches(1, BAD, 1, 1, 1, 1, 1, 1), Fuse(**settings), precision=precision)
    assert moved_by == 1.0
    assert outcomes.of("reason") == ["nonfinite", "ok"]
    assert outcomes.of("window_size") == [4, 4]


def test_case_21_mean_is_the_mean_of_those_that_are_there(precision, settings):
    moved_by, outcomes = moved(one_bad(5), Fuse(window="mean", **settings), precision=precision)
    assert moved_by == pytest.approx(2.0, abs=1e-6)
    assert outcomes.of("grad_norm") == pytest.approx([2.0, 2.0], rel=1e-6)
    assert outcomes.of("window_size") == [4, 1]


def test_case_21_mean_is_the_default(settings):
    assert moved(one_bad(5), Fuse(**settings))[0] == pytest.approx(2.0, abs=1e-6)


def test_case_21_sum_keeps_the_arithmetic_of_stock(precision, settings):
    moved_by, outcomes = moved(one_bad(5), Fuse(window="sum", **settings), precision=precision)
    assert moved_by == 1.25
    assert outcomes.of("grad_norm") == [2.0, 0.5]


def test_case_21_stock_applies_a_quarter():
    assert moved(one_bad(5))[0] == 1.25


def test_case_21_the_short_window_is_clipped_as_the_mean(settings):
    moved_by, outcomes = moved(one_bad(5), Fuse(**settings), gradient_clip_val=1.0)
    assert moved_by == pytest.approx(1.0, abs=1e-5)
    assert outcomes.of("clip_coef") == pytest.approx([0.5, 0.5], rel=1e-5)


def test_a_schedule_of_accumulation(settings):
    plan = GradientAccumulationScheduler({0: 1, 1: 3})
    moved_by, outcomes = moved(one_bad(4), Fuse(**settings), plan, accumulate=1, max_epochs=2)
    assert outcomes.of("window_size") == [1, 1, 1, 1, 3, 1]
    assert moved_by == pytest.approx(6.0, abs=1e-5)


class Fragile(Four):
    """Stops with an error, once, in the middle of a window."""

    broken = False

    def training_step(self, batch):
        if not self.broken and self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            self.broken = True
            raise ValueError("broken")
        return super().training_step(batch)


def test_a_window_that_an_error_cut_off_does_not_count_into_the_next_fit(settings):
    module, outcomes = Fragile(sgd), Watch()
    with pytest.raises(ValueError, match="broken"):
        quiet_trainer(fuse := Fuse(**settings), outcomes, accumulate_grad_batches=4).fit(module, one_bad(4))
    quiet_trainer(fuse, outcomes, accumulate_grad_batches=4).fit(module, one_bad(2))
    assert outcomes.of("window_size") == [2]
    assert module.w.tolist() == [0.0] * 4


def test_an_epoch_that_ends_early_leaves_nothing_in_the_window(settings):
    class Early(Four):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.trainer.current_epoch == 0 and batch_idx == 2 else None

    module = Early(sgd)
    _, outcomes = train(module, one_bad(6), Fuse(**settings), accumulate_grad_batches=4, max_epochs=2)
    assert outcomes.of("window_size") == [4, 2]
    assert module.w.tolist() == pytest.approx([-1.0] * 4, abs=1e-6)


def test_a_module_that_steps_every_second_batch_reports_the_micro_batches_it_holds(settings):
    class Second(Four):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    module = Second(sgd)
    _, outcomes = train(module, one_bad(4), Fuse(**settings))
    assert module.w.tolist() == [-1.0] * 4  # Lightning zeroes gradients at every batch: one counts
    assert outcomes.of("window_size") == [1, 1, 1, 1]
    assert outcomes.of("reason") == ["user", "ok", "user", "ok"]
