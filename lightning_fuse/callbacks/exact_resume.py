"""ExactResume: a resumed run is the uninterrupted one, bit for bit.

``Trainer(callbacks=[ExactResume()])`` is all. Train 8 steps, or train 4, save, and train 4 in another process: the same
weights, whether the checkpoint was saved after a batch, inside an accumulation window, after a validation, at an
epoch's end, or where ``max_steps`` stopped. Beside what Lightning saves, a checkpoint then holds, per rank:

- the random streams of Python, NumPy and torch, on the CPU and each GPU;
- the place of each training loader in its epoch (a plain ``DataLoader`` is exchanged for one that can be continued, and
  yields the same batches; what cannot be continued is named in a warning);
- the gradients of an open accumulation window;
- the metrics that plateau schedulers look at.

All of it is plain data, which ``torch.load(weights_only=True)`` reads. A checkpoint can be resumed without ExactResume,
and one that was saved without it can be resumed with it; then the data and the random streams start anew.

Not restored: training metrics that are averaged over an epoch (they cover the part since the resume), a batch during
which an exception struck (it is left out), gradients that manual optimization accumulates, and everything per rank if
the number of ranks changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_map

from lightning_fuse.callbacks.loop_position import BETWEEN, Place, place_of, prepare_loops, settle_loops
from lightning_fuse.callbacks.random_state import capture_random_state, kept_random_state, restore_random_state
from lightning_fuse.plugins import contract_of

FORMAT = 1


class ExactResume(Callback):
    """Saves and restores what a resume needs to be exact; see the module.

    Raises:
        ValueError: On resume, if a later version of this package saved the checkpoint.
    """

    def __init__(self) -> None:
        self._resume: tuple[dict[str, Any], Place] | None = None
        self._finished: dict[str, Any] | None = None  # the state at the end of the last fit
        self._warned: set[str] = set()

    # Saving.

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds this callback's state; every rank takes part."""
        state = self._finished if self._finished is not None else self._collect(trainer)
        checkpoint["callbacks"][self.state_key] = state
        if any(_is_ours(loader) for loader in _loaders(trainer)):
            # Stock Lightning could not hand these to the loaders that the user gave it, and would refuse to resume.
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the state for checkpoints that are saved after the loaders are gone."""
        self._finished = self._collect(trainer)

    def _collect(self, trainer: pl.Trainer) -> dict[str, Any]:
        mine = {
            "random": capture_random_state(),
            "loaders": _loader_states(trainer),
            "fetched": self._fetched_ahead(trainer),
            "gradients": _open_gradients(trainer),
        }
        ranks: list[Any] = [mine]
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, mine)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"format": FORMAT, "ranks": ranks, "metrics": metrics}

    def _fetched_ahead(self, trainer: pl.Trainer) -> list[Any]:
        """Batches that Lightning took from a loader of unknown length before it needed them."""
        ahead = list(getattr(trainer.fit_loop._data_fetcher, "batches", []))
        if not _is_plain(ahead):
            self._warn("the batch fetched ahead holds more than tensors and numbers; a resumed run leaves it out")
            return []
        return ahead

    # Restoring.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Sees to it that the training loaders can be continued."""
        if stage == "fit":
            source = trainer.fit_loop._data_source
            trainer.fit_loop._data_source = _ResumableSource(source, self._make_resumable)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the state out of the checkpoint before Lightning restores its loops."""
        self._resume = None
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            self._warn("the checkpoint was saved without ExactResume; data and random streams start anew")
            return
        if state["format"] > FORMAT:
            raise ValueError(
                f"the checkpoint holds ExactResume state of format {state['format']}, this version reads formats up to "
                f"{FORMAT}; resume with the lightning_fuse that saved it"
            )
        fit_loop = checkpoint["loops"]["fit_loop"]
        place = place_of(fit_loop)
        prepare_loops(fit_loop, place)
        self._resume = (state, place)
        fit_loop["state_dict"].pop("combined_loader", None)  # handed to the loaders here, at the right moment

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts everything back; after this the run goes on as if it had never stopped."""
        self._finished = None
        if self._resume is None:
            return
        state, place = self._resume
        self._resume = None
        if place is Place.INSIDE_BATCH:
            self._warn("the checkpoint was saved inside a batch, when an exception struck; that batch is left out")
        # Lightning has none of these after a resume, and a plateau scheduler may ask before the next validation.
        metrics = {name: torch.tensor(value) for name, value in state["metrics"].items()}
        trainer._logger_connector._callback_metrics.update(metrics)
        mine = self._of_this_rank(trainer, state["ranks"])
        if mine is not None:
            _restore_gradients(pl_module, mine["gradients"])
            _restore_loaders(trainer, mine["loaders"], mine["fetched"], place)
            restore_random_state(mine["random"])
        settle_loops(trainer, place)

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


def _loaders(trainer: pl.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _is_ours(loader: Any) -> bool:
    return type(loader).__name__ == "ResumableLoader"


def _is_torchdata(loader: Any) -> bool:
    return any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__)


def _loader_states(trainer: pl.Trainer) -> list[Any]:
    # A loader that was not iterated yet begins to be when it is asked, and draws its seeds.
    with kept_random_state():
        return [loader.state_dict() if isinstance(loader, _Stateful) else None for loader in _loaders(trainer)]


def _restore_loaders(trainer: pl.Trainer, states: list[Any], fetched: list[Any], place: Place) -> None:
    """Positions the training loaders; what is drawn meanwhile is for the caller to undo."""
    fit_loop: Any = trainer.fit_loop
    between = place in BETWEEN
    for loader, state in zip(_loaders(trainer), states, strict=False):
        if state is None or not hasattr(loader, "load_state_dict"):
            continue
        # Lightning tells a distributed sampler its epoch only after it has made the iterator.
        _set_sampler_epoch(loader, fit_loop.epoch_progress.current.ready - 1)
        if between and _is_torchdata(loader):
            # At its epoch's last batch, so that the samplers' generators stand where the next epoch begins. Marked as
            # not finished, or the loader would begin that epoch itself, and then Lightning another one.
            loader.load_state_dict({**state, "_iterator_finished": False})
            iter(loader)
        else:
            loader.load_state_dict(state)
    if between or not any(state is not None for state in states):
        return
    fetcher = fit_loop._data_fetcher
    ahead = getattr(fetcher, "prefetch_batches", 0)
    fetcher.prefetch_batches = 0
    iter(fetcher)
    fetcher.prefetch_batches = ahead
    if fetched:
        fetcher.batches = fetched


def _open_gradients(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """What an open accumulation window has gathered, by parameter name."""
    module = trainer.lightning_module
    if not module.automatic_optimization or not trainer.fit_loop._should_accumulate():
        return {}
    if contract_of(trainer) is not None and trainer.world_size == 1:
        return {}  # the precision plugin keeps them, of one rank
    named = ((name, p.grad) for name, p in module.named_parameters())
    return {name: grad.detach().clone() for name, grad in named if grad is not None and not hasattr(grad, "to_local")}


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
