"""Schedules of a resumed run: what differs is told, and a configured learning rate moves its peaks along."""

from __future__ import annotations

import pytest
from torch.optim import lr_scheduler as s

from lightning_fuse import Fuse
from lightning_fuse.callbacks.exact_resume import ExactResume
from tests.cases import Four, adamw, one_bad, quiet_trainer, sgd

FUSES = [None, {}, {"optimizer": None}]
PEAKED = {
    "one_cycle": lambda peak: lambda o: s.OneCycleLR(o, peak, total_steps=10),
    "one_cycle_without_momentum": lambda peak: lambda o: s.OneCycleLR(o, peak, total_steps=10, cycle_momentum=False),
    "cyclic": lambda peak: lambda o: s.CyclicLR(o, peak / 10, peak, step_size_up=5, cycle_momentum=False),
    "cyclic_with_momentum": lambda peak: lambda o: s.CyclicLR(o, peak / 10, peak, step_size_up=5),
    "triangular2": lambda peak: (
        lambda o: s.CyclicLR(o, peak / 10, peak, step_size_up=2, mode="triangular2", cycle_momentum=False)
    ),
}


def fit(scheduler, steps, folder, *, fuse=None, resume=False, override=(), make=adamw):
    module = Four(make, scheduler)
    callbacks = [ExactResume(override=override)] + ([] if fuse is None else [Fuse(**fuse)])
    trainer = quiet_trainer(*callbacks, max_steps=steps, max_epochs=-1)
    trainer.fit(module, one_bad(10), ckpt_path=folder / "a.ckpt" if resume else None)
    trainer.save_checkpoint(folder / "a.ckpt")
    return module.lrs


def as_if_always(scheduler, folder, make=adamw):
    (folder / "whole").mkdir()
    return fit(scheduler, 10, folder / "whole", make=make)


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("kind", PEAKED)
@pytest.mark.parametrize("stop", [2, 5])
def test_the_configured_peak_is_what_runs(kind, fuse, stop, tmp_path, capsys):
    fit(PEAKED[kind](0.1), stop, tmp_path, fuse=fuse)
    lrs = fit(PEAKED[kind](0.4), 10, tmp_path, fuse=fuse, resume=True, override=["lr"])
    assert lrs == pytest.approx(as_if_always(PEAKED[kind](0.4), tmp_path)[stop:])
    told = capsys.readouterr().out
    assert "the configuration wins" in told
    assert "the checkpoint wins" not in told


@pytest.mark.parametrize("kind", PEAKED)
def test_without_override_the_checkpoints_peak_runs_and_is_told(kind, tmp_path, capsys):
    fit(PEAKED[kind](0.1), 3, tmp_path, fuse={})
    lrs = fit(PEAKED[kind](0.4), 10, tmp_path, fuse={}, resume=True)
    assert lrs == pytest.approx(as_if_always(PEAKED[kind](0.1), tmp_path)[3:])
    assert "the checkpoint wins" in capsys.readouterr().out


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("kind", PEAKED)
def test_an_unchanged_schedule_has_nothing_to_tell(kind, fuse, tmp_path, capsys):
    def make(params):
        return sgd(params, lr=0.01, momentum=0.9)

    fit(PEAKED[kind](0.1), 3, tmp_path, fuse=fuse, make=make)
    lrs = fit(PEAKED[kind](0.1), 10, tmp_path, fuse=fuse, resume=True, make=make)
    assert lrs == pytest.approx(as_if_always(PEAKED[kind](0.1), tmp_path, make)[3:])
    assert "differ" not in capsys.readouterr().out


TOLD = {
    "T_max: checkpoint 5, configured 8": (lambda n: lambda o: s.CosineAnnealingLR(o, n), 5, 8),
    "step_size: checkpoint 2, configured 4": (lambda n: lambda o: s.StepLR(o, n), 2, 4),
    "milestones: checkpoint (2, 3), configured (4,)": (lambda n: lambda o: s.MultiStepLR(o, n), [2, 3], [4]),
    "gamma: checkpoint 0.5, configured 0.25": (lambda n: lambda o: s.ExponentialLR(o, n), 0.5, 0.25),
    "total_iters: checkpoint 3, configured 6": (lambda n: lambda o: s.LinearLR(o, total_iters=n), 3, 6),
    "patience: checkpoint 3, configured 6": (lambda n: lambda o: s.ReduceLROnPlateau(o, patience=n), 3, 6),
    "total_steps: checkpoint 20, configured 40": (lambda n: lambda o: s.OneCycleLR(o, 0.1, total_steps=n), 20, 40),
    "SequentialLR.milestones: checkpoint (2,), configured (5,)": (
        lambda n: lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [n]), 2, 5,
    ),
    "ExponentialLR.gamma: checkpoint 0.9, configured 0.8": (
        lambda n: lambda o: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, n)]), 0.9, 0.8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("text", TOLD)
def test_what_a_schedule_is_told_differently_is_listed(text, fuse, tmp_path, capsys):
    make, saved, configured = TOLD[text]

    config = {"monitor": "level"} if "patience" in text else {}

    def run(value, steps, resume):
        class Logs(Four):
            def training_step(self, batch):
                self.log("level", 1.0)
                return super().training_step(batch)

        trainer = quiet_trainer(ExactResume(), *([] if fuse is None else [Fuse(**fuse)]), max_steps=steps)
        trainer.fit(Logs(adamw, make(value), **config), one_bad(8), ckpt_path=tmp_path / "a.ckpt" if resume else None)
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    run(saved, 4, False)
    run(saved, 5, True)
    assert "differ" not in capsys.readouterr().out
    run(configured, 6, True)
    assert f"{text}; the checkpoint wins" in capsys.readouterr().out
