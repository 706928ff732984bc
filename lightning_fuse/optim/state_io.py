"""Optimizer state to and from plain data: every bit of every tensor, matched by parameter name.

torch's own ``load_state_dict`` casts every state tensor to its parameter's dtype, integers included, and takes even the
way a step is executed from the checkpoint. Here everything numerical comes from the checkpoint, tensors keep their
dtype, and a checkpoint that does not fit is refused before anything is changed.

The state dict is torch's (``state`` by index, ``param_groups``) with one entry more::

    "lightning_fuse": {"format_version": 3, "rules": [name per parameter], "formats": [...], "masters": [...]}

Versions 1 and 2, which are still read, kept int8 moments in other codes (``formats/versions.py``).

A load has two parts. The first reads and checks everything and changes nothing; the second goes through the parameters
one by one, so that a state that is mapped from a file is never in memory twice, and has nothing left to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fuse.formats.versions import FORMAT_VERSION
from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.optim.load_options import LoadOptions, LoadReport
from lightning_fuse.optim.param_states import ensure_states
from lightning_fuse.optim.state_convert import Planned
from lightning_fuse.optim.state_foreign import in_torchs_words
from lightning_fuse.optim.state_groups import GroupNumbers, group_numbers, take_over
from lightning_fuse.optim.state_match import Incoming, match, outline
from lightning_fuse.optim.state_plan import plan

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer

ENTRY = "lightning_fuse"


def describe(optimizer: FusedOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Adds to torch's state dict what its tensors are.

    Args:
        optimizer: Whose state it is.
        packed: What ``torch.optim.Optimizer.state_dict`` returned.

    Returns:
        The same dict with the entry ``lightning_fuse``.
    """
    specs = optimizer.specs()
    # torch keeps steps as float32 and its own optimizers cannot count up an integer; float32 is exact up to 2^24.
    packed["state"] = {
        index: {**held, "step": held["step"].to(torch.float32)} if int(held.get("step", 2**24)) < 2**24 else held
        for index, held in packed["state"].items()
    }
    packed[ENTRY] = {
        "format_version": FORMAT_VERSION,
        "rules": [spec.rule.name for spec in specs],
        "formats": [spec.state_format.name for spec in specs],
        "masters": [spec.master.name for spec in specs],
    }
    return packed


@torch.no_grad()
def load(optimizer: FusedOptimizer, state_dict: Any, options: LoadOptions) -> LoadReport:
    """Loads a state dict into an optimizer; see ``FusedOptimizer.load_state_dict``.

    Args:
        optimizer: The optimizer to load into.
        state_dict: Ours, that of torch's optimizer of the same rule, or that of bitsandbytes'.
        options: What to do where it does not fit exactly.

    Returns:
        What was done.

    Raises:
        TypeError: It is not a state dict.
        ValueError: It does not fit; nothing has been changed then.
    """
    numbers, planned, left_out = _checked(optimizer, state_dict, options)
    _part_from_own(optimizer, planned)
    _prepare(optimizer, numbers, planned)
    # From here on nothing can be refused any more.
    for entry in planned:
        _fill(optimizer, entry)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    return LoadReport(
        matched=tuple(entry.item.name for entry in planned if not entry.fresh),
        converted=tuple(f"{entry.item.name}: {', '.join(entry.notes)}" for entry in planned if entry.notes),
        fresh=tuple(f"{entry.item.name}: {entry.fresh}" for entry in planned if entry.fresh),
        left_out=tuple(left_out),
        taken_over=tuple(numbers.taken_over),
        overridden=tuple(numbers.overridden),
        warnings=tuple(warning for entry in planned for warning in entry.warnings),
    )


def check(optimizer: FusedOptimizer, state_dict: Any, options: LoadOptions) -> None:
    """Refuses what ``load`` would refuse, and changes nothing.

    Args:
        optimizer: One like that which will load it.
        state_dict: See ``load``.
        options: See ``load``.

    Raises:
        TypeError: It is not a state dict.
        ValueError: It does not fit.
    """
    _checked(optimizer, state_dict, options)


def _part_from_own(optimizer: FusedOptimizer, planned: Sequence[Planned]) -> None:
    """Copies what another parameter's state here will overwrite: a live state dict, under other names."""
    owner = {id(tensor): p for p, held in optimizer.state.items() for tensor in held.values()}
    for entry in planned:
        state: Any = entry.item.state
        # Not by asking for each: a dict may map tensors from a file when it is asked for them.
        kept = dict.values(state) if isinstance(state, dict) else state.values()
        taken = [owner.get(id(value), entry.item.param) for value in kept]
        if any(p is not entry.item.param for p in taken):
            entry.part()


