"""Which hyperparameters a load takes over: the checkpoint's, unless the user says that one stays as configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_fuse.optim.load_options import LoadOptions
from lightning_fuse.optim.settings import EXECUTION_KEYS, plain_numbers
from lightning_fuse.optim.state_match import Incoming, Matching

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer

# What of a group is not a hyperparameter: who is in it, what it is called, how its state is kept and its step executed.
# All of that comes from the configuration.
NO_NUMBERS = ("params", "param_names", "name", "state", "decoupled_weight_decay", *EXECUTION_KEYS)


class GroupNumbers(NamedTuple):
    """What the groups become, and a list of what differed.

    Attributes:
        groups: Hyperparameters of each group, all checked; what the checkpoint does not know stays as it is.
        taken_over: Differences where the checkpoint wins, in words.
        overridden: Differences where the configuration wins.
    """

    groups: list[dict[str, Any]]
    taken_over: list[str]
    overridden: list[str]


def group_numbers(
    optimizer: FusedOptimizer, saved_groups: Sequence[Mapping[str, Any]], matching: Matching, options: LoadOptions
) -> GroupNumbers:
    """The hyperparameters that each group takes over: those of the saved group that holds its parameters.

    Args:
        optimizer: The optimizer to load into.
        saved_groups: The checkpoint's groups.
        matching: Its parameters, matched.
        options: Which of them stay as they are.

    Returns:
        The hyperparameters, and what differed.

    Raises:
        ValueError: The groups are cut in another way, a value cannot be used, or ``override`` names none of them.
    """
    known = {key for group in optimizer.param_groups for key in group} - set(NO_NUMBERS)
    for key in options.override:
        if key not in known:
            raise ValueError(f"override: unknown hyperparameter {key!r}; known: {', '.join(sorted(known))}")
    result = GroupNumbers([], [], [])
    for number, group in enumerate(optimizer.param_groups):
        saved = _source(number, group, saved_groups, matching, options)
        numbers = dict(group)
        if saved is not None:
            _check_kind(optimizer, group, saved)
            _check_coupling(optimizer, group, saved)
            _note_differences(number, group, saved, options, result)
            numbers.update(_numbers_of(saved, options))
        merged = {key: value for key, value in numbers.items() if key not in NO_NUMBERS}
        optimizer.check_group(plain_numbers(merged))
        result.groups.append(merged)
    return result


def take_over(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Sets a group's hyperparameters; a tensor lr stays the same tensor, which somebody may hold.

    Args:
        group: The group, changed in place.
        numbers: Its new hyperparameters.
    """
    for key, value in numbers.items():
        mine = group.get(key)
        if isinstance(mine, Tensor):
            mine.fill_(float(value))
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value


def _source(
    number: int,
    group: Mapping[str, Any],
    saved_groups: Sequence[Mapping[str, Any]],
    matching: Matching,
    options: LoadOptions,
) -> Mapping[str, Any] | None:
    """The saved group whose numbers one group takes over; None where nothing in it comes from the checkpoint."""
    owner = {index: place for place, saved in enumerate(saved_groups) for index in saved["params"]}
    mine: list[Incoming] = [item for item in matching.incoming if item.group is group and item.index is not None]
    owners = sorted({owner[item.index] for item in mine if item.index is not None})
    if not owners:
        alike = not group["params"] and number < len(saved_groups) and not saved_groups[number]["params"]
        return saved_groups[number] if alike else None
    first = saved_groups[owners[0]]
    for other in owners[1:]:
        one, two = (plain_numbers(_numbers_of(saved_groups[place], options)) for place in (owners[0], other))
        differing = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
        if differing:
            raise ValueError(
                f"the parameters of group {number} here lie in {len(owners)} groups of the checkpoint, whose "
                f"{', '.join(differing)} differ: build the optimizer with the same groups, or keep what is configured "
                f"with override={differing}"
            )
    return first


def _numbers_of(saved: Mapping[str, Any], options: LoadOptions) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key not in NO_NUMBERS and not options.keeps(key)}


def _note_differences(
    number: int, group: Mapping[str, Any], saved: Mapping[str, Any], options: LoadOptions, result: GroupNumbers
) -> None:
    here = plain_numbers({key: value for key, value in group.items() if key not in NO_NUMBERS})
    there = plain_numbers({key: value for key, value in saved.items() if key not in NO_NUMBERS})
    label = f"group {number}" + (f" ({group['name']})" if group.get("name") else "")
    for key in here:
        if key not in there or here[key] == there[key]:
            continue
        if options.keeps(key):
            result.overridden.append(f"{label}: {key} {here[key]} as configured, {there[key]} in the checkpoint")
        else:
            result.taken_over.append(f"{label}: {key} {there[key]} from the checkpoint, configured {here[key]}")


def _check_kind(optimizer: FusedOptimizer, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuses groups of another kind of optimizer: those lack what every relative of this one has.

    torch's RAdam and NAdam keep moments like Adam's, RMSprop a buffer like SGD's; amsgrad and Nesterov tell them apart.
    """
    told_by = ("lr", "weight_decay", "betas", "momentum", "amsgrad", "nesterov")
    missing = [key for key in told_by if key in group and key not in saved]
    if missing:
        raise ValueError(
            f"checkpoint holds no {missing[0]} for a group: it belongs to another optimizer than "
            f"{type(optimizer).__name__}, or is damaged"
        )


def _check_coupling(optimizer: FusedOptimizer, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Torch's Adam and AdamW keep the same tensors; one key of their groups tells how they decay."""
    decoupled, rule = saved.get("decoupled_weight_decay"), optimizer._rule(group).name
    coupled_here = {"adam": True, "adamw": False}.get(rule.removesuffix("_amsgrad"))
    if None in (decoupled, coupled_here) or not saved.get("weight_decay"):
        return
    if decoupled is coupled_here:
        theirs, ours = ("AdamW", "FusedAdam") if decoupled else ("Adam", "FusedAdamW")
        raise ValueError(
            f"checkpoint holds the state of an {theirs}, whose weight decay is not that of {ours}: "
            f"use {'FusedAdamW' if decoupled else 'FusedAdam'}, or set weight_decay to 0 before saving"
        )
