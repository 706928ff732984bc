"""Fuse in a Trainer that people already have: what it refuses, what it leaves alone, and resume to the bit."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.callbacks import StepMonitor
from lightning_fuse.plugins import FusePrecision, contract_of
from tests.cases import Four, Validated, adamw, half, one_bad, quiet_trainer, sgd, train


class Net(LightningModule):
    """Small, but with rows long enough for blocks of int8; data and weights from fixed seeds."""

    def __init__(self, optimizer=None):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 160), torch.nn.GELU(), torch.nn.Linear(160, 8))
        self._optimizer = optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1))

    def training_step(self, batch):
        return (self.layers(batch) - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self):
        optimizer = self._optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(count=8, bad=()):
    made = torch.Generator().manual_seed(3)
    rows = [torch.randn(4, 8, generator=made) for _ in range(count)]
    for index in bad:
        rows[index][0, 0] = float("inf")
    return DataLoader(rows, batch_size=None)


def everything(trainer):
    """Parameters and optimizer state, in order."""
    optimizer = trainer.optimizers[0]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach() for p in params] + [t for p in params for _, t in sorted(optimizer.state[p].items())]


def assert_same_bits(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer": "adamw"}, "adamw_fused"),
        ({"optimizer": "rprop_fused"}, "rprop_fused"),
        ({"on_nonfinite": "drop"}, "on_nonfinite"),
        ({"window": "average"}, "mean"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips"),
        ({"max_updates": 0}, "max_updates"),
        ({"optimizer": None, "state": "int8"}, "optimizer=None"),
        ({"optimizer": None, "master": "fp32"}, "optimizer=None"),
        ({"optimizer": None, "kernel": "reference"}, "optimizer=None"),
    ],
    ids=str,
)
def test_unknown_words_and_choices_without_effect_are_refused_at_once(settings, named):
    with pytest.raises(ValueError, match=named):
        Fuse(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"state": "int9"}, "int9"),
        ({"master": "double"}, "double"),
        ({"kernel": "cuda"}, "cuda"),
        ({"master": "fp32"}, "no effect"),
        ({"state": [("lyers.*", "int8"), "fp32"]}, "lyers"),
        ({"init_loss_scale": 8.0}, "no loss scale"),
        ({"growth_interval": 8}, "no loss scale"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_before_training(settings, named):
    module = Net()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises((ValueError, KeyError), match=named):
        train(module, data(), Fuse(**settings))
    assert_same_bits([p.detach() for p in module.parameters()], [p.detach() for p in before])


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="stat"):
        Fuse(stat="int8")


def test_twice_is_refused():
    for second in ({"precision": "32-true"}, {"precision": FusePrecision("32-true")}):
        callbacks = [Fuse(), Fuse()] if second["precision"] == "32-true" else [Fuse()]
        with pytest.raises(ValueError, match="twice"):
            train(Four(), one_bad(1), *callbacks, **second)


def test_a_precision_that_cannot_be_wrapped_is_refused_with_those_that_can():
    with pytest.raises(ValueError, match=r"DoublePrecision.*MixedPrecision"):
        train(Four(), one_bad(1), Fuse(), precision=DoublePrecision())


def test_the_scaler_of_lightnings_plugin_keeps_settings_and_state():
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(
        {"scale": 512.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 8, "_growth_tracker": 6}
    )
    trainer, outcomes = train(Four(), one_bad(5, 3), Fuse(), precision=MixedPrecision("16-mixed", "cpu", scaler))
    assert outcomes.of("loss_scale_after") == [512.0, 2048.0, 2048.0, 512.0, 512.0]
    state = contract_of(trainer).loss_scale.state_dict()
    assert (state["growth_factor"], state["backoff_factor"], state["growth_interval"]) == (4.0, 0.25, 8)


def test_settings_of_fuse_go_before_those_of_the_scaler():
    fuse = Fuse(init_loss_scale=4.0, growth_interval=3, min_loss_scale=4.0)
    _, outcomes = train(Four(), one_bad(4, 3), fuse, precision=half(64.0))
    assert outcomes.of("loss_scale_after") == [4.0, 4.0, 8.0, 4.0]


def test_the_floor_holds():
    _, outcomes = train(Four(), one_bad(4, 0, 1, 2, 3), Fuse(min_loss_scale=16.0), precision=half(64.0))
    assert outcomes.of("loss_scale_after") == [32.0, 16.0, 16.0, 16.0]


def test_a_disabled_scaler_scales_nothing():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    module = Four(sgd)
    _, outcomes = train(module, one_bad(2, 1), Fuse(), precision=plugin)
    assert outcomes.of("loss_scale_before") == [None, None]
    assert module.w.tolist() == [0.0] * 4


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("master", ["none", "fp32"])
def test_true_half_precisions(precision, master):
    module = Four(lambda ps: adamw(ps, lr=1e-3))
    trainer, outcomes = train(module, one_bad(30, 5), Fuse(master=master), precision=precision)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float16
    assert module.w.dtype == dtype
    good = outcomes.of("applied").count(True)
    assert outcomes.of("reason").count("nonfinite") == 30 - good
    assert (contract_of(trainer).loss_scale is not None) == (precision == "16-true")
    if master == "fp32":
        assert module.w.tolist() == pytest.approx([1 - 1e-3 * good] * 4, abs=5e-3)


def test_validation_test_and_prediction_with_fuse_installed():
    module, trainer = Validated(), quiet_trainer(Fuse(), precision=half())
    trainer.validate(module, one_bad(2), verbose=False)
    assert contract_of(trainer) is None
    trainer.fit(module, one_bad(3), one_bad(2))
    assert contract_of(trainer).updates == 3
    trainer.validate(module, one_bad(2), verbose=False)
    trainer.test(module, one_bad(2), verbose=False)
    assert len(trainer.predict(module, one_bad(2))) == 2
    assert contract_of(trainer).updates == 3


def test_fast_dev_run_and_an_empty_run():
    quiet_trainer(Fuse(), fast_dev_run=True).fit(Validated(), one_bad(3), one_bad(1))
    quiet_trainer(Fuse(), max_epochs=0).fit(Four(), one_bad(3))
    quiet_trainer(Fuse(), max_steps=0).fit(Four(), one_bad(3))
    quiet_trainer(Fuse(), limit_train_batches=0).fit(Four(), one_bad(3))


def test_one_fuse_in_two_trainers_starts_anew():
    fuse = Fuse()
    first, _ = train(Four(), one_bad(3, 1), fuse, precision=half())
    second, _ = train(Four(), one_bad(2), fuse, precision=half())
    assert (contract_of(first).updates, contract_of(second).updates) == (2, 2)
    assert contract_of(second).loss_scale.value == 1024.0
    assert contract_of(first).loss_scale.value == 512.0


class Hooked(Net):
    """Overrides everything that people override."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.calls.append("optimizer_step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def lr_scheduler_step(self, scheduler, metric):
        self.calls.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.calls.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_before_zero_grad(self, optimizer):
        self.calls.append("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer):
        self.calls.append("on_before_optimizer_step")
        self.norm = float(torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls.append("optimizer_zero_grad")
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_hooks_of_the_module_are_called_as_in_stock(fuse, precision):
    def trained(*callbacks):
        module = Hooked()
        plugin = half() if precision == "16-mixed" else precision
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"}
        train(module, data(), *callbacks, precision=plugin, **settings)
        return module

    stock, ours = trained(), trained(Fuse(**fuse))
    assert ours.calls == stock.calls
    assert ours.norm == pytest.approx(stock.norm, rel=1e-3)
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3 if precision == "16-mixed" else 1e-5)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_clipping_of_either_kind_is_stocks(algorithm, fuse):
    stock, ours = Net(), Net()
    settings = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    train(stock, data(), **settings)
    train(ours, data(), Fuse(**fuse), **settings)
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8", "int8_bf16"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_resume_is_exact_to_the_bit(state, precision, tmp_path):
    def fuse():
        return Fuse(state=state, master="split" if precision == "bf16-true" else None)

    def plugin():
        return half() if precision == "16-mixed" else precision

    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    whole, _ = train(Net(), data(bad=[1]), fuse(), precision=plugin(), max_epochs=4, **settings)
    first, _ = train(Net(), data(bad=[1]), fuse(), precision=plugin(), max_epochs=2, **settings)
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(fuse(), precision=plugin(), max_epochs=4, **settings)
    second.fit(Net(), data(bad=[1]), ckpt_path=tmp_path / "a.ckpt")
    assert_same_bits(everything(second), everything(whole))
    assert contract_of(second).state_dict() == contract_of(whole).state_dict()
    kinds = {str(t.dtype) for t in everything(second)}
    assert ("torch.uint8" in kinds or "torch.int8" in kinds) == ("int8" in state)


def test_checkpoints_load_with_weights_only(tmp_path):
    trainer, _ = train(Net(), data(bad=[1]), Fuse(state="int8"), precision=half(), accumulate_grad_batches=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)


def test_a_checkpoint_of_another_format_is_refused_with_both_named(tmp_path):
    trainer, _ = train(Net(), data(), Fuse(state="int8"))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"int8.*bf16"):
        quiet_trainer(Fuse(state="bf16"), max_epochs=2).fit(Net(), data(), ckpt_path=tmp_path / "a.ckpt")


