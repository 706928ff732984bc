"""What a state dict says about itself: format version, and for every parameter rule, state format and master weight.

The state dict is torch's. In version 4 each parameter's state names what it is, so that whoever keeps ``state`` and
``param_groups`` alone (torch.distributed.checkpoint, ZeroRedundancyOptimizer, accelerate) carries it whole::

    {"state": {0: {"step": …, "exp_avg.codes": …, "format": uint8 tensor of b"4 adamw int8 none"}, …},
     "param_groups": […],
     "lightning_fuse": {"format_version": 4}}

It is a tensor because some of them carry nothing else. Versions 1 to 3, which are still read, kept lists instead::

    "lightning_fuse": {"format_version": 3, "rules": [name per parameter], "formats": […], "masters": […]}

Versions 1 and 2 kept int8 moments in other codes (``formats/versions.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fuse.formats import MASTERS, STATE_FORMATS, versions
from lightning_fuse.formats.format import Codec
from lightning_fuse.formats.master import MasterFormat
from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.rules import RULES
from lightning_fuse.rules.rule import Moment

FORMAT_VERSION = 4
CODEC_VERSION = versions.FORMAT_VERSION  # the last one that changed the tensors themselves
ENTRY = "lightning_fuse"  # of a state dict
FORMAT = "format"  # of one parameter's state
# What a state can hold that is no entry of somebody else's: moments of any rule, in any codec's parts, and masters.
_MOMENTS = frozenset(moment.name for rule in RULES.values() for moment in rule.moments)
_OWN = frozenset(("step", FORMAT, "master", "remainder"))
_LISTS = ("rules", "formats", "masters")


class SavedFormat(NamedTuple):
    """What one parameter's saved state is.

    Attributes:
        version: Of the state dict's format.
        rule: The update rule's name.
        state: The word of the state format.
        master: The word of the master weight format.
    """

    version: int
    rule: str
    state: str
    master: str


class StateLayout(NamedTuple):
    """How the state of one parameter is kept.

    Attributes:
        state: The word of the state format, or whose state it is.
        moments: The rule's moments.
        codecs: What keeps each.
        master: How the float32 weight is kept.
    """

    state: str
    moments: Sequence[Moment]
    codecs: Sequence[Codec]
    master: MasterFormat


def describe_state(specs: Sequence[ParamSpec], packed: dict[str, Any]) -> dict[str, Any]:
    """Adds to torch's state dict what its tensors are.

    Args:
        specs: All parameters of the optimizer, in the order of its groups.
        packed: What ``torch.optim.Optimizer.state_dict`` returned; its tensors stay the optimizer's own.

    Returns:
        The same dict, described; whatever else a hook of the user's made of it, as it is.
    """
    if not (isinstance(packed, dict) and isinstance(packed.get("state"), dict) and "param_groups" in packed):
        return packed
    state = packed["state"] = dict(packed["state"])
    indices = [index for group in packed["param_groups"] for index in group["params"]]
    for index, spec in zip(indices, specs, strict=True):
        held = state.get(index)
        if held and spec.tensors.keys() <= held.keys():
            state[index] = {**held, FORMAT: format_tensor(spec)}
    packed[ENTRY] = {"format_version": FORMAT_VERSION}
    return packed


def format_text(spec: ParamSpec) -> str:
    """What one parameter's state is, in four words: ``4 adamw int8 none``."""
    return f"{FORMAT_VERSION} {spec.rule.name} {spec.state_format.name} {spec.master.name}"


def format_tensor(spec: ParamSpec) -> Tensor:
    """``format_text`` as a uint8 tensor, on the parameter's device: some loaders want all tensors on one."""
    text = torch.frombuffer(bytearray(format_text(spec).encode()), dtype=torch.uint8)
    return text if spec.param.device.type in ("cpu", "meta") else text.to(spec.param.device)


def read_format(held: Any) -> str | None:
    """The text of one parameter's ``format``; None where there is none, or torch's optimizer has cast it."""
    kept = held.get(FORMAT) if isinstance(held, Mapping) else None
    if not isinstance(kept, Tensor) or kept.dtype != torch.uint8:
        return None
    return bytes(kept.tolist()).decode("ascii", errors="replace")


def parse_format(text: str) -> SavedFormat:
    """Reads ``format_text``.

    Args:
        text: The text.

    Returns:
        What it says.

    Raises:
        ValueError: It is damaged, or of a later version.
    """
    words = text.split(" ")
    if len(words) != 4 or not words[0].isdigit():
        raise ValueError(f"checkpoint describes a state as {text!r}, expected four words: it is damaged")
    if int(words[0]) not in range(1, FORMAT_VERSION + 1):
        raise ValueError(_unknown_version(int(words[0])))
    return SavedFormat(int(words[0]), *words[1:])


def saved_formats(state_dict: Mapping[str, Any]) -> dict[Any, SavedFormat]:
    """What each parameter's state is, as far as the state dict says so; by index.

    Args:
        state_dict: A state dict of any version, or of another library.

    Returns:
        By index in ``state``; empty for another library's.

    Raises:
        ValueError: It is of a later version, or damaged.
    """
    about: Any = state_dict.get(ENTRY)
    version = None if about is None else about.get("format_version")
    if about is not None and version not in range(1, FORMAT_VERSION + 1):
        raise ValueError(_unknown_version(version))
    if version is not None and version < FORMAT_VERSION:
        return _of_lists(about, version, state_dict["param_groups"])
    known: dict[str, SavedFormat] = {}
    found = {}
    for index, held in state_dict["state"].items():
        text = read_format(held)
        if text is not None:
            if text not in known:
                known[text] = parse_format(text)
            found[index] = known[text]
    return found


def is_ours(key: Any) -> bool:
    """Whether a key of a parameter's state is one that this package writes, or a moment that a rule knows."""
    return key in _OWN or (isinstance(key, str) and key.partition(".")[0] in _MOMENTS)


def layout_of(saved: SavedFormat, moments: Sequence[Moment]) -> StateLayout:
    """How a state of any version is kept.

    Args:
        saved: What it is.
        moments: The moments of its rule.

    Returns:
        The layout; version 1 kept every moment on its own.

    Raises:
        ValueError: Its state format or master weight format is unknown.
    """
    if saved.version == 1:
        moments = [replace(moment, normalizer="") for moment in moments]
    fmt, version = STATE_FORMATS[saved.state], min(saved.version, CODEC_VERSION)
    word = fmt.name if version == CODEC_VERSION else f"{fmt.name} of version {saved.version}"
    codecs = [versions.codec_of_version(version, fmt, moment) for moment in moments]
    return StateLayout(word, moments, codecs, MASTERS[saved.master])


def layout_here(spec: ParamSpec) -> StateLayout:
    """How a parameter's state is kept in this optimizer."""
    return StateLayout(spec.state_format.name, spec.rule.moments, spec.codecs, spec.master)


def _of_lists(about: Mapping[str, Any], version: int, groups: Sequence[Mapping[str, Any]]) -> dict[Any, SavedFormat]:
    indices = [index for group in groups for index in group["params"]]
    for kind in _LISTS:
        if len(about[kind]) != len(indices):
            raise ValueError(f"checkpoint lists {len(about[kind])} {kind} for {len(indices)} parameters: it is damaged")
    rows = zip(indices, *(about[kind] for kind in _LISTS), strict=True)
    return {index: SavedFormat(version, *words) for index, *words in rows}


def _unknown_version(version: object) -> str:
    return (
        f"checkpoint has state format version {version!r}, known: 1 to {FORMAT_VERSION}; "
        "load it with the version of lightning_fuse that wrote it, or a newer one"
    )
