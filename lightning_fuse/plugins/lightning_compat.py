"""Everything private of Lightning that this package touches, under names of our own.

Lightning's loops have no public seam for much of what a step contract and an exact resume need. Each private name is
read or replaced here and nowhere else, and is listed in ``PRIVATE_NAMES`` with what needs it:
``tests/plugins/test_lightning_compat.py`` looks for every one of them in the installed Lightning, and says what breaks
where one has moved.

Paths begin at a Trainer in ``fit``, at a class that ``lightning.pytorch`` exports, or at one of a submodule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.tuner.lr_finder import _LRCallback

PRIVATE_NAMES: dict[str, str] = {
    "trainer.fit_loop.epoch_loop._should_accumulate": "whether a window is open; closing windows by policy",
    "trainer.fit_loop.epoch_loop._accumulated_batches_reached": "closing windows by policy",
    "trainer.fit_loop.epoch_loop._num_ready_batches_reached": "the last batch of an epoch",
    "trainer.fit_loop.epoch_loop._should_check_val_fx": "validation waits for closed windows; resuming around one",
    "trainer.fit_loop.epoch_loop._update_learning_rates": "schedulers follow outcomes that a GPU tells later",
    "trainer.fit_loop.epoch_loop._batches_that_stepped": "the x at which Lightning logs a batch",
    "trainer.fit_loop.epoch_loop._results": "names and sums that are logged in training",
    "trainer.fit_loop.epoch_loop.val_loop._results": "names and sums that are logged in validation",
    "trainer.fit_loop.epoch_loop.automatic_optimization._make_zero_grad_fn": "a window may begin in another epoch",
    "trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward": "a window may begin in another epoch",
    "trainer.fit_loop.epoch_loop.automatic_optimization._on_before_zero_grad": "a window may begin in another epoch",
    "trainer.fit_loop.epoch_loop.automatic_optimization._optimizer_zero_grad": "a window may begin in another epoch",
    "trainer.fit_loop.epoch_loop._restart_stage": "resuming at any place of an epoch",
    "trainer.fit_loop._restarting": "resuming at any place of an epoch",
    "trainer.fit_loop._loaded_from_state_dict": "resuming at any place of an epoch",
    "trainer.fit_loop._resuming_from_checkpoint": "resuming at any place of an epoch",
    "trainer.fit_loop._data_fetcher": "batches that were fetched ahead",
    "trainer.fit_loop._data_source": "putting resumable loaders in the place of plain ones",
    "trainer.fit_loop._combined_loader": "the loaders of training and where they stand",
    "trainer.strategy._lightning_optimizers": "an optimizer that was exchanged while training",
    "trainer._val_check_time_interval": "validation that falls due by time",
    "trainer._checkpoint_connector._loaded_checkpoint": "leaving out of a resume what shall not be restored",
    "trainer._logger_connector._callback_metrics": "metrics that a resumed plateau scheduler asks for",
    "trainer._signal_connector._original_handlers": "whether SIGTERM has another meaning",
    "trainer._accelerator_connector.cluster_environment": "whether SIGTERM asks a scheduler to requeue",
    "callbacks.ModelCheckpoint._train_time_interval": "checkpoints by time wait for closed windows",
    "callbacks.WeightAveraging._average_model": "averages that nothing was averaged into are not shown",
    "plugins.precision.Precision._after_closure": "hooks and clipping between backward and step",
    "core.optimizer._MockOptimizer": "modules without an optimizer",
    "tuner.lr_finder._LRCallback": "a search for a learning rate steps as stock does",
}


class PrivateName(NamedTuple):
    """One private name of Lightning.

    Attributes:
        path: See the module.
        used_for: What breaks without it.
    """

    path: str
    used_for: str


def private_names() -> list[PrivateName]:
    """All of them, in the order of the table."""
    return [PrivateName(path, used_for) for path, used_for in PRIVATE_NAMES.items()]


class Overrides:
    """Methods that are replaced on single objects of a Trainer, and put back when its fit ends.

    Nothing of the class of an object changes, and an object that another Trainer uses later is as it was.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def put(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """Replaces a method of one object.

        Args:
            target: The object; one that has a method of its own by that name already is left alone.
            name: The method's name.
            method: What is called in its place, without ``target``.
        """
        if name not in vars(target):
            setattr(target, name, method)
            self._replaced.append((target, name))

    def undo(self) -> None:
        """Puts every method back; more than once is fine."""
        for target, name in self._replaced:
            vars(target).pop(name, None)
        self._replaced = []


# The training loop.


def window_is_open(trainer: pl.Trainer) -> bool:
    """Whether the batch under way leaves gradients for later ones."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Whether the batch under way is the last one of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def logger_x(trainer: pl.Trainer) -> int:
    """The x at which Lightning logs what belongs to the batch under way."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def stock_validation_check(loop: Any) -> Callable[..., bool]:
    """How an epoch loop's own class answers whether to validate; takes the loop and the fetcher of its batches."""
    check: Callable[..., bool] = type(loop)._should_check_val_fx
    return check


def clearing_call(inner: Any, batch_idx: int, optimizer: Any) -> Callable[[], None] | None:
    """What clears gradients where a window begins, hooks included; None where the loop runs no backward.

    Args:
        inner: The loop of automatic optimization.
        batch_idx: The window's first batch.
        optimizer: Whose gradients.
    """
    if inner._skip_backward:
        return None

    def clear() -> None:
        inner._on_before_zero_grad(optimizer)
        inner._optimizer_zero_grad(batch_idx, optimizer)

    return clear


def step_schedulers(trainer: pl.Trainer) -> None:
    """Asks every step-interval scheduler once more whether it moves."""
    for plateau in (False, True):
        trainer.fit_loop.epoch_loop._update_learning_rates("step", update_plateau_schedulers=plateau)


def logged_results(loop: Any) -> Any:
    """What the epoch loop or its validation loop has been given to log.

    Args:
        loop: ``trainer.fit_loop.epoch_loop``, or its ``val_loop``.

    Returns:
        Lightning's collection: key to result.
    """
    return loop._results


def logged_names(loop: Any, *, on_step: bool) -> set[str]:
    """Names that a loop's own steps and hooks log.

    Args:
        loop: ``trainer.fit_loop.epoch_loop``, or its ``val_loop``.
        on_step: Those logged on steps, or those logged on epochs.
    """
    return set(loop._results.metrics(on_step)["callback"])


def validates_by_time(trainer: pl.Trainer) -> bool:
    """Whether validation falls due by the clock."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def searches_learning_rate(trainer: pl.Trainer) -> bool:
    """Whether Lightning is trying learning rates; it has put its own callback in the place of all others then."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return len(callbacks) == 1 and isinstance(callbacks[0], _LRCallback)


# Loaders.


def data_fetcher(trainer: pl.Trainer) -> Any:
    """What hands the training loop its batches; None before ``fit`` has made it."""
    return trainer.fit_loop._data_fetcher


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders that a trainer trains on, in order; none before they are made."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def data_source(trainer: pl.Trainer) -> Any:
    """What makes the training loaders."""
    return trainer.fit_loop._data_source


def set_data_source(trainer: pl.Trainer, source: Any) -> None:
    """Lets something else make the training loaders."""
    trainer.fit_loop._data_source = source


# Restarts.


def restarts_by_stage(trainer: pl.Trainer) -> bool:
    """Whether this Lightning tells the stages of a restart apart."""
    return hasattr(trainer.fit_loop, "_restart_stage")


def not_restarting(loop: Any) -> None:
    """Takes the mark of a restart off a loop alone; it leaves out plateau schedulers where it ends an epoch with it."""
    loop._restarting = False


def nothing_to_restart(loop: Any) -> None:
    """Takes the marks of a restart off a loop and those right inside it."""
    for one in (loop, *(inner for inner in vars(loop).values() if hasattr(inner, "_restarting"))):
        one._restarting = one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        one.reset_restart_stage()


def should_validate(trainer: pl.Trainer) -> bool:
    """Asks the epoch loop whether it is time to validate."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(data_fetcher(trainer)))


def restart_on_last_batch(trainer: pl.Trainer, *, validates: bool) -> None:
    """Lets the epoch loop do what is left after a batch.

    Args:
        trainer: Resumed at a batch that has been trained on.
        validates: Whether a validation is due; without one, the batch is its epoch's last.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._restart_stage = "restarted_on_last"
    if validates:
        # The loop takes this for a validation that was interrupted, and runs it before it trains on.
        epoch_loop.val_loop._restart_stage = "restarted_mid_evaluation"
        epoch_loop.val_loop._restarting = False
    else:
        data_fetcher(trainer).done = True
        epoch_loop._batches_that_stepped += not epoch_loop._should_accumulate()


def answer_validation(trainer: pl.Trainer, answer: bool, times: int) -> None:
    """Overrides the next checks for validation.

    The loop checks twice for the batch that it was resumed at, and a check may have consequences: the step contract
    remembers a validation that waits for its window to close.

    Args:
        trainer: Resumed.
        answer: What the epoch loop is told.
        times: How often, before it is asked itself again.
    """
    epoch_loop, name = trainer.fit_loop.epoch_loop, "_should_check_val_fx"
    own, left = vars(epoch_loop).get(name), [answer] * times

    def answered(fetcher: Any) -> bool:
        if left:
            return left.pop()
        if own is None:
            delattr(epoch_loop, name)
        else:
            setattr(epoch_loop, name, own)
        return bool(getattr(epoch_loop, name)(fetcher))

    setattr(epoch_loop, name, answered)


# Checkpoints, metrics and signals.


def loaded_checkpoint(trainer: pl.Trainer) -> Any:
    """The checkpoint that a resume is about to restore, to be changed in place; None without one."""
    return trainer._checkpoint_connector._loaded_checkpoint


def add_callback_metrics(trainer: pl.Trainer, metrics: dict[str, Any]) -> None:
    """Makes metrics known to callbacks and schedulers that ask for them by name."""
    trainer._logger_connector._callback_metrics.update(metrics)


def original_handlers(trainer: pl.Trainer) -> Any:
    """Signal handlers from before this fit, by number."""
    return trainer._signal_connector._original_handlers


def tell_sigterm(trainer: pl.Trainer) -> None:
    """Tells the trainer that a SIGTERM came."""
    trainer._signal_connector.received_sigterm = True


def cluster_environment(trainer: pl.Trainer) -> Any:
    """The cluster that the trainer runs in."""
    return trainer._accelerator_connector.cluster_environment


# Callbacks.


def saves_by_time(callback: Callback) -> bool:
    """Whether this is a ModelCheckpoint that saves by the clock."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def averages_taken(callback: Any) -> int | None:
    """How often a weight-averaging callback has averaged; None before it has a model to average into."""
    average = callback._average_model
    return None if average is None else int(average.n_averaged)
