"""Which of a checkpoint's parameters and groups belong to which here: by name where both sides have names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_fuse.optim.settings import EXECUTION_KEYS, plain_numbers

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer


class Incoming(NamedTuple):
    """One parameter of an optimizer beside what a checkpoint holds for it.

    Attributes:
        group: The parameter's group.
        name: Its name here.
        param: The parameter.
        index: Its index in the checkpoint.
        state: What the checkpoint holds; empty where it was never stepped.
    """

    group: Mapping[str, Any]
    name: str
    param: Tensor
    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    state: Mapping[str, Any]


def match(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> list[Incoming]:
    """Finds for every parameter its index in the checkpoint: by name where both have names, else by order.

    Args:
        optimizer: The optimizer to load into.
        state_dict: The checkpoint.

    Returns:
        One entry for each parameter, in the optimizer's order.

    Raises:
        ValueError: The two do not hold the same parameters.
    """
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    indices = [index for group in saved_groups for index in group["params"]]
    members = optimizer._members()
    if all("param_names" in group for group in [*saved_groups, *optimizer.param_groups]):
        saved_names = [name for group in saved_groups for name in group["param_names"]]
        _check_names(saved_names, [name for _, name, _ in members])
        by_name = dict(zip(saved_names, indices, strict=True))
        order = [by_name[name] for _, name, _ in members]
    else:
        sizes = [len(group["params"]) for group in saved_groups]
        here = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here:
            raise ValueError(
                f"checkpoint holds groups of {sizes} parameters, this optimizer has {here}: build it with the same "
                "groups, or pass named parameters on both sides so that they are matched by name"
            )
        order = indices
    return [
        Incoming(group, name, p, index, state.get(index, {}))
        for (group, name, p), index in zip(members, order, strict=True)
    ]


def group_numbers(
    optimizer: FusedOptimizer, saved_groups: Sequence[Mapping[str, Any]], incoming: Sequence[Incoming]
) -> list[dict[str, Any]]:
    """The hyperparameters that each group takes over: those of the saved group that holds its parameters.

    Args:
        optimizer: The optimizer to load into.
        saved_groups: The checkpoint's groups.
        incoming: Its parameters, matched.

    Returns:
        Hyperparameters for each group, all checked; what the checkpoint does not know stays as it is here.

    Raises:
        ValueError: The groups are cut in another way, or a value cannot be used.
    """
    owner = {index: number for number, group in enumerate(saved_groups) for index in group["params"]}
    result = []
    for number, group in enumerate(optimizer.param_groups):
        owners = {owner[item.index] for item in incoming if item.group is group} or {number}
        if len(owners) != 1:
            raise ValueError(
                f"the parameters of one group here lie in {len(owners)} groups of the checkpoint: "
                "build the optimizer with the same groups"
            )
        saved = saved_groups[owners.pop()]
        _check_kind(optimizer, group, saved)
        _check_coupling(optimizer, group, saved)
        left_out = {"params", "param_names", "decoupled_weight_decay", *EXECUTION_KEYS}
        merged = {key: value for key, value in {**group, **saved}.items() if key not in left_out}
        optimizer._check_group(plain_numbers(merged))
        result.append(merged)
    return result


def outline(value: Any) -> str:
    """What a value that is no state dict looks like, in a few words."""
    return f"the keys {_shorten([str(key) for key in value])}" if isinstance(value, Mapping) else type(value).__name__


def _check_kind(optimizer: FusedOptimizer, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuses groups of another kind of optimizer: those lack what every relative of this one has."""
    missing = [key for key in ("lr", "weight_decay", "betas", "momentum") if key in group and key not in saved]
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
            f"checkpoint holds the state of torch's {theirs}, whose weight decay is not that of {ours}: "
            f"use {'FusedAdamW' if decoupled else 'FusedAdam'}, or set weight_decay to 0 before saving"
        )


def _check_names(saved: Sequence[str], here: Sequence[str]) -> None:
    missing, new = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    if missing or new:
        raise ValueError(
            f"checkpoint and optimizer hold different parameters: only in the checkpoint: {_shorten(missing)}; "
            f"only in this optimizer: {_shorten(new)}; build the optimizer for the model that was saved"
        )


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
