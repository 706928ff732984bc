"""Learning-rate schedulers that follow applied updates and the optimizer that took over.

Lightning moves a step-interval scheduler after every optimizer step, skipped or not, and counts its ``frequency`` in
batches. Both go through one expression, ``batch_number % config.frequency == 0``, so a frequency that answers the
question itself is all it takes: Lightning still calls ``lr_scheduler_step``, the user's own where there is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fuse.step import StepContract


class UpdateFrequency(int):
    """A scheduler's frequency, counted in applied updates instead of batches.

    It is the number that the user gave, and as the right operand of ``%`` it answers 0 exactly when an update has been
    applied since it was last asked and the run's count of updates is a multiple of it.
    """

    _contract: StepContract
    _answered: int

    def __new__(cls, frequency: int, contract: StepContract) -> UpdateFrequency:
        """Makes the frequency follow a contract.

        Args:
            frequency: Applied updates from one scheduler step to the next.
            contract: Whose updates are counted.
        """
        made = super().__new__(cls, frequency)
        made._contract = contract
        made._answered = -1
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        # A copy in another trainer or process has no contract to follow: it is the plain number.
        return int, (int(self),)

    def __rmod__(self, batch_number: int) -> int:
        updates, last = self._contract.updates, self._contract.last
        due = last is not None and last.applied and updates % int(self) == 0 and updates != self._answered
        if due:
            self._answered = updates
        return 0 if due else 1


def follow_updates(configs: Iterable[Any], contract: StepContract) -> None:
    """Lets every step-interval scheduler follow applied updates; epoch-interval ones are left alone.

    Args:
        configs: Lightning's ``LRSchedulerConfig`` objects; their ``frequency`` is replaced.
        contract: Whose updates they follow.
    """
    for config in configs:
        if config.interval == "step":
            config.frequency = UpdateFrequency(config.frequency, contract)


def holders(configs: Iterable[Any], optimizer: Optimizer) -> list[tuple[Any, str]]:
    """Every scheduler that drives an optimizer, nested ones too.

    Args:
        configs: Lightning's ``LRSchedulerConfig`` objects.
        optimizer: The optimizer.

    Returns:
        Schedulers and the names of their attributes that hold it.
    """
    seen: set[int] = set()
    return [
        (scheduler, name)
        for config in configs
        for scheduler in _with_nested(config.scheduler, seen)
        for name, value in vars(scheduler).items()
        if value is optimizer
    ]


def _with_nested(scheduler: Any, seen: set[int]) -> Iterator[Any]:
    """A scheduler and all that it holds, in attributes or in lists and tuples (SequentialLR, ChainedScheduler, ...)."""
    if id(scheduler) in seen or not hasattr(scheduler, "__dict__"):
        return
    seen.add(id(scheduler))
    yield scheduler
    for value in list(vars(scheduler).values()):
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(entry, LRScheduler) or (hasattr(entry, "optimizer") and hasattr(entry, "step")):
                yield from _with_nested(entry, seen)


def mark_step(optimizer: Optimizer) -> None:
    """Leaves the marks by which torch's schedulers see that ``optimizer.step`` came before their own."""
    original = type(optimizer).step
    owner = weakref.ref(optimizer)

    @wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = owner()
        assert alive is not None  # a call through the instance keeps it alive
        alive._opt_called = True  # type: ignore[attr-defined]
        return original(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
