"""Optimizer state to and from plain data: every bit of every tensor, matched by parameter name.

torch's own ``load_state_dict`` casts every state tensor to its parameter's dtype, integers included, and takes even the
way a step is executed from the checkpoint. Here everything numerical comes from the checkpoint, tensors keep their
dtype, and a checkpoint that does not fit is refused before anything is changed.

The state dict is torch's (``state`` by index, ``param_groups``) with one entry more::

    "lightning_fuse": {"format_version": 1, "rules": [name per parameter], "formats": [...], "masters": [...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fuse.formats.format import Place
from lightning_fuse.optim.settings import EXECUTION_KEYS

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer

ENTRY = "lightning_fuse"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Incoming:
    """One parameter of this optimizer beside what the checkpoint holds for it.

    Attributes:
        group: The parameter's group here.
        name: Its name here.
        param: The parameter.
        index: Its index in the checkpoint.
        state: What the checkpoint holds; empty where it was never stepped.
    """

    group: Mapping[str, Any]
    name: str
    param: Tensor
    index: int
    state: Mapping[str, Any]


def describe(optimizer: FusedOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Adds to torch's state dict what its tensors are.

    Args:
        optimizer: Whose state it is.
        packed: What ``torch.optim.Optimizer.state_dict`` returned.

    Returns:
        The same dict with the entry ``lightning_fuse``.
    """
    members = optimizer._members()
    # torch keeps steps as float32 and its own optimizers cannot count up an integer; float32 is exact up to 2^24.
    packed["state"] = {
        index: {**held, "step": held["step"].to(torch.float32)} if int(held.get("step", 2**24)) < 2**24 else held
        for index, held in packed["state"].items()
    }
    packed[ENTRY] = {
        "format_version": FORMAT_VERSION,
        "rules": [optimizer._rule_of(group, p).name for group, _, p in members],
        "formats": [optimizer._format(group, name, p).name for group, name, p in members],
        "masters": [optimizer._master(p).name for _, _, p in members],
    }
    return packed


