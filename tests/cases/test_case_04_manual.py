"""Cases 3-6 in manual optimization: clipping by hand, and several optimizers on one loss scale."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import FusePrecision, contract_of
from lightning_fuse.step import NonFiniteGradientError
from tests.cases import BAD, NONE, half, one_bad, quiet_trainer, sgd, train
from tests.cases.manual import Manual, Pair

INSTALLS = {
    "fuse": lambda scale: {"callbacks": [Fuse()], "precision": half(scale)},
    "kept": lambda scale: {"callbacks": [Fuse(optimizer=None)], "precision": half(scale)},
    "plugin": lambda scale: {"callbacks": [], "precision": FusePrecision(half(scale))},
}


def run(module, loader, install, scale=1024.0):
    settings = INSTALLS[install](scale) if install else {"callbacks": [], "precision": half(scale)}
    return train(module, loader, *settings["callbacks"], precision=settings["precision"])


def pairs(*values):
    return DataLoader([torch.tensor(value) for value in values], batch_size=None)


@pytest.mark.parametrize("install", INSTALLS)
def test_case_04_clipping_by_hand_is_in_unscaled_units(install):
    module = Manual(clip=1.0)
    _, outcomes = run(module, one_bad(1), install)
    assert float((1 - module.w).norm()) == pytest.approx(1.0, abs=1e-5)
    assert outcomes.of("clip_coef") == pytest.approx([0.5], rel=1e-5)
    assert outcomes.of("grad_norm") == [2.0]


@pytest.mark.parametrize("install", INSTALLS)
def test_case_04_clipping_by_value_by_hand(install):
    module = Manual(clip=0.25, algorithm="value")
    _, outcomes = run(module, one_bad(3, 1), install)
    assert module.w.tolist() == [0.5] * 4
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok"]
    assert outcomes.of("grad_norm")[::2] == [2.0, 2.0]


def test_case_04_stock_moves_a_thousandth():
    module = Manual(clip=1.0)
    run(module, one_bad(1), None)
    assert float((1 - module.w).norm()) == pytest.approx(1 / 1024, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("install", INSTALLS)
def test_case_03_hooks_see_unscaled_gradients_in_manual_optimization_too(install, clip):
    seen = []
    look = LambdaCallback(on_before_optimizer_step=lambda _t, module, _o: seen.append(float(module.w.grad.norm())))
    settings = INSTALLS[install](1024.0)
    train(Manual(clip=clip), one_bad(2), *settings["callbacks"], look, precision=settings["precision"])
    assert seen == pytest.approx([clip or 2.0] * 2, rel=1e-5)


def test_case_04_a_second_unscale_gives_a_clear_message():
    class Twice(Manual):
        def training_step(self, batch):
            optimizer = self.optimizers()
            self.manual_backward((self.w * batch).sum())
            contract_of(self.trainer).unscale_(optimizer.optimizer)
            contract_of(self.trainer).unscale_(optimizer.optimizer)

    with pytest.raises(RuntimeError, match="unscaled already: unscale once per step"):
        run(Twice(), one_bad(1), "fuse")


@pytest.mark.parametrize("install", INSTALLS)
def test_case_05_the_scale_moves_once_after_both(install):
    module = Pair()
    plugin = half(1024.0, growth_interval=1)
    callbacks = {"fuse": [Fuse()], "kept": [Fuse(optimizer=None)], "plugin": []}[install]
    trainer, outcomes = train(
        module, pairs([1.0, 1.0]), *callbacks, precision=FusePrecision(plugin) if install == "plugin" else plugin
    )
    assert (module.a.item(), module.b.item()) == (-1.0, -1.0)
    assert contract_of(trainer).loss_scale.value == 2048.0
    assert outcomes.of("loss_scale_before") == [1024.0, 1024.0]
    assert outcomes.of("loss_scale_after") == [2048.0, 2048.0]
    assert outcomes.of("optimizer") == [0, 1]


def test_case_05_stock_moves_the_second_by_half():
    module = Pair()
    train(module, pairs([1.0, 1.0]), precision=half(1024.0, growth_interval=1))
    assert (module.a.item(), module.b.item()) == (-1.0, -0.5)


@pytest.mark.parametrize("install", INSTALLS)
def test_case_05_an_overflow_in_one_skips_that_one(install):
    module = Pair()
    trainer, outcomes = run(module, pairs([BAD, 1.0]), install)
    assert (module.a.item(), module.b.item()) == (0.0, -1.0)
    assert contract_of(trainer).loss_scale.value == 512.0
    assert outcomes.of("reason") == ["nonfinite", "ok"]


def test_case_05_stock_moves_the_second_by_two():
    module = Pair()
    run(module, pairs([BAD, 1.0]), None)
    assert (module.a.item(), module.b.item()) == (0.0, -2.0)


@pytest.mark.parametrize("install", INSTALLS)
def test_case_06_an_optimizer_without_gradients_beside_one_with(install):
    module = Pair()
    trainer, outcomes = run(module, pairs([NONE, 1.0], [1.0, NONE], [NONE, NONE]), install)
    assert (module.a.item(), module.b.item()) == (-1.0, -1.0)
    assert outcomes.of("reason") == ["no_grad", "ok", "ok", "no_grad", "no_grad", "no_grad"]
    scale = contract_of(trainer).loss_scale
    assert (scale.value, scale.growth_counter) == (1024.0, 2)


@pytest.mark.parametrize("install", INSTALLS)
def test_outcomes_are_told_once_per_step_and_agree_with_the_trainers_count(install):
    trainer, outcomes = run(Pair(), pairs([1.0, 1.0], [BAD, BAD], [1.0, 1.0]), install)
    assert outcomes.of("global_step") == [1, 2, 3, 4, 5, 6]
    assert outcomes.of("update") == [1, 2, 2, 2, 3, 4]
    assert trainer.global_step == 6


def test_a_streak_of_one_optimizer_is_not_hidden_by_the_other():
    with pytest.raises(NonFiniteGradientError, match="6 steps in a row"):
        train(Pair(), pairs(*[[BAD, 1.0]] * 20), Fuse(max_consecutive_skips=5), precision=half())


def test_alternating_optimizers_each_step_on_their_own_gradients():
    class Alternating(Pair):
        def training_step(self, batch):
            for weight, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward((weight * batch[0]).sum())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    module = Alternating()
    _, outcomes = run(module, pairs([1.0], [BAD], [1.0]), "fuse")
    assert (module.a.item(), module.b.item()) == (-2.0, -2.0)
    assert outcomes.of("reason") == ["ok", "ok", "nonfinite", "nonfinite", "ok", "ok"]
    assert outcomes.of("window_size") == [1] * 6


@pytest.mark.parametrize("install", INSTALLS)
def test_steps_after_a_shared_backward_share_its_window(install):
    class Shared(Pair):
        def training_step(self, batch):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward((self.a * batch[0] + self.b * batch[1]).sum())
            for optimizer in self.optimizers():
                optimizer.step()

    module = Shared()
    _, outcomes = run(module, pairs([1.0, 1.0], [1.0, 2.0]), install)
    assert (module.a.item(), module.b.item()) == (-2.0, -3.0)
    assert outcomes.of("window_size") == [1] * 4


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_module_code_that_reaches_for_the_scaler_goes_on_working(scale):
    class OldCode(Manual):
        def training_step(self, batch):
            optimizer, scaler = self.optimizers(), self.trainer.precision_plugin.scaler
            optimizer.zero_grad()
            self.manual_backward((self.w * batch).sum())
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            assert scaler.get_scale() in (scale, scale / 2)

    module = OldCode()
    _, outcomes = run(module, one_bad(3, 1), "fuse", scale)
    assert module.w.tolist() == pytest.approx([0.0] * 4, abs=1e-5)
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok"]


def test_the_scaler_cannot_step_past_the_contract():
    class OldCode(Manual):
        def training_step(self, batch):
            self.manual_backward((self.w * batch).sum())
            self.trainer.precision_plugin.scaler.step(self.optimizers())

    with pytest.raises(RuntimeError, match=r"optimizer\.step"):
        run(OldCode(), one_bad(1), "fuse")


def test_one_optimizer_stepped_twice_in_a_batch():
    class Double(Manual):
        def training_step(self, batch):
            super().training_step(batch)
            super().training_step(batch)

    module = Double(sgd)
    trainer, outcomes = run(module, one_bad(2), "fuse")
    assert module.w.tolist() == [-3.0] * 4
    assert outcomes.of("window_size") == [1] * 4
    assert contract_of(trainer).loss_scale.growth_counter == 2


def test_windows_by_hand():
    class ByHand(Manual):
        def training_step(self, batch):
            self.manual_backward((self.w * batch).sum() / 2)
            if self.trainer.fit_loop.epoch_loop.batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    module = ByHand()
    _, outcomes = run(module, one_bad(4), "fuse")
    assert module.w.tolist() == [-1.0] * 4
    assert outcomes.of("window_size") == [2, 2]


@pytest.mark.parametrize("install", INSTALLS)
def test_a_closure_by_hand(install):
    class Closure(Manual):
        def training_step(self, batch):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = (self.w * batch).sum()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    module = Closure()
    _, outcomes = run(module, one_bad(3, 1), install)
    assert module.w.tolist() == [-1.0] * 4
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok"]


def test_the_plugin_alone_is_enough_for_a_second_fit():
    module, trainer = Manual(), quiet_trainer(precision=FusePrecision(half()))
    trainer.fit(module, one_bad(2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, one_bad(2))
    assert contract_of(trainer).updates == 4
    assert module.w.tolist() == [-3.0] * 4


class Unequal(Pair):
    """Steps a on every batch and b on every second one."""

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        self.toggle_optimizer(a)
        self.manual_backward((self.a * batch[0]).sum())
        a.step()
        a.zero_grad()
        self.untoggle_optimizer(a)
        self.toggle_optimizer(b)
        self.manual_backward((self.b * batch[1]).sum() / 2)
        if batch_idx % 2:
            b.step()
            b.zero_grad()
        self.untoggle_optimizer(b)


def unequal(fuse, of_a=(BAD, 1.0, 1.0, 1.0), **settings):
    module = Unequal()
    loader = pairs(*[[gradient, 1.0] for gradient in of_a])
    trainer, _ = train(module, loader, *fuse, precision=half(1024.0, **settings))
    return module.a.item(), module.b.item(), trainer


FUSES = {"ours": [Fuse()], "kept": [Fuse(optimizer=None)]}


@pytest.mark.parametrize("fuse", FUSES)
def test_case_05_gradients_that_wait_move_with_the_scale(fuse):
    """The scale halves after the first batch, while b holds half of its gradient."""
    assert unequal(FUSES[fuse])[:2] == (-3.0, -2.0)


@pytest.mark.parametrize("fuse", FUSES)
def test_case_05_gradients_that_wait_move_with_a_scale_that_grows(fuse):
    a, b, trainer = unequal(FUSES[fuse], (1.0,) * 4, growth_interval=1)
    assert (a, b) == (-4.0, -2.0)
    assert contract_of(trainer).loss_scale.value == 1024.0 * 2**4


def test_case_05_stock_adds_gradients_of_two_scales():
    assert unequal([], (1.0,) * 4, growth_interval=1)[1] != -2.0


@pytest.mark.parametrize("fuse", FUSES)
def test_an_average_follows_any_of_several_optimizers(fuse):
    module = Pair()
    train(module, pairs([1.0, BAD], [1.0, BAD], [1.0, BAD]), *FUSES[fuse], EMAWeightAveraging(decay=0.5))
    # a is -1, -2, -3; the average begins with the first and halves the distance: -1, -1.5, -2.25.
    assert module.a.item() == -2.25
    assert module.b.item() == 0.0
