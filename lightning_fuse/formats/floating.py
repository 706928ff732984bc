"""fp32 and bf16: one tensor of the parameter's shape.

bf16 is rounded by the dither sequence, because nearest freezes a running average: with beta2 = 0.999 a second moment
stops at 0.25 where 0.2593 is exact, and never decays again; with beta1 = 0.9 a first moment under a constant gradient
of 1 stops at 0.984, and 1.6 % of every update are lost.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec, DitherKey, TensorSpec
from lightning_fuse.formats.rounding import PHASE_SIGNED, PHASE_UNSIGNED, bf16_dithered, dither_word


class Float32(Codec):
    """The codec ``fp32``: the values themselves, 4 bytes an element."""

    name = "fp32"

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``Codec.parts``."""
        return (TensorSpec("", shape, torch.float32),)

    def encode(
        self, values: Tensor, key: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See ``Codec.encode``."""
        return (values,)

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        return parts[0]


class BFloat16Signed(Codec):
    """The codec ``bf16_signed``: 2 bytes an element, right on average."""

    name = "bf16_signed"
    phase: ClassVar[int] = PHASE_SIGNED

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``Codec.parts``."""
        return (TensorSpec("", shape, torch.bfloat16),)

    def encode(
        self, values: Tensor, key: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See ``Codec.encode``."""
        word = dither_word(values.numel(), key.step, self.phase, key.first_index, values.device)
        return (bf16_dithered(values, word.view(values.shape)),)

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``; exact."""
        return parts[0].to(torch.float32)


class BFloat16Unsigned(BFloat16Signed):
    """The codec ``bf16_unsigned``: the same for a second moment, rounded half a turn away from the first."""

    name = "bf16_unsigned"
    phase = PHASE_UNSIGNED
