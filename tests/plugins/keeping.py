"""Modules that build their optimizer once and keep it, for the tests of whose it is."""

from __future__ import annotations

import torch

from tests.cases import Four, adamw, batches

MAKERS = {
    "adamw": lambda ps: adamw(ps),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
}
VARIED = batches(1.0, -2.0)


class Keeps(Four):
    """Builds optimizer and scheduler once and returns them at every fit."""

    def __init__(self, make=adamw, scheduler=None):
        super().__init__()
        self.opt = make([self.w])
        self.sched = scheduler and scheduler(self.opt)

    def configure_optimizers(self):
        if self.sched is None:
            return self.opt
        return [self.opt], [{"scheduler": self.sched, "interval": "step"}]


class KeepsManual(Keeps):
    """Steps the optimizer that it kept, by hand."""

    def __init__(self, make=adamw):
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch):
        self.opt.zero_grad()
        self.manual_backward((self.w * batch).sum())
        self.opt.step()


def same_state(one, other):
    assert one.param_groups[0].keys() == other.param_groups[0].keys()
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    ours, theirs = one.state_dict()["state"], other.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index in ours:
        assert ours[index].keys() == theirs[index].keys()
        for key in ours[index]:
            torch.testing.assert_close(ours[index][key], theirs[index][key], rtol=2e-6, atol=1e-9)
