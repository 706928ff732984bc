"""What our optimizer takes over from the one that a module configured, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_fuse import Fuse, FusedAdam, FusedAdamW, FusedSGD, param_groups
from tests.cases import Four, adamw, one_bad, quiet_trainer, sgd, train
from tests.cases.manual import Pair

SAME = {
    FusedAdamW: lambda ps: torch.optim.AdamW(ps, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, amsgrad=True),
    FusedAdam: lambda ps: torch.optim.Adam(ps, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, maximize=True),
    FusedSGD: lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=0.8, weight_decay=0.3, nesterov=True),
}

# Keys that decide how torch executes a step, or which class it is.
EXECUTION = {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class Net(Four):
    """Two layers and a norm, in groups of their own; the loss has all their gradients."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 1))

    def training_step(self, batch):
        return self.body(self.w * batch).square().sum()

    def configure_optimizers(self):
        return self._optimizer(self.groups())

    def groups(self):
        return [
            {"params": [self.body[0].weight, self.body[2].weight], "lr": 3e-4},
            {"params": [p for p in self.body.parameters() if p.dim() == 1], "weight_decay": 0.0, "mine": "kept"},
            {"params": [self.w]},
        ]


def weights(module):
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("cls", SAME)
def test_the_same_rule_with_the_same_settings(cls):
    stock, ours = Net(SAME[cls]), Net(SAME[cls])
    train(stock, one_bad(5))
    trainer, _ = train(ours, one_bad(5), Fuse())
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is cls
    for p, q in zip(weights(stock), weights(ours), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5)
    expected = SAME[cls](Net(SAME[cls]).groups())
    for group, reference in zip(optimizer.param_groups, expected.param_groups, strict=True):
        for key in set(reference) - EXECUTION:
            assert group[key] == reference[key]
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["body.0.weight", "body.2.weight"], ["body.0.bias", "body.1.weight", "body.1.bias", "body.2.bias"], ["w"],
    ]  # fmt: skip


def test_adam_told_to_decouple_is_adamw():
    module = Four(lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=5.0, decoupled_weight_decay=True))
    trainer, _ = train(module, one_bad(1), Fuse())
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert module.w.tolist() == pytest.approx([0.94] * 4, abs=1e-6)


@pytest.mark.parametrize(
    ("word", "cls"), [("adamw_fused", FusedAdamW), ("adam_fused", FusedAdam), ("sgd_fused", FusedSGD)]
)
@pytest.mark.parametrize("old", [adamw, sgd, lambda ps: torch.optim.RAdam(ps, lr=0.5)])
def test_another_rule_keeps_lr_and_decay(word, cls, old):
    module = Four(lambda ps: old(ps))
    trainer, _ = train(module, one_bad(1), Fuse(optimizer=word))
    assert type(trainer.optimizers[0]) is cls
    assert trainer.optimizers[0].param_groups[0]["lr"] == old([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    assert (module.w < 1).all()


def test_a_rule_that_is_not_ours_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"RAdam.*Adam, AdamW, SGD.*optimizer=None"):
        train(Four(lambda ps: torch.optim.RAdam(ps)), one_bad(1), Fuse())
    module = Four(lambda ps: torch.optim.RAdam(ps))
    train(module, one_bad(1), Fuse(optimizer=None))


class Subclassed(torch.optim.AdamW):
    """Who knows what it does."""


def test_a_subclass_is_not_taken_for_its_base():
    with pytest.raises(ValueError, match="Subclassed"):
        train(Four(lambda ps: Subclassed(ps)), one_bad(1), Fuse())


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}, {"optimizer": "adamw_fused"}])
def test_lbfgs_is_refused(fuse):
    with pytest.raises(ValueError, match="LBFGS"):
        train(Four(lambda ps: torch.optim.LBFGS(ps)), one_bad(1), Fuse(**fuse))


def test_after_a_refusal_the_optimizer_is_as_it_was():
    class Keeps(Four):
        def configure_optimizers(self):
            self.mine = adamw([self.w], foreach=False)
            return self.mine

    module = Keeps()
    with pytest.raises(ValueError, match="master"):
        train(module, one_bad(1), Fuse(master="split"))
    module.w.grad = torch.ones(4)
    module.mine.step()
    assert module.w.tolist() == pytest.approx([0.99] * 4)


def test_hooks_of_every_kind_go_along():
    seen = []

    def configured(params):
        optimizer = adamw(params)
        optimizer.register_step_pre_hook(lambda *_: seen.append("step_pre"))
        optimizer.register_step_post_hook(lambda *_: seen.append("step_post"))
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save_pre"))
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("save_post"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("load_pre"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("load_post"))
        return optimizer

    trainer, _ = train(Four(configured), one_bad(1), Fuse())
    assert seen == ["step_pre", "step_post"]
    seen.clear()
    (optimizer,) = trainer.optimizers
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save_pre", "save_post", "load_pre", "load_post"]


class Keeps(Four):
    """Builds its optimizer once, keeps it and its group, and returns it at every fit."""

    def __init__(self):
        super().__init__()
        self.mine = adamw([self.w])
        self.group = self.mine.param_groups[0]

    def configure_optimizers(self):
        return self.mine


@pytest.mark.parametrize("through", ["optimizer", "group"])
def test_who_holds_the_old_optimizer_or_its_group_drives_the_new_one(through):
    class Drives(Keeps):
        def on_train_batch_start(self, batch, batch_idx):
            (self.mine.param_groups[0] if through == "optimizer" else self.group)["lr"] = 0.5

    module = Drives()
    train(module, one_bad(1), Fuse())
    assert module.w.tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("fuse", [None, {}, {"state": "int8"}, {"optimizer": None}])
def test_an_optimizer_that_was_built_once_keeps_its_state_over_fits(fuse):
    module = Keeps()
    trainer = quiet_trainer(*([] if fuse is None else [Fuse(**fuse)]))
    trainer.fit(module, one_bad(3))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, one_bad(3))
    assert float(trainer.optimizers[0].state[module.w]["step"]) == 6


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_state_that_the_old_optimizer_has_goes_along(state):
    module, stock = Keeps(), Keeps()
    for one in (module, stock):
        one.w.grad = torch.tensor([1.0, 2.0, -3.0, 4.0])
        one.mine.step()
    trainer, _ = train(module, one_bad(2), Fuse(state=state))
    train(stock, one_bad(2))
    assert int(trainer.optimizers[0].state[module.w]["step"]) == 3
    torch.testing.assert_close(module.w, stock.w, rtol=0, atol=1e-6 if state == "fp32" else 3e-4)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.head)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.head, optimizer, lr=0.1)


