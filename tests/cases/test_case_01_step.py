"""Cases 1-3, 6, 8-10, 12-14: unscale, check, clip, step and the loss scale, in automatic optimization."""

from __future__ import annotations

from math import isfinite

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from lightning_fuse.step import NonFiniteGradientError
from tests.cases import BAD, UNUSED, Four, adamw, batches, half, one_bad, quiet_trainer, sgd, train

EXECUTIONS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSES = {"ours": {}, "kept": {"optimizer": None}, "int8": {"state": "int8"}}


def fused(params):
    return adamw(params, fused=True)


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_case_01_fused_clipped_and_scaled(execution, fuse):
    module = Four(lambda params: adamw(params, **EXECUTIONS[execution]))
    trainer, outcomes = train(module, one_bad(8, 3), Fuse(**FUSES[fuse]), precision=half(1024.0), gradient_clip_val=0.5)
    assert module.w.tolist() == pytest.approx([0.93] * 4, abs=2e-6)
    assert int(trainer.optimizers[0].state[module.w]["step"]) == 7
    assert contract_of(trainer).loss_scale.value == 512.0
    good = [outcome for outcome in outcomes.seen if outcome.applied]
    assert [outcome.grad_norm for outcome in good] == [2.0] * 7
    assert [outcome.clip_coef for outcome in good] == pytest.approx([0.25] * 7, rel=1e-6)


def test_case_01_stock_raises():
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        train(Four(fused), one_bad(8, 3), precision=half(), gradient_clip_val=0.5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_case_02_fused_and_clipped_without_a_scale(precision):
    module = Four(lambda params: sgd(params, fused=True))
    for fuse in (Fuse(), Fuse(optimizer=None)):
        before = module.w.detach().clone()
        train(module, one_bad(1), fuse, precision=precision, gradient_clip_val=1.0)
        assert float((module.w - before).detach().norm()) == pytest.approx(1.0, abs=1e-6)


def test_case_02_stock_raises():
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        train(Four(fused), one_bad(2), precision="bf16-mixed", gradient_clip_val=1.0)


def watched(scale, *callbacks):
    seen = []
    look = LambdaCallback(on_before_optimizer_step=lambda _t, module, _o: seen.append(float(module.w.grad.norm())))
    train(Four(fused), one_bad(2), *callbacks, look, precision=half(scale))
    return seen


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**16])
@pytest.mark.parametrize("fuse", FUSES)
def test_case_03_hooks_see_unscaled_gradients(scale, fuse):
    assert watched(scale, Fuse(**FUSES[fuse])) == [2.0, 2.0]


def test_case_03_stock_shows_scaled_ones():
    assert watched(1024.0) == [2048.0, 2048.0]


@pytest.mark.parametrize("fuse", FUSES)
def test_case_06_no_gradient_moves_nothing(fuse):
    module = Four()
    trainer, outcomes = train(
        module, batches(1, UNUSED, 1), Fuse(**FUSES[fuse]), precision=half(64.0, growth_interval=3)
    )
    assert outcomes.of("reason") == ["ok", "no_grad", "ok"]
    assert module.w.tolist() == pytest.approx([0.98] * 4, abs=1e-6)
    scale = contract_of(trainer).loss_scale
    assert (scale.value, scale.growth_counter) == (64.0, 2)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_case_06_no_gradient_and_clipping(algorithm, precision):
    module, plugin = Four(sgd), half(64.0) if precision == "16-mixed" else precision
    clip = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    _, outcomes = train(module, batches(UNUSED, 1, UNUSED), Fuse(), precision=plugin, **clip)
    assert outcomes.of("reason") == ["no_grad", "ok", "no_grad"]
    assert module.w.tolist() == pytest.approx([1 - (0.25 if algorithm == "norm" else 0.5)] * 4, abs=1e-6)


def test_case_06_stock_asserts():
    with pytest.raises(AssertionError, match="No inf checks"):
        train(Four(), batches(UNUSED), precision=half())


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_case_08_a_veto_is_for_one_step(precision):
    def veto(trainer, module, optimizer):
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            contract_of(trainer).skip_next()

    module = Four(sgd)
    trainer, outcomes = train(
        module,
        batches(0.25, BAD, 0.25),
        Fuse(),
        LambdaCallback(on_before_optimizer_step=veto),
        precision=half(64.0) if precision == "16-mixed" else precision,
    )
    assert outcomes.of("reason") == ["ok", "user", "ok"]
    assert outcomes.of("update") == [1, 1, 2]
    assert module.w.tolist() == [0.5] * 4
    if precision == "16-mixed":
        scale = contract_of(trainer).loss_scale
        assert (scale.value, scale.growth_counter) == (64.0, 2)


