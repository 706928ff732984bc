"""Optimizer state to and from plain data: every bit of every tensor, matched by parameter name.

torch's own ``load_state_dict`` casts every state tensor to its parameter's dtype, integers included, and takes even the
way a step is executed from the checkpoint. Here everything numerical comes from the checkpoint, tensors keep their
dtype, and a checkpoint that does not fit is refused before anything is changed.

The state dict is torch's (``state`` by index, ``param_groups``) with one entry more::

    "lightning_fuse": {"format_version": 2, "rules": [name per parameter], "formats": [...], "masters": [...]}

Version 1, which is still read, kept int8 first moments on their own, not in units of the second moment's root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fuse.formats.format import Place, encode_moments, state_tensors
from lightning_fuse.optim.state_match import Incoming, group_numbers, match, outline

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer

ENTRY = "lightning_fuse"
FORMAT_VERSION = 2


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
            f"not an optimizer's state dict: expected the keys 'state' and 'param_groups', got {outline(state_dict)}"
        )
    try:
        groups, incoming, tensors = _read(optimizer, state_dict)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"the state dict is damaged, or not one of an optimizer like this ({type(error).__name__}: {error}); "
            "load a checkpoint of the same optimizer and model"
        ) from error
    # From here on nothing can be refused any more.
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        _take_over(group, numbers)
    optimizer._reset_caches()
    optimizer._ensure_state()
    for item, held in zip(incoming, tensors, strict=True):
        _restart(optimizer, item)
        for key, value in held.items():
            optimizer.state[item.param][key].copy_(value)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _read(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[Incoming], list[dict[str, Tensor]]]:
    """Reads all of a state dict and changes nothing: hyperparameters, matched parameters, tensors to copy."""
    about = state_dict.get(ENTRY)
    if about is not None:
        _check_version(about)
    matched = match(optimizer, state_dict)
    groups = group_numbers(optimizer, state_dict["param_groups"], matched)
    # A rule may depend on a number (amsgrad, momentum), and the checkpoint's numbers are those that will be there.
    merged = {id(group): {**group, **numbers} for group, numbers in zip(optimizer.param_groups, groups, strict=True)}
    incoming = [item._replace(group=merged[id(item.group)]) for item in matched]
    if about is None:
        tensors = [_from_torch(optimizer, item) for item in incoming]
    else:
        tensors = [_from_ours(optimizer, item, about) for item in incoming]
    return groups, incoming, tensors


def _from_ours(optimizer: FusedOptimizer, item: Incoming, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Checks one parameter's state of our own making against what this optimizer keeps, tensor by tensor."""
    here = {
        "rules": ("optimizer", optimizer._rule_of(item.group, item.param).name),
        "formats": ("state", optimizer._format(item.group, item.name, item.param).name),
        "masters": ("master", optimizer._master(item.param).name),
    }
    for kind, (word, asked) in here.items():
        saved = about[kind][item.index]
        if saved != asked:
            raise ValueError(
                f"checkpoint holds {word} {saved!r} for {item.name}, this run asks for {asked!r}: "
                f"resume with {word}={saved}"
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
            continue
        got = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got != (request.shape, request.dtype):
            raise ValueError(
                f"checkpoint holds {key} of {item.name} as {got}, expected {(request.shape, request.dtype)}: "
                "the parameter has another shape than when it was saved"
            )
    held = {**item.state, "step": _step_of(item)}
    return _in_units(optimizer, item, held) if about["format_version"] == 1 else held


def _in_units(optimizer: FusedOptimizer, item: Incoming, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Encodes anew what version 1 kept without a unit."""
    fmt, shape = optimizer._format(item.group, item.name, item.param), tuple(item.param.shape)
    moments = optimizer._rule_of(item.group, item.param).moments
    parts = {m.name: state_tensors(m, fmt.codec(m), held, shape) for m in moments}
    by_name, result = {m.name: m for m in moments}, dict(held)
    for moment in moments:
        if moment.unit and fmt.codec(moment).scaled:
            codec, unit = fmt.codec(moment), by_name[moment.unit]
            root = fmt.codec(unit).root(parts[unit.name])
            encoded = codec.encode(codec.decode(parts[moment.name]), Place(int(held["step"])), root)
            result.update({moment.name + p.suffix: t for p, t in zip(codec.parts(shape), encoded, strict=True)})
    return result


def _from_torch(optimizer: FusedOptimizer, item: Incoming) -> dict[str, Tensor]:
    """Encodes the state of torch's optimizer of the same rule into the format that this one keeps."""
    rule = optimizer._rule_of(item.group, item.param)
    if not item.state:
        return {}
    step = _step_of(item)
    held = {"step": step}
    fmt, shape = optimizer._format(item.group, item.name, item.param), tuple(item.param.shape)
    values = []
    for moment in rule.moments:
        tensor = item.state.get(moment.name)
        if not isinstance(tensor, Tensor) or tensor.shape != item.param.shape:
            raise ValueError(
                f"checkpoint holds {sorted(item.state)} for {item.name}, the rule {rule.name} needs {moment.name} "
                f"of shape {shape}: it belongs to another optimizer or model"
            )
        values.append(tensor.to(torch.float32))
    codecs = [fmt.codec(moment) for moment in rule.moments]
    encoded = encode_moments(rule.moments, codecs, values, Place(int(step)))
    for moment, codec, parts in zip(rule.moments, codecs, encoded, strict=True):
        held.update({moment.name + part.suffix: t for part, t in zip(codec.parts(shape), parts, strict=True)})
    return held


def _step_of(item: Incoming) -> Tensor:
    """The updates applied to a parameter; torch's SGD keeps none, and with a momentum buffer has applied one."""
    number = float(item.state.get("step", 1))
    if number < 0 or number != int(number):
        raise ValueError(
            f"checkpoint holds step {number:g} for {item.name}: must be a whole number >= 0; it is damaged"
        )
    return torch.tensor(int(number), dtype=torch.int64)


def _take_over(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Sets a group's hyperparameters; a tensor lr stays the same tensor, which somebody may hold."""
    for key, value in numbers.items():
        mine = group.get(key)
        if isinstance(mine, Tensor):
            mine.fill_(float(value))
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value


def _restart(optimizer: FusedOptimizer, item: Incoming) -> None:
    """State of a parameter that was never stepped, with a master weight that knows only the parameter."""
    held = optimizer.state[item.param]
    master = optimizer._master(item.param)
    for tensor in held.values():
        tensor.zero_()
    for part, value in zip(master.parts(tuple(item.param.shape)), master.start(item.param), strict=True):
        held[part.suffix].copy_(value)


def _check_version(about: Mapping[str, Any]) -> None:
    version = about.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise ValueError(
            f"checkpoint has state format version {version!r}, known: 1 and {FORMAT_VERSION}; "
            "load it with the version of lightning_fuse that wrote it, or a newer one"
        )
