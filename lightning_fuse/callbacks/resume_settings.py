"""Settings of a resumed run that differ from its checkpoint: which there are, and which side wins.

How a step is executed comes from the configuration, everything numerical from the checkpoint. A hyperparameter that is
named in ``override`` comes from the configuration all the same; with the learning rate its schedule moves along, so
that it goes on at the same place of the same curve, scaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from lightning_fuse.optim.settings import EXECUTION_KEYS
from lightning_fuse.registry import unknown_name

# Not hyperparameters, or such that decide which state there is and cannot be exchanged under it.
FIXED = {"params", "param_names", "initial_lr", "name", "state", "decoupled_weight_decay", "amsgrad", *EXECUTION_KEYS}
PREFIX = "optimizer."
# Keys of groups that OneCycleLR computes the learning rate from: they move along with "lr".
PEAKS = ("max_lr", "min_lr")
# What torch's schedulers are told, by attribute; the rest of their state is how far they are.
SCHEDULE_SETTINGS = {
    **{key: key for key in ("T_max", "T_0", "T_mult", "eta_min", "gamma", "step_size", "milestones", "factor")},
    **{key: key for key in ("power", "start_factor", "end_factor", "total_iters", "total_steps", "total_size")},
    **{key: key for key in ("step_ratio", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "patience")},
    **{key: key for key in ("threshold", "mode", "threshold_mode", "cooldown", "cycle_momentum", "scale_mode")},
    "_milestones": "milestones",
    "_anneal_func_type": "anneal_strategy",
}

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


def schedule_settings(schedulers: Sequence[Any]) -> list[Numbers]:
    """What torch's schedulers were told: ``T_max``, ``gamma``, ``milestones`` and the like, and where lr starts.

    Args:
        schedulers: Those of a trainer.

    Returns:
        Attribute to value, for each scheduler and those inside it.
    """
    return [
        {key: _plain(value) for key, value in vars(one).items() if key in SCHEDULE_SETTINGS or key == "base_lrs"}
        if isinstance(one, LRScheduler)
        else {}
        for scheduler in schedulers
        for one in _all(scheduler)
    ]


def settle(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    configured: Sequence[Sequence[Numbers]],
    override: Sequence[str],
    schedules: Sequence[Numbers] = (),
) -> list[Difference]:
    """Lets the configuration win where it shall, after a checkpoint has been loaded.

    Args:
        optimizers: Loaded.
        schedulers: Theirs, loaded.
        configured: What ``hyperparameters`` returned before. Groups that the checkpoint has besides are its own.
        override: Bare names of settings.
        schedules: What ``schedule_settings`` returned before.

    Returns:
        Every setting that differs.
    """
    wins_with = {*override, *(PEAKS if "lr" in override else ())}
    found = []
    for number, (optimizer, wanted) in enumerate(zip(optimizers, configured, strict=True)):
        loaded = hyperparameters([optimizer])[0]
        for index, (group, before) in enumerate(zip(loaded, wanted, strict=False)):
            place = f"optimizer {number}, " * (len(optimizers) > 1) + f"group {index}, " * (len(loaded) > 1)
            for key in sorted(group.keys() & before.keys()):
                if group[key] == before[key]:
                    continue
                wins = "configuration" if key in wins_with else "checkpoint"
                found.append(Difference(f"{place}{key}", group[key], before[key], wins))
                if wins == "configuration":
                    _set(optimizer, schedulers, index, key, group[key], before[key])
    found += _settle_schedules(schedulers, schedules, "lr" in override)
    if "lr" in override and found:
        for scheduler in schedulers:
            _recompute(scheduler, schedulers)
    return found


def _settle_schedules(schedulers: Sequence[Any], schedules: Sequence[Numbers], lr_wins: bool) -> list[Difference]:
    found = []
    every = [one for scheduler in schedulers for one in _all(scheduler)]
    for one, before, now in zip(every, schedules, schedule_settings(schedulers), strict=False):
        for key in sorted((before.keys() & now.keys()) - {"base_lrs"}):
            if before[key] == now[key]:
                continue
            mine = lr_wins and key == "max_lrs"
            name = f"{type(one).__name__}.{SCHEDULE_SETTINGS[key]}"
            found.append(Difference(name, now[key], before[key], "configuration" if mine else "checkpoint"))
            if mine:
                one.max_lrs, one.base_lrs = list(before["max_lrs"]), list(before["base_lrs"])
    return found


def _recompute(scheduler: Any, schedulers: Sequence[Any]) -> None:
    """Sets the lr of a schedule that does not compute it from the last one; next to others it is left to them."""
    optimizer = getattr(scheduler, "optimizer", None)
    shared = sum(getattr(one, "optimizer", None) is optimizer for one in schedulers) > 1
    if shared or not isinstance(scheduler, (OneCycleLR, CyclicLR)):
        return
    within, scheduler._get_lr_called_within_step = scheduler._get_lr_called_within_step, True
    rates = scheduler.get_lr()
    scheduler._get_lr_called_within_step = within
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        _set_number(group, "lr", rate)
    scheduler._last_lr = list(rates)


def _numbers(group: Mapping[str, Any]) -> Numbers:
    numbers = {key: _plain(value) for key, value in group.items() if key not in FIXED}
    if "base_momentum" in group:
        # The schedule moves these; how far it is, is no setting.
        numbers.pop("momentum", None)
        if "betas" in numbers:
            numbers["betas"] = numbers["betas"][1:]
    return {**numbers, "lr": _plain(group.get("initial_lr", group["lr"]))}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, Counter):
        return tuple(sorted(value.elements()))
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _set(optimizer: Optimizer, schedulers: Sequence[Any], index: int, key: str, saved: Any, wanted: Any) -> None:
    group = optimizer.param_groups[index]
    if key != "lr":
        moved = key == "betas" and "base_momentum" in group
        _set_number(group, key, (group[key][0], *wanted) if moved else wanted)
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
            _set_number(group, name, wanted if factor is None or name == "initial_lr" else group[name] * factor)


def _set_number(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = value


def _all(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all(inner)