class LeavesOut(Four):
    """A module whose own optimizer_step runs the closure of batch 1 and does not step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


def halving():
    return LeavesOut(sgd, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_case_08_a_step_that_the_module_leaves_out_is_a_veto(precision, fuse, accumulate):
    module, plugin = halving(), half(64.0) if precision == "16-mixed" else precision
    # With windows of two, batch 1 closes the first window.
    trainer, outcomes = train(
        module, one_bad(3 * accumulate), Fuse(**fuse), precision=plugin, accumulate_grad_batches=accumulate
    )
    expected = ["ok", "user", "ok"] if accumulate == 1 else ["user", "ok", "ok"]
    assert outcomes.of("reason") == expected
    assert outcomes.of("window_size") == [accumulate] * 3
    assert module.w.tolist() == [1.0 - 1.0 - 0.5] * 4
    assert contract_of(trainer).global_step == trainer.global_step == 3
    assert (contract_of(trainer).updates, contract_of(trainer).skips["user"]) == (2, 1)
    if precision == "16-mixed":
        assert contract_of(trainer).loss_scale.growth_counter == 2


def test_case_08_stock_advances_schedulers_on_a_step_that_is_left_out():
    module = halving()
    train(module, one_bad(3), precision=half(64.0))
    assert module.w.tolist() == [1.0 - 1.0 - 0.25] * 4


def test_case_09_a_long_streak_of_bad_batches_leaves_the_weights():
    loader = batches(1, *[BAD] * 200, 1)
    module = Four()
    trainer, outcomes = train(module, loader, Fuse(max_consecutive_skips=None), precision=half(65536.0))
    assert module.w.tolist() == pytest.approx([0.98] * 4, abs=1e-6)
    assert contract_of(trainer).loss_scale.value == 1.0
    assert contract_of(trainer).skips == {"nonfinite": 200, "no_grad": 0, "user": 0}
    assert outcomes.of("loss_scale_after")[-1] == 1.0


def test_case_09_a_streak_beyond_the_limit_raises_with_the_batches():
    module, after_one = Four(), Four()
    train(after_one, one_bad(1), Fuse(), precision=half())
    with pytest.raises(NonFiniteGradientError, match=r"(?s)51 steps in a row.*batch 1 .*batch 51.*\bw\b"):
        train(module, batches(1, *[BAD] * 60), Fuse(max_consecutive_skips=50), precision=half())
    assert torch.equal(module.w, after_one.w)


def test_case_09_stock_writes_nan_into_every_weight():
    module = Four(sgd)
    trainer, _ = train(module, batches(1, *[BAD] * 200, 1), precision=half(65536.0))
    assert trainer.precision_plugin.scaler.get_scale() == 0.0
    assert module.w.isnan().all()


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("fuse", FUSES)
def test_case_10_a_bad_batch_is_as_if_it_had_not_been(precision, clip, fuse):
    def trained(loader):
        module = Four(lambda params: adamw(params, weight_decay=0.1))
        plugin = half() if precision == "16-mixed" else precision
        return module, *train(module, loader, Fuse(**FUSES[fuse]), precision=plugin, **clip)

    module, trainer, outcomes = trained(one_bad(8, 3))
    without, _, _ = trained(one_bad(7))
    assert torch.equal(module.w, without.w)
    assert contract_of(trainer).updates == 7
    assert contract_of(trainer).skips == {"nonfinite": 1, "no_grad": 0, "user": 0}
    assert [outcome.global_step for outcome in outcomes.seen if not outcome.applied] == [4]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_case_10_stock_makes_every_weight_nan(precision):
    module = Four()
    train(module, one_bad(8, 3), precision=precision, gradient_clip_val=0.5)
    assert module.w.isnan().all()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_case_10_raise_names_batch_and_parameter_before_anything_is_written(precision):
    module, after_three = Four(), Four()
    train(after_three, one_bad(3), Fuse(), precision=half() if precision == "16-mixed" else precision)
    with pytest.raises(NonFiniteGradientError, match=r"batch 3 of epoch 0.*first in w \(4 of 4"):
        train(
            module,
            one_bad(8, 3),
            Fuse(on_nonfinite="raise"),
            precision=half() if precision == "16-mixed" else precision,
        )
    assert torch.equal(module.w, after_three.w)


class Clips(Four):
    """A module with its own clipping; gradients of random sizes."""

    how = staticmethod(lambda module, optimizer: None)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.how(self, optimizer)

    def training_step(self, batch):
        return (self.w * torch.tensor([0.1, 0.7, -1.3, 3.0]) * batch).sum()


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
def test_case_12_looking_and_clipping_at_a_billion_change_no_bit(scale):
    def trained(module, *callbacks, **settings):
        precision = "32-true" if scale is None else half(scale)
        train(module, batches(1, 0.3, BAD, 7), Fuse(), *callbacks, precision=precision, **settings)
        return module.w

    class Plain(Four):
        training_step = Clips.training_step

    plain = trained(Plain())
    looked = trained(Plain(), LambdaCallback(on_before_optimizer_step=lambda *_: None))
    clipped = trained(Plain(), gradient_clip_val=1e9)
    both = trained(Plain(), LambdaCallback(on_before_optimizer_step=lambda *_: None), gradient_clip_val=1e9)
    own = Clips()
    own.how = lambda module, optimizer: module.clip_gradients(optimizer, 1e9, "norm")
    for other in (looked, clipped, both, trained(own)):
        assert torch.equal(plain, other)


@pytest.mark.parametrize("scale", [1000.0, 3.0])
def test_case_12_stock_fused_gives_other_bits_where_somebody_unscales(scale):
    def trained(*callbacks):
        class Uneven(Four):
            training_step = Clips.training_step

        module = Uneven(lambda params: sgd(params, fused=True))
        train(module, batches(1, 0.3, 7, 0.9, 0.2), *callbacks, precision=half(scale))
        return module.w

    unscales = LambdaCallback(
        on_before_optimizer_step=lambda trainer, _m, optimizer: trainer.precision_plugin.scaler.unscale_(optimizer)
    )
    looks = LambdaCallback(on_before_optimizer_step=lambda *_: None)
    assert not torch.equal(trained(), trained(unscales))
    assert torch.equal(trained(Fuse()), trained(Fuse(), looks))


SPOILERS = {
    "torch_norm": lambda module, _: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "torch_value": lambda module, _: torch.nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "repair": lambda module, _: module.w.grad.nan_to_num_(0.0, 0.0, 0.0),
    "lightning_norm": lambda module, optimizer: module.clip_gradients(optimizer, 1.0, "norm"),
    "lightning_value": lambda module, optimizer: module.clip_gradients(optimizer, 1.0, "value"),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("scale", [None, 64.0])
def test_case_13_what_is_not_finite_at_any_moment_never_reaches_a_parameter(spoiler, scale):
    class OneInf(Clips):
        def training_step(self, batch):
            return (self.w * torch.tensor([BAD if float(batch) == 2 else 1.0, 1.0, 1.0, 1.0])).sum()

    module = OneInf(sgd)
    module.how = SPOILERS[spoiler]
    _, outcomes = train(module, batches(1, 2, 1), Fuse(), precision="32-true" if scale is None else half(scale))
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok"]
    moved = 0.5 if "norm" in spoiler else 1.0
    assert module.w.tolist() == pytest.approx([1 - 2 * moved] * 4, abs=1e-5)


def test_case_13_gradients_spoilt_after_unscale_are_caught():
    def spoil(trainer, module, optimizer):
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            module.w.grad[2] = float("nan")

    for precision in ("32-true", half(8.0)):
        module = Four(sgd)
        _, outcomes = train(
            module, one_bad(3), Fuse(), LambdaCallback(on_before_optimizer_step=spoil), precision=precision
        )
        assert outcomes.of("reason") == ["ok", "nonfinite", "ok"]
        assert all(isfinite(x) for x in module.w.tolist())


def test_case_13_stock_lets_them_reach_the_weights():
    def spoil(trainer, module, optimizer):
        module.w.grad[0] = float("nan")

    module = Four(sgd)
    train(module, one_bad(1), LambdaCallback(on_before_optimizer_step=spoil), precision=half())
    assert module.w.isnan().any()


def test_case_14_what_grad_holds_after_a_step_and_after_a_skip():
    held = []
    look = LambdaCallback(on_train_batch_end=lambda _t, module, *_: held.append(module.w.grad.tolist()))
    train(Four(), one_bad(2, 1), Fuse(), look, precision=half(8.0), gradient_clip_val=1.0)
    assert held == [[8.0] * 4, [BAD] * 4]  # what backward left: scaled, not clipped
    held.clear()
    train(Four(), one_bad(2, 1), Fuse(optimizer=None), look, precision=half(8.0), gradient_clip_val=1.0)
    assert held[0] == pytest.approx([0.5] * 4, rel=1e-5)  # what was applied
    assert held[1] == [BAD] * 4


def test_second_fit_goes_on_counting():
    module, trainer = Four(), quiet_trainer(Fuse())
    trainer.fit(module, one_bad(4, 1))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, one_bad(4, 1))
    contract = contract_of(trainer)
    assert (contract.global_step, contract.updates, trainer.global_step) == (8, 6, 8)
