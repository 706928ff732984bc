"""The version of the state formats, and how earlier versions kept int8 moments: read, never written.

Version 3 changed what int8 keeps of Adam's moments. Files of versions 1 and 2 go on being read, by these codecs,
and are encoded anew.

Signed with a unit, up to version 2, for quotients q of a block: the codes of the square root that momentum still has::

    q' = (code * |code|) * (scale / 127^2),  m' = q' * root

Unsigned, up to version 2. An ordinary block has codes of the fourth root and a scale >= 0::

    root = (code * code) * ((scale * scale) / 255^2),  v' = root * root

A *wide* block, which version 1 does not have, has a negative scale, its sign the mark, and logarithmic codes on the
levels L(n) = 2^(n/16), where L(top) = scale^2::

    root = L(code - 255 + top), and 0 for code 0

Version 1 kept the first moment as if it had no unit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_fuse.formats.blocks import from_blocks, per_block, step_size, to_blocks
from lightning_fuse.formats.format import Codec, DitherKey, StateFormat, extremes
from lightning_fuse.formats.int8 import Int8Signed, Int8Unsigned
from lightning_fuse.formats.rounding import bits_to_float, float_bits
from lightning_fuse.rules.rule import Moment

FORMAT_VERSION = 3

# Mantissa bits of 2^(k/16), k = 0..15, rounded to float32.
_LEVELS = tuple(int((2.0 ** (k / 16) - 1.0) * 2.0**23 + 0.5) for k in range(16))
_LEVEL_OF_ONE = 16 * 127  # levels are numbered from 2^-127, so that a number's upper bits are its exponent


def codec_of_version(version: int, fmt: StateFormat, moment: Moment) -> Codec:
    """The codec that kept a moment in a file of a given version.

    Args:
        version: Of the file's state format, from 1.
        fmt: The state format that the file names.
        moment: The moment, with its unit as that version had it.

    Returns:
        A codec that reads; one of an earlier version does not write.
    """
    codec = fmt.codec(moment)
    if version == FORMAT_VERSION:
        return codec
    if isinstance(codec, Int8Unsigned):
        return UnsignedOfVersion2()
    return SignedOfVersion2() if isinstance(codec, Int8Signed) and moment.normalizer else codec


class _ReadOnly(Codec):
    """A codec of an earlier version."""

    def encode(
        self, values: Tensor, key: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Never: ``NotImplementedError``."""
        raise NotImplementedError("an earlier version's codes are read, not written")


class SignedOfVersion2(_ReadOnly, Int8Signed):
    """The codec ``int8_signed_v2``: a quotient as codes of its square root."""

    name = "int8_signed_v2"

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        quotients = super().decode(parts)
        return quotients if root is None else quotients * torch.where(torch.isfinite(root), root, 0.0)


class UnsignedOfVersion2(_ReadOnly, Int8Unsigned):
    """The codec ``int8_unsigned_v2``: fourth-root or logarithmic codes of a second moment."""

    name = "int8_unsigned_v2"

    def sqrt_decoded(self, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``Codec.sqrt_decoded``; what the codes stand for, without a square root."""
        codes, scale = parts
        blocks = to_blocks(codes)
        code, wide = blocks.to(torch.float32), torch.signbit(scale)
        roots = (code * code) * per_block(step_size(scale * scale, 255.0**2), codes.shape)
        number = blocks.to(torch.int64) - 255 + per_block(_top_level(scale.abs()), codes.shape)
        levels = torch.where(blocks > 0, _level(number), 0.0)
        return from_blocks(torch.where(per_block(wide, codes.shape), levels, roots), codes.shape)

    def validate(self, parts: tuple[Tensor, ...], *, signed: bool, finite: bool) -> str:
        """See ``Codec.validate``; a negative scale is a wide block's, and a power of 2^(1/8)."""
        scale = parts[1]
        lowest, highest = extremes(scale)
        if not (-math.inf < lowest and highest < math.inf):
            return "a scale that is infinite or NaN"
        mantissa, grid = float_bits(scale) & 0x7FFFFF, torch.tensor(_LEVELS[::2], device=scale.device)
        off = (scale < 0) & ~torch.isin(mantissa, grid)
        return "a negative scale that is no power of 2^(1/8)" if bool(off.any()) else ""


def _level(number: Tensor) -> Tensor:
    """2^(number / 16 - 127) for int64 numbers in [16, 4080), put together from exponent and table."""
    levels = torch.tensor(_LEVELS, dtype=torch.int64, device=number.device)
    return bits_to_float(((number >> 4) << 23) + levels[number & 15])


def _top_level(scale: Tensor) -> Tensor:
    """The number of the level that is the square of a scale, a power of 2^(1/8); for 0 one that no code uses."""
    bits = float_bits(scale)
    eighths = sum(((bits & 0x7FFFFF) >= bound).to(torch.int64) for bound in _LEVELS[2::2])
    return ((bits >> 23) - 127) * 32 + eighths * 4 + _LEVEL_OF_ONE
