"""Where in a run a checkpoint was saved, and putting Lightning's loops back to exactly there.

Lightning 2.6 resumes some places inexactly, and each is mended here:

========================================  ============================================  ==============================
saved                                     stock Lightning, resumed                      here
========================================  ============================================  ==============================
after a batch that validation follows     the validation is left out                    it runs
after the last batch of an epoch          the epoch's end is left out; with a loader    the epoch ends as it would
                                          that resumes, the next epoch is empty         have, the next one is full
at an epoch's end, with ``max_steps``     the epoch ends twice, its number is off       the next epoch begins
at an epoch's end                         the loader starts anew                        its next epoch begins
mid-epoch where ``max_steps`` stopped     the rest of the epoch is left out             it is trained
after any of these                        ``ReduceLROnPlateau`` misses its update       it gets it
========================================  ============================================  ==============================

This is the one module that knows the private names of Lightning's loops. What has no such name in the installed version
is left to Lightning.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl


class LoopPosition(enum.Enum):
    """A place in the training loop at which a checkpoint can be saved."""

    START = "before the first batch"
    EPOCH_START = "at the start of a later epoch"
    INSIDE_BATCH = "inside a batch"
    BATCH_END = "after a batch, before the validation that may follow it"
    VALIDATION_END = "after a batch and its validation"
    CUT = "inside an epoch that max_steps cut short, and its validation"
    EPOCH_END = "at the end of an epoch"
    BETWEEN_EPOCHS = "after an epoch"


# Places after which a new epoch begins, with a new iterator of the loader.
BETWEEN = (LoopPosition.EPOCH_START, LoopPosition.EPOCH_END, LoopPosition.BETWEEN_EPOCHS)


def position_of(fit_loop: Mapping[str, Any]) -> LoopPosition:
    """The place that a saved state of the fit loop belongs to.

    Args:
        fit_loop: ``checkpoint["loops"]["fit_loop"]``.

    Returns:
        The place.
    """
    batch = fit_loop["epoch_loop.batch_progress"]
    current = batch["current"]
    if current["ready"] == 0:
        return LoopPosition.START
    epoch = fit_loop["epoch_progress"]["current"]
    if epoch["started"] < epoch["ready"]:
        return LoopPosition.EPOCH_START
    if epoch["processed"] >= epoch["ready"]:
        if not batch["is_last_batch"]:
            return LoopPosition.CUT
        return LoopPosition.EPOCH_END if epoch["completed"] < epoch["processed"] else LoopPosition.BETWEEN_EPOCHS
    if current["processed"] < current["ready"]:
        return LoopPosition.INSIDE_BATCH
    return LoopPosition.BATCH_END if current["completed"] < current["processed"] else LoopPosition.VALIDATION_END


def prepare_loops(fit_loop: dict[str, Any], place: LoopPosition) -> None:
    """Mends a saved state of the fit loop before Lightning reads it.

    Args:
        fit_loop: ``checkpoint["loops"]["fit_loop"]``; changed in place.
        place: What ``position_of`` said of it.
    """
    if place is LoopPosition.CUT:
        # The epoch has not ended: the rest of it is still to be trained.
        for tracker in fit_loop["epoch_progress"].values():
            tracker["processed"] = tracker["completed"] = tracker["ready"] - 1
    elif place is LoopPosition.EPOCH_START:
        # The epoch begins again, hooks included.
        for tracker in fit_loop["epoch_progress"].values():
            tracker["ready"] = tracker["started"]
    elif place is LoopPosition.INSIDE_BATCH:
        # The loader has handed out this batch and goes on with the next one; so do the loops.
        batch = fit_loop["epoch_loop.batch_progress"]
        for tracker in (batch["total"], batch["current"]):
            tracker["started"] = tracker["processed"] = tracker["completed"] = tracker["ready"]


def settle_loops(trainer: pl.Trainer, place: LoopPosition) -> None:
    """Puts the loops where the checkpoint was saved; called in ``on_train_start``, after Lightning's own attempt.

    Args:
        trainer: Its fit loop has been restored, reset and not yet advanced.
        place: What ``position_of`` said of the checkpoint.
    """
    fit_loop: Any = trainer.fit_loop
    if not hasattr(fit_loop, "_restart_stage"):
        return
    if place in BETWEEN:
        _begin_next_epoch(fit_loop, place)
        return
    if place is LoopPosition.START:
        # The epoch loop would look for a validation to leave out.
        _nothing_to_restart(fit_loop.epoch_loop)
    elif place is LoopPosition.BATCH_END:
        _finish_batch(fit_loop)
    elif place is LoopPosition.VALIDATION_END:
        # The loop, asked whether it is time to validate, then leaves out the validation that was done.
        _answer_validation(fit_loop.epoch_loop, True, times=2)
    elif place is LoopPosition.CUT:
        # Its last batch has been followed by everything that follows a batch.
        _answer_validation(fit_loop.epoch_loop, False, times=1)
    # Only the loop itself, not those inside: it looks at this flag when its epoch ends, and would leave out the
    # plateau schedulers.
    fit_loop._restarting = False


def _begin_next_epoch(fit_loop: Any, place: LoopPosition) -> None:
    epoch_loop = fit_loop.epoch_loop
    trackers = (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current)
    if place is LoopPosition.EPOCH_END:
        # What comes between the hook at an epoch's end and counting the epoch as completed.
        for tracker in trackers:
            tracker.completed = tracker.ready - 1
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    for tracker in trackers:
        tracker.started = tracker.processed = tracker.completed = tracker.ready
    # So that the next epoch begins like any other, with a new iterator of the loader.
    _nothing_to_restart(fit_loop)
    _nothing_to_restart(epoch_loop)


def _nothing_to_restart(loop: Any) -> None:
    """Takes the marks of a restart off a loop and those right inside it."""
    for one in (loop, *(inner for inner in vars(loop).values() if hasattr(inner, "_restarting"))):
        one._restarting = one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        one.reset_restart_stage()


def _finish_batch(fit_loop: Any) -> None:
    """Makes the epoch loop do what it does after a batch: validate if it is time, end the epoch after the last."""
    epoch_loop = fit_loop.epoch_loop
    fetcher, last = fit_loop._data_fetcher, epoch_loop.batch_progress.is_last_batch
    if last:
        # Lightning has just counted the epoch as over, which its validation and its end are not.
        for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            tracker.processed = tracker.completed = tracker.ready - 1
    validate = epoch_loop._should_check_val_fx(fetcher)
    if not (validate or last):
        return
    epoch_loop.batch_progress.increment_completed()
    epoch_loop._restart_stage = "restarted_on_last"
    if validate:
        # The loop takes this for a validation that was interrupted, and runs it before it trains on.
        epoch_loop.val_loop._restart_stage = "restarted_mid_evaluation"
        epoch_loop.val_loop._restarting = False
        _answer_validation(epoch_loop, True, times=2)
    else:
        fetcher.done = True
        epoch_loop._batches_that_stepped += not epoch_loop._should_accumulate()
        _answer_validation(epoch_loop, False, times=1)


def _answer_validation(epoch_loop: Any, answer: bool, times: int) -> None:
    """Settles what the loop is told the next times that it asks whether to validate.

    It asks twice about the batch that it was resumed at, and asking may have consequences: the step contract remembers
    a validation that waits for its window to close.
    """
    name = "_should_check_val_fx"
    own, left = vars(epoch_loop).get(name), [answer] * times

    def answered(data_fetcher: Any) -> bool:
        if left:
            return left.pop()
        if own is None:
            delattr(epoch_loop, name)
        else:
            setattr(epoch_loop, name, own)
        return getattr(epoch_loop, name)(data_fetcher)

    setattr(epoch_loop, name, answered)
