"""ExactResume: a resumed run is the uninterrupted one, bit for bit.

``Trainer(callbacks=[ExactResume()])`` is all. Train 8 steps, or train 4, save, and train 4 in another process: the same
weights, whether the checkpoint was saved after a batch, inside an accumulation window, after a validation, at an
epoch's end, or where ``max_steps`` stopped. Beside what Lightning saves, a checkpoint then holds, per rank:

- the random streams of Python, NumPy and torch, on the CPU and each GPU;
- the place of each training loader in its epoch (a plain ``DataLoader`` is exchanged for one that can be continued, and
  yields the same batches; what cannot be continued is named in a warning);
- the gradients of an open accumulation window, in manual optimization all that are there;
- which parameters are frozen, where a callback freezes and unfreezes them;
- what training metrics have gathered in an epoch that is not over, and the metrics that plateau schedulers look at;
- versions of the packages, and a format version.

All of it is plain data, which ``torch.load(weights_only=True)`` reads. A checkpoint can be resumed without ExactResume,
and one that was saved without it can be resumed with it; then the data and the random streams start anew.

Not restored: a batch during which an exception struck (it is left out), and everything per rank if the number of ranks
changes. Where the loader or the data are not the checkpoint's, a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_map

from lightning_fuse.callbacks.epoch_metrics import EpochMetricsRestorer, capture_epoch_metrics
from lightning_fuse.callbacks.loader_state import loader_shape, loader_states, restore_loaders
from lightning_fuse.callbacks.loader_workers import is_resumable_loader, other_workers
from lightning_fuse.callbacks.loop_position import BETWEEN, LoopPosition, position_of, prepare_loops, settle_loops
from lightning_fuse.callbacks.random_state import capture_random_state, restore_random_state
from lightning_fuse.callbacks.resume_settings import Numbers, hyperparameters, override_keys, schedule_settings, settle
from lightning_fuse.callbacks.trainable_state import capture_trainable, restore_trainable
from lightning_fuse.optim import FusedOptimizer, LoadOptions
from lightning_fuse.plugins import contract_of
from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO
from lightning_fuse.plugins.lightning_compat import (
    add_callback_metrics,
    data_fetcher,
    data_source,
    loaded_checkpoint,
    set_data_source,
    training_loaders,
    window_is_open,
)
from lightning_fuse.records.manifest import installed_versions
from lightning_fuse.registry import unknown_name

FORMAT = 1
ENTRY = "lightning_fuse"  # of a checkpoint: what wrote it
MODES = ("full", "weights_only")


class ExactResume(Callback):
    """Saves and restores what a resume needs to be exact; see the module.

    Where Lightning would read and write checkpoint files itself, ``AtomicCheckpointIO`` does it.

    Args:
        mode: "full", or "weights_only" to take nothing but the model's weights from a checkpoint and begin a training.
        override: Hyperparameters of the optimizer that the configuration decides, not the checkpoint: "lr" or
            "optimizer.lr", ....
        load: What optimizers of ours may do where a checkpoint does not fit exactly (convert formats, rename, start new
            parameters afresh): a ``LoadOptions``, or its arguments; None leaves their ``load_options`` alone.

    Raises:
        ValueError: ``mode`` is unknown, or ``override`` has no effect in it. On resume, if a later version of this
            package saved the checkpoint or ``override`` names no hyperparameter.
    """

    def __init__(self, mode: str = "full", override: Iterable[str] = (), load: Any = None) -> None:
        if mode not in MODES:
            raise ValueError(unknown_name("resume mode", mode, MODES))
        if isinstance(override, str):
            raise TypeError(f"override={override!r}: must be a list of settings; write [{override!r}]")
        self.override = tuple(override)
        if mode == "weights_only" and self.override:
            raise ValueError(
                f"override={list(self.override)} has no effect with weights_only, where every setting is the "
                "configuration's; leave it out"
            )
        self.mode = mode
        self.load = dict(load) if isinstance(load, Mapping) else load
        self._resume: tuple[dict[str, Any], LoopPosition] | None = None
        self._configured: list[list[Numbers]] | None = None  # hyperparameters before a checkpoint is loaded
        self._schedules: list[Numbers] = []  # settings of the schedulers, likewise
        self._metrics: EpochMetricsRestorer | None = None
        self._finished: dict[str, Any] | None = None  # the state at the end of the last fit
        self._warned: set[str] = set()
        self._versions = installed_versions()  # looking them up takes as long as a step

    # Saving.

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds this callback's state; every rank takes part."""
        state = self._finished if self._finished is not None else self._collect(trainer)
        checkpoint["callbacks"][self.state_key] = state
        checkpoint[ENTRY] = {**checkpoint.get(ENTRY, {}), "format_version": FORMAT, "versions": self._versions}
        if any(is_resumable_loader(loader) for loader in training_loaders(trainer)):
            # Stock Lightning could not hand these to the loaders that the user gave it, and would refuse to resume.
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the state for checkpoints that are saved after the loaders are gone."""
        self._finished = self._collect(trainer)

    def _collect(self, trainer: pl.Trainer) -> dict[str, Any]:
        mine = {
            "random": capture_random_state(),
            "loaders": loader_states(trainer),
            "fetched": self._fetched_ahead(trainer),
            "gradients": _open_gradients(trainer),
            "shapes": [loader_shape(loader) for loader in training_loaders(trainer)],
            "epoch_metrics": capture_epoch_metrics(trainer),
        }
        ranks: list[Any] = [mine]
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, mine)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainable = capture_trainable(trainer.lightning_module)
        return {"format": FORMAT, "ranks": ranks, "metrics": metrics, "trainable": trainable}

    def _fetched_ahead(self, trainer: pl.Trainer) -> list[Any]:
        """Batches that Lightning took from a loader of unknown length before it needed them."""
        ahead = list(getattr(data_fetcher(trainer), "batches", []))
        if not _is_plain(ahead):
            self._warn("the batch fetched ahead holds more than tensors and numbers; a resumed run leaves it out")
            return []
        return ahead

    # Restoring.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Sees to it that the training loaders can be continued, and checkpoint files are read and written safely."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        self._configured = None
        if stage == "fit":
            self._note_optimizers(trainer)
            set_data_source(trainer, _ResumableSource(data_source(trainer), self._make_resumable))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the state out of the checkpoint before Lightning restores its loops."""
        self._resume = None
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        if self.mode == "weights_only":
            if trainer.strategy.restore_checkpoint_after_setup:
                raise NotImplementedError(
                    f"weights_only with {type(trainer.strategy).__name__}: it restores everything in one act; "
                    "load the weights in configure_model, or use one device or ddp"
                )
            checkpoint["callbacks"] = {}  # the rest is forgotten in on_fit_start
            return
        _check_version(checkpoint.get(ENTRY, {}).get("format_version", 1))
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            self._warn("the checkpoint was saved without ExactResume; data and random streams start anew")
            return
        _check_version(state["format"])
        fit_loop = checkpoint["loops"]["fit_loop"]
        place = position_of(fit_loop)
        prepare_loops(fit_loop, place)
        self._resume = (state, place)
        fit_loop["state_dict"].pop("combined_loader", None)  # handed to the loaders here, at the right moment

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes the configured hyperparameters, and hands options to the optimizers, before their state is restored.

        Raises:
            ValueError: ``override`` names no hyperparameter.
        """
        if trainer.ckpt_path is None or trainer.strategy.restore_checkpoint_after_setup:
            self._configured = None
            return
        loaded: Any = loaded_checkpoint(trainer)
        loaded.pop("state_dict", None)  # in the model by now; its memory is wanted
        if self.mode == "weights_only":
            loaded.clear()  # Lightning then restores nothing more
            self._configured = None
            return
        if self._configured is None:
            self._configured = hyperparameters(trainer.optimizers)
        self._schedules = schedule_settings([config.scheduler for config in trainer.lr_scheduler_configs])
        override_keys(self.override, self._configured)
        for optimizer in trainer.optimizers:
            if self.load is not None and isinstance(optimizer, FusedOptimizer):
                optimizer.load_options = _load_options(self.load, optimizer.load_options)

    def _note_optimizers(self, trainer: pl.Trainer) -> None:
        """Notes the configured hyperparameters as soon as there are any.

        A finetuning callback sets the checkpoint's groups in its own ``on_fit_start``, which may come before ours.
        """
        if not any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return
        strategy: Any = trainer.strategy

        def setup_optimizers(trainer: pl.Trainer) -> None:
            del strategy.setup_optimizers
            strategy.setup_optimizers(trainer)
            self._configured = hyperparameters(trainer.optimizers)

        strategy.setup_optimizers = setup_optimizers

    def _settle_settings(self, trainer: pl.Trainer) -> None:
        """Lets the configuration win where it shall, and says what differs."""
        if self._configured is None:
            return
        configured, self._configured = self._configured, None
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        override = override_keys(self.override, configured)
        differences = settle(trainer.optimizers, schedulers, configured, override, self._schedules)
        lines = [str(found) for found in differences]
        for optimizer in trainer.optimizers:
            report = getattr(optimizer, "last_load", None)
            if report is not None and not report.exact:
                lines += str(report).split("\n")
        if lines and trainer.is_global_zero:
            print("\n".join(["resumed with settings or state that differ:", *(f"  {line}" for line in lines)]))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts everything back; after this the run goes on as if it had never stopped."""
        self._finished = self._metrics = None
        self._settle_settings(trainer)
        if self._resume is None:
            return
        state, place = self._resume
        self._resume = None
        self._restore_trainable(trainer, pl_module, state.get("trainable"))
        if place is LoopPosition.INSIDE_BATCH:
            self._warn("the checkpoint was saved inside a batch, when an exception struck; that batch is left out")
        # Lightning has none of these after a resume, and a plateau scheduler may ask before the next validation.
        metrics = {name: torch.tensor(value) for name, value in state["metrics"].items()}
        add_callback_metrics(trainer, metrics)
        mine = self._of_this_rank(trainer, state["ranks"])
        if mine is not None:
            _restore_gradients(pl_module, mine["gradients"])
            self._compare_loaders(trainer, mine.get("shapes", []), mine["loaders"])
            if place not in BETWEEN:
                self._metrics = EpochMetricsRestorer(mine.get("epoch_metrics", {}))
            restore_loaders(trainer, mine["loaders"], mine["fetched"], place)
            restore_random_state(mine["random"])
        settle_loops(trainer, place)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Goes on with the averages of the epoch, after Lightning has begun it."""
        if self._metrics is not None:
            self._metrics.restore_modules(pl_module)
            self._metrics.merge_logged(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Goes on with the averages that this batch has begun."""
        if self._metrics is not None:
            self._metrics.merge_logged(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Goes on with what was logged after the last batch; the next epoch is whole."""
        if self._metrics is not None:
            self._metrics.merge_logged(trainer)
            self._metrics = None

    def _restore_trainable(self, trainer: pl.Trainer, module: pl.LightningModule, state: Any) -> None:
        """Freezes and unfreezes as the run had; a callback that does so knows, of anything else the user is told."""
        switched = [] if state is None else restore_trainable(module, state)
        if switched and not any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            self._warn(
                f"requires_grad is that of the checkpoint for {', '.join(switched[:3])}"
                + (f" and {len(switched) - 3} more" if len(switched) > 3 else "")
            )

    def _compare_loaders(self, trainer: pl.Trainer, saved: list[dict[str, Any]], states: list[Any]) -> None:
        """Says where the data are not those of the checkpoint, as far as a loader tells."""
        for before, loader in zip(saved, training_loaders(trainer), strict=False):
            changed = [
                f"{key} is {now}, the checkpoint's was {before[key]}"
                for key, now in loader_shape(loader).items()
                if key in before and before[key] != now
            ]
            if changed:
                self._warn(f"the data do not continue exactly: {'; '.join(changed)}. Its place is kept in batches")
        told = [other_workers(*each) for each in zip(training_loaders(trainer), states, strict=False)]
        if any(told):
            self._warn("; ".join(dict.fromkeys(text for text in told if text)))

    def _of_this_rank(self, trainer: pl.Trainer, ranks: list[Any]) -> dict[str, Any] | None:
        if len(ranks) == trainer.world_size:
            return ranks[trainer.global_rank]
        self._warn(
            f"the checkpoint was saved by {len(ranks)} ranks, this run has {trainer.world_size}; data and random "
            "streams start anew. Resume with the same number of ranks for an exact continuation"
        )
        return None

    # Loaders.

    def _make_resumable(self, loaders: Any) -> Any:
        if isinstance(loaders, CombinedLoader):
            loaders.flattened = [self._make_one_resumable(loader) for loader in loaders.flattened]
            return loaders
        return tree_map(self._make_one_resumable, loaders)

    def _make_one_resumable(self, loader: Any) -> Any:
        try:
            from lightning_fuse.callbacks.resumable_loader import make_resumable
        except ImportError:
            self._warn("training data does not continue mid-epoch: torchdata is missing; pip install 'torchdata>=0.11'")
            return loader
        loader, doubt = make_resumable(loader)
        if doubt is not None:
            self._warn(f"training data may not continue exactly mid-epoch: {doubt}")
        return loader

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            rank_zero_warn(f"ExactResume: {text}")


class _ResumableSource(_DataLoaderSource):
    """Where Lightning asks for training loaders, with a conversion behind it."""

    def __init__(self, source: _DataLoaderSource, convert: Callable[[Any], Any]) -> None:
        super().__init__(source.instance, source.name)
        self._convert = convert

    def dataloader(self) -> Any:
        """The user's loaders, converted."""
        return self._convert(super().dataloader())


def _open_gradients(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """What an open accumulation window has gathered, by parameter name."""
    module = trainer.lightning_module
    # In manual optimization only the module knows what of it a later step will use.
    if module.automatic_optimization:
        if not window_is_open(trainer):
            return {}
        if contract_of(trainer) is not None and trainer.world_size == 1:
            return {}  # the precision plugin keeps them, of one rank
    named = ((name, p.grad) for name, p in module.named_parameters())
    return {name: grad.detach().clone() for name, grad in named if grad is not None and not hasattr(grad, "to_local")}


def _check_version(version: int) -> None:
    if version > FORMAT:
        raise ValueError(
            f"the checkpoint holds ExactResume state of format {version}, this version reads formats up to "
            f"{FORMAT}; resume with the lightning_fuse that saved it"
        )


def _load_options(load: Any, standing: LoadOptions) -> Any:
    # What the arguments leave open stays as it is: NaN moments of a run that steps on them are kept.
    return replace(standing, **{str(key): value for key, value in load.items()}) if isinstance(load, Mapping) else load


def _restore_gradients(module: pl.LightningModule, gradients: dict[str, torch.Tensor]) -> None:
    parameters = dict(module.named_parameters())
    for name, gradient in gradients.items():
        if name in parameters:
            parameters[name].grad = gradient.to(parameters[name].device)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (torch.Tensor, str, int, float, bool)
