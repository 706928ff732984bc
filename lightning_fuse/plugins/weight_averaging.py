"""Lightning's weight-averaging callbacks, following applied updates only.

Stock, they average after every optimizer step, skipped or not, and at the end of training (and around validation, and
in checkpoints) put the average in the place of the weights even if nothing was ever averaged: untrained weights replace
trained ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_fuse.plugins.lightning_compat import Overrides, averages_taken
from lightning_fuse.step import StepContract

# Hooks that show or store the average instead of the weights.
_SHOWING = ("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end", "on_save_checkpoint")


def follow_applied_updates(
    trainer: Trainer, contract: StepContract, catch_up: Callable[[], None], overrides: Overrides
) -> None:
    """Gates the weight-averaging callbacks of a trainer; once per fit.

    Args:
        trainer: The trainer.
        contract: Whose outcomes they follow.
        catch_up: Reads outcomes that were left on a GPU: an average cannot be taken before it is known of what.
        overrides: Puts the callbacks back when the fit ends.
    """
    try:
        from lightning.pytorch.callbacks import WeightAveraging
    except ImportError:  # Lightning before 2.6
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and "should_update" not in vars(callback):
            stock = type(callback).should_update
            overrides.put(callback, "should_update", partial(_should_update, stock, callback, contract, catch_up))
            for hook in _SHOWING:
                overrides.put(callback, hook, partial(_show, getattr(type(callback), hook), callback))


def _should_update(
    stock: Callable[..., bool],
    callback: Callback,
    contract: StepContract,
    catch_up: Callable[[], None],
    step_idx: int | None = None,
    epoch_idx: int | None = None,
) -> bool:
    if step_idx is not None:
        catch_up()
        # Of several optimizers that stepped in a batch any one will do.
        if not any(outcome.applied for outcome in contract.latest):
            return False
    return stock(callback, step_idx=step_idx, epoch_idx=epoch_idx)


def _show(stock: Callable[..., None], callback: Any, *args: Any, **kwargs: Any) -> None:
    if averages_taken(callback) != 0:
        stock(callback, *args, **kwargs)
