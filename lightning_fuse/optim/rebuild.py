"""An optimizer made to fit a saved state dict, where there is no model at hand: for converters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from glob import escape
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.kernels.kernel import PARAM_DTYPES
from lightning_fuse.optim.adam import FusedAdam
from lightning_fuse.optim.adamw import FusedAdamW
from lightning_fuse.optim.ademamix import FusedAdEMAMix
from lightning_fuse.optim.fused import FusedOptimizer, parameter_names
from lightning_fuse.optim.lamb import FusedLAMB
from lightning_fuse.optim.lars import FusedLARS
from lightning_fuse.optim.lion import FusedLion
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.sgd import FusedSGD
from lightning_fuse.optim.state_foreign import Mapped, in_torchs_words
from lightning_fuse.optim.state_groups import NO_NUMBERS
from lightning_fuse.optim.state_io import ENTRY
from lightning_fuse.registry import unknown_name

CLASSES: dict[str, Callable[..., FusedOptimizer]] = {
    "adamw": FusedAdamW,
    "adam": FusedAdam,
    "sgd": FusedSGD,
    "lion": FusedLion,
    "lars": FusedLARS,
    "lamb": FusedLAMB,
    "ademamix": FusedAdEMAMix,
}


def rebuild(
    state_dict: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    optimizer: str | None = None,
    state: StateSpec | None = None,
    master: str | None = None,
) -> FusedOptimizer:
    """Builds an optimizer with the groups, names and settings of a saved one.

    Args:
        state_dict: Ours, torch's or bitsandbytes'.
        weights: The model's parameters by name. What is not among them gets zeros of the shape that its state has.
        optimizer: A word of ``CLASSES``, where the state dict does not tell.
        state: State formats; None for those that it was saved with, fp32 for other libraries'.
        master: Master weights; None for those that it was saved with.

    Returns:
        The optimizer, with nothing loaded yet. Parameters without names are called ``group.index``.

    Raises:
        ValueError: It cannot be told whose state it is, or the choices do not fit it.
    """
    about = state_dict.get(ENTRY)
    cls = CLASSES[_word(state_dict, optimizer)]
    known = set(_settings(cls))
    words = state_dict if about is not None else in_torchs_words(state_dict, known)
    groups: list[dict[str, Any]] = []
    formats: list[tuple[str, str]] = []
    masters: list[str] = []
    for number, group in enumerate(words["param_groups"]):
        names = parameter_names(group, number)
        named = [
            (name, _parameter(words["state"].get(index, {}), weights.get(name)))
            for name, index in zip(names, group["params"], strict=True)
        ]
        numbers = {key: value for key, value in group.items() if key in known and key not in NO_NUMBERS}
        label = {"name": group["name"]} if "name" in group else {}
        groups.append({**numbers, **label, "params": named})
        if about is not None:
            first = len(formats)
            formats += [(escape(name), about["formats"][first + i]) for i, name in enumerate(names)]
            masters += list(about["masters"][first : first + len(names)])
    kept = next((word for word in masters if word != "none"), "none")
    if kept != "none" and not weights:
        raise ValueError(
            f"the state holds {kept} master weights, which belong to a model's parameters, and there is no model: "
            "convert the checkpoint that holds both"
        )
    plain = all(word == "fp32" for _, word in formats)
    given = state if state is not None else "fp32" if plain else formats
    return cls(groups, state=given, master=kept if master is None else master)


def weights_of(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """A model's tensors by the names that its parameters have, wrappers of torch.compile taken off."""
    return {name.replace("_orig_mod.", ""): value for name, value in state_dict.items() if isinstance(value, Tensor)}


def _word(state_dict: Mapping[str, Any], given: str | None) -> str:
    """Which optimizer a state dict belongs to."""
    found = _found(state_dict)
    if given is not None and given not in CLASSES:
        raise ValueError(unknown_name("optimizer", given, CLASSES))
    if found is None and given is None:
        raise ValueError(
            f"the state dict does not tell which optimizer it is of; known: {', '.join(CLASSES)}; say which one"
        )
    if found is not None and given not in (None, found):
        raise ValueError(f"optimizer={given!r}, and the state is of {found}; leave it out")
    return str(found or given)


def _found(state_dict: Mapping[str, Any]) -> str | None:
    groups, about = state_dict["param_groups"], state_dict.get(ENTRY)
    if about is not None:
        rules = [rule.split("_")[0] for rule in about["rules"]]
        # LARS moves vectors by the rules of SGD.
        return "lars" if any("trust_coefficient" in group for group in groups) else rules[0]
    words = in_torchs_words(state_dict, {"betas", "momentum"})
    if words is not state_dict:
        two = any("exp_avg_sq" in held for held in words["state"].values())
        return "adamw" if two else None
    if all("momentum" in group and "betas" not in group for group in groups):
        return "sgd"
    decoupled = {group.get("decoupled_weight_decay") for group in groups}
    return {frozenset({True}): "adamw", frozenset({False}): "adam"}.get(frozenset(decoupled))


def _settings(cls: Callable[..., FusedOptimizer]) -> dict[str, Any]:
    return {**cls([torch.zeros(1)], lr=0.1).defaults, "initial_lr": None}


def _parameter(held: Mapping[str, Any], weight: Tensor | None) -> Tensor:
    """The model's parameter, or zeros of its shape."""
    if weight is not None and weight.dtype in PARAM_DTYPES:
        return weight
    kept = [held.get(key) for key in ("exp_avg", "momentum_buffer", "exp_avg.codes", "momentum_buffer.codes")]
    shape = next((tuple(tensor.shape) for tensor in kept if isinstance(tensor, (Tensor, Mapped))), (1,))
    return torch.zeros(shape)
