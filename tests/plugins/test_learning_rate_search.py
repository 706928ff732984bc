"""Lightning's learning-rate finder with Fuse: stock's suggestion, however the loss diverges, and all is put back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import Four, half, quiet_trainer, train

FUSES = [{}, {"on_nonfinite": "raise"}, {"max_consecutive_skips": 2}, {"optimizer": None}, {"max_updates": 30}]


class Line(Four):
    """A regression whose loss falls, then diverges; ``limit`` makes it NaN from some size of the weights on."""

    def __init__(self, limit=None, once=False):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr, self.limit = torch.nn.Linear(4, 1), 0.01, limit
        self.opt = self.make() if once else None

    def make(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr)

    def training_step(self, batch):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        if self.limit is not None and not float(self.net.weight.detach().abs().max()) < self.limit:
            return loss * float("nan")
        return loss

    def configure_optimizers(self):
        return self.opt or self.make()


def data():
    return DataLoader(torch.randn(400, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)


def search(module, how, folder, fuse=None, **settings):
    callbacks = [] if fuse is None else [Fuse(**fuse)]
    limits = {"max_lr": 10.0, "early_stop_threshold": None}
    if how == "callback":
        finder = LearningRateFinder(num_training_steps=120, **limits)
        trainer = quiet_trainer(finder, *callbacks, max_steps=5, default_root_dir=folder, **settings)
        trainer.fit(module, data())
        return trainer, finder.optimal_lr
    trainer = quiet_trainer(*callbacks, max_steps=5, default_root_dir=folder, **settings)
    found = Tuner(trainer).lr_find(module, data(), num_training=120, **limits)
    trainer.fit(module, data())
    return trainer, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("how", "fuse", "limit"), product(["tuner", "callback"], FUSES, [None, 1.5]))
@pytest.mark.parametrize("once", [False, True])
def test_the_suggestion_and_the_fit_after_it_are_stocks(how, fuse, limit, once, tmp_path):
    stock, ours = Line(limit, once), Line(limit, once)
    _, expected = search(stock, how, tmp_path)
    trainer, found = search(ours, how, tmp_path, fuse)
    finite = [x == x for x in expected.results["loss"]]
    assert (False in finite) == (limit is not None)
    assert [x == x for x in found.results["loss"]] == finite
    assert found.suggestion() == expected.suggestion()
    assert ours.lr == stock.lr
    torch.testing.assert_close(ours.net.weight, stock.net.weight, rtol=1e-5, atol=1e-7)
    contract = contract_of(trainer)
    assert (contract.updates, contract.global_step, trainer.global_step) == (5, 5, 5)
    assert contract.policy.on_nonfinite == fuse.get("on_nonfinite", "skip")
    state = trainer.optimizers[0].state
    assert {int(values["step"]) for values in state.values()} == {5}


@pytest.mark.filterwarnings("ignore")
def test_in_16_mixed_the_search_skips_without_a_limit(tmp_path):
    trainer, _ = search(Line(1.5), "tuner", tmp_path, {"max_consecutive_skips": 2}, precision=half(8.0))
    assert contract_of(trainer).loss_scale.value == 8.0
    assert contract_of(trainer).updates == 5


def test_outside_of_a_search_the_policy_is_the_users():
    class Diverges(Line):
        def training_step(self, batch):
            return super().training_step(batch) * float("nan")

    with pytest.raises(RuntimeError, match="not finite"):
        train(Diverges(), data(), Fuse(on_nonfinite="raise"))
