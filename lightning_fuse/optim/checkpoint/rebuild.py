"""A whole state dict in another format, without the run that it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from glob import escape
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.kernels.kernel import PARAM_DTYPES
from lightning_fuse.optim.catalog import CATALOG
from lightning_fuse.optim.checkpoint.export import to_torch_state
from lightning_fuse.optim.checkpoint.foreign import BnbMoment, from_bitsandbytes
from lightning_fuse.optim.checkpoint.hyperparameters import NON_HYPERPARAMETERS
from lightning_fuse.optim.checkpoint.options import LoadOptions, LoadReport
from lightning_fuse.optim.checkpoint.schema import SavedFormat, saved_formats
from lightning_fuse.optim.fused import FusedOptimizer
from lightning_fuse.optim.group_names import parameter_names
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.registry import unknown_name

CLASSES: dict[str, Callable[..., FusedOptimizer]] = {entry.name: entry.cls for entry in CATALOG}


def convert(
    state_dict: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    *,
    optimizer: str | None = None,
    state: StateSpec | None = None,
    master: str | None = None,
    to_torch: bool = False,
    nonfinite: str = "refuse",
) -> tuple[dict[str, Any], LoadReport]:
    """Converts an optimizer's state dict to other formats, or to torch's own.

    The state is loaded into an optimizer that is built for it, as a run would do that asks for the other format, so a
    conversion here and one at a resume give the same bits.

    Args:
        state_dict: Ours of any version, torch's or bitsandbytes'.
        weights: The model's parameters by name; needed where master weights are read or written.
        optimizer: Whose state it is ("adamw", "sgd", ...), where it does not tell.
        state: State formats; None for those that it was saved with, fp32 for other libraries'.
        master: Master weights; None for those that it was saved with.
        to_torch: Return what torch's optimizer of the same rule loads.
        nonfinite: See ``LoadOptions``.

    Returns:
        The new state dict, and what was converted and lost. A state dict without names stays without.

    Raises:
        ValueError: It cannot be told whose state it is, or it cannot become what is wanted.
    """
    made = rebuild(state_dict, weights or {}, optimizer=optimizer, state=state, master=master)
    made.load_state_dict(dict(state_dict), LoadOptions(formats="convert", nonfinite=nonfinite))
    packed = to_torch_state(made) if to_torch else made.state_dict()
    if not all("param_names" in group for group in state_dict["param_groups"]):
        packed["param_groups"] = [
            {key: value for key, value in group.items() if key != "param_names"} for group in packed["param_groups"]
        ]
    report = made.last_load
    assert report is not None
    return packed, report


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
        optimizer: Whose state it is, where it does not tell.
        state: State formats; None for those that it was saved with, fp32 for other libraries'.
        master: Master weights; None for those that it was saved with.

    Returns:
        The optimizer, with nothing loaded yet. Parameters without names are called ``group.index``.

    Raises:
        ValueError: It cannot be told whose state it is, or the choices do not fit it.
    """
    formats = saved_formats(state_dict)
    cls = CLASSES[_word(state_dict, formats, optimizer)]
    known = _settings(cls)
    words = state_dict if formats else from_bitsandbytes(state_dict, known)
    groups: list[dict[str, Any]] = []
    patterns: list[tuple[str, str]] = []
    for number, group in enumerate(words["param_groups"]):
        names = parameter_names(group, number)
        named = []
        for name, index in zip(names, group["params"], strict=True):
            named.append((name, _parameter(words["state"].get(index, {}), weights.get(name))))
            if index in formats:
                patterns.append((escape(name), formats[index].state))
        numbers = {key: value for key, value in group.items() if key in known and key not in NON_HYPERPARAMETERS}
        label = {"name": group["name"]} if "name" in group else {}
        groups.append({**numbers, **label, "params": named})
    kept = next((saved.master for saved in formats.values() if saved.master != "none"), "none")
    if kept != "none" and not weights:
        raise ValueError(
            f"the state holds {kept} master weights, which belong to a model's parameters, and there is no model: "
            "convert the checkpoint that holds both"
        )
    plain = all(word == "fp32" for _, word in patterns)
    given = state if state is not None else "fp32" if plain else patterns
    return cls(groups, state=given, master=kept if master is None else master)


def weights_of(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """A model's tensors by the names that its parameters have, wrappers of torch.compile taken off."""
    return {name.replace("_orig_mod.", ""): value for name, value in state_dict.items() if isinstance(value, Tensor)}


def _word(state_dict: Mapping[str, Any], formats: Mapping[Any, SavedFormat], given: str | None) -> str:
    """Which optimizer a state dict belongs to."""
    found = _found(state_dict, formats)
    if given is not None and given not in CLASSES:
        raise ValueError(unknown_name("optimizer", given, CLASSES))
    if found is None and given is None:
        raise ValueError(
            f"the state dict does not tell which optimizer it is of; known: {', '.join(CLASSES)}; say which one"
        )
    if found is not None and given not in (None, found):
        raise ValueError(f"optimizer={given!r}, and the state is of {found}; leave it out")
    return str(found or given)


def _found(state_dict: Mapping[str, Any], formats: Mapping[Any, SavedFormat]) -> str | None:
    """Whose state it is, in the word of the command; None where nothing tells."""
    groups = state_dict["param_groups"]
    if formats:
        # LARS moves vectors by the rules of SGD.
        rule = next(iter(formats.values())).rule.split("_")[0]
        return "lars" if any("trust_coefficient" in group for group in groups) else rule
    words = from_bitsandbytes(state_dict, {"betas", "momentum"})
    if words is not state_dict:
        return _found_bitsandbytes(words["state"].values())
    if all("momentum" in group and "betas" not in group for group in groups):
        return "lars" if any("trust_coefficient" in group for group in groups) else "sgd"
    decoupled = {group.get("decoupled_weight_decay") for group in groups}
    return {frozenset({True}): "adamw", frozenset({False}): "adam"}.get(frozenset(decoupled))


def _found_bitsandbytes(states: Iterable[Mapping[str, Any]]) -> str | None:
    """Adam keeps two moments, and decays as AdamW does, AdEMAMix three; Lion and SGD keep one, and do not tell."""
    keys = {key for held in states for key in held}
    return "ademamix" if "exp_avg_slow" in keys else "adamw" if "exp_avg_sq" in keys else None


def _settings(cls: Any) -> dict[str, Any]:
    return {**cls([torch.zeros(1)], lr=0.1).defaults, "initial_lr": None}


def _parameter(held: Mapping[str, Any], weight: Tensor | None) -> Tensor:
    """The model's parameter, or zeros of its shape."""
    if weight is not None and weight.dtype in PARAM_DTYPES:
        return weight
    kept = [held.get(key) for key in ("exp_avg", "momentum_buffer", "exp_avg.codes", "momentum_buffer.codes")]
    shape = next((tuple(tensor.shape) for tensor in kept if isinstance(tensor, (Tensor, BnbMoment))), (1,))
    return torch.zeros(shape)
