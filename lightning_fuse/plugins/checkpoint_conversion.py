"""Converting a checkpoint file: its optimizer state to another format or to torch's own, or its weights alone.

It reads checkpoints of Lightning, with our state, torch's or bitsandbytes' in them, and files that hold one optimizer's
state dict. The state is loaded into an optimizer that is built for it, as a run would do that asks for the other
format, so a conversion here and one at a resume give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats import MASTERS
from lightning_fuse.optim import convert
from lightning_fuse.optim.checkpoint.rebuild import weights_of
from lightning_fuse.optim.checkpoint.schema import saved_formats
from lightning_fuse.optim.group_names import parameter_names
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO
from lightning_fuse.records.checkpoint_file import verify
from lightning_fuse.registry import unknown_name

TARGETS = ("lightning_fuse", "lightning", "torch")
# What a file of weights keeps of a checkpoint, so that Lightning's load_from_checkpoint takes it.
KEPT_WITH_WEIGHTS = ("pytorch-lightning_version", "hyper_parameters", "hparams_name", "epoch", "global_step")


@dataclass(frozen=True)
class ConversionSpec:
    """What a checkpoint should become.

    Attributes:
        to: "lightning_fuse" for state of ours, "lightning" for a checkpoint that a Trainer with torch's own optimizer
            resumes, "torch" for the state dict of torch's optimizer alone.
        state: State formats; None leaves each as it is, and fp32 what comes from others.
        master: Master weights; None leaves them as they are.
        weights_only: Write the float32 weights and nothing else.
        optimizer: "adamw", "adam", "sgd", "lion", "lars" or "lamb", where the state itself does not tell.
        nonfinite: See ``LoadOptions``.

    Raises:
        ValueError: A word is unknown, or a choice has no effect beside another.
    """

    to: str = "lightning_fuse"
    state: StateSpec | None = None
    master: str | None = None
    weights_only: bool = False
    optimizer: str | None = None
    nonfinite: str = "refuse"

    def __post_init__(self) -> None:
        if self.to not in TARGETS:
            raise ValueError(unknown_name("target", self.to, TARGETS))
        if self.master is not None:
            MASTERS[self.master]  # raises where it is unknown
        chosen = [key for key in ("state", "master") if getattr(self, key) is not None]
        other = "weights_only" if self.weights_only else f"to={self.to}" if self.to != "lightning_fuse" else ""
        if chosen and other:
            raise ValueError(
                f"{chosen[0]} has no effect with {other}, which keeps no state of ours; give one of the two"
            )


@dataclass
class Conversion:
    """What was done.

    Attributes:
        rows: (parameter, what happened to it) of everything that was converted.
        unchanged: How many parameters kept their state bit for bit.
        bytes_before: Size of the file that was read.
        bytes_after: Size of the one that was written.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    unchanged: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def convert_file(source: Path, target: Path, spec: ConversionSpec) -> Conversion:
    """Reads a checkpoint and writes what it should become, in one act.

    Args:
        source: A checkpoint of Lightning, or a file with one optimizer's state dict.
        target: The file to write; must not exist.
        spec: What to write.

    Returns:
        What was done.

    Raises:
        FileNotFoundError: There is no source, or no folder for the target.
        FileExistsError: The target exists.
        ValueError: The source is damaged, holds more than tensors and plain data, is no checkpoint, or cannot become
            what is wanted. Nothing has been written then.
    """
    if not source.is_file():
        raise FileNotFoundError(f"{source} is no file: give a checkpoint, for instance checkpoints/last.ckpt of a run")
    if target.exists():
        raise FileExistsError(f"{target} exists: give another name, or remove it first")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target.absolute().parent} is no folder: make it first")
    contents = _read(source)
    result = Conversion(bytes_before=source.stat().st_size)
    written = _weights(source, contents, result) if spec.weights_only else _with_state(source, contents, spec, result)
    AtomicCheckpointIO().save_checkpoint(written, target)
    result.bytes_after = target.stat().st_size
    return result


def _read(path: Path) -> dict[str, Any]:
    """Reads a file that may come from anywhere: tensors and plain data, mapped, and no code.

    Not with ``atomic_checkpoint.read_checkpoint``, which gives every tensor memory of its own: here two names of one
    tensor must be known as such.
    """
    try:
        verify(path)
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"{path} cannot be read as tensors and plain data ({type(error).__name__}: {reason}): it is damaged, no "
            "checkpoint, or holds objects, which could run code; give another, or save it without them"
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds a {type(contents).__name__}, no checkpoint; give a checkpoint of Lightning")
    return contents