@pytest.mark.parametrize("fuse", [None, {}, {"state": "int8"}, {"optimizer": None}])
def test_groups_can_be_added_as_lightnings_finetuning_does(fuse, tmp_path):
    class WithHead(Four):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.head = torch.nn.Linear(4, 160)

        def training_step(self, batch):
            return self.head(self.w * batch).sum()

    module = WithHead()
    before = module.head.weight.detach().clone()
    callbacks = [] if fuse is None else [Fuse(**fuse)]
    trainer, _ = train(module, one_bad(2), *callbacks, Unfreezes(), max_epochs=3)
    (optimizer,) = trainer.optimizers
    assert len(optimizer.param_groups) == 2
    # Two epochs of two updates of 0.1.
    assert (module.head.weight - before).abs().max().item() == pytest.approx(0.4, abs=0.02)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = WithHead()
    more = quiet_trainer(*([] if fuse is None else [Fuse(**fuse)]), Unfreezes(), max_epochs=4)
    more.fit(again, one_bad(2), ckpt_path=tmp_path / "a.ckpt")
    assert [len(group["params"]) for group in more.optimizers[0].param_groups] == [1, 2]
    assert int(more.optimizers[0].state[again.w]["step"]) == 8


def test_patterns_need_to_match_in_one_of_several_optimizers():
    trainer, _ = train(Pair(lambda ps: adamw(ps)), pair_batches(), Fuse(state=[("b", "bf16"), "fp32"]))
    assert [optimizer.formats() for optimizer in trainer.optimizers] == [{"a": "fp32"}, {"b": "bf16"}]
    with pytest.raises(ValueError, match="matches no parameter"):
        train(Pair(lambda ps: adamw(ps)), pair_batches(), Fuse(state=[("c", "bf16"), "fp32"]))


def test_a_format_may_concern_one_of_several_optimizers():
    class Mixed(Pair):
        def configure_optimizers(self):
            return [adamw([self.a]), sgd([self.b])]

    trainer, _ = train(Mixed(), pair_batches(), Fuse(state="bf16"))
    assert trainer.optimizers[0].formats() == {"a": "bf16"}


def pair_batches():
    return torch.utils.data.DataLoader([torch.tensor([1.0, 1.0])], batch_size=None)


def test_named_groups_with_formats_of_their_own():
    class Grouped(Net):
        def groups(self):
            return param_groups(self, weight_decay=0.1, overrides={"body.2.*": {"lr": 1e-4, "state": "fp32"}})

    module = Grouped(adamw)
    del module.idle  # never has a gradient; stays out of the listing
    trainer, _ = train(module, one_bad(2), Fuse(state="int8"))
    (optimizer,) = trainer.optimizers
    formats = optimizer.formats()
    assert formats["body.0.weight"] == "int8"
    assert formats["body.2.weight"] == "fp32"
    assert {group["name"] for group in optimizer.param_groups} >= {"decay", "no_decay"}


def test_our_own_optimizer_in_the_module_is_kept_and_a_contradiction_refused():
    module = Four(lambda ps: FusedAdamW(ps, lr=0.01, state="bf16"))
    trainer, _ = train(module, one_bad(1), Fuse())
    assert trainer.optimizers[0].formats() == {"0.0": "bf16"}
    train(Four(lambda ps: FusedAdamW(ps, state="bf16")), one_bad(1), Fuse(state="bf16"))
    with pytest.raises(ValueError, match="one place"):
        train(Four(lambda ps: FusedAdamW(ps, state="bf16")), one_bad(1), Fuse(state="int8"))
    with pytest.raises(ValueError, match="one place"):
        train(Four(lambda ps: FusedAdamW(ps)), one_bad(1), Fuse(optimizer="sgd_fused"))


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, lambda ps: torch.optim.SGD(ps, lr=0.1)])
def test_sparse_gradients_of_a_kept_optimizer(make):
    class Sparse(Four):
        def __init__(self):
            super().__init__(make)
            self.table = torch.nn.Embedding(4, 2, sparse=True)

        def training_step(self, batch):
            return self.table(torch.tensor([1])).sum() * batch

        def configure_optimizers(self):
            return self._optimizer(list(self.table.parameters()))

    module = Sparse()
    before = module.table.weight.detach().clone()
    _, outcomes = train(module, one_bad(3, 1), Fuse(optimizer=None))
    assert outcomes.of("reason") == ["ok", "nonfinite", "ok"]
    assert outcomes.of("grad_norm")[0] == pytest.approx(2**0.5)
    assert module.table.weight.isfinite().all()
    assert not torch.equal(module.table.weight[1], before[1])
    assert torch.equal(module.table.weight[0], before[0])
