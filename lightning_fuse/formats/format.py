"""The contract of a state format: how one moment of one parameter is kept between two steps.

A *codec* keeps one kind of moment as one or more plain tensors, its *parts*; a *state format* is the pair of codecs
that a user's word stands for: one for signed moments, one for those that are never negative. Codecs know no rule and
no optimizer. Encoding is a pure function of (values, step, index), so a replay gives the same bits anywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fuse.rules.rule import Moment, sqrt


@dataclass(frozen=True)
class TensorSpec:
    """One plain tensor of an encoded moment.

    Attributes:
        suffix: Appended to the moment's name in ``optimizer.state[p]``: "" or, for instance, ".codes".
        shape: Shape of the tensor.
        dtype: Its dtype.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class DitherKey:
    """Where and when values are encoded: all that a dithered rounding depends on.

    Attributes:
        step: The number of this update for the parameter, from 1.
        first_index: Index of the first element in the whole, unsharded parameter.
    """

    step: int
    first_index: int = 0


class Codec(ABC):
    """Keeps one moment as parts.

    Attributes:
        name: What it is called in error messages and in the native tables.
        scaled: Whether it keeps a scale per block, which costs something for one-dimensional tensors.
    """

    name: ClassVar[str]
    scaled: ClassVar[bool] = False

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """The tensors that keep a moment of the given shape. All zeros stand for an all-zero moment."""

    @abstractmethod
    def encode(
        self, values: Tensor, key: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Encodes.

        Args:
            values: float32, the parameter's shape.
            key: Step and index.
            root: Square root of the moment's unit before it is encoded, or None where the moment has no unit. A codec
                may keep values relative to it, and then keeps 0 where it is 0 or not finite.
            share: ``share`` of the unit's codec; what is kept relative to the unit is multiplied by it. None for ones.

        Returns:
            One tensor for each of ``parts(values.shape)``, in that order.
        """

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """Decodes.

        Args:
            parts: The tensors that ``encode`` gave.
            root: ``root`` of what the moment's unit was encoded as, where ``encode`` was given one.

        Returns:
            float32, the parameter's shape.
        """

    def sqrt_decoded(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The square root of what ``decode`` gives, correctly rounded unless the codec says otherwise.

        Args:
            parts: The tensors that ``encode`` gave for a moment that is never negative.

        Returns:
            float32, the parameter's shape.
        """
        return sqrt(self.decode(parts))

    def clamp_ratio(self, values: Tensor) -> Tensor | None:
        """Where what is kept of a value is more than the value: the root of it over the root that is kept.

        A moment in units of a root that was raised would be raised as much.

        Args:
            values: float32, a moment that is never negative.

        Returns:
            float32 in [0, 1], the shape of ``values``; None where it is 1 everywhere.
        """
        return None

    def validate(self, parts: tuple[Tensor, ...], *, signed: bool, finite: bool) -> str:
        """What no encoding can have left in stored tensors; one pass over them, without a copy.

        Args:
            parts: Tensors as ``encode`` gives them.
            signed: Whether the moment can be negative.
            finite: Whether NaN and infinities are faults, too. Where the values themselves are kept, a step on a
                gradient that is not finite leaves such.

        Returns:
            What is wrong, as it reads after "holds", or "".
        """
        (values,) = parts
        lowest, highest = extremes(values)
        if finite and not (math.isfinite(lowest) and math.isfinite(highest)):
            return "NaN or infinite values"
        if not signed and (lowest < 0 or (math.isnan(lowest) and bool((values < 0).any()))):
            return "negative values, and it is a mean of squares"
        return ""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a moment of the given shape takes."""
        return sum(part.nbytes for part in self.parts(shape))


@dataclass(frozen=True)
class StateFormat:
    """What one word of ``state=`` stands for.

    Attributes:
        name: The word.
        signed: Codec of moments that can be negative (first moment, momentum buffer).
        unsigned: Codec of moments that cannot (second moment).
    """

    name: str
    signed: Codec
    unsigned: Codec

    def codec(self, moment: Moment) -> Codec:
        """The codec that keeps the given moment."""
        return self.signed if moment.signed else self.unsigned

    @property
    def scaled(self) -> bool:
        """Whether either codec keeps scales."""
        return self.signed.scaled or self.unsigned.scaled


def extremes(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of any number of values; both NaN where one is, both 0 where there are none."""
    if not values.numel():
        return 0.0, 0.0
    lowest, highest = torch.aminmax(values)
    return float(lowest), float(highest)


def state_tensors(
    moment: Moment, codec: Codec, state: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """The parts of one moment, looked up in a parameter's state.

    Args:
        moment: The moment.
        codec: The codec that keeps it.
        state: ``optimizer.state[p]``.
        shape: The parameter's shape.

    Returns:
        The tensors in the order of ``codec.parts(shape)``.
    """
    return tuple(state[moment.name + part.suffix] for part in codec.parts(shape))


def decode_moments(
    moments: Sequence[Moment], codecs: Sequence[Codec], parts: Sequence[tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Decodes all moments of one parameter, those with a unit relative to it.

    Args:
        moments: The moments of a rule.
        codecs: What keeps each.
        parts: The parts of each.

    Returns:
        float32 values of each moment, the parameter's shape.
    """
    return tuple(decode_moment(index, moments, codecs, parts) for index in range(len(moments)))


def decode_moment(
    index: int, moments: Sequence[Moment], codecs: Sequence[Codec], parts: Sequence[tuple[Tensor, ...]]
) -> Tensor:
    """Decodes one moment of a parameter; arguments as of ``decode_moments``, and which moment."""
    return codecs[index].decode(parts[index], _normalizer_sqrt(moments[index], moments, codecs, parts))


def encode_moments(
    moments: Sequence[Moment], codecs: Sequence[Codec], values: Sequence[Tensor], key: DitherKey
) -> tuple[tuple[Tensor, ...], ...]:
    """Encodes all moments of one parameter, those with a unit relative to it as it is before it is encoded.

    Args:
        moments: The moments of a rule.
        codecs: What keeps each.
        values: float32, the new values of each.
        key: Step and index.

    Returns:
        The parts of each moment.
    """
    return tuple(encode_moment(i, moments, codecs, values, key) for i in range(len(moments)))


def encode_moment(
    index: int,
    moments: Sequence[Moment],
    codecs: Sequence[Codec],
    values: Sequence[Tensor] | Mapping[int, Tensor],
    key: DitherKey,
) -> tuple[Tensor, ...]:
    """Encodes one moment of a parameter; arguments as of ``encode_moments``, and which moment.

    Of ``values`` only its own and those of its unit are read.
    """
    if not moments[index].normalizer:
        return codecs[index].encode(values[index], key)
    unit = _normalizer_index(moments[index], moments)
    return codecs[index].encode(values[index], key, sqrt(values[unit]), codecs[unit].clamp_ratio(values[unit]))


def _normalizer_sqrt(
    moment: Moment, moments: Sequence[Moment], codecs: Sequence[Codec], parts: Sequence[tuple[Tensor, ...]]
) -> Tensor | None:
    if not moment.normalizer:
        return None
    index = _normalizer_index(moment, moments)
    return codecs[index].sqrt_decoded(parts[index])


def _normalizer_index(moment: Moment, moments: Sequence[Moment]) -> int:
    return [other.name for other in moments].index(moment.normalizer)
