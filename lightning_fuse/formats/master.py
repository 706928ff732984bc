"""Master weights: how a 16-bit parameter keeps the float32 weight that the rule updates.

``none``     nothing more; the new weight is rounded to the parameter's dtype, to nearest, ties to even.
``fp32``     a float32 copy beside the parameter: 2 + 4 bytes. Where the parameter is not what the copy rounds to,
             somebody has written to it since, and it wins.
``split``    the parameter is the upper half of the float32 weight, an int16 the lower: 2 + 2 bytes, every bit kept.
``split8``   as split with an int8: a weight of 24 bits, 2 + 1 bytes, rounded with the dither sequence so that
             updates below its last place still happen on average.

Splitting is arithmetic on the bits of w, as an unsigned 32-bit number::

    upper = (w + 2^15) >> 16        the parameter: w rounded to nearest, ties away from zero
    lower = w mod 2^16              as a signed number: what upper is away from w
    w     = upper * 2^16 + lower    modulo 2^32

which is one-to-one for all 2^32 patterns. Ties must go away from zero: with ties to even there would be 65,537
different remainders. A NaN whose upper bits are all ones would show as a zero, so kernels store a new NaN as
0x7FC00000.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fuse.formats.format import DitherKey, TensorSpec
from lightning_fuse.formats.rounding import (
    PHASE_WEIGHT,
    bf16_bits,
    bf16_nearest,
    bits_to_bf16,
    bits_to_float,
    dither_word,
    float_bits,
)

CANONICAL_NAN = 0x7FC00000


class MasterFormat(ABC):
    """How the float32 weight of one parameter is kept.

    Attributes:
        name: The word of ``master=``.
        dtypes: Parameter dtypes it can be used with.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]]

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """The tensors kept beside the parameter; a suffix here is the whole key in the state."""

    @abstractmethod
    def join(self, param: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """The float32 weight.

        Args:
            param: The parameter as the model sees it.
            parts: The tensors kept beside it.

        Returns:
            float32, the shape of ``param``.
        """

    @abstractmethod
    def split(self, weight: Tensor, dtype: torch.dtype, key: DitherKey) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What to store for a new weight.

        Args:
            weight: float32.
            dtype: The parameter's dtype.
            key: Step and index, for a dithered rounding.

        Returns:
            The parameter in its dtype, and the tensors kept beside it.
        """

    @abstractmethod
    def start(self, param: Tensor) -> tuple[Tensor, ...]:
        """The tensors to keep for a parameter whose own value is all that is known of the weight."""

    @abstractmethod
    def fit(self, weight: Tensor, param: Tensor, key: DitherKey) -> tuple[Tensor, ...]:
        """The tensors that come closest to a weight beside a parameter that stays as it is.

        A tie between two values of the parameter is rounded to even by one kind of master and away from zero by
        another; the weight then moves by one unit in float32's last place. Where the parameter is not what the weight
        rounds to, somebody has written to it since, and it wins.

        Args:
            weight: float32, as another kind of master kept it.
            param: The parameter, the shape of ``weight``.
            key: Step and index, for a dithered rounding.

        Returns:
            One tensor for each of ``parts``.
        """


class NoMaster(MasterFormat):
    """The word ``none``; see the module."""

    name = "none"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``MasterFormat.parts``."""
        return ()

    def join(self, param: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``MasterFormat.join``; exact."""
        return param.to(torch.float32)

    def split(self, weight: Tensor, dtype: torch.dtype, key: DitherKey) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``MasterFormat.split``."""
        return round_to(weight, dtype), ()

    def start(self, param: Tensor) -> tuple[Tensor, ...]:
        """See ``MasterFormat.start``."""
        return ()

    def fit(self, weight: Tensor, param: Tensor, key: DitherKey) -> tuple[Tensor, ...]:
        """See ``MasterFormat.fit``."""
        return ()


class CopyMaster(NoMaster):
    """The word ``fp32``; see the module."""

    name = "fp32"
    dtypes = (torch.bfloat16, torch.float16)

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``MasterFormat.parts``."""
        return (TensorSpec("master", shape, torch.float32),)

    def join(self, param: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``MasterFormat.join``; a parameter that was written to wins over its copy."""
        (copy,) = parts
        same = round_to(copy, param.dtype).view(torch.int16) == param.contiguous().view(torch.int16)
        return torch.where(same, copy, param.to(torch.float32))

    def split(self, weight: Tensor, dtype: torch.dtype, key: DitherKey) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``MasterFormat.split``."""
        return round_to(weight, dtype), (weight,)

    def start(self, param: Tensor) -> tuple[Tensor, ...]:
        """See ``MasterFormat.start``."""
        return (param.to(torch.float32),)

    def fit(self, weight: Tensor, param: Tensor, key: DitherKey) -> tuple[Tensor, ...]:
        """See ``MasterFormat.fit``."""
        (kept,) = self.start(param)
        for unit in (-1, 1, 0):
            near = bits_to_float(float_bits(weight) + unit)
            same = round_to(near, param.dtype).view(torch.int16) == param.contiguous().view(torch.int16)
            kept = torch.where(same, near, kept)
        return (kept,)


class SplitMaster(MasterFormat):
    """The word ``split``; see the module."""

    name = "split"
    dtypes = (torch.bfloat16,)

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``MasterFormat.parts``."""
        return (TensorSpec("remainder", shape, torch.int16),)

    def join(self, param: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``MasterFormat.join``."""
        return bits_to_float((bf16_bits(param) << 16) + parts[0].to(torch.int64))

    def split(self, weight: Tensor, dtype: torch.dtype, key: DitherKey) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``MasterFormat.split``; exact for every bit pattern."""
        bits = float_bits(weight)
        lower = ((bits + 0x8000) & 0xFFFF) - 0x8000
        return bits_to_bf16((bits + 0x8000) >> 16), (lower.to(torch.int16),)

    def start(self, param: Tensor) -> tuple[Tensor, ...]:
        """See ``MasterFormat.start``."""
        return (torch.zeros_like(param, dtype=torch.int16),)

    def fit(self, weight: Tensor, param: Tensor, key: DitherKey) -> tuple[Tensor, ...]:
        """See ``MasterFormat.fit``."""
        return (_remainder(float_bits(weight), bf16_bits(param), 16).to(torch.int16),)


class Split8Master(MasterFormat):
    """The word ``split8``; see the module."""

    name = "split8"
    dtypes = (torch.bfloat16,)

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``MasterFormat.parts``."""
        return (TensorSpec("remainder", shape, torch.int8),)

    def join(self, param: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``MasterFormat.join``."""
        return bits_to_float((bf16_bits(param) << 16) + (parts[0].to(torch.int64) << 8))

    def split(self, weight: Tensor, dtype: torch.dtype, key: DitherKey) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``MasterFormat.split``; the lowest 8 of the weight's 32 bits are dithered away."""
        bits = float_bits(weight)
        word = dither_word(weight.numel(), key.step, PHASE_WEIGHT, key.first_index, weight.device)
        dithered = bits + (word.view(weight.shape) >> 24)
        # An infinity or NaN has no neighbours to be between; a finite weight may not become one of them.
        rounded = torch.where((bits & 0x7FFFFFFF) + 0xFF < 0x7F800000, dithered, bits) >> 8
        lower = ((rounded + 0x80) & 0xFF) - 0x80
        return bits_to_bf16((rounded + 0x80) >> 8), (lower.to(torch.int8),)

    def start(self, param: Tensor) -> tuple[Tensor, ...]:
        """See ``MasterFormat.start``."""
        return (torch.zeros_like(param, dtype=torch.int8),)

    def fit(self, weight: Tensor, param: Tensor, key: DitherKey) -> tuple[Tensor, ...]:
        """See ``MasterFormat.fit``."""
        upper, (lower,) = self.split(weight, param.dtype, key)
        return (_remainder((bf16_bits(upper) << 8) + lower.to(torch.int64), bf16_bits(param), 8).to(torch.int8),)


def _remainder(bits: Tensor, upper: Tensor, width: int) -> Tensor:
    """What a weight's bits are away from a given upper half, 0 where that is not the weight's own.

    Args:
        bits: int64, the upper 16 + ``width`` bits of the weight.
        upper: int64, the bits of the parameter.
        width: Bits of the remainder.

    Returns:
        int64, in the range of a signed number of that width.
    """
    half, whole = 1 << (width - 1), 1 << (16 + width)
    away = ((bits - (upper << width) + whole // 2) % whole) - whole // 2
    # Half a unit upwards is a tie that went to even, or a dithered rounding that went up: the last place is given up.
    return torch.where(away.abs() <= half, away, 0).clamp(max=half - 1)


def round_to(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 to a parameter's dtype, to nearest and ties to even.

    Args:
        weight: float32, any shape.
        dtype: float32, bfloat16 or float16.

    Returns:
        ``dtype``, the shape of ``weight``.
    """
    return bf16_nearest(weight) if dtype == torch.bfloat16 else weight.to(dtype)


def canonical_nan(weight: Tensor) -> Tensor:
    """Replaces every NaN by the one that survives splitting; other values keep their bits."""
    nan = bits_to_float(torch.tensor(CANONICAL_NAN, dtype=torch.int64, device=weight.device))
    return torch.where(torch.isnan(weight), nan, weight)
