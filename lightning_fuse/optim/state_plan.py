"""What becomes of one parameter's saved state: taken over, converted, or started anew. Checks all, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.formats.floating import Float32
from lightning_fuse.formats.format import state_tensors
from lightning_fuse.formats.versions import FORMAT_VERSION, codec_of_version
from lightning_fuse.optim.load_options import LoadOptions
from lightning_fuse.optim.state_convert import Keeping, Planned, converted
from lightning_fuse.optim.state_foreign import Mapped
from lightning_fuse.optim.state_match import Incoming
from lightning_fuse.rules.rule import Moment, UpdateRule

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer


def plan(optimizer: FusedOptimizer, item: Incoming, about: Mapping[str, Any] | None, options: LoadOptions) -> Planned:
    """Checks what a checkpoint holds for one parameter, and says what to do with it. Changes nothing.

    Args:
        optimizer: The optimizer to load into.
        item: The parameter, its group with the numbers that it will have.
        about: The checkpoint's entry ``lightning_fuse``, or None where it has none.
        options: What may be done where it does not fit exactly.

    Returns:
        The plan.

    Raises:
        ValueError: It does not fit, or is damaged.
    """
    spec = optimizer.spec_of(item.group, item.name, item.param)
    rule = spec.rule
    here = Keeping(spec.state_format.name, rule.moments, list(spec.codecs), spec.master)
    planned = Planned(item)
    if item.index is None:
        planned.fresh = "the checkpoint does not hold it"
        return planned
    if about is not None:
        _check_rule(item, rule.name, about["rules"][item.index])
        saved = _saved_keeping(item.index, here, about)
        _check_same(item, saved, here, options)
    else:
        saved = Keeping(_whose(item), rule.moments, [Float32()] * len(rule.moments), MASTERS["none"])
    if not item.state or (about is None and all(item.state.get(moment.name) is None for moment in rule.moments)):
        planned.fresh = "never stepped in the checkpoint" if rule.moments else "its rule keeps no moments"
        _check_foreign(item, rule)
        return planned
    shape = _saved_shape(item, saved)
    if shape is not None and shape != tuple(item.param.shape):
        planned.fresh = _reshaped(item, shape, options)
        return planned
    if about is not None and about["format_version"] < FORMAT_VERSION:
        saved = saved._replace(state=f"{saved.state} of version {about['format_version']}")
    finite = options.nonfinite == "refuse"
    if about is not None:
        _check_parts(item, saved, finite)
    else:
        _check_values(item, rule, finite)
    if about is None and saved.state == "of torch" and rule.name.split("_")[0] not in ("adamw", "adam", "sgd"):
        planned.notes.append(f"moments of another rule go on under {rule.name}")
    step = _step_of(item)
    planned.tensors = lambda: converted(planned, saved, here, step)
    return planned


def _check_rule(item: Incoming, here: str, saved: str) -> None:
    if saved != here:
        raise ValueError(
            f"checkpoint holds optimizer {saved!r} for {item.name}, this run asks for {here!r}: resume with "
            f"optimizer={saved}, or keep the weights alone and start with fresh state"
        )


def _saved_keeping(index: int, here: Keeping, about: Mapping[str, Any]) -> Keeping:
    """How the checkpoint keeps a parameter; version 1 kept every moment on its own."""
    fmt, moments, version = STATE_FORMATS[about["formats"][index]], here.moments, about["format_version"]
    if version == 1:
        moments = [replace(moment, normalizer="") for moment in moments]
    codecs = [codec_of_version(version, fmt, moment) for moment in moments]
    return Keeping(fmt.name, moments, codecs, MASTERS[about["masters"][index]])


def _check_same(item: Incoming, saved: Keeping, here: Keeping, options: LoadOptions) -> None:
    """Refuses other formats and masters, unless they may be converted."""
    if options.formats == "convert":
        return
    for word, was, asked in (("state", saved.state, here.state), ("master", saved.master.name, here.master.name)):
        if was != asked:
            raise ValueError(
                f"checkpoint holds {word} {was!r} for {item.name}, this run asks for {asked!r}: resume with "
                f'{word}={was}, let it be converted with LoadOptions(formats="convert") (train.py: '
                "restore.formats=convert), or convert first with scripts/convert_checkpoint.py"
            )


def _saved_shape(item: Incoming, saved: Keeping) -> tuple[int, ...] | None:
    """The shape that a parameter had when it was saved; None where nothing tells."""
    param_shape = tuple(item.param.shape)
    firsts = [m.name + c.parts(param_shape)[0].suffix for m, c in zip(saved.moments, saved.codecs, strict=True)]
    firsts += [part.suffix for part in saved.master.parts(param_shape)]
    shapes = {tuple(tensor.shape) for key in firsts if isinstance(tensor := item.state.get(key), (Tensor, Mapped))}
    return shapes.pop() if len(shapes) == 1 else None


def _reshaped(item: Incoming, shape: tuple[int, ...], options: LoadOptions) -> str:
    """Refuses a parameter of another shape, unless it may start anew; returns why it does."""
    here = tuple(item.param.shape)
    if options.reshaped == "refuse":
        raise ValueError(
            f"checkpoint holds {item.name} of shape {shape}, here it is of shape {here}: it belongs to another model; "
            'build the one that was saved, or start this parameter anew with LoadOptions(reshaped="fresh")'
        )
    return f"it was of shape {shape} and is of shape {here}"


def _check_parts(item: Incoming, saved: Keeping, finite: bool) -> None:
    """Refuses tensors of one of our own checkpoints that are not all there, of the right kind and sound."""
    state, shape = item.state, tuple(item.param.shape)
    kinds = list(zip(saved.moments, saved.codecs, strict=True))
    wanted = {moment.name + part.suffix: part for moment, codec in kinds for part in codec.parts(shape)}
    wanted.update({part.suffix: part for part in saved.master.parts(shape)})
    if {*wanted, "step"} != set(state):
        raise ValueError(
            f"checkpoint holds {sorted(state)} for {item.name}, expected {sorted({*wanted, 'step'})}: it is damaged; "
            "load another one"
        )
    for key, part in wanted.items():
        tensor = state[key]
        got = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got != (part.shape, part.dtype):
            raise ValueError(
                f"checkpoint holds {key} of {item.name} as {got}, expected {(part.shape, part.dtype)}: it is damaged, "
                "or the parameter had another shape when it was saved"
            )
    for moment, codec in kinds:
        kept = state_tensors(moment, codec, state, shape)
        _check_fault(item, moment, codec.validate(kept, signed=moment.signed, finite=finite))


def _check_values(item: Incoming, rule: UpdateRule, finite: bool) -> None:
    """Refuses moments of another library's state dict that are not all there and sound."""
    _check_foreign(item, rule)
    if any(moment.normalizer for moment in rule.moments) and "step" not in item.state:
        raise ValueError(
            f"checkpoint holds no step for {item.name}, and the rule {rule.name} corrects its moments by it: "
            "it belongs to another optimizer"
        )
    for moment in rule.moments:
        value = item.state.get(moment.name)
        if isinstance(value, Mapped):
            fault = value.validate(signed=moment.signed)
        elif isinstance(value, Tensor) and value.shape == item.param.shape and value.is_floating_point():
            fault = Float32().validate((value,), signed=moment.signed, finite=finite)
        else:
            raise ValueError(
                f"checkpoint holds {sorted(item.state)} for {item.name}, the rule {rule.name} needs {moment.name} "
                f"of shape {tuple(item.param.shape)}: it belongs to another optimizer or model"
            )
        _check_fault(item, moment, fault)


