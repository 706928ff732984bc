"""Everything that a load will do, decided once: ``plan_load`` reads and checks all of it and changes nothing.

torch's own ``load_state_dict`` casts every state tensor to its parameter's dtype, integers included, and takes even the
way a step is executed from the checkpoint. Here everything numerical comes from the checkpoint, tensors keep their
dtype, and a checkpoint that does not fit is refused before anything is changed.

``LoadPlan.apply`` then goes through the parameters one by one, so that a state that is mapped from a file is never in
memory twice, and has nothing left to refuse.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.kernels.shards import local_part
from lightning_fuse.optim.checkpoint.convert import LoadItem, converted
from lightning_fuse.optim.checkpoint.foreign import from_bitsandbytes
from lightning_fuse.optim.checkpoint.hyperparameters import CheckGroup, GroupChanges, merge_groups, update_group
from lightning_fuse.optim.checkpoint.match import NAMES, match, outline
from lightning_fuse.optim.checkpoint.options import LoadOptions, LoadReport
from lightning_fuse.optim.checkpoint.schema import (
    CODEC_VERSION,
    FORMAT,
    SavedFormat,
    StateLayout,
    is_ours,
    layout_here,
    layout_of,
    saved_formats,
)
from lightning_fuse.optim.checkpoint.sharded import local_state
from lightning_fuse.optim.checkpoint.torch_state import damaged_moment, plan_foreign, reshaped
from lightning_fuse.optim.regions import Request, allocate
from lightning_fuse.rules.rule import UpdateRule

# What reading a damaged state dict can raise.
_DAMAGED = (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError)


class Destination(NamedTuple):
    """What a state dict is loaded into.

    Attributes:
        specs: All parameters, in the order of the groups.
        groups: The parameter groups.
        owner: The optimizer's class, for errors.
        check_group: Refuses hyperparameters that no update can be computed from.
        choose_rule: The update rule of a parameter under other hyperparameters of its group.
    """

    specs: Sequence[ParamSpec]
    groups: Sequence[dict[str, Any]]
    owner: str
    check_group: CheckGroup
    choose_rule: Callable[[Mapping[str, Any], Tensor], UpdateRule]


@dataclass
class LoadPlan:
    """What a load will do.

    Attributes:
        changes: What becomes of the groups.
        names: Names that groups without any take over.
        items: What becomes of each parameter's state, in the order of the groups.
        left_out: Names of what only the checkpoint holds.
        beside: Entries of the state that belong to no parameter.
    """

    changes: GroupChanges
    names: list[list[str] | None]
    items: list[LoadItem]
    left_out: list[str]
    beside: dict[Any, Any]

    @torch.no_grad()
    def apply(self, groups: Sequence[dict[str, Any]], state: MutableMapping[Any, Any]) -> None:
        """Does it. Where there is too little memory for the state, nothing has been changed.

        Args:
            groups: The groups that it was planned for.
            state: The optimizer's state.
        """
        rooms = self._make_room(state)
        self._part_from_own(state)
        # From here on nothing can be refused any more.
        for group, numbers, names in zip(groups, self.changes.groups, self.names, strict=True):
            update_group(group, numbers)
            if names is not None:
                group[NAMES] = names
        for key in list(state):
            if not isinstance(key, Tensor):
                del state[key]
        state.update(deepcopy(self.beside))
        for item, room in zip(self.items, rooms, strict=True):
            _fill(item, room, state)

    def report(self) -> LoadReport:
        """What was done, by name; what was lost is known once the plan has been applied."""
        matched, converted, fresh, warnings = [], [], [], []
        for item in self.items:
            if item.fresh:
                fresh.append(f"{item.spec.name}: {item.fresh}")
            else:
                matched.append(item.spec.name)
            if item.notes:
                converted.append(f"{item.spec.name}: {', '.join(item.notes)}")
            warnings += item.warnings
        lists = (matched, converted, fresh, self.left_out, self.changes.taken_over, self.changes.overridden, warnings)
        return LoadReport(*map(tuple, lists))

    def _make_room(self, state: Mapping[Any, Any]) -> list[dict[str, Tensor]]:
        """The tensors that each parameter's state is written to: those that are there, and new ones."""
        rooms: list[dict[str, Tensor]] = []
        missing: list[tuple[dict[str, Tensor], Request]] = []
        for item in self.items:
            room: dict[str, Tensor] = {}
            rooms.append(room)
            if item.layout is None:
                continue
            param, shard = item.spec.param, item.spec.shard
            held = state.get(param, {})
            for key, wanted in item.spec.tensors.items():
                kept = held.get(key)
                if shard is not None:
                    kept = local_part(kept)
                if (
                    isinstance(kept, Tensor)
                    and kept.dtype == wanted.dtype
                    and kept.shape == wanted.shape
                    and kept.device == param.device
                ):
                    room[key] = kept
                else:
                    missing.append((room, Request(key, wanted.shape, wanted.dtype, param.device)))
        if missing:
            there, requests = zip(*missing, strict=True)
            for room, request, made in zip(there, requests, allocate(requests), strict=True):
                room[request.key] = made
        return rooms

    def _part_from_own(self, state: Mapping[Any, Any]) -> None:
        """Copies what another parameter's state here will overwrite: a live state dict, under other names."""
        owner: dict[int | None, Any] = {}
        for p, held in state.items():
            for tensor in held.values() if isinstance(p, Tensor) else ():
                if isinstance(tensor, Tensor) and tensor.numel():
                    owner[tensor.data_ptr() if type(tensor) is Tensor else local_part(tensor).data_ptr()] = p
        for item in self.items if owner else ():
            source: Any = item.state
            # Not by asking for each: a dict may map tensors from a file when it is asked for them.
            for value in dict.values(source) if isinstance(source, dict) else source.values():
                place = value.data_ptr() if type(value) is Tensor and value.numel() else None
                if owner.get(place, item.spec.param) is not item.spec.param:
                    item.state = _copied(dict(source.items()), item.spec.param.device)
                    break


