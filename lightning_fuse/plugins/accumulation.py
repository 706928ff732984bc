"""Accumulation windows in Lightning's training loop: where they close, and what waits until they have.

Lightning closes a window every ``accumulate_grad_batches`` batches of an epoch and at the epoch's last batch. The
policies "drop" and "carry" need other closings, and validation and time-based checkpoints should not fall into an open
window. The loop has no public seam for either, so four of its questions are answered here, on the loop object of this
trainer only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lightning_fuse.plugins.lightning_compat import (
    Overrides,
    clearing_call,
    is_last_batch,
    saves_by_time,
    stock_validation_check,
    validates_by_time,
    window_is_open,
)
from lightning_fuse.step import StepContract


class LoopWindows:
    """The windows of one trainer's training loop.

    Args:
        trainer: The trainer; automatic optimization.
        contract: Whose window policy is followed.

    Attributes:
        carried: Batches of the open window that earlier epochs have contributed; only "carry" has any.
    """

    def __init__(self, trainer: Trainer, contract: StepContract) -> None:
        self._trainer = trainer
        self._contract = contract
        self._policy = contract.window.policy
        self._loop = trainer.fit_loop.epoch_loop
        self._validation_is_due = False
        self.carried = 0

    def install(self, overrides: Overrides) -> None:
        """Answers the loop's questions; once per fit.

        Args:
            overrides: Puts everything back when the fit ends.
        """
        loop = self._loop
        if self._policy in ("drop", "carry"):
            overrides.put(loop, "_accumulated_batches_reached", self._reached)
            overrides.put(loop, "_should_accumulate", self._should_accumulate)
            inner = loop.automatic_optimization
            overrides.put(inner, "_make_zero_grad_fn", partial(self._zero_grad_fn, inner))
        if max(self._sizes()) > 1:
            stock_check = stock_validation_check(loop)
            overrides.put(loop, "_should_check_val_fx", partial(self._should_validate, stock_check, loop))
            for callback in self._trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint) and saves_by_time(callback):
                    stock_end = type(callback).on_train_batch_end
                    overrides.put(callback, "on_train_batch_end", partial(self._on_closed, stock_end, callback))

    def check_length(self) -> None:
        """Says at the start what an epoch too short for one window means.

        Raises:
            ValueError: No window of the run can ever close, so that nothing would be trained.
        """
        batches, sizes = self._trainer.num_training_batches, self._sizes()
        size = max(sizes)
        if batches >= size or batches == 0:
            return
        facts = f"accumulate_grad_batches={size}, but an epoch has only {int(batches)} batches"
        if self._policy == "drop" and batches < min(sizes):
            raise ValueError(
                f'{facts}: with window="drop" no step would ever be taken; '
                f'accumulate at most {int(batches)}, or use window="carry" or "mean"'
            )
        if self._policy == "carry":
            epochs = self._trainer.max_epochs
            if epochs is not None and 0 <= epochs * batches + self.carried < min(sizes):
                raise ValueError(
                    f"{facts} and there are {epochs} epochs: no window would ever be full and no step taken; "
                    f'accumulate at most {int(epochs * batches)}, train for more epochs, or use window="mean"'
                )
        elif self._policy == "drop":
            rank_zero_warn(f'{facts}: with window="drop" no step is taken in the epochs of that size')
        else:
            rank_zero_warn(f"{facts}: every window is short (window={self._policy!r})")

    def end_batch(self) -> None:
        """Drops a short last window with the epoch's last batch: validation and checkpoints come after that."""
        if self._policy == "drop" and is_last_batch(self._trainer):
            self._contract.window.close()

    def end_epoch(self) -> None:
        """Carries the open window into the next epoch, or drops it, where the policy says so."""
        if self._policy == "carry":
            ready, first = self._loop.batch_progress.current.ready, self._first
            self.carried = (ready - first) % self._size if ready >= first else self.carried + ready
        elif self._policy == "drop":
            self._contract.window.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know, as plain data."""
        return {"carried": self.carried, "validation_is_due": self._validation_is_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state_dict`` was taken."""
        self.carried, self._validation_is_due = int(state["carried"]), bool(state["validation_is_due"])

    @property
    def _size(self) -> int:
        return self._trainer.accumulate_grad_batches

    @property
    def _first(self) -> int:
        """Batches that the epoch's first window wants of it: one at least, also where its size fell below its count."""
        return max(1, self._size - self.carried)

    def _sizes(self) -> set[int]:
        """Sizes that windows have now and, by Lightning's scheduler of them, will have."""
        now, last, found = self._trainer.current_epoch, self._trainer.max_epochs, set()
        for callback in getattr(self._trainer, "callbacks", ()):
            if isinstance(callback, GradientAccumulationScheduler):
                found.add(callback.get_accumulate_grad_batches(now))
                ahead = (epoch for epoch in callback.epochs if epoch > now and not (last and 0 <= last <= epoch))
                found.update(map(callback.get_accumulate_grad_batches, ahead))
        return found or {self._size}

    def _reached(self) -> bool:
        beyond = self._loop.batch_progress.current.ready - self._first
        return beyond >= 0 and beyond % self._size == 0

    def _should_accumulate(self) -> bool:
        # A short last window is no step: it is dropped with the next window's zero_grad, or goes on.
        return not self._reached()

    def _zero_grad_fn(self, inner: Any, batch_idx: int, optimizer: Any) -> Callable[[], None] | None:
        """Clears gradients where a window begins, which the loop would only look for inside an epoch."""
        before = batch_idx - self._first  # batches of this epoch that came after its first closing
        begins = (batch_idx == 0 and self.carried == 0) or (before >= 0 and before % self._size == 0)
        return clearing_call(inner, batch_idx, optimizer) if begins else None

    def _should_validate(self, stock: Callable[..., bool], loop: Any, data_fetcher: Any) -> bool:
        """Validates where a window has closed: at once, or at the end of the window in which validation fell due."""
        due, closed = stock(loop, data_fetcher), not window_is_open(self._trainer)
        interval = self._interval_in_windows()
        if interval is not None and not self._trainer.should_stop:
            return closed and self._trainer.enable_validation and self._trainer.global_step % interval == 0
        if due and not closed and not is_last_batch(self._trainer):
            self._validation_is_due = True
            return False
        if self._validation_is_due and closed:
            self._validation_is_due = False
            return True
        return due

    def _interval_in_windows(self) -> int | None:
        """Steps between validations, where they are counted over epochs: batches there are shares of full windows."""
        trainer: Any = self._trainer
        if len(self._sizes()) > 1:
            return None  # steps are no measure of batches then
        if trainer.check_val_every_n_epoch is not None or validates_by_time(trainer):
            return None
        batches = trainer.val_check_batch
        return None if batches is None or math.isinf(batches) else max(1, round(batches / self._size))

    def _on_closed(self, stock: Callable[..., None], callback: ModelCheckpoint, *args: Any, **kwargs: Any) -> None:
        """A checkpoint that falls due by time waits until the window has closed."""
        if not window_is_open(self._trainer):
            stock(callback, *args, **kwargs)
