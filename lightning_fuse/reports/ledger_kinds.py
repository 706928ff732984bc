"""What the words of a run take in bytes: precisions, optimizers, state formats, master weights.

Written down a second time here, as plain arithmetic that needs no torch; the tests hold every row to the optimizers
themselves, tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

Shape = tuple[int, ...]
Family = Literal["fused", "torch", "bnb"]

# Bytes of one element.
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int16": 2, "int8": 1}

# Lightning's word -> what parameters and gradients are kept as.
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "fp32", "16-mixed": "fp32", "bf16-true": "bf16", "16-true": "fp16"}

# State format -> codec of moments that can be negative, codec of those that cannot.
FORMATS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "int8": ("int8", "int8"), "int8_bf16": ("int8", "bf16")}

# Master weight format -> its key in the state and its dtype, and the parameters that it fits.
MASTERS: dict[str, tuple[str, str] | None] = {
    "none": None,
    "fp32": ("master", "fp32"),
    "split": ("remainder", "int16"),
    "split8": ("remainder", "int8"),
}
MASTERS_FIT = {"none": ("fp32", "bf16", "fp16"), "fp32": ("bf16", "fp16"), "split": ("bf16",), "split8": ("bf16",)}

BLOCK = 128  # codes of ours per float32 scale, inside one row of dimension 0
BNB_BLOCK = 256  # codes of bitsandbytes per scale
BNB_SMALLEST = 4096  # elements; bitsandbytes keeps smaller tensors in float32
BNB_TABLE = 256  # float32 entries of each of its two code tables, which all tensors share


@dataclass(frozen=True)
class MomentKind:
    """One moment that a rule keeps: its key in the state, and whether it can be negative."""

    name: str
    signed: bool


@dataclass(frozen=True)
class OptimizerKind:
    """What an optimizer's word stands for.

    Attributes:
        family: Whose it is.
        moments: What it keeps per element.
        options: Settings that change what is kept: ``amsgrad``, ``momentum``.
    """

    family: Family
    moments: tuple[MomentKind, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """One tensor of state.

    Attributes:
        key: Its key in ``optimizer.state[p]``.
        dtype: Its dtype.
        count: Its elements; 1 for a step counter.
        scalar: Whether it has no dimension; such tensors are packed.
    """

    key: str
    dtype: str
    count: int
    scalar: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.count * WIDTH[self.dtype]


_ADAM = (MomentKind("exp_avg", True), MomentKind("exp_avg_sq", False))
_MOMENTUM = (MomentKind("momentum_buffer", True),)
AMSGRAD = MomentKind("max_exp_avg_sq", False)

OPTIMIZERS = {
    "adamw_fused": OptimizerKind("fused", _ADAM, ("amsgrad",)),
    "adam_fused": OptimizerKind("fused", _ADAM, ("amsgrad",)),
    "sgd_fused": OptimizerKind("fused", _MOMENTUM, ("momentum",)),
    "lion_fused": OptimizerKind("fused", (MomentKind("exp_avg", True),)),
    "lars_fused": OptimizerKind("fused", _MOMENTUM),
    "lamb_fused": OptimizerKind("fused", _ADAM),
    "ademamix_fused": OptimizerKind("fused", (_ADAM[0], MomentKind("exp_avg_slow", True), _ADAM[1])),
    "adamw_loop": OptimizerKind("torch", _ADAM, ("amsgrad",)),
    "adamw_foreach": OptimizerKind("torch", _ADAM, ("amsgrad",)),
    "adamw_torch": OptimizerKind("torch", _ADAM, ("amsgrad",)),
    "sgd_torch": OptimizerKind("torch", _MOMENTUM, ("momentum",)),
    "adamw_bnb": OptimizerKind("bnb", (MomentKind("state1", True), MomentKind("state2", False))),
}


def numel(shape: Shape) -> int:
    """Elements of a tensor."""
    return prod(shape)


def scales(shape: Shape) -> int:
    """Scales that int8 keeps for a tensor: one per 128 elements of each row, one-dimensional tensors being one row."""
    rows, row = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    return rows * ceil(row / BLOCK)


def moment_pieces(codec: str, moment: str, shape: Shape) -> list[Piece]:
    """The tensors in which one of our optimizers keeps a moment.

    Args:
        codec: "fp32", "bf16" or "int8".
        moment: Its name.
        shape: The parameter's.

    Returns:
        One piece, or codes and scales.
    """
    if codec == "int8":
        codes = Piece(f"{moment}.codes", "int8", numel(shape), scalar=not shape)
        return [codes, Piece(f"{moment}.scale", "fp32", scales(shape))]
    return [Piece(moment, codec, numel(shape), scalar=not shape)]


def bnb_pieces(moment: str, shape: Shape, state: str, smallest: int = BNB_SMALLEST) -> list[Piece]:
    """The tensors in which bitsandbytes keeps a moment, without the code tables that all tensors share.

    Args:
        moment: "state1" or "state2".
        shape: The parameter's.
        state: "fp32" or "int8".
        smallest: Elements below which float32 is kept.

    Returns:
        One piece, or codes and scales.
    """
    count = numel(shape)
    if state == "fp32" or count < smallest:
        return [Piece(moment, "fp32", count)]
    number = moment.removeprefix("state")
    return [Piece(moment, "int8", count), Piece(f"absmax{number}", "fp32", ceil(count / BNB_BLOCK))]