def plan_load(into: Destination, state_dict: Any, options: LoadOptions) -> LoadPlan:
    """Plans a load.

    Args:
        into: What it goes into; left as it is.
        state_dict: Ours of any version, that of torch's optimizer of the same rule, or that of bitsandbytes'.
        options: What to do where it does not fit exactly.

    Returns:
        The plan.

    Raises:
        TypeError: It is not a state dict.
        ValueError: It does not fit, or is damaged.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            f"not an optimizer's state dict: expected the keys 'state' and 'param_groups', got {outline(state_dict)}"
        )
    if not isinstance(options, LoadOptions):
        raise TypeError(f"load_options={options!r}: must be a LoadOptions; write LoadOptions(formats=...)")
    try:
        return _plan(into, state_dict, options)
    except _DAMAGED as error:
        raise ValueError(
            f"the state dict is damaged, or not one of an optimizer like this ({type(error).__name__}: {error}); "
            "load a checkpoint of the same optimizer and model"
        ) from error


@torch.no_grad()
def _plan(into: Destination, state_dict: Mapping[str, Any], options: LoadOptions) -> LoadPlan:
    formats = saved_formats(state_dict)
    if not formats:
        state_dict = from_bitsandbytes(state_dict, {key for group in into.groups for key in group})
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    matching = match(into.specs, into.groups, state_dict, options)
    changes = merge_groups(
        into.specs, into.groups, saved_groups, matching.indices, into.check_group, into.owner, options
    )
    items, dtensor = [], getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for spec, index in zip(_specs_then(into, changes), matching.indices, strict=True):
        held = {} if index is None else state.get(index, {})
        # Not held.values(): a dict may map tensors from a file when it is asked for them.
        raw = dict.values(held) if isinstance(held, dict) else held.values()
        if spec.shard is not None or any(map(isinstance, raw, repeat(dtensor))):
            held = local_state(spec, held)
        items.append(_plan_item(spec, index, held, formats.get(index), options))
    beside = {key: value for key, value in state.items() if key not in matching.listed}
    return LoadPlan(changes, matching.names, items, matching.left_out, beside)


def _specs_then(into: Destination, changes: GroupChanges) -> list[ParamSpec]:
    """The specs under the numbers that the groups will have: a rule may depend on one (amsgrad, momentum)."""
    specs, start = list(into.specs), 0
    for group, numbers, differs in zip(into.groups, changes.groups, changes.differing, strict=True):
        end = start + len(group["params"])
        for place in range(start, end) if differs else ():
            rule = into.choose_rule({**group, **numbers}, specs[place].param)
            if rule is not specs[place].rule:
                specs[place] = replace(specs[place], rule=rule)
        start = end
    return specs


def _plan_item(
    spec: ParamSpec, index: Any, state: Mapping[str, Any], saved: SavedFormat | None, options: LoadOptions
) -> LoadItem:
    """Checks what a checkpoint holds for one parameter, and says what to do with it."""
    item = LoadItem(spec, state)
    if index is None:
        item.fresh = "the checkpoint does not hold it"
    elif saved is None and not (state and _looks_kept_as_here(spec, state)):
        plan_foreign(item, options)
    elif state:
        _plan_own(item, saved, options)
    if item.layout is not None:
        item.step = _step_of(item)
    if len(state) != len(spec.tensors) + (FORMAT in state) and not item.fresh:
        item.others = {key: state[key] for key in state if not is_ours(key)}
    return item


def _plan_own(item: LoadItem, saved: SavedFormat | None, options: LoadOptions) -> None:
    """Checks a state of ours; None stands for one that is kept as here."""
    spec, layout = item.spec, layout_here(item.spec)
    if saved is not None:
        if saved.rule != spec.rule.name:
            raise _other_rule(spec, saved)
        same = (saved.state, saved.master) == (spec.state_format.name, spec.master.name)
        if not same or saved.version < CODEC_VERSION:
            layout = layout_of(saved, spec.rule.moments)
        if not same and options.formats != "convert":
            raise _other_format(spec, saved)
    item.exact = layout.codecs is spec.codecs
    wanted: Mapping[str, Any] = spec.tensors if item.exact else _tensors_of(layout, spec.local_shape)
    kept: dict[str, Tensor] = {}
    if "step" not in item.state:
        raise _incomplete(item, "step")
    for key, part in wanted.items():
        if key == "step":
            continue
        tensor = kept[key] = item.state.get(key)  # type: ignore[assignment]
        if not isinstance(tensor, Tensor) or tensor.dtype != part.dtype or tensor.shape != part.shape:
            item.fresh = _unfit(item, layout, key, part, options)
            item.exact = False
            return
    for moment, codec in zip(layout.moments, layout.codecs, strict=True):
        parts = [tensor for key, tensor in kept.items() if key.partition(".")[0] == moment.name]
        fault = codec.validate(tuple(parts), signed=moment.signed, finite=options.nonfinite == "refuse")
        if fault:
            raise damaged_moment(spec.name, moment.name, fault)
    item.layout = layout


def _looks_kept_as_here(spec: ParamSpec, state: Mapping[str, Any]) -> bool:
    """Whether a state of ours that does not say what it is (torch flattened and unflattened it) is kept as here."""
    if spec.state_format.name == "fp32" and spec.master.name == "none":
        return False  # then it is kept as torch keeps it, and read so
    for key, part in spec.tensors.items():
        kept = state.get(key)
        if not isinstance(kept, Tensor) or (key != "step" and (kept.dtype != part.dtype or kept.shape != part.shape)):
            return False
    return True


def _other_rule(spec: ParamSpec, saved: SavedFormat) -> ValueError:
    return ValueError(
        f"checkpoint holds optimizer {saved.rule!r} for {spec.name}, this run asks for {spec.rule.name!r}: resume with "
        f"optimizer={saved.rule}, or keep the weights alone and start with fresh state"
    )


def _other_format(spec: ParamSpec, saved: SavedFormat) -> ValueError:
    word, was, asked = "state", saved.state, spec.state_format.name
    if was == asked:
        word, was, asked = "master", saved.master, spec.master.name
    return ValueError(
        f"checkpoint holds {word} {was!r} for {spec.name}, this run asks for {asked!r}: resume with "
        f'{word}={was}, let it be converted with LoadOptions(formats="convert") (train.py: '
        "restore.formats=convert), or convert the file first with lightning-fuse convert"
    )


def _tensors_of(layout: StateLayout, shape: tuple[int, ...]) -> dict[str, Any]:
    wanted = {
        moment.name + part.suffix: part
        for moment, codec in zip(layout.moments, layout.codecs, strict=True)
        for part in codec.parts(shape)
    }
    return {**wanted, **{part.suffix: part for part in layout.master.parts(shape)}}


def _unfit(item: LoadItem, layout: StateLayout, key: str, part: Any, options: LoadOptions) -> str:
    """Refuses a tensor that is not what it should be, unless the parameter had another shape and may start anew."""
    spec, state = item.spec, item.state
    shape = spec.local_shape
    firsts = [m.name + c.parts(shape)[0].suffix for m, c in zip(layout.moments, layout.codecs, strict=True)]
    firsts += [part.suffix for part in layout.master.parts(shape)]
    shapes = {tuple(kept.shape) for first in firsts if isinstance(kept := state.get(first), Tensor)}
    if len(shapes) == 1 and shapes != {shape}:
        return reshaped(spec, shapes.pop(), options)
    tensor = state.get(key)
    if tensor is None:
        raise _incomplete(item, key)
    got = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
    raise ValueError(
        f"checkpoint holds {key} of {spec.name} as {got}, expected {(tuple(part.shape), part.dtype)}: it is damaged, "
        "or the parameter had another shape when it was saved"
    )


def _incomplete(item: LoadItem, key: str) -> ValueError:
    return ValueError(
        f"checkpoint holds {sorted(map(str, item.state))} for {item.spec.name}, expected {key} beside them: it is "
        "damaged; load another one"
    )


def _step_of(item: LoadItem) -> int:
    """The updates applied to a parameter; torch's SGD keeps none, and with a momentum buffer has applied one."""
    name, saved = item.spec.name, item.state.get("step", 1)
    if isinstance(saved, bool) or not isinstance(saved, (int, float)):
        if not (isinstance(saved, Tensor) and saved.numel() == 1):
            raise ValueError(f"checkpoint holds a step of {name} that is no number: it is damaged; load another one")
        saved = saved.item()
    if not math.isfinite(saved) or saved < 0 or saved != int(saved):
        raise ValueError(f"checkpoint holds step {saved:g} for {name}: must be a whole number >= 0; it is damaged")
    return int(saved)


def _fill(item: LoadItem, room: Mapping[str, Tensor], state: MutableMapping[Any, Any]) -> None:
    """Copies or converts one parameter's state; one that has none here has none after it."""
    param, layout = item.spec.param, item.layout
    held: dict[Any, Any] = {}
    if layout is not None:
        if item.exact and layout.master.name != "fp32":
            for key, tensor in room.items():
                if key != "step":
                    tensor.copy_(item.state[key])
        else:
            for key, value in converted(item, layout, layout_here(item.spec)).items():
                room[key].copy_(value)
        room["step"].fill_(item.step)
        for key, part in item.spec.tensors.items():
            shard = item.spec.shard if part.shape else None
            held[key] = room[key] if shard is None else shard.wrap(room[key], part.shape[1:])
    for key, value in item.others.items():
        held[key] = _copied(value, param.device)
    if not held:
        state.pop(param, None)
    elif param in state:
        state[param].clear()
        state[param].update(held)
    else:
        state[param] = held


def _copied(value: Any, device: torch.device) -> Any:
    """A copy of entries of a state, their tensors on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(entry, device) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, device) for entry in value)
    return deepcopy(value)
