"""Converting one parameter's state: any format and master weight to any other.

A conversion decodes to float32 and encodes with the target's own codecs, as a step would, with the dither of the
parameter's step: a pure function of the checkpoint. What is kept alike on both sides keeps its bits. What is lost is
measured and told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats.format import DitherKey, decode_moment, encode_moment, extremes
from lightning_fuse.formats.master import MasterFormat
from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.optim.checkpoint.foreign import BnbMoment
from lightning_fuse.optim.checkpoint.schema import StateLayout


@dataclass
class LoadItem:
    """What will become of one parameter's state.

    Attributes:
        spec: The parameter, as it will be.
        state: What the checkpoint holds for it.
        layout: How that is kept; None where the parameter will have no state before its next gradient.
        exact: Whether every tensor is kept there as it is here.
        step: Updates applied to the parameter.
        others: Entries that somebody else keeps beside ours.
        fresh: Why it starts anew; empty where it does not.
        notes: What was converted and what it cost; complete once it has been converted.
        warnings: What a person should look at.
    """

    spec: ParamSpec
    state: Mapping[str, Any]
    layout: StateLayout | None = None
    exact: bool = False
    step: int = 0
    others: dict[Any, Any] = field(default_factory=dict)
    fresh: str = ""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def converted(item: LoadItem, layout: StateLayout, here: StateLayout) -> dict[str, Tensor]:
    """Converts the state of one parameter.

    Args:
        item: The parameter; notes and warnings are added to it.
        layout: How its state is kept in the checkpoint.
        here: How it is kept here.

    Returns:
        Every tensor of its state as it is kept here, but for the step.
    """
    dither = DitherKey(item.step, item.spec.first_index)
    return {**_moments(item, layout, here, dither), **converted_master(item, layout.master, here.master, dither)}


def _moments(item: LoadItem, saved: StateLayout, here: StateLayout, dither: DitherKey) -> dict[str, Tensor]:
    """The parts of every moment; those that are kept alike here keep their bits."""
    shape, device = item.spec.local_shape, item.spec.local.device
    # Device first: what a codec computes is the same on all, but it computes with what lies together.
    stored = [
        tuple(_on(device, item.state[moment.name + part.suffix], part.dtype) for part in codec.parts(shape))
        for moment, codec in zip(saved.moments, saved.codecs, strict=True)
    ]
    names = [moment.name for moment in here.moments]
    lost: list[str] = []
    now: list[tuple[Tensor, ...]] = [()] * len(names)
    same = [False] * len(names)
    for i in sorted(range(len(names)), key=lambda i: bool(here.moments[i].normalizer)):
        unit, codec = here.moments[i].normalizer, here.codecs[i]
        place_of_unit = names.index(unit) if unit else i
        alike = saved.codecs[i].name == codec.name
        same[i] = alike and (
            not (codec.scaled and unit) or (saved.moments[i].normalizer == unit and same[place_of_unit])
        )
        if same[i]:
            now[i] = stored[i]
            continue
        values = {k: decode_moment(k, saved.moments, saved.codecs, stored) for k in {i, place_of_unit}}
        now[i] = encode_moment(i, here.moments, here.codecs, values, dither)
        kept = here.codecs[place_of_unit].sqrt_decoded(now[place_of_unit]) if unit else None
        distance = _distance(codec.decode(now[i], kept), values[i])
        lost += [f"{names[i]} {distance}"] if distance else []
    if not all(same):
        item.notes.append(f"state {saved.state} -> {here.state} ({', '.join(lost) or 'nothing is lost'})")
    return {
        moment.name + part.suffix: tensor
        for moment, codec, kept in zip(here.moments, here.codecs, now, strict=True)
        for part, tensor in zip(codec.parts(shape), kept, strict=True)
    }


def converted_master(item: LoadItem, saved: MasterFormat, here: MasterFormat, dither: DitherKey) -> dict[str, Tensor]:
    """The parts of the master weight, and what happened to it. The parameter itself is the model's, and stays.

    Args:
        item: The parameter; notes and warnings are added to it.
        saved: How the checkpoint keeps the float32 weight.
        here: How it is kept here.
        dither: Of the parameter's step.

    Returns:
        The tensors beside the parameter.
    """
    param, shape, name = item.spec.local.detach(), item.spec.local_shape, item.spec.name
    kept = tuple(_on(param.device, item.state[part.suffix], part.dtype) for part in saved.parts(shape))
    readable = bool(kept) and param.dtype in saved.dtypes
    weight = saved.join(param, kept) if readable else None
    if weight is not None and saved.name == "fp32":
        written = int((weight != kept[0]).sum()) - int((weight.isnan() & kept[0].isnan()).sum())
        if written:
            item.warnings.append(
                f"{written} of {param.numel()} weights of {name} are not what their master weights round to: "
                "somebody has written to the parameter since, and it wins; load the model before the optimizer"
            )
    if saved.name == here.name:
        return {part.suffix: tensor for part, tensor in zip(here.parts(shape), kept, strict=True)}
    if weight is None:
        # With a parameter of another dtype the remainder beside it has no meaning.
        now = here.start(param)
        lost = "starts from the parameter" if here.name != "none" else "what lies below the parameter's dtype is lost"
    else:
        now = here.fit(weight, param, dither)
        lost = _what_a_weight_loses(weight, here.join(param, now))
    item.notes.append(f"master {saved.name} -> {here.name} ({lost})")
    return {part.suffix: tensor for part, tensor in zip(here.parts(shape), now, strict=True)}


def _what_a_weight_loses(weight: Tensor, now: Tensor) -> str:
    same = (weight == now) | (weight.isnan() & now.isnan())
    if bool(same.all()):
        return "nothing is lost"
    _, most = extremes(torch.where(same, 0.0, (weight - now).abs()))
    return f"{int((~same).sum())} of {same.numel()} weights move, by {most:.2g} at most"


def _distance(now: Tensor, before: Tensor) -> str:
    """How far values are from what they were, in words; empty where they are the same."""
    if torch.equal(now, before):
        return ""
    size = torch.linalg.vector_norm(before, dtype=torch.float64)
    share = 100 * float(torch.linalg.vector_norm(now - before, dtype=torch.float64) / size)
    return f"off by {share:.2g} %" if math.isfinite(share) else "loses what is not finite"


def _on(device: torch.device, kept: Tensor | BnbMoment, dtype: torch.dtype) -> Tensor:
    return (kept.decode() if isinstance(kept, BnbMoment) else kept).to(device=device, dtype=dtype)