def _whose(item: Incoming) -> str:
    return "of bitsandbytes" if any(isinstance(value, Mapped) for value in item.state.values()) else "of torch"


def _check_foreign(item: Incoming, rule: UpdateRule) -> None:
    """Refuses the state of another rule, which holds moments that this one does not know."""
    known = {moment.name for moment in rule.moments}
    if item.state and known and not known & set(item.state):
        raise ValueError(
            f"checkpoint holds {sorted(item.state)} for {item.name}, the rule {rule.name} needs {sorted(known)} "
            f"of shape {tuple(item.param.shape)}: it belongs to another optimizer or model"
        )


def _check_fault(item: Incoming, moment: Moment, fault: str) -> None:
    if fault:
        keep = (
            'keep them with LoadOptions(nonfinite="keep") if the run stepped on such gradients'
            if fault.startswith("NaN")
            else "load another one"
        )
        raise ValueError(f"checkpoint holds {fault} in {moment.name} of {item.name}: it is damaged; {keep}")


def _step_of(item: Incoming) -> Tensor:
    """The updates applied to a parameter; torch's SGD keeps none, and with a momentum buffer has applied one."""
    saved = item.state.get("step", 1)
    if not isinstance(saved, (int, float)) and not (isinstance(saved, Tensor) and saved.numel() == 1):
        raise ValueError(f"checkpoint holds a step of {item.name} that is no number: it is damaged; load another one")
    number = float(saved)
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ValueError(
            f"checkpoint holds step {number:g} for {item.name}: must be a whole number >= 0; it is damaged"
        )
    return torch.tensor(int(number), dtype=torch.int64)