def _checked(
    optimizer: FusedOptimizer, state_dict: Any, options: LoadOptions
) -> tuple[GroupNumbers, list[Planned], list[str]]:
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            f"not an optimizer's state dict: expected the keys 'state' and 'param_groups', got {outline(state_dict)}"
        )
    if not isinstance(options, LoadOptions):
        raise TypeError(f"load_options={options!r}: must be a LoadOptions; write LoadOptions(formats=...)")
    try:
        return _read(optimizer, state_dict, options)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"the state dict is damaged, or not one of an optimizer like this ({type(error).__name__}: {error}); "
            "load a checkpoint of the same optimizer and model"
        ) from error


def _read(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any], options: LoadOptions
) -> tuple[GroupNumbers, list[Planned], list[str]]:
    """Reads all of a state dict and changes nothing: hyperparameters, what becomes of each parameter, what is left."""
    about = state_dict.get(ENTRY)
    if about is None:
        state_dict = in_torchs_words(state_dict, {key for group in optimizer.param_groups for key in group})
    else:
        about = _entry(about, state_dict)
    matching = match(optimizer, state_dict, options)
    numbers = group_numbers(optimizer, state_dict["param_groups"], matching, options)
    # A rule may depend on a number (amsgrad, momentum), and the checkpoint's numbers are those that will be there.
    keeping = {id(group): {**group, **now} for group, now in zip(optimizer.param_groups, numbers.groups, strict=True)}
    incoming = [item._replace(group=keeping[id(item.group)]) for item in matching.incoming]
    return numbers, [plan(optimizer, item, about, options) for item in incoming], matching.left_out


def _prepare(optimizer: FusedOptimizer, numbers: GroupNumbers, planned: Sequence[Planned]) -> None:
    """Takes the numbers over and makes room for the state; where there is too little memory, all is as it was."""
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    tensors = [(group[key], value.clone()) for group, _ in groups for key, value in group.items() if _is_number(value)]
    held = {p: dict(optimizer.state[p]) for p in optimizer.state}
    try:
        for group, now in zip(optimizer.param_groups, numbers.groups, strict=True):
            take_over(group, now)
        optimizer.reset_caches()
        _drop_unwanted(optimizer, planned)
        ensure_states([_spec(optimizer, entry.item) for entry in planned if not entry.fresh], optimizer.state)
    except BaseException:
        for group, before in groups:
            group.clear()
            group.update(before)
        for tensor, value in tensors:
            tensor.copy_(value)
        for p in list(optimizer.state):
            if p in held:
                optimizer.state[p] = held[p]
            else:
                del optimizer.state[p]
        optimizer.reset_caches()
        raise


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _drop_unwanted(optimizer: FusedOptimizer, planned: Sequence[Planned]) -> None:
    """Drops the state of what starts anew, and what the rule that comes with the numbers does not keep."""
    for entry in planned:
        if entry.fresh:
            optimizer.state.pop(entry.item.param, None)
        elif entry.item.param in optimizer.state:
            held, wanted = optimizer.state[entry.item.param], _spec(optimizer, entry.item).tensors
            for key in [key for key in held if key not in wanted]:
                del held[key]


def _spec(optimizer: FusedOptimizer, item: Incoming) -> ParamSpec:
    return optimizer.spec_of(item.group, item.name, item.param)


def _fill(optimizer: FusedOptimizer, entry: Planned) -> None:
    """Copies or converts one parameter's state."""
    if not entry.fresh:
        held = optimizer.state[entry.item.param]
        for key, value in entry.tensors().items():
            held[key].copy_(value)


def _entry(about: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of ours with what it lists by index, as the state is."""
    version = about.get("format_version")
    if version not in range(1, FORMAT_VERSION + 1):
        raise ValueError(
            f"checkpoint has state format version {version!r}, known: 1 to {FORMAT_VERSION}; "
            "load it with the version of lightning_fuse that wrote it, or a newer one"
        )
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    listed = {}
    for kind in ("rules", "formats", "masters"):
        if len(about[kind]) != len(indices):
            raise ValueError(f"checkpoint lists {len(about[kind])} {kind} for {len(indices)} parameters: it is damaged")
        listed[kind] = dict(zip(indices, about[kind], strict=True))
    return {"format_version": version, **listed}
