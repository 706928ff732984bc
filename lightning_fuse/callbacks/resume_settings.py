"""Settings of a resumed run that differ from its checkpoint: which there are, and which side wins.

How a step is executed comes from the configuration, everything numerical from the checkpoint. A hyperparameter that is
named in ``override`` comes from the configuration all the same; with the learning rate its schedule moves along, so
that it goes on at the same place of the same curve, scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.optim.settings import EXECUTION_KEYS
from lightning_fuse.registry import unknown_name

# Not hyperparameters, or such that decide which state there is and cannot be exchanged under it.
FIXED = {"params", "param_names", "initial_lr", "name", "state", "decoupled_weight_decay", "amsgrad", *EXECUTION_KEYS}
PREFIX = "optimizer."

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One setting that the configuration and the checkpoint have differently.

    Attributes:
        key: Its name, with that of its group where there are several.
        saved: The checkpoint's value.
        configured: The configuration's.
        wins: "checkpoint" or "configuration".
    """

    key: str
    saved: Any
    configured: Any
    wins: str

    def __str__(self) -> str:
        return f"{self.key}: checkpoint {self.saved}, configured {self.configured}; the {self.wins} wins"


def hyperparameters(optimizers: Sequence[Optimizer]) -> list[list[Numbers]]:
    """The hyperparameters of every group of every optimizer; ``lr`` is the one that schedules start from.

    Args:
        optimizers: Any optimizers of torch's kind.

    Returns:
        Per optimizer and group, name to value.
    """
    return [[_numbers(group) for group in optimizer.param_groups] for optimizer in optimizers]


def override_keys(override: Sequence[str], configured: Sequence[Sequence[Numbers]]) -> list[str]:
    """The names of the groups' settings that shall win over the checkpoint.

    Args:
        override: ``lr`` or ``optimizer.lr``, ….
        configured: What ``hyperparameters`` returned.

    Returns:
        The bare names.

    Raises:
        ValueError: One of them is no hyperparameter of any group.
    """
    known = sorted({key for groups in configured for group in groups for key in group})
    bare = [key.removeprefix(PREFIX) for key in override]
    for given, key in zip(override, bare, strict=True):
        if key not in known:
            raise ValueError(unknown_name("setting to override", given, [PREFIX + name for name in known]))
    return bare


def settle(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    configured: Sequence[Sequence[Numbers]],
    override: Sequence[str],
) -> list[Difference]:
    """Lets the configuration win where it shall, after a checkpoint has been loaded.

    Args:
        optimizers: Loaded.
        schedulers: Theirs, loaded.
        configured: What ``hyperparameters`` returned before.
        override: Bare names of settings.

    Returns:
        Every setting that differs.
    """
    found = []
    for number, (optimizer, wanted) in enumerate(zip(optimizers, configured, strict=True)):
        loaded = hyperparameters([optimizer])[0]
        for index, (group, before) in enumerate(zip(loaded, wanted, strict=True)):
            place = f"optimizer {number}, " * (len(optimizers) > 1) + f"group {index}, " * (len(loaded) > 1)
            for key in sorted(group.keys() & before.keys()):
                if group[key] == before[key]:
                    continue
                wins = "configuration" if key in override else "checkpoint"
                found.append(Difference(f"{place}{key}", group[key], before[key], wins))
                if wins == "configuration":
                    _set(optimizer, schedulers, index, key, group[key], before[key])
    return found


def _numbers(group: Mapping[str, Any]) -> Numbers:
    numbers = {key: _plain(value) for key, value in group.items() if key not in FIXED}
    return {**numbers, "lr": _plain(group.get("initial_lr", group["lr"]))}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _set(optimizer: Optimizer, schedulers: Sequence[Any], index: int, key: str, saved: Any, wanted: Any) -> None:
    group = optimizer.param_groups[index]
    if key != "lr":
        group[key] = wanted
        return
    factor = wanted / saved if saved else None
    mine = [one for scheduler in schedulers for one in _all(scheduler) if getattr(one, "optimizer", None) is optimizer]
    for scheduler in mine:
        for name in ("base_lrs", "_last_lr"):
            rates = getattr(scheduler, name, None)
            if isinstance(rates, list) and index < len(rates):
                rates[index] = wanted if factor is None or name == "base_lrs" else rates[index] * factor
    for name in ("lr", "initial_lr"):
        if name in group:
            value = wanted if factor is None or name == "initial_lr" else group[name] * factor
            if isinstance(group[name], Tensor):
                group[name].fill_(float(value))
            else:
                group[name] = value


def _all(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all(inner)
