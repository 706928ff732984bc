"""bitsandbytes' state dicts, given torch's keys, so that one reader does for both.

bitsandbytes keeps, per parameter and possibly nested under one key more, ``state1`` and ``state2`` (Adam's moments, or
the momentum of SGD and Lion alone). Its 32-bit state is the values; its 8-bit state is one byte per element that points
into a table of 256 values (``qmap1``), times the largest magnitude of a block of elements in memory order
(``absmax1``), 256 in its blockwise optimizers::

    value[i] = qmap1[state1[i]] * absmax1[i // block]

Everything that is needed lies in the state dict, so bitsandbytes itself need not be installed. Its Adam decays as AdamW
does, so its state belongs to ``FusedAdamW``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fuse.formats.format import extremes

NESTED = "__bnb_optimizer_quant_state__"
TABLE = 256  # values that a byte can point to


class BnbMoment(NamedTuple):
    """A moment as bitsandbytes' 8-bit optimizers keep it, decoded when it is asked for.

    Attributes:
        codes: uint8, the parameter's shape.
        table: float32, [256].
        largest: float32, [blocks].
    """

    codes: Tensor
    table: Tensor
    largest: Tensor

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.codes.shape

    @property
    def block(self) -> int:
        """Elements per block: the power of two from 64 up that gives this number of blocks.

        Raises:
            ValueError: There is none.
        """
        for block in (256, 64, 128, 512, 1024, 2048, 4096):
            if -(-self.codes.numel() // block) == self.largest.numel():
                return block
        raise ValueError(
            f"a bitsandbytes state of {self.codes.numel()} elements has {self.largest.numel()} block scales: "
            "fits no block size; it is damaged"
        )

    def validate(self, *, signed: bool) -> str:
        """What no optimizer can have left in it; see ``Codec.validate``."""
        low, high = extremes(self.table)
        smallest, largest = extremes(self.largest)
        if not all(map(math.isfinite, (low, high, smallest, largest))):
            return "a table or a block's scale that is infinite or NaN"
        if smallest < 0 or (low < 0 and not signed):
            return "negative values, and it is a mean of squares" if smallest >= 0 else "a negative scale"
        return ""

    def decode(self) -> Tensor:
        """float32, the parameter's shape; see the module for the formula."""
        order = sorted(range(self.codes.dim()), key=self.codes.stride, reverse=True)
        laid_out = self.codes.permute(order)
        codes = laid_out.reshape(-1)
        scale = self.largest.to(torch.float32).repeat_interleave(self.block)[: codes.numel()]
        values = (self.table.to(torch.float32)[codes.to(torch.int64)] * scale).view(laid_out.shape)
        return values.permute([order.index(dim) for dim in range(len(order))])


def from_bitsandbytes(state_dict: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """A state dict with torch's keys, whoever wrote it.

    Args:
        state_dict: torch's, which is returned as it is, or bitsandbytes'.
        known: Hyperparameters of the optimizer that will load it; what else bitsandbytes keeps means nothing to it.

    Returns:
        torch's keys; bitsandbytes' 8-bit moments are ``BnbMoment`` in place of tensors.

    Raises:
        ValueError: It is a kind of bitsandbytes' state that cannot be read.
    """
    state = state_dict["state"]
    if not any("state1" in _flat(held) for held in state.values()):
        return state_dict
    groups = [_group(group, known) for group in state_dict["param_groups"]]
    return {"state": {index: _moments(_flat(held)) for index, held in state.items()}, "param_groups": groups}


def _flat(held: Any) -> Mapping[str, Any]:
    if not isinstance(held, Mapping):
        return {}
    nested = held.get(NESTED)
    return {**held, **nested} if isinstance(nested, Mapping) else held


def _group(group: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """A group with the keys of torch's AdamW and SGD; bitsandbytes' SGD calls its momentum betas[0]."""
    words = {"amsgrad": False, "momentum": group["betas"][0], "dampening": 0.0, "nesterov": False, **group}
    kept = {key: words[key] for key in words if key in known or key in ("params", "param_names", "initial_lr")}
    return {**kept, "decoupled_weight_decay": True}


def _moments(held: Mapping[str, Any]) -> dict[str, Any]:
    if any(key in held for key in ("max1", "new_max1")):
        raise ValueError(
            "checkpoint holds bitsandbytes state without blocks, of an old release (block_wise=False): cannot be read; "
            "save it from a blockwise or 32-bit optimizer"
        )
    if "state3" in held:
        raise ValueError(
            "checkpoint holds a third state of bitsandbytes' for one parameter, and even its AdEMAMix has two: it is "
            "of a release that is not known here; save it with bitsandbytes 0.45 or later"
        )
    result = {"step": held.get("step", 1)}
    if "state2" in held and held["state1"].dim() == held["state2"].dim() + 1:
        fast, slow = (_moment({**held, **_half(held, number)}, "1") for number in range(2))
        return {**result, "exp_avg": fast, "exp_avg_slow": slow, "exp_avg_sq": _moment(held, "2")}
    first = _moment(held, "1")
    if "state2" in held:
        return {**result, "exp_avg": first, "exp_avg_sq": _moment(held, "2")}
    # Lion's and SGD's one moment goes by both names; the rule takes the one it knows.
    return {**result, "exp_avg": first, "momentum_buffer": first}


def _half(held: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One of AdEMAMix's two averages, which lie in one tensor."""
    return {key: held[key][number] for key in ("state1", "absmax1") if key in held}


def _moment(held: Mapping[str, Any], number: str) -> Tensor | BnbMoment:
    codes = held["state" + number]
    if f"qmap{number}" not in held:
        return codes
    moment = BnbMoment(codes, held[f"qmap{number}"], held[f"absmax{number}"])
    if codes.dtype != torch.uint8 or moment.table.numel() != TABLE:
        raise ValueError(
            f"checkpoint holds bitsandbytes codes as {codes.dtype} with a table of {moment.table.numel()} values: "
            f"expected torch.uint8 and {TABLE}; it is damaged"
        )
    moment.block  # noqa: B018  # raises where the blocks fit no size
    return moment
