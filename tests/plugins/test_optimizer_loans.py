"""An optimizer that a module keeps stays the module's: in the next Trainer, with Fuse or without, and after a fit."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.optim import lr_scheduler as s

from lightning_fuse import Fuse, FusedAdamW
from tests.cases import Four, adamw, batches, one_bad, quiet_trainer, train
from tests.plugins.keeping import MAKERS, VARIED, Keeps, same_state


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("scheduler", [None, lambda o: s.ExponentialLR(o, 0.5), lambda o: s.CosineAnnealingLR(o, 3)])
def test_two_trainers_go_on_with_one_optimizer(kind, shared, scheduler):
    stock, ours = Keeps(MAKERS[kind], scheduler), Keeps(MAKERS[kind], scheduler)
    kept, group, groups = ours.opt, ours.opt.param_groups[0], ours.opt.param_groups
    fuse = Fuse()
    for fit in range(3):
        train(stock, VARIED)
        trainer, _ = train(ours, VARIED, fuse if shared else Fuse())
        torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
        assert int(trainer.optimizers[0].state[ours.w]["step"]) == 2 * (fit + 1)
        assert (ours.opt, id(ours.opt.param_groups), id(groups[0])) == (kept, id(groups), id(group))
        assert type(kept) is type(stock.opt)
        same_state(kept, stock.opt)
        if scheduler is not None:
            assert ours.sched.optimizer is kept
            assert ours.sched.get_last_lr() == stock.sched.get_last_lr()


@pytest.mark.parametrize("order", ["fuse first", "stock first"])
@pytest.mark.parametrize("kind", MAKERS)
def test_trainers_with_and_without_fuse_take_turns(order, kind):
    stock, ours = Keeps(MAKERS[kind]), Keeps(MAKERS[kind])
    for fit in range(4):
        train(stock, VARIED)
        train(ours, VARIED, *([Fuse()] if (fit % 2 == 0) == (order == "fuse first") else []))
        torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    same_state(ours.opt, stock.opt)


def test_int8_state_is_not_rounded_again_between_fits():
    once, twice = Keeps(), Keeps()
    train(once, batches(1.0, -2.0, 0.3, 0.7), Fuse(state=[("w", "int8")]))
    train(twice, batches(1.0, -2.0), Fuse(state=[("w", "int8")]))
    assert twice.opt.state[twice.w]["exp_avg"].dtype == torch.float32  # somebody looks
    trainer, _ = train(twice, batches(0.3, 0.7), Fuse(state=[("w", "int8")]))
    assert torch.equal(once.w, twice.w)
    assert trainer.optimizers[0].formats() == {"w": "int8"}


def test_what_is_done_to_the_optimizer_between_fits_counts():
    stock, ours = Keeps(), Keeps()
    for module, fuse in ((stock, []), (ours, [Fuse()])):
        train(module, VARIED, *fuse)
        module.w.grad = torch.tensor([1.0, -1.0, 2.0, 3.0])
        module.opt.step()
        module.opt.param_groups[0]["lr"] = 0.05
        train(module, VARIED, *fuse)
        module.opt.state[module.w]["exp_avg"].zero_()
        train(module, VARIED, *fuse)
        module.opt.load_state_dict(adamw([module.w]).state_dict())
        train(module, VARIED, *fuse)
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    same_state(ours.opt, stock.opt)


def test_another_format_in_the_next_trainer_takes_the_state_over():
    module, stock = Keeps(), Keeps()
    for spec in ({}, {"state": "bf16"}, {}):
        train(module, VARIED, Fuse(**spec))
        train(stock, VARIED)
    assert float(module.opt.state[module.w]["step"]) == 6
    torch.testing.assert_close(module.w, stock.w, rtol=0, atol=2e-3)


def test_another_rule_gives_the_optimizer_back_without_state():
    module = Keeps()
    train(module, VARIED, Fuse(optimizer="lion_fused"))
    assert type(module.opt) is torch.optim.AdamW
    assert not module.opt.state
    train(module, VARIED)
    again, _ = train(Keeps(), VARIED, Fuse(optimizer="lion_fused"))
    assert int(again.optimizers[0].state[again.lightning_module.w]["step"]) == 2


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_fit_that_fails_gives_back_too(error):
    class Fails(Keeps):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise error("stop")

    module = Fails(adamw, lambda o: s.ExponentialLR(o, 0.5))
    with pytest.raises(error, match="stop"):
        train(module, batches(1, 1, 1), Fuse())
    assert type(module.opt) is torch.optim.AdamW
    assert float(module.opt.state[module.w]["step"]) == 2
    assert module.sched.optimizer is module.opt
    module.w.grad = torch.ones(4)
    module.opt.step()
    assert module.w.isfinite().all()


def test_groups_added_between_fits_are_trained_and_named():
    module = Keeps()
    train(module, VARIED, Fuse(state=[("w", "bf16")]))
    module.extra = torch.nn.Parameter(torch.ones(4))
    module.opt.add_param_group({"params": [module.extra], "lr": 0.5})
    module.training_step = lambda batch: ((module.w + module.extra) * batch).sum()
    trainer, _ = train(module, one_bad(1), Fuse(state=[("w", "bf16")]))
    assert trainer.optimizers[0].formats() == {"w": "bf16", "extra": "fp32"}
    assert module.extra.tolist() == pytest.approx([0.5] * 4)
    assert int(trainer.optimizers[0].state[module.w]["step"]) == 3


def test_the_state_given_back_can_be_copied_and_pickled_and_loaded():
    module, stock = Keeps(), Keeps()
    train(module, VARIED, Fuse())
    train(stock, VARIED)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        same_state(copied.opt, stock.opt)
    fresh = adamw([torch.nn.Parameter(torch.ones(4))])
    fresh.load_state_dict(module.opt.state_dict())
    same_state(fresh, stock.opt)
    assert list(dict(module.opt.state)) == list(module.opt.state) == [module.w]
    assert module.w in module.opt.state


def test_an_optimizer_that_nobody_keeps_is_not_decoded():
    trainer, _ = train(Four(), VARIED, Fuse())
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01


def test_a_kept_rule_has_no_hooks_of_ours_after_a_fit():
    module = Keeps(lambda ps: torch.optim.RAdam(ps))
    for _ in range(2):
        train(module, VARIED, Fuse(optimizer=None))
    assert not module.opt._optimizer_load_state_dict_post_hooks


def test_a_fit_goes_on_in_the_same_trainer():
    stock, ours = Keeps(), Keeps()
    for module, fuse in ((stock, []), (ours, [Fuse()])):
        trainer = quiet_trainer(*fuse)
        trainer.fit(module, VARIED)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, VARIED)
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    same_state(ours.opt, stock.opt)


def test_nothing_of_a_former_trainer_stays_alive():
    module = Keeps()
    trainer, outcomes = train(module, VARIED, Fuse())
    refs = [weakref.ref(one) for one in (trainer.precision_plugin, trainer.optimizers[0], module.opt)]
    del trainer, outcomes
    module.trainer = None
    gc.collect()
    # The module's optimizer goes on with ours.
    assert [ref() is None for ref in refs] == [True, False, False]
    del module
    gc.collect()
    assert [ref() is None for ref in refs] == [True, True, True]


def test_torchs_fused_step_takes_the_state_given_back():
    def make(params):
        return adamw(params, fused=True)

    stock, ours = Keeps(make), Keeps(make)
    for fuses in ([Fuse()], [], [Fuse(state="bf16")], []):
        train(stock, VARIED)
        train(ours, VARIED, *fuses)
        assert ours.opt.param_groups[0]["fused"] is True
    torch.testing.assert_close(ours.w, stock.w, rtol=0, atol=2e-3)


def test_a_fold_that_clears_the_state_begins_anew():
    stock, ours = Keeps(), Keeps()
    for module, fuse in ((stock, []), (ours, [Fuse()])):
        for _ in range(3):
            train(module, VARIED, *fuse)
            module.opt.state.clear()
            with torch.no_grad():
                module.w.fill_(1.0)
        train(module, VARIED, *fuse)
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    same_state(ours.opt, stock.opt)


def test_the_next_trainer_may_have_another_precision():
    module = Keeps()
    train(module, VARIED, Fuse())
    trainer, _ = train(module, VARIED, Fuse(), precision="bf16-true")
    assert module.w.dtype == torch.bfloat16
    assert int(trainer.optimizers[0].state[module.w]["step"]) == 4
    assert float(module.opt.state[module.w]["step"]) == 4


def test_where_one_of_two_is_refused_the_other_is_given_back():
    class Mixed(Four):
        def __init__(self):
            super().__init__()
            self.v = torch.nn.Parameter(torch.ones(4))
            self.opts = [adamw([self.w]), torch.optim.RAdam([self.v])]
            self.automatic_optimization = False

        def configure_optimizers(self):
            return self.opts

    module = Mixed()
    with pytest.raises(ValueError, match="RAdam"):
        train(module, VARIED, Fuse())
    assert [type(opt) for opt in module.opts] == [torch.optim.AdamW, torch.optim.RAdam]
    module.w.grad = torch.ones(4)
    module.opts[0].step()
    assert module.w.tolist() == pytest.approx([0.99] * 4)


def test_averages_of_weights_leave_optimizer_and_scheduler_as_stock_does():
    stock, ours = (Keeps(adamw, lambda o: s.ExponentialLR(o, 0.9)) for _ in range(2))
    for module, fuse in ((stock, []), (ours, [Fuse()])):
        for _ in range(2):
            train(module, VARIED, StochasticWeightAveraging(0.05, swa_epoch_start=1), *fuse, max_epochs=4)
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=1e-7)
    assert ours.sched.optimizer is ours.opt
    assert ours.opt.param_groups[0]["lr"] == stock.opt.param_groups[0]["lr"]
