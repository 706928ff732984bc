"""Groups added in training: by any caller, in any collection, named as the module names them at that moment."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback

from lightning_fuse import Fuse, FusedAdamW
from tests.cases import Four, adamw, batches, one_bad, quiet_trainer, train


class Grows(Four):
    """Trains ``w`` at first; ``a`` and ``b`` wait, and ``fresh`` is made when it is wanted."""

    def __init__(self, make=adamw):
        super().__init__(make)
        self.a, self.b = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
        self.opt = make([self.w])

    def training_step(self, batch):
        return ((self.w + self.a + self.b + getattr(self, "fresh", 0.0)) * batch).sum() / 4

    def configure_optimizers(self):
        return self.opt


def make_fresh(module):
    module.fresh = torch.nn.Parameter(torch.ones(4, 4))
    return [module.fresh]


COLLECTIONS = {
    "generator": lambda m: (p for p in (m.a, m.b)),
    "one parameter": lambda m: m.a,
    "tuple": lambda m: (m.a, m.b),
    "values": lambda m: {"one": m.a, "two": m.b}.values(),
    "iterator": lambda m: iter([m.b]),
    "fresh": make_fresh,
    "list": lambda m: [m.a],
}
MAKERS = {
    "torch": adamw,
    "named torch": lambda ps: adamw([("w", p) for p in ps]),
    "ours": lambda ps: FusedAdamW([("w", p) for p in ps], lr=0.01, weight_decay=0.0),
}


class Adds(Callback):
    """Adds a group at the second batch of the run."""

    def __init__(self, collection, through):
        self.collection, self.through = COLLECTIONS[collection], through

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1:
            optimizer = module.opt if self.through == "module" else trainer.optimizers[0]
            optimizer.add_param_group({"params": self.collection(module), "lr": 0.1})


@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("through", ["trainer", "module"])
@pytest.mark.parametrize("make", MAKERS)
def test_every_collection_through_every_holder(collection, through, make):
    stock, ours = Grows(), Grows(MAKERS[make])
    train(stock, batches(1, -2, 0.5), Adds(collection, through))
    trainer, _ = train(ours, batches(1, -2, 0.5), Fuse(), Adds(collection, through))
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    names = {p: name for name, p in ours.named_parameters()}
    for group in trainer.optimizers[0].param_groups:
        assert group["param_names"] == [names[p] for p in group["params"]]
    assert [len(g["params"]) for g in ours.opt.param_groups] == [len(g["params"]) for g in stock.opt.param_groups]
    if make == "torch":
        ours.opt.zero_grad()
        ours.a.grad = torch.ones(4, 4)
        ours.opt.step()  # the given back groups have all that torch needs
        assert "param_names" not in ours.opt.param_groups[0]


def test_patterns_count_for_parameters_that_come_later():
    trainer, _ = train(Grows(), one_bad(3), Fuse(state=[("a", "int8"), "bf16"]), Adds("tuple", "trainer"))
    assert trainer.optimizers[0].formats() == {"w": "bf16", "a": "int8", "b": "bf16"}
    with pytest.raises(ValueError, match="matches no parameter"):
        train(Grows(), one_bad(3), Fuse(state=[("c", "int8"), "bf16"]))


def test_a_replaced_layer_leaves_its_name_to_the_new_one():
    class Replaces(Grows):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.w = torch.nn.Parameter(torch.full((4,), 2.0))
                self.opt.add_param_group({"params": [self.w]})

    module = Replaces()
    trainer, _ = train(module, one_bad(3), Fuse(state="bf16"))
    first, second = (group["param_names"] for group in trainer.optimizers[0].param_groups)
    assert second == ["w"]
    assert first != ["w"]
    assert module.w.tolist() == pytest.approx([1.98] * 4, abs=1e-4)


@pytest.mark.parametrize("collection", ["generator", "fresh"])
def test_a_checkpoint_with_added_groups_resumes_by_name(collection, tmp_path):
    class Again(Grows):
        def __init__(self):
            super().__init__()
            self.opt.add_param_group({"params": COLLECTIONS[collection](self), "lr": 0.1})

    first, second = Grows(), Again()
    trainer, _ = train(first, one_bad(3), Fuse(state=[("w", "bf16")]), Adds(collection, "module"))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"][0]
    assert saved["param_groups"][1]["param_names"] == (["a", "b"] if collection == "generator" else ["fresh"])
    more = quiet_trainer(Fuse(state=[("w", "bf16")]), max_epochs=2)
    more.fit(second, one_bad(3), ckpt_path=tmp_path / "a.ckpt")
    steps = {
        name: int(more.optimizers[0].state[p]["step"])
        for name, p in second.named_parameters()
        if p in more.optimizers[0].state
    }
    assert steps == {"w": 6, **dict.fromkeys(saved["param_groups"][1]["param_names"], 5)}


class WithBackbone(Four):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.backbone, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch):
        return self.head(self.backbone(self.w * batch).tanh()).sum()

    def configure_optimizers(self):
        return adamw([self.w, *self.head.parameters()])


@pytest.mark.parametrize("fuse", [{}, {"state": [("backbone.*", "bf16")]}])
def test_backbone_finetuning_trains_as_stock_and_names_the_backbone(fuse):
    def finetuning():
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    stock, ours = WithBackbone(), WithBackbone()
    train(stock, one_bad(2), finetuning(), max_epochs=3)
    trainer, _ = train(ours, one_bad(2), Fuse(**fuse), finetuning(), max_epochs=3)
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if not fuse else 1e-2, atol=1e-6 if not fuse else 1e-3)
    formats = trainer.optimizers[0].formats()
    assert {"backbone.weight", "backbone.bias"} <= formats.keys()
    assert formats["backbone.weight"] == ("bf16" if fuse else "fp32")
