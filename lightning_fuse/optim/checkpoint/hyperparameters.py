"""Which hyperparameters a load takes over: the checkpoint's, unless the user says that one stays as configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.optim.checkpoint.options import LoadOptions
from lightning_fuse.optim.group_cache import plain_numbers
from lightning_fuse.optim.settings import EXECUTION_KEYS

# What of a group is not a hyperparameter: who is in it, what it is called, how its state is kept and its step executed.
# All of that comes from the configuration.
NON_HYPERPARAMETERS = frozenset(
    ("params", "param_names", "name", "state", "master", "kernel", "decoupled_weight_decay", *EXECUTION_KEYS)
)
# Keys that every relative of an optimizer has. torch's RAdam and NAdam keep moments like Adam's, RMSprop a buffer like
# SGD's; amsgrad and Nesterov tell them apart.
_TELLING = ("lr", "weight_decay", "betas", "momentum", "amsgrad", "nesterov")

CheckGroup = Callable[[Mapping[str, Any]], None]


class GroupChanges(NamedTuple):
    """What the groups become, and a list of what differed.

    Attributes:
        groups: Hyperparameters of each group, all checked; what the checkpoint does not know stays as it is.
        differing: Whether any of them is not what the group has now.
        taken_over: Differences where the checkpoint wins, in words.
        overridden: Differences where the configuration wins.
    """

    groups: list[dict[str, Any]]
    differing: list[bool]
    taken_over: list[str]
    overridden: list[str]


def merge_groups(
    specs: Sequence[ParamSpec],
    groups: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    indices: Sequence[Any],
    check_group: CheckGroup,
    owner: str,
    options: LoadOptions,
) -> GroupChanges:
    """The hyperparameters that each group will have: those of the saved group that holds its parameters.

    Args:
        specs: The parameters here, in the order of the groups.
        groups: The groups here; left as they are.
        saved_groups: The checkpoint's groups.
        indices: For each parameter its index in the checkpoint, or None.
        check_group: Refuses hyperparameters that no update can be computed from.
        owner: The optimizer's class, for errors.
        options: Which of them stay as they are.

    Returns:
        The hyperparameters, and what differed.

    Raises:
        ValueError: The groups are cut in another way, a value cannot be used, or ``override`` names none of them.
    """
    if options.override:
        known = {key for group in groups for key in group} - NON_HYPERPARAMETERS
        for key in options.override:
            if key not in known:
                raise ValueError(f"override: unknown hyperparameter {key!r}; known: {', '.join(sorted(known))}")
    group_of: dict[Any, int] = {}
    for number, saved in enumerate(saved_groups):
        group_of.update(dict.fromkeys(saved["params"], number))
    result, start = GroupChanges([], [], [], []), 0
    for number, group in enumerate(groups):
        end = start + len(group["params"])
        [index for index in indices[start:end] if index is not None]
        owners = sorted({group_of[index] for index in indices[start:end] if index is not None})
        source = _source(number, group, saved_groups, owners, options)
        merged = {key: value for key, value in group.items() if key not in NON_HYPERPARAMETERS}
        if source is not None and end > start:
            _check_kind(group, source, specs[start].rule.name, owner)
        numbers = {key: value for key, value in (source or {}).items() if key not in NON_HYPERPARAMETERS}
        here, there = plain_numbers(merged), plain_numbers(numbers)
        differs = not there.items() <= here.items()
        if differs:
            _note_differences(number, group, here, there, options, result)
            merged.update((key, value) for key, value in numbers.items() if not options.keeps(key))
            check_group(plain_numbers(merged))
        result.groups.append(merged)
        result.differing.append(differs)
        start = end
    return result


def update_group(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Sets a group's hyperparameters; a tensor lr stays the same tensor, which somebody may hold.

    Args:
        group: The group, changed in place.
        numbers: Its new hyperparameters; their tensors are copied.
    """
    for key, value in numbers.items():
        mine = group.get(key)
        if isinstance(mine, Tensor):
            if mine is not value:
                mine.fill_(float(value))
        elif mine is not value:
            group[key] = deepcopy(value)


def _source(
    number: int,
    group: Mapping[str, Any],
    saved_groups: Sequence[Mapping[str, Any]],
    owners: Sequence[int],
    options: LoadOptions,
) -> Mapping[str, Any] | None:
    """The saved group whose numbers one group takes over; None where nothing in it comes from the checkpoint."""
    if not owners:
        alike = not group["params"] and number < len(saved_groups) and not saved_groups[number]["params"]
        return saved_groups[number] if alike else None
    first = saved_groups[owners[0]]
    for other in owners[1:]:
        one, two = (_numbers_of(saved_groups[place], options) for place in (owners[0], other))
        differing = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
        if differing:
            raise ValueError(
                f"the parameters of group {number} here lie in {len(owners)} groups of the checkpoint, whose "
                f"{', '.join(differing)} differ: build the optimizer with the same groups, or keep what is configured "
                f"with override={differing}"
            )
    return first


def _numbers_of(saved: Mapping[str, Any], options: LoadOptions) -> dict[str, Any]:
    return plain_numbers(
        {key: value for key, value in saved.items() if key not in NON_HYPERPARAMETERS and not options.keeps(key)}
    )


def _note_differences(
    number: int,
    group: Mapping[str, Any],
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    options: LoadOptions,
    result: GroupChanges,
) -> None:
    label = f"group {number}" + (f" ({group['name']})" if group.get("name") else "")
    for key in here:
        if key not in there or here[key] == there[key]:
            continue
        if options.keeps(key):
            result.overridden.append(f"{label}: {key} {here[key]} as configured, {there[key]} in the checkpoint")
        else:
            result.taken_over.append(f"{label}: {key} {there[key]} from the checkpoint, configured {here[key]}")


def _check_kind(group: Mapping[str, Any], saved: Mapping[str, Any], rule: str, owner: str) -> None:
    """Refuses groups of another kind of optimizer: those lack what every relative of this one has.

    torch's Adam and AdamW have the same; one key of their groups tells how they decay.
    """
    for key in _TELLING:
        if key in group and key not in saved:
            raise ValueError(
                f"checkpoint holds no {key} for a group: it belongs to another optimizer than {owner}, or is damaged; "
                "load one of the same kind"
            )
    decoupled = saved.get("decoupled_weight_decay")
    coupled_here = {"adam": True, "adamw": False}.get(rule.removesuffix("_amsgrad"))
    if saved.get("weight_decay") and decoupled is not None and decoupled is coupled_here:
        theirs, ours = ("AdamW", "FusedAdam") if decoupled else ("Adam", "FusedAdamW")
        raise ValueError(
            f"checkpoint holds the state of an {theirs}, whose weight decay is not that of {ours}: "
            f"use {'FusedAdamW' if decoupled else 'FusedAdam'}, or set weight_decay to 0 before saving"
        )
