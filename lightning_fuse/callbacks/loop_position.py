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

Where the installed version does not tell the stages of a restart apart, resuming is left to Lightning.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_fuse.plugins.lightning_compat import (
    answer_validation,
    not_restarting,
    nothing_to_restart,
    restart_on_last_batch,
    restarts_by_stage,
    should_validate,
)


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
    if not restarts_by_stage(trainer):
        return
    if place in BETWEEN:
        _begin_next_epoch(trainer, place)
        return
    if place is LoopPosition.START:
        # The epoch loop would look for a validation to leave out.
        nothing_to_restart(trainer.fit_loop.epoch_loop)
    elif place is LoopPosition.BATCH_END:
        _finish_batch(trainer)
    elif place is LoopPosition.VALIDATION_END:
        # The loop, asked whether it is time to validate, then leaves out the validation that was done.
        answer_validation(trainer, True, times=2)
    elif place is LoopPosition.CUT:
        # Its last batch has been followed by everything that follows a batch.
        answer_validation(trainer, False, times=1)
    not_restarting(trainer.fit_loop)


def _begin_next_epoch(trainer: pl.Trainer, place: LoopPosition) -> None:
    fit_loop: Any = trainer.fit_loop
    trackers = (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current)
    if place is LoopPosition.EPOCH_END:
        # What comes between the hook at an epoch's end and counting the epoch as completed.
        for tracker in trackers:
            tracker.completed = tracker.ready - 1
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    for tracker in trackers:
        tracker.started = tracker.processed = tracker.completed = tracker.ready
    # So that the next epoch begins like any other, with a new iterator of the loader.
    nothing_to_restart(fit_loop)
    nothing_to_restart(fit_loop.epoch_loop)


def _finish_batch(trainer: pl.Trainer) -> None:
    """Makes the epoch loop do what it does after a batch: validate if it is time, end the epoch after the last."""
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    last = epoch_loop.batch_progress.is_last_batch
    if last:
        # Lightning has just counted the epoch as over, which its validation and its end are not.
        for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            tracker.processed = tracker.completed = tracker.ready - 1
    validates = should_validate(trainer)
    if not (validates or last):
        return
    epoch_loop.batch_progress.increment_completed()
    restart_on_last_batch(trainer, validates=validates)
    answer_validation(trainer, validates, times=2 if validates else 1)
