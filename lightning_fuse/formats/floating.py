"""fp32 and bf16: one tensor of the parameter's shape.

bf16 rounds signed moments to nearest and ties to even, and the second moment by the dither sequence, because nearest
freezes it: with beta2 = 0.999 it stops at 0.25 where 0.2593 is exact, and never decays again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec, Part, Place
from lightning_fuse.formats.rounding import PHASE_UNSIGNED, bf16_dithered, bf16_nearest, dither_word


class Float32(Codec):
    """The codec ``fp32``: the values themselves, 4 bytes an element."""

    name = "fp32"

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See ``Codec.parts``."""
        return (Part("", shape, torch.float32),)

    def encode(self, values: Tensor, place: Place, root: Tensor | None = None) -> tuple[Tensor, ...]:
        """See ``Codec.encode``."""
        return (values,)

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        return parts[0]


class BFloat16Nearest(Codec):
    """The codec ``bf16_nearest``: 2 bytes an element, rounded to nearest."""

    name = "bf16_nearest"

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See ``Codec.parts``."""
        return (Part("", shape, torch.bfloat16),)

    def encode(self, values: Tensor, place: Place, root: Tensor | None = None) -> tuple[Tensor, ...]:
        """See ``Codec.encode``."""
        return (bf16_nearest(values),)

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``; exact."""
        return parts[0].to(torch.float32)


class BFloat16Dithered(BFloat16Nearest):
    """The codec ``bf16_dithered``: 2 bytes an element, right on average; for values that are never negative."""

    name = "bf16_dithered"

    def encode(self, values: Tensor, place: Place, root: Tensor | None = None) -> tuple[Tensor, ...]:
        """See ``Codec.encode``."""
        word = dither_word(values.numel(), place.step, PHASE_UNSIGNED, place.index_start, values.device)
        return (bf16_dithered(values, word.view(values.shape)),)
