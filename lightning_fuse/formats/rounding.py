"""Roundings and the dither sequence that every format shares, on integer bits so that all devices agree.

The dither is an integer sequence, not a random number: nothing has to be saved, seeded or synchronised, and the
error of what it rounds does not walk (a golden-ratio sequence in both the index and the step)::

    u = (index * 0x9E3779B1 + step * 0x9E3779B9 + phase) mod 2^32
    d = (u >> 8) * 2^-24                                            in [0, 1)

``index`` is the element's place in the whole, unsharded parameter in row-major order, ``step`` the number of the
update. Quantities of one element that are rounded in one step take different phases.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEX_STRIDE = 0x9E3779B1
STEP_STRIDE = 0x9E3779B9
WORD_MASK = 0xFFFFFFFF

PHASE_UNSIGNED = 0
PHASE_SIGNED = 1 << 31
PHASE_WEIGHT = 1 << 30


def dither_word(numel: int, step: int, phase: int, first_index: int, device: torch.device) -> Tensor:
    """The 32-bit dither words of consecutive elements.

    Args:
        numel: How many elements.
        step: The number of this update, from 1.
        phase: One of the ``PHASE_`` constants.
        first_index: Index of the first element in the whole parameter; 0 unless this is a shard.
        device: Where the result lives.

    Returns:
        int64, shape [numel], values in [0, 2^32).
    """
    index = torch.arange(first_index, first_index + numel, dtype=torch.int64, device=device)
    offset = (step * STEP_STRIDE + phase) & WORD_MASK
    # int64 products wrap modulo 2^64, which leaves the value modulo 2^32 intact.
    return (index * INDEX_STRIDE + offset) & WORD_MASK


def dither_fraction(word: Tensor) -> Tensor:
    """Dither words as fractions in [0, 1).

    Args:
        word: int64, any shape, values in [0, 2^32).

    Returns:
        float32, the shape of ``word``; exact multiples of 2^-24.
    """
    return (word >> 8).to(torch.float32) * 2.0**-24


def float_bits(x: Tensor) -> Tensor:
    """The bits of a float32 tensor as int64 in [0, 2^32), so that arithmetic on them cannot overflow."""
    return x.contiguous().view(torch.int32).to(torch.int64) & WORD_MASK


def bits_to_float(bits: Tensor) -> Tensor:
    """The float32 tensor that has the given bits (int64; taken modulo 2^32)."""
    return _wrap(bits, 32).to(torch.int32).view(torch.float32)


def bits_to_bf16(bits: Tensor) -> Tensor:
    """The bfloat16 tensor that has the given 16 bits (int64; taken modulo 2^16)."""
    return _wrap(bits, 16).to(torch.int16).view(torch.bfloat16)


def bf16_bits(x: Tensor) -> Tensor:
    """The bits of a bfloat16 tensor as int64 in [0, 2^16)."""
    return x.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF


def bf16_nearest(x: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, to nearest and ties to even; a NaN stays a (quiet) NaN.

    Args:
        x: float32, any shape.

    Returns:
        bfloat16, the shape of ``x``.
    """
    bits = float_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits_to_bf16(torch.where(torch.isnan(x), (bits >> 16) | 0x40, rounded))


def bf16_dithered(x: Tensor, word: Tensor) -> Tensor:
    """Rounds float32 to bfloat16 so that the mean over steps is right.

    Nearest rounding freezes a second moment: with beta2 = 0.999 the decay of one step is below half a unit in the
    last place, so it never happens. What is rounded is the magnitude: a value and its negative round alike.

    Args:
        x: float32, any shape.
        word: Dither words, int64, the shape of ``x``.

    Returns:
        bfloat16, the shape of ``x``. A finite value never becomes infinite; a NaN stays a NaN.
    """
    bits = float_bits(x)
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    rounded = ((magnitude + (word >> 16)) >> 16).clamp(max=0x7F7F)
    special = (magnitude >> 16) | torch.where(torch.isnan(x), 0x40, 0)
    return bits_to_bf16(torch.where(torch.isfinite(x), rounded, special) | sign)


def _wrap(bits: Tensor, width: int) -> Tensor:
    """int64 values modulo 2^width as signed numbers of that width, so that a narrowing cast keeps every bit."""
    half = 1 << (width - 1)
    return ((bits + half) & ((1 << width) - 1)) - half
