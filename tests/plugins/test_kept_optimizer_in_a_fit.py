"""What a module does during a fit with the optimizer that it kept: it drives ours."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim import lr_scheduler as s

from lightning_fuse import Fuse
from tests.cases import Four, adamw, half, one_bad, sgd, train
from tests.plugins.keeping import MAKERS, VARIED, Keeps, KeepsManual, same_state


@pytest.mark.parametrize("kind", MAKERS)
def test_the_kept_optimizer_drives_ours_in_manual_optimization(kind):
    stock, ours = KeepsManual(MAKERS[kind]), KeepsManual(MAKERS[kind])
    train(stock, one_bad(4))
    trainer, outcomes = train(ours, one_bad(4), Fuse())
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    assert outcomes.of("reason") == ["ok"] * 4
    assert int(trainer.optimizers[0].state[ours.w]["step"]) == 4


def test_the_kept_optimizer_skips_what_is_not_finite():
    ours = KeepsManual()
    _, outcomes = train(ours, one_bad(4, 1), Fuse())
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok", "ok"]
    assert ours.w.tolist() == pytest.approx([0.97] * 4)


def test_everything_else_that_a_module_does_with_it():
    seen = {}

    class Looks(Keeps):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            opt = self.opt
            seen["text"] = repr(opt)
            seen["state"] = opt.state[self.w]
            seen["dict"] = opt.state_dict()
            seen["copy"] = copy.deepcopy(opt)
            seen["pickle"] = pickle.loads(pickle.dumps(opt))
            opt.load_state_dict(opt.state_dict())
            assert isinstance(opt, torch.optim.AdamW)
            opt.register_step_pre_hook(lambda *_: seen.update(hooked=True))
            assert opt.param_groups is self.trainer.optimizers[0].param_groups

    module = Looks()
    train(module, VARIED, Fuse(state=[("w", "bf16")]))
    assert seen["text"].startswith("AdamW (")
    assert seen["state"]["exp_avg"].dtype == torch.bfloat16
    assert seen["dict"]["lightning_fuse"]
    assert seen["hooked"]
    for name in ("copy", "pickle"):
        copied = seen[name]
        assert type(copied) is torch.optim.AdamW
        (p,) = copied.param_groups[0]["params"]
        assert copied.state[p]["exp_avg"].dtype == torch.float32
        p.grad = torch.ones(4)
        copied.step()


def test_a_callback_that_sets_the_groups_anew_reaches_the_modules_optimizer():
    class Exchanges(Keeps):
        def on_train_start(self):
            self.trainer.optimizers[0].param_groups = [dict(g) for g in self.trainer.optimizers[0].param_groups]

        def on_train_batch_start(self, batch, batch_idx):
            self.opt.param_groups[0]["lr"] = 0.5

    module = Exchanges()
    train(module, one_bad(1), Fuse())
    assert module.w.tolist() == pytest.approx([0.5] * 4)
    assert module.opt.param_groups[0]["lr"] == 0.5


def test_two_optimizers_of_a_module_keep_apart():
    class Two(Four):
        def __init__(self):
            super().__init__()
            self.v = torch.nn.Parameter(torch.ones(4))
            self.opts = [adamw([self.w]), sgd([self.v])]
            self.automatic_optimization = False

        def configure_optimizers(self):
            return self.opts

        def training_step(self, batch):
            self.manual_backward(((self.w + 2 * self.v) * batch).sum())
            for opt in self.opts:
                opt.step()
                opt.zero_grad()

    stock, ours = Two(), Two()
    for _ in range(2):
        train(stock, VARIED)
        train(ours, VARIED, Fuse())
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.v, stock.v, rtol=1e-6, atol=1e-7)
    for one, other in zip(ours.opts, stock.opts, strict=True):
        same_state(one, other)


class Closes(Keeps):
    """Steps its kept optimizer with a closure, and its scheduler by hand."""

    def __init__(self):
        super().__init__(adamw, lambda o: s.ExponentialLR(o, 0.5))
        self.automatic_optimization = False
        self.returned = []

    def configure_optimizers(self):
        return self.opt

    def training_step(self, batch):
        def closure():
            self.opt.zero_grad()
            loss = (self.w * batch).sum()
            self.manual_backward(loss)
            return loss.detach()

        self.returned.append(self.opt.step(closure))
        self.sched.step()


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_a_closure_and_a_scheduler_stepped_by_hand(fuse):
    stock, ours = Closes(), Closes()
    for _ in range(2):
        train(stock, VARIED)
        train(ours, VARIED, Fuse(**fuse))
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.returned, stock.returned, rtol=1e-6, atol=1e-6)
    assert ours.sched.get_last_lr() == stock.sched.get_last_lr()
    same_state(ours.opt, stock.opt)


def test_the_kept_optimizer_steps_under_a_loss_scale():
    ours = KeepsManual()
    _, outcomes = train(ours, one_bad(4, 1), Fuse(), precision=half(1024.0))
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok", "ok"]
    assert outcomes.of("loss_scale_after") == [1024.0, 512.0, 512.0, 512.0]
    assert ours.w.tolist() == pytest.approx([0.97] * 4)