def test_a_compiled_layer_is_named_and_trained_as_a_plain_one():
    plain, compiled = Net(), Net()
    compiled.layers[0] = torch.compile(compiled.layers[0], backend="eager")
    first, _ = train(plain, data(), Fuse(state=[("layers.0.weight", "int8"), "fp32"]))
    second, _ = train(compiled, data(), Fuse(state=[("layers.0.weight", "int8"), "fp32"]))
    assert_same_bits(everything(first), everything(second))
    assert first.optimizers[0].formats() == second.optimizers[0].formats()


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("monitor", [False, True])
def test_the_users_own_bar_shows_skips_and_scale_and_one_line_ends_it(bar, monitor, caplog):
    shown = bar()
    callbacks = [Fuse(), shown, *([StepMonitor()] if monitor else [])]
    with caplog.at_level("INFO"):
        trainer, _ = train(Four(), one_bad(6, 1, 3), *callbacks, precision=half(1024.0), enable_progress_bar=True)
    assert shown.get_metrics(trainer, trainer.lightning_module) == {"fuse/skips": 2.0, "fuse/loss_scale": 256.0}
    lines = [record.message for record in caplog.records if "optimizer steps" in record.message]
    assert lines == ["4 updates in 6 optimizer steps; skipped: 2 nonfinite; loss scale 256"]


def test_without_a_bar_nothing_is_logged_for_one():
    trainer, _ = train(Four(), one_bad(2), Fuse())
    assert trainer.callback_metrics == {}
