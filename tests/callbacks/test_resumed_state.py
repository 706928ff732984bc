"""What ExactResume brings back beside weights: epoch averages, open windows, settings; in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins.precision import HalfPrecision

from lightning_fuse import LoadOptions
from lightning_fuse.callbacks import ExactResume, Fuse
from tests.callbacks.resume_runs import (
    Net,
    SaveAt,
    differences,
    fingerprint,
    fit,
    loader,
    resumed_equals_uninterrupted,
)
from tests.cases import half

PRECISIONS = {
    "32-true": (None, {}),
    "16-mixed": (lambda: [half(2.0**18)], {}),
    "bf16-true": (lambda: [HalfPrecision("bf16-true")], {"master": "split"}),
}


class Cast(Net):
    """The same network for data of another dtype than its parameters."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(float(batch.float().sum()))
        return self.net(batch.to(self.net[0].weight.dtype)).float().square().mean()


@pytest.mark.parametrize("place", [("batch", 3), ("epoch", 1)], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8", "int8_bf16"])
def test_case_29_every_state_and_precision(tmp_path: Path, state: str, precision: str, place: tuple[str, int]) -> None:
    """Inside a window and at an epoch's end, with dropout; the run is stopped by max_steps."""
    plugins, more = PRECISIONS[precision]
    settings: dict[str, Any] = {} if plugins is None else {"plugins": plugins}
    resumed_equals_uninterrupted(
        tmp_path,
        place,
        make_module=Cast,
        more=lambda: [Fuse(state=state, **more)],
        accumulate_grad_batches=2,
        max_steps=5,
        **settings,
    )


class Averaged(Net):
    """Logs in every way in which something is averaged over an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.kept = torchmetrics.CatMetric()
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        self.kept.update(loss.detach())
        self.log("mean", loss, on_step=True, on_epoch=True)
        for name in ("sum", "max", "min"):
            self.log(name, loss, on_step=False, on_epoch=True, reduce_fx=name)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("late", float(self.trainer.global_step), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.epochs.append({"kept": float(self.kept.compute().sum())})
        self.kept.reset()


class Epochs(Fuse):
    """Keeps what the epochs came to."""

    def __init__(self) -> None:
        super().__init__(state="int8")
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: Any) -> None:
        metrics = trainer.callback_metrics
        if "metric" in metrics:
            self.seen.append({name: float(metrics[name]) for name in ("mean_epoch", "sum", "max", "min", "metric")})


@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_averages_over_an_epoch_cover_all_of_it(tmp_path: Path, call: int) -> None:
    def run(callbacks: list[Any], seed: int, resume: Path | None = None) -> tuple[Averaged, Epochs]:
        net, epochs = Averaged(), Epochs()
        fit(net, [epochs, *callbacks], loader(), tmp_path, seed=seed, resume=resume, max_epochs=2)
        return net, epochs

    path = tmp_path / "saved.ckpt"
    whole, expected = run([ExactResume()], 1)
    run([ExactResume(), SaveAt(path, "batch", call)], 1)
    rest, epochs = run([ExactResume()], 2, path)
    assert rest.epochs == whole.epochs[-len(rest.epochs) :]
    assert epochs.seen == expected.seen[-len(epochs.seen) :]
    assert len(rest.epochs) == (2 if call < 5 else 1)


class Validated(Net):
    """Averages its validation with an object that is not reset yet when a checkpoint is saved at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.metric.update(self.net(batch).square().mean())
        self.log("val/loss", self.metric)


def test_a_validation_starts_anew_after_a_checkpoint_at_the_end_of_another(tmp_path: Path) -> None:
    settings = {"val": True, "val_check_interval": 2, "max_epochs": 2}
    resumed_equals_uninterrupted(tmp_path, ("validation", 1), make_module=Validated, **settings)


class OpenManual(Net):
    """Manual optimization with a window of three batches, across epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(float(batch.sum()))
        self.manual_backward(self.net(batch).square().mean())
        if (self.trainer.current_epoch * 5 + batch_idx + 1) % 3 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("more", [list, lambda: [Fuse(state="int8")]], ids=["stock", "fuse"])
@pytest.mark.parametrize("place", [("batch", 1), ("batch", 2), ("batch", 3), ("batch", 7), ("epoch", 1)], ids=str)
def test_an_open_window_of_manual_optimization(tmp_path: Path, place: tuple[str, int], more: Any) -> None:
    resumed_equals_uninterrupted(tmp_path, place, make_module=OpenManual, more=more, max_epochs=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.ckpt"
    fit(Net(), [ExactResume(), Fuse(state="fp32"), SaveAt(path, "batch", 4)], loader(), tmp_path, seed=1, max_epochs=1)
    return path


class Other(Net):
    """Another learning rate and decay."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.5, weight_decay=0.3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


@pytest.mark.parametrize("fuse", [{"state": "fp32"}, {"optimizer": None}])
def test_case_28_what_differs_is_listed_with_who_wins(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fuse: dict[str, Any]
) -> None:
    callbacks = [ExactResume(override=["weight_decay"]), Fuse(**fuse)]
    trainer = fit(Other(), callbacks, loader(), tmp_path, seed=1, max_steps=5, resume=saved)
    shown = capsys.readouterr().out
    assert "lr: checkpoint 0.05, configured 0.5; the checkpoint wins" in shown
    assert "weight_decay: checkpoint 0.01, configured 0.3; the configuration wins" in shown
    [group] = trainer.optimizers[0].param_groups
    assert group["weight_decay"] == 0.3
    assert group["lr"] == pytest.approx(0.005)  # StepLR has divided by ten after three steps


def test_case_28_an_overridden_lr_moves_its_schedule_along(saved: Path, tmp_path: Path) -> None:
    callbacks = [ExactResume(override=["optimizer.lr"]), Fuse(state="fp32")]
    trainer = fit(Other(), callbacks, loader(), tmp_path, seed=1, max_steps=7, resume=saved)
    [group] = trainer.optimizers[0].param_groups
    assert group["lr"] == pytest.approx(0.005)  # 0.5, divided twice
    assert trainer.lr_scheduler_configs[0].scheduler.base_lrs == [0.5]


def test_case_28_fresh_state_with_the_checkpoints_weights(saved: Path, tmp_path: Path) -> None:
    class Frozen(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.0)

    net = Frozen()
    callbacks = [ExactResume(mode="weights_only"), Fuse(state="int8")]
    trainer = fit(net, callbacks, loader(), tmp_path, seed=1, max_steps=2, resume=saved)
    weights = torch.load(saved, weights_only=True)["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert (trainer.global_step, len(net.seen)) == (2, 2)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {2}


def test_options_of_a_load_reach_the_optimizer(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [ExactResume(load=LoadOptions(formats="convert")), Fuse(state="int8")]
    trainer = fit(Net(), callbacks, loader(), tmp_path, seed=1, max_steps=5, resume=saved)
    assert "int8" in trainer.optimizers[0].formats().values()
    assert "converted: net.0.weight" in capsys.readouterr().out
    with pytest.raises(ValueError, match="fp32"):  # the control: without the option it is refused
        fit(Net(), [ExactResume(), Fuse(state="int8")], loader(), tmp_path, seed=1, max_steps=5, resume=saved)


def test_unknown_and_ineffective_arguments_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown resume mode 'half'; known: full, weights_only"):
        ExactResume(mode="half")
    with pytest.raises(ValueError, match=r"override=\['lr'\] has no effect with weights_only"):
        ExactResume(mode="weights_only", override=["lr"])
    with pytest.raises(TypeError, match=r"must be a list of settings; write \['lr'\]"):
        ExactResume(override="lr")
    with pytest.raises(ValueError, match=r"unknown setting to override 'lrr'; known: .*optimizer\.lr"):
        fit(Net(), [ExactResume(override=["lrr"]), Fuse()], loader(), tmp_path, seed=1, max_steps=5, resume=saved)


def test_another_batch_size_is_said(saved: Path, tmp_path: Path) -> None:
    net = Net()
    callbacks = [ExactResume(), Fuse(state="fp32")]
    with pytest.warns(UserWarning, match="batch size is 5, the checkpoint's was 4; number of batches is 4"):
        fit(net, callbacks, loader(batch_size=5), tmp_path, seed=1, max_epochs=2, resume=saved)
    assert len(net.seen) == 4  # nothing is left of the epoch that was four batches long


def test_the_same_settings_say_nothing(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for seed, resume in ((1, None), (2, saved)):
        net = Net()
        capsys.readouterr()
        callbacks = [ExactResume(), Fuse(state="fp32")]
        ends.append(fingerprint(net, fit(net, callbacks, loader(), tmp_path, seed=seed, max_epochs=2, resume=resume)))
        assert capsys.readouterr().out == ""
    assert differences(*ends) == []
