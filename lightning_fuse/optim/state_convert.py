"""Converting one parameter's state: any format and master weight to any other.

A conversion decodes to float32 and encodes with the target's own codecs, as a step would, with the dither of the
parameter's step: a pure function of the checkpoint. What is kept alike on both sides keeps its bits. What is lost is
measured and told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec, DitherKey, decode_moment, encode_moment, extremes
from lightning_fuse.formats.master import MasterFormat
from lightning_fuse.optim.state_foreign import Mapped
from lightning_fuse.optim.state_match import Incoming
from lightning_fuse.rules.rule import Moment


@dataclass
class Planned:
    """What will become of one parameter's state.

    Attributes:
        item: The parameter.
        tensors: Gives every tensor of its state; converts when it is called, and adds to ``notes``.
        fresh: Why it starts anew; empty where it does not.
        notes: What was converted and what it cost.
        warnings: What a person should look at.
    """

    item: Incoming
    tensors: Callable[[], Mapping[str, Tensor]] = dict
    fresh: str = ""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def part(self) -> None:
        """Goes on with copies of what the checkpoint holds."""
        copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.item.state.items()}
        self.item = self.item._replace(state=copies)


class Keeping(NamedTuple):
    """How the state of one parameter is kept.

    Attributes:
        state: The word of the state format, or whose it is.
        moments: The rule's moments.
        codecs: What keeps each.
        master: How the float32 weight is kept.
    """

    state: str
    moments: Sequence[Moment]
    codecs: Sequence[Codec]
    master: MasterFormat


def converted(planned: Planned, saved: Keeping, here: Keeping, step: Tensor) -> dict[str, Tensor]:
    """Converts the state of one parameter.

    Args:
        planned: The parameter; notes and warnings are added to it.
        saved: How it is kept there.
        here: How it is kept here.
        step: int64, the updates applied to the parameter.

    Returns:
        Every tensor of its state as this optimizer keeps it.
    """
    key = DitherKey(int(step))
    return {
        "step": step,
        **_moments(planned, saved, here, key),
        **_master(planned, saved.master, here.master, key),
    }


def _moments(planned: Planned, saved: Keeping, here: Keeping, key: DitherKey) -> dict[str, Tensor]:
    """The parts of every moment; those that are kept alike here keep their bits."""
    shape, device, held = tuple(planned.item.param.shape), planned.item.param.device, planned.item.state
    # Device first: what a codec computes is the same on all, but it computes with what lies together.
    stored = [
        tuple(_on(device, held[moment.name + part.suffix], part.dtype) for part in codec.parts(shape))
        for moment, codec in zip(saved.moments, saved.codecs, strict=True)
    ]
    names = [moment.name for moment in here.moments]
    lost: list[str] = []
    now: list[tuple[Tensor, ...]] = [()] * len(names)
    same = [False] * len(names)
    for i in sorted(range(len(names)), key=lambda i: bool(here.moments[i].normalizer)):
        unit, codec = here.moments[i].normalizer, here.codecs[i]
        normalizer_index = names.index(unit) if unit else i
        alike = saved.codecs[i].name == codec.name
        same[i] = alike and (
            not (codec.scaled and unit) or (saved.moments[i].normalizer == unit and same[normalizer_index])
        )
        if same[i]:
            now[i] = stored[i]
            continue
        values = {k: decode_moment(k, saved.moments, saved.codecs, stored) for k in {i, normalizer_index}}
        now[i] = encode_moment(i, here.moments, here.codecs, values, key)
        kept = here.codecs[normalizer_index].sqrt_decoded(now[normalizer_index]) if unit else None
        distance = _distance(codec.decode(now[i], kept), values[i])
        lost += [f"{names[i]} {distance}"] if distance else []
    if not all(same):
        planned.notes.append(f"state {saved.state} -> {here.state} ({', '.join(lost) or 'nothing is lost'})")
    return {
        moment.name + part.suffix: tensor
        for moment, codec, kept in zip(here.moments, here.codecs, now, strict=True)
        for part, tensor in zip(codec.parts(shape), kept, strict=True)
    }


def _master(planned: Planned, saved: MasterFormat, here: MasterFormat, key: DitherKey) -> dict[str, Tensor]:
    """The parts of the master weight, and what happened to it. The parameter itself is the model's, and stays."""
    param, shape, name = planned.item.param, tuple(planned.item.param.shape), planned.item.name
    kept = tuple(_on(param.device, planned.item.state[part.suffix], part.dtype) for part in saved.parts(shape))
    readable = bool(kept) and param.dtype in saved.dtypes
    weight = saved.join(param, kept) if readable else None
    if weight is not None and saved.name == "fp32":
        written = int((weight != kept[0]).sum()) - int((weight.isnan() & kept[0].isnan()).sum())
        if written:
            planned.warnings.append(
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
        now = here.fit(weight, param, key)
        lost = _what_a_weight_loses(weight, here.join(param, now))
    planned.notes.append(f"master {saved.name} -> {here.name} ({lost})")
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


def _on(device: torch.device, kept: Tensor | Mapped, dtype: torch.dtype) -> Tensor:
    return (kept.decode() if isinstance(kept, Mapped) else kept).to(device=device, dtype=dtype)
