"""Finetuning callbacks and ExactResume, in either order: what was unfrozen goes on being trained."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback

from lightning_fuse import Fuse
from lightning_fuse.callbacks.exact_resume import ExactResume
from tests.cases import Four, adamw, batches, quiet_trainer


class WithLayers(Four):
    """Trains ``w`` and the head; the backbone with its norm is frozen at first."""

    def __init__(self, lr=0.01):
        super().__init__()
        torch.manual_seed(4)
        self.lr = lr
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh())
        self.head = torch.nn.Linear(6, 1)

    def training_step(self, batch):
        x = torch.arange(12.0).view(3, 4).cos() * self.w * batch
        return self.head(self.backbone(x)).square().sum()

    def configure_optimizers(self):
        return adamw([self.w, *self.head.parameters()], lr=self.lr)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.02, train_bn=False)


class OwnUnfreezing(Callback):
    """As people write it: no groups, every parameter is in the optimizer from the start."""

    def setup(self, trainer, module, stage):
        module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(True)


KINDS = {
    "own groups": Unfreezes,
    "backbone": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
    "in the optimizer": OwnUnfreezing,
}


def fit(kind, first, fuse, epochs, folder, resume=False, lr=0.01, override=()):
    module = WithLayers(lr)
    if kind == "in the optimizer":
        module.configure_optimizers = lambda: adamw(module.parameters(), lr=lr)
    pair = [KINDS[kind](), ExactResume(override=override)]
    callbacks = pair if first == "finetuning" else pair[::-1]
    trainer = quiet_trainer(*callbacks, *([] if fuse is None else [Fuse(**fuse)]), max_epochs=epochs)
    trainer.fit(module, batches(1, -2, 0.5), ckpt_path=folder / "a.ckpt" if resume else None)
    trainer.save_checkpoint(folder / "a.ckpt")
    return module, trainer


@pytest.mark.filterwarnings("ignore:ExactResume. requires_grad is that of the checkpoint")
@pytest.mark.parametrize(
    ("kind", "first", "fuse"),
    product(KINDS, ["finetuning", "resume"], [None, {}, {"state": "int8"}, {"optimizer": None}]),
)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resume_before_and_past_the_unfreezing_is_the_whole_run(kind, first, fuse, stop, tmp_path):
    whole, one = fit(kind, first, fuse, 4, tmp_path)
    fit(kind, first, fuse, stop, tmp_path)
    resumed, two = fit(kind, first, fuse, 4, tmp_path, resume=True)
    for (name, p), q in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad, name
        assert torch.equal(p, q), name
    for mine, groups in zip(two.optimizers[0].param_groups, one.optimizers[0].param_groups, strict=True):
        assert [p.shape for p in mine["params"]] == [p.shape for p in groups["params"]]
        assert mine["lr"] == groups["lr"]
    assert resumed.backbone[1].track_running_stats == whole.backbone[1].track_running_stats


@pytest.mark.parametrize("first", ["finetuning", "resume"])
@pytest.mark.parametrize("fuse", [None, {}])
def test_settings_are_the_checkpoints_and_what_differs_is_told(first, fuse, tmp_path, capsys):
    fit("own groups", first, fuse, 3, tmp_path)
    _, trainer = fit("own groups", first, fuse, 4, tmp_path, resume=True, lr=0.05)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.01, 0.02]
    assert "lr: checkpoint 0.01, configured 0.05; the checkpoint wins" in capsys.readouterr().out


@pytest.mark.parametrize("first", ["finetuning", "resume"])
@pytest.mark.parametrize("fuse", [None, {}])
def test_an_override_reaches_the_group_that_is_configured(first, fuse, tmp_path):
    fit("own groups", first, fuse, 3, tmp_path)
    _, trainer = fit("own groups", first, fuse, 4, tmp_path, resume=True, lr=0.05, override=["lr"])
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.05, 0.02]


def test_who_froze_other_parameters_is_told(tmp_path):
    fit("in the optimizer", "resume", {}, 3, tmp_path)
    with pytest.warns(UserWarning, match=r"requires_grad is that of the checkpoint for backbone\.0\.weight"):
        fit("in the optimizer", "resume", {}, 4, tmp_path, resume=True)