def _is_state_dict(contents: Mapping[str, Any]) -> bool:
    return {"state", "param_groups"} <= set(contents)


def _with_state(source: Path, contents: dict[str, Any], spec: ConversionSpec, result: Conversion) -> dict[str, Any]:
    """The checkpoint with every optimizer's state converted."""
    alone = _is_state_dict(contents)
    states = [contents] if alone else contents.get("optimizer_states")
    if not isinstance(states, (list, tuple)) or not states or not all(map(_is_state_dict, states)):
        raise ValueError(
            f"{source} holds no optimizer state (its keys: {', '.join(sorted(map(str, contents))[:8]) or 'none'}); "
            "give a checkpoint of Lightning, or a file with one optimizer's state dict"
        )
    weights = {} if alone else weights_of(contents.get("state_dict") or {})
    converted = [_convert(state, weights, spec, result) for state in states]
    if alone or (spec.to == "torch" and len(converted) == 1):
        return converted[0]
    if spec.to == "torch":
        return {"optimizer_states": converted}
    return {**contents, "optimizer_states": converted}


def _convert(
    state_dict: Mapping[str, Any], weights: Mapping[str, Tensor], spec: ConversionSpec, result: Conversion
) -> dict[str, Any]:
    packed, report = convert(
        state_dict,
        weights,
        optimizer=spec.optimizer,
        state=spec.state,
        master=spec.master,
        to_torch=spec.to != "lightning_fuse",
        nonfinite=spec.nonfinite,
    )
    notes = dict(entry.split(": ", 1) for entry in report.converted)
    if spec.to != "lightning_fuse":
        notes.update(_notes_of_export(state_dict))
    result.rows += list(notes.items())
    result.unchanged += sum(len(group["params"]) for group in packed["param_groups"]) - len(notes)
    return packed


def _notes_of_export(state_dict: Mapping[str, Any]) -> dict[str, str]:
    notes, formats = {}, saved_formats(state_dict)
    for name, index in _named(state_dict):
        saved = formats.get(index)
        if saved is None or not state_dict["state"].get(index):
            continue
        master = "" if saved.master == "none" else f", master {saved.master} -> none (its bits are lost)"
        if saved.state != "fp32" or master:
            notes[name] = f"state {saved.state} -> torch's float32 (nothing is lost){master}"
    return notes


def _named(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, index) of every parameter, those without a name called ``group.position``."""
    for number, group in enumerate(state_dict["param_groups"]):
        yield from zip(parameter_names(group, number), group["params"], strict=True)


def _weights(source: Path, contents: Mapping[str, Any], result: Conversion) -> dict[str, Any]:
    """The float32 weights: joined from parameter and master where there is one, everything else widened."""
    saved = contents.get("state_dict")
    if not isinstance(saved, Mapping):
        raise ValueError(f"{source} holds no weights (no key state_dict); give a checkpoint of Lightning")
    joined: dict[tuple[Any, ...], Tensor] = {}
    for state in contents.get("optimizer_states") or ():
        for name, param, weight, master in _joined(state, weights_of(saved)):
            joined[_place(param)] = weight
            result.rows.append((name, f"float32 weight from {param.dtype} and master {master}".replace("torch.", "")))
    weights = {}
    for name, value in saved.items():
        # Tied weights are one tensor under two names, and stay equal.
        wide = isinstance(value, Tensor) and value.is_floating_point()
        weights[name] = joined.get(_place(value), value.to(torch.float32)) if wide else value
    result.unchanged = len(weights) - len(result.rows)
    return {**{key: contents[key] for key in KEPT_WITH_WEIGHTS if key in contents}, "state_dict": weights}


def _joined(state_dict: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Sequence[tuple[str, Tensor, Tensor, str]]:
    """(name, parameter, float32 weight, master) of every parameter that has a master weight."""
    formats, found = saved_formats(state_dict), []
    for name, index in _named(state_dict):
        held, saved = state_dict["state"].get(index), formats.get(index)
        if not held or saved is None or saved.master == "none":
            continue
        if name not in weights:
            raise ValueError(
                f"the master weight of {name} belongs to a parameter that the checkpoint's weights do not name: the "
                "optimizer was built without names; pass it model.named_parameters() and save again"
            )
        param, master = weights[name], MASTERS[saved.master]
        parts = tuple(held[part.suffix] for part in master.parts(tuple(param.shape)))
        found.append((name, param, master.join(param, parts), master.name))
    return found


def _place(value: Tensor) -> tuple[Any, ...]:
    return (value.data_ptr(), tuple(value.shape), value.dtype) if value.numel() else (id(value),)