@torch.no_grad()
def load(optimizer: FusedOptimizer, state_dict: Any) -> None:
    """Loads a state dict into an optimizer; see ``FusedOptimizer.load_state_dict``.

    Args:
        optimizer: The optimizer to load into.
        state_dict: Ours, or that of torch's optimizer of the same rule.

    Raises:
        TypeError: It is not a state dict.
        ValueError: It does not fit; nothing has been changed then.
    """
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            f"not an optimizer's state dict: expected the keys 'state' and 'param_groups', got {_outline(state_dict)}"
        )
    incoming = _match(optimizer, state_dict)
    about = state_dict.get(ENTRY)
    if about is None:
        tensors = [_from_torch(optimizer, item) for item in incoming]
    else:
        _check_version(about)
        tensors = [_from_ours(optimizer, item, about) for item in incoming]
    groups = _numbers_of(optimizer, state_dict["param_groups"], incoming)
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        optimizer._check_group(numbers)
        group.update(numbers)
    optimizer._reset_caches()
    optimizer._ensure_state()
    for item, held in zip(incoming, tensors, strict=True):
        for key, value in held.items():
            optimizer.state[item.param][key].copy_(value)
        if not held:
            _restart(optimizer, item)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _match(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> list[Incoming]:
    """Finds for every parameter here its index in the checkpoint: by name where both have names, else by order."""
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    indices = [index for group in saved_groups for index in group["params"]]
    members = optimizer._members()
    named = all("param_names" in group for group in [*saved_groups, *optimizer.param_groups])
    if named:
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


def _check_names(saved: Sequence[str], here: Sequence[str]) -> None:
    missing, new = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    if missing or new:
        raise ValueError(
            f"checkpoint and optimizer hold different parameters: only in the checkpoint: {_shorten(missing)}; "
            f"only in this optimizer: {_shorten(new)}; build the optimizer for the model that was saved"
        )


def _from_ours(optimizer: FusedOptimizer, item: Incoming, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Checks one parameter's state of our own making against what this optimizer keeps, tensor by tensor."""
    position = item.index
    here = {
        "rules": optimizer._rule_of(item.group, item.param).name,
        "formats": optimizer._format(item.group, item.name, item.param).name,
        "masters": optimizer._master(item.param).name,
    }
    words = {"rules": "optimizer", "formats": "state", "masters": "master"}
    for kind, word in here.items():
        saved = about[kind][position]
        if saved != word:
            raise ValueError(
                f"checkpoint holds {words[kind]} {saved!r} for {item.name}, this run asks for {word!r}: "
                f"resume with {words[kind]}={saved}"
            )
    if not item.state:
        return {}
    wanted = {r.key: r for r in optimizer._requests(item.group, item.name, item.param)}
    if set(wanted) != set(item.state):
        raise ValueError(
            f"checkpoint holds {sorted(item.state)} for {item.name}, expected {sorted(wanted)}: it is damaged"
        )
    for key, request in wanted.items():
        tensor = item.state[key]
        if key == "step":
            tensor = torch.as_tensor(tensor).to(torch.int64)
        got = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got != (request.shape, request.dtype):
            raise ValueError(
                f"checkpoint holds {key} of {item.name} as {got}, expected {(request.shape, request.dtype)}: "
                "the parameter has another shape than when it was saved"
            )
    return dict(item.state)


def _from_torch(optimizer: FusedOptimizer, item: Incoming) -> dict[str, Tensor]:
    """Encodes the state of torch's optimizer of the same rule into the format that this one keeps."""
    rule = optimizer._rule_of(item.group, item.param)
    if not item.state:
        return {}
    for moment in rule.moments:
        tensor = item.state.get(moment.name)
        if not isinstance(tensor, Tensor) or tensor.shape != item.param.shape:
            raise ValueError(
                f"checkpoint holds {sorted(item.state)} for {item.name}, the rule {rule.name} needs {moment.name} "
                f"of shape {tuple(item.param.shape)}: it belongs to another optimizer or model"
            )
    # torch's SGD keeps no step; with a momentum buffer at least one update has been applied.
    step = int(item.state.get("step", 1))
    held = {"step": torch.tensor(step, dtype=torch.int64)}
    fmt = optimizer._format(item.group, item.name, item.param)
    for moment in rule.moments:
        codec = fmt.codec(moment)
        values = item.state[moment.name].to(torch.float32)
        parts = codec.parts(tuple(item.param.shape))
        for part, tensor in zip(parts, codec.encode(values, Place(step)), strict=True):
            held[moment.name + part.suffix] = tensor
    return held


def _numbers_of(
    optimizer: FusedOptimizer, saved_groups: Sequence[Mapping[str, Any]], incoming: Sequence[Incoming]
) -> list[dict[str, Any]]:
    """The hyperparameters that each group here takes over: those of the saved group that holds its parameters."""
    owner = {index: number for number, group in enumerate(saved_groups) for index in group["params"]}
    result = []
    for group in optimizer.param_groups:
        owners = {owner[item.index] for item in incoming if item.group is group}
        if len(owners) != 1:
            raise ValueError(
                f"the parameters of one group here lie in {len(owners)} groups of the checkpoint: "
                "build the optimizer with the same groups"
            )
        saved = saved_groups[owners.pop()]
        left_out = {"params", "param_names", "decoupled_weight_decay", *EXECUTION_KEYS}
        result.append({key: value for key, value in saved.items() if key not in left_out})
    return result


def _restart(optimizer: FusedOptimizer, item: Incoming) -> None:
    """Clears the state of a parameter that the checkpoint says was never stepped."""
    held = optimizer.state[item.param]
    master = optimizer._master(item.param)
    for tensor in held.values():
        tensor.zero_()
    for part, value in zip(master.parts(tuple(item.param.shape)), master.start(item.param), strict=True):
        held[part.suffix].copy_(value)


def _check_version(about: Mapping[str, Any]) -> None:
    version = about.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint has state format version {version!r}, known: {FORMAT_VERSION}; "
            "load it with the version of lightning_fuse that wrote it, or a newer one"
        )


def _outline(value: Any) -> str:
    return f"the keys {_shorten([str(key) for key in value])}" if isinstance(value, Mapping) else type(value).__name__


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
