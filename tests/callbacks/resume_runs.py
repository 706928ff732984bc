"""Short runs that are interrupted and resumed, for the tests of everything that must survive a resume.

The task draws from every random stream: dropout, augmentation in the dataset (torch, NumPy, Python), and noise in the
validation. Two runs with equal ``fingerprint`` saw the same batches and hold the same weights, optimizer and streams.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_fuse.callbacks.exact_resume import ExactResume


class Augmented(Dataset):
    """Twenty samples, each blurred by three random streams."""

    def __init__(self, size: int = 20) -> None:
        self.rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.rand(4) + random.random() + float(np.random.rand())


class Net(pl.LightningModule):
    """A small network with dropout that remembers what it saw."""

    def __init__(self, plateau: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.plateau = plateau
        self.seen: list[float] = []
        self.validations: list[tuple[int, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(float(batch.sum()))
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch + torch.rand(4)).square().mean())

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, float(self.trainer.callback_metrics["val/loss"])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if not self.plateau:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


class SaveAt(Checkpoint):
    """Saves once, the given time that a hook is called; Lightning calls it after all other callbacks."""

    def __init__(self, path: Path, hook: str, call: int) -> None:
        self.path, self.hook, self.left = path, hook, call

    def _called(self, trainer: pl.Trainer, hook: str) -> None:
        if hook == self.hook and not trainer.sanity_checking:
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(self.path)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._called(trainer, "start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._called(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._called(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._called(trainer, "epoch")


def scramble_streams(seed: int) -> None:
    """What another process would start with."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def loader(**arguments: Any) -> DataLoader:
    return DataLoader(Augmented(), **{"batch_size": 4, "shuffle": True, **arguments})


def fit(
    module: pl.LightningModule,
    callbacks: list[Any],
    train: Any,
    root: Path,
    *,
    seed: int,
    resume: Path | None = None,
    val: Any = None,
    **trainer: Any,
) -> pl.Trainer:
    """Trains with nothing but the given callbacks; ``seed`` stands for a process of its own."""
    scramble_streams(seed)
    defaults = {
        "accelerator": "cpu",
        "default_root_dir": root,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "num_sanity_val_steps": 1,
    }
    fitted = pl.Trainer(**{**defaults, **trainer, "callbacks": callbacks})
    loaders = {"train_dataloaders": train, "val_dataloaders": val}
    fitted.fit(module, **loaders, ckpt_path=resume, weights_only=None if resume is None else True)
    return fitted


def fingerprint(module: Net, trainer: pl.Trainer) -> dict[str, Any]:
    """Everything that an uninterrupted and a resumed run have in common at their end."""
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "streams": (torch.rand(2).tolist(), random.random(), float(np.random.rand())),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "logged_step": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def same(a: Any, b: Any) -> bool:
    """Equality down to the bits of tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in a if not same(a[key], b[key])]


def resumed_equals_uninterrupted(
    tmp_path: Path,
    place: tuple[str, int],
    *,
    make_loader: Any = None,
    make_module: Any = None,
    first: dict[str, Any] | None = None,
    more: Any = list,
    **trainer: Any,
) -> None:
    """Trains once without and once with an interruption at the place, and compares everything.

    ``first`` holds trainer settings of the interrupted run alone; without them that run goes on to the end, as a run
    does that is killed later than its checkpoint. ``more()`` makes further callbacks of each run.
    """
    if not {"max_epochs", "max_steps"} & trainer.keys():
        trainer["max_epochs"] = 3
    val = trainer.pop("val", None)

    def run(callbacks: list[Any], seed: int, resume: Path | None = None, **own: Any):
        net = (make_module or Net)()
        settings = {**trainer, **own}
        if callable(settings.get("plugins")):
            settings["plugins"] = settings["plugins"]()
        callbacks = [*more(), *callbacks]
        settings["val"] = loader(shuffle=False) if val else None
        return net, fit(net, callbacks, (make_loader or loader)(), tmp_path, seed=seed, resume=resume, **settings)

    whole, whole_trainer = run([ExactResume()], 1)
    expected = fingerprint(whole, whole_trainer)

    path = tmp_path / "saved.ckpt"
    hook, call = place
    cut, cut_trainer = run([ExactResume(), SaveAt(path, hook, call)], 1, **(first or {}))
    if hook == "after":
        cut_trainer.save_checkpoint(path)
    assert path.exists(), "the place was not reached"

    rest, rest_trainer = run([ExactResume()], 2, path)
    assert rest.seen == whole.seen[len(whole.seen) - len(rest.seen) :]
    done = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    assert len(rest.seen) == len(whole.seen) - done
    assert differences(expected, fingerprint(rest, rest_trainer)) == []
    assert rest.validations == whole.validations[len(whole.validations) - len(rest.validations) :]
    missed = [v for v in whole.validations if v not in rest.validations and v not in cut.validations]
    assert missed == []
