"""int8: blocks of up to 128 one-byte codes and one float32 scale each, about 1.031 bytes an element.

All codes are rounded with the dither sequence of ``rounding.py``, u being an element's dither word and d its fraction:
a code is worth 1-2 % of the value and beta2 = 0.999 moves it by 0.1 % a step, so nearest rounding would never move it.

Signed (momentum), one int8 per element, for a block of values m: codes of the square root, so that small values get
their share::

    s = max |m|                                  stored
    code = sign(m) * min(127, floor(sqrt(|m|) * (127 / sqrt(s)) + d))
    m' = (code * |code|) * (s / 127^2)

Signed with a unit (first moment), that is where the update divides by the root of a second moment. What is kept is the
quotient q = m / root, ``root`` being the root of the second moment before it is encoded; what is read back is
multiplied by the root of the second moment as it is stored. A dithered code is then wrong by a share of the update, not
of the block's largest moment, and an error of the second moment's code moves both alike, so that it does not change the
quotient. Quotients are of one size, so their codes are evenly spaced::

    s = max |q|, 0 if below 2^-64                stored
    code = (trunc(q * ((127 * 2^24 - 256) / s)) + (u >> 8)) >> 24     (256 keeps the largest at 127)
    m' = (code * (s / 127)) * root

Unsigned (second moment), one uint8 per element, for a block of values v, r = sqrt(v). Codes number *levels*: float32
numbers that have only 6 or 5 bits of mantissa. The upper bits of any number y name the level below it, the lower bits
say how far it is to the next, so a code is the bits of y and a dither word, added and shifted. What is put between
levels is not r but r and an offset c, so that codes are evenly spaced far below c and logarithmic far above::

    S = 35/32 * max r, rounded up to 2 bits of mantissa
    c = S / 2^4 and k = 0, or S / 2^8 and k = 1: the first of which no r > 0 is below c / 2
    code = (bits(r + c) - bits(c) + (u >> (15 - k))) >> (17 + k)
    root = float(bits(c) + (code << (17 + k))) - c,  v' = root * root

35/32 leaves room for c and for rounding up, so no code exceeds 255. Where a block reaches too far for either offset it
is *wide*, k = 2, and has 16 levels an octave without an offset: 5, 4, 4 and 3 in the quarters of the mantissa, so that
each is 3.6 to 5 % above the one before. With n the number of the level below r (16 times its exponent, and its place in
the octave), top that of S, which is a level, and t = (r - level n) / (level n + 1 - level n)::

    code = n + floor(t + d) - top + 255          clamped to [1, 255], and 0 for r = 0
    root = level (code - 255 + top), and 0 for code 0

Stored is S, with k in the lowest bits of its mantissa. It has few values, so it stands still in most steps, and with it
the levels: then what was read back is written as it was, whatever the dither. A block gets the finest levels that
reach its smallest value: 1.1 % of r + c on average, 2.2 %, or 4.3 % of r. Second moments below the last level stand
still there, and a quotient by such a root is multiplied by the root over the level, which is what is read back: that
makes updates too small, and nothing makes them large, a gradient far below eps least of all.

Every bracket without a tensor of values is computed once per block. Second moments have no smallest scale and all
operations scale exactly with powers of two: multiplying all gradients by one changes no code. A block of zeros has
scale 0. A value that is not finite counts as zero here (the parameter has it already), so it spoils its element, not
its block; so does a quotient by a unit that is zero or not finite.

Where blocks lie: ``blocks.py``.
"""

from __future__ import annotations

import math
from math import ceil

import torch
from torch import Tensor

from lightning_fuse.formats.blocks import from_blocks, per_block, scale_shape, scaled_parts, step_size, to_blocks
from lightning_fuse.formats.format import Codec, DitherKey, TensorSpec, extremes
from lightning_fuse.formats.rounding import (
    PHASE_SIGNED,
    PHASE_UNSIGNED,
    bits_to_float,
    dither_fraction,
    dither_word,
    float_bits,
)
from lightning_fuse.rules.rule import divide, sqrt

ROOM = 35 / 32  # a scale over the largest root: leaves 1/16 for the offset, and a level for rounding up
SCALE_BITS = 21  # lower bits of a float32 that a scale does not use, but for the kind
SCALES = (2.0**-75, 2.0**65)  # reach of scales: roots of a float32 are 2^-74.5 at least, and below 2^64
OFFSETS = (2.0**-4, 2.0**-8)  # of the scale, by kind: there are 256 levels from offset to scale
FINEST_SHIFT = 17  # lower bits of a float32 that the finest levels do not use
WIDE = 2  # the kind whose levels are logarithmic

# Of wide blocks, by quarter of the mantissa: levels in it, levels before it, and mantissa bits from one to the next,
# rounded up so that the number of a level is its own and not the one before.
COUNTS, STARTS = (5, 4, 4, 3), (0, 5, 9, 13)
STEPS = tuple(ceil(2**21 / count) for count in COUNTS)

QUOTIENT_CODES = 127 * 2.0**24 - 256  # less by two units of a float32's last place: rounded twice, still below 127
SMALLEST_QUOTIENT = 2.0**-64  # a block of smaller ones is nothing, and the division above stays finite


class Int8Signed(Codec):
    """The codec ``int8_signed``: square-root codes, or, with a unit, even ones of the quotient; see the module."""

    name = "int8_signed"
    scaled = True

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``Codec.parts``."""
        return scaled_parts(shape, torch.int8)

    def encode(
        self, values: Tensor, key: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See ``Codec.encode``; returns codes and scales."""
        if root is not None:
            # Where the unit is zero this is a quotient that is not finite, and so a zero.
            quotients = _finite(values / _finite(root))
            return _encode_quotients(quotients if share is None else quotients * share, key)
        blocks = to_blocks(_finite(values))
        scale = blocks.abs().amax(dim=-1)
        per_unit = torch.where(scale > 0, divide(127.0, sqrt(scale)), 0.0)
        dither = dither_fraction(_block_words(values, key, PHASE_SIGNED))
        code = torch.floor(sqrt(blocks.abs()) * per_unit.unsqueeze(-1) + dither).clamp(max=127.0)
        codes = from_blocks(torch.copysign(code, blocks), values.shape)
        return codes.to(torch.int8), scale.view(scale_shape(values.shape))

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        codes, scale = parts
        code = to_blocks(codes.to(torch.float32))
        if root is None:
            return from_blocks((code * code.abs()) * per_block(step_size(scale, 127.0**2), codes.shape), codes.shape)
        return from_blocks(code * per_block(step_size(scale, 127.0), codes.shape), codes.shape) * _finite(root)

    def validate(self, parts: tuple[Tensor, ...], *, signed: bool, finite: bool) -> str:
        """See ``Codec.validate``; what is not finite is never stored."""
        codes, scale = parts
        lowest, highest = extremes(scale)
        if not (lowest >= 0.0 and highest < math.inf):
            return "a scale that is negative, infinite or NaN"
        return "the code -128, which none has" if extremes(codes)[0] < -127 else ""


class Int8Unsigned(Codec):
    """The codec ``int8_unsigned``: codes of a second moment's root, counted in levels; see the module."""

    name = "int8_unsigned"
    scaled = True

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """See ``Codec.parts``."""
        return scaled_parts(shape, torch.uint8)

    def encode(
        self, values: Tensor, key: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See ``Codec.encode``; returns codes and scales."""
        roots = sqrt(to_blocks(_finite(values)))
        scale, word = scale_of(roots), _block_words(values, key, PHASE_UNSIGNED)
        kind, offset, shift = (of_block.unsqueeze(-1) for of_block in levels_of(scale))
        code = float_bits(roots + offset)  # in place from here: int64 takes twice the memory of the values
        code -= float_bits(offset)
        code += word >> (32 - shift)
        code >>= shift
        wide = kind.squeeze(-1) == WIDE
        if bool(wide.any()):
            code[wide] = _wide_codes(roots[wide], top_level(scale[wide]).unsqueeze(-1), word[wide])
        return from_blocks(code, values.shape).to(torch.uint8), scale.view(scale_shape(values.shape))

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        own = self.sqrt_decoded(parts)
        return own * own

    def clamp_ratio(self, values: Tensor) -> Tensor | None:
        """See ``Codec.clamp_ratio``; below 1 in wide blocks, where a root is below that of code 1."""
        roots = sqrt(to_blocks(_finite(values)))
        scale = scale_of(roots)
        wide = levels_of(scale)[0] == WIDE
        if not bool(wide.any()):
            return None
        least = _wide_roots(torch.ones_like(scale, dtype=torch.int64), top_level(scale))
        raised = wide.unsqueeze(-1) & (roots < least.unsqueeze(-1))
        return from_blocks(torch.where(raised, roots / least.unsqueeze(-1), 1.0), values.shape)

    def sqrt_decoded(self, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``Codec.sqrt_decoded``; what the codes stand for, without a square root."""
        codes, scale = parts
        blocks = to_blocks(codes).to(torch.int64)
        kind, offset, shift = (per_block(of_block, codes.shape) for of_block in levels_of(scale))
        roots = bits_to_float(float_bits(offset) + (blocks << shift)) - offset
        wide = kind.squeeze(-1) == WIDE
        if bool(wide.any()):
            roots[wide] = _wide_roots(blocks[wide], top_level(scale.view(wide.shape)[wide]).unsqueeze(-1))
        return from_blocks(roots, codes.shape)

    def validate(self, parts: tuple[Tensor, ...], *, signed: bool, finite: bool) -> str:
        """See ``Codec.validate``; scales have few values."""
        scale = parts[1]
        lowest, highest = extremes(scale)
        if not (lowest >= 0.0 and highest < math.inf):
            return "a scale that is negative, infinite or NaN"
        tag, known = float_bits(scale) & (1 << SCALE_BITS) - 1, (scale >= SCALES[0]) & (scale < SCALES[1])
        return "" if bool(((known & (tag <= WIDE)) | (float_bits(scale) == 0)).all()) else "a scale that no block has"


def scale_of(roots: Tensor) -> Tensor:
    """The scales of blocks of roots, which say their kind, too.

    Args:
        roots: float32, [..., 128], finite and >= 0.

    Returns:
        float32, [...]; 0 for a block of zeros.
    """
    largest = roots.amax(dim=-1)
    smallest = torch.where(roots > 0, roots, math.inf).amin(dim=-1)
    bits = ((float_bits(largest * ROOM) + (1 << SCALE_BITS) - 1) >> SCALE_BITS) << SCALE_BITS
    scale = bits_to_float(bits)
    kind = sum((smallest < scale * (offset / 2)).to(torch.int64) for offset in OFFSETS)
    return torch.where(largest > 0, bits_to_float(bits | kind), 0.0)


def levels_of(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """On which levels the codes of a block stand.

    Args:
        scale: float32, any shape, as ``scale_of`` gives it.

    Returns:
        The kind, int64; the offset, float32, whose bits are those of level 0; by how many bits a code is shifted,
        int64. All of the shape of ``scale``; offset and shift have a meaning only where a block is not wide.
    """
    bits = float_bits(scale)
    kind = bits & 3
    shares = torch.tensor([*OFFSETS, 0.0], dtype=torch.float32, device=scale.device)
    return kind, bits_to_float(bits - kind) * shares[kind], FINEST_SHIFT + kind


def top_level(scale: Tensor) -> Tensor:
    """The number of the level that the scale of a wide block is.

    Args:
        scale: float32, any shape, as ``scale_of`` gives it.

    Returns:
        int64, the shape of ``scale``.
    """
    bits = float_bits(scale)
    starts = torch.tensor(STARTS, dtype=torch.int64, device=scale.device)
    return (bits >> 23) * 16 + starts[bits >> 21 & 3]


def _wide_codes(roots: Tensor, top: Tensor, word: Tensor) -> Tensor:
    """Codes of wide blocks.

    Args:
        roots: float32, [blocks, 128], 0 or a normal number > 0.
        top: Number of the top level, int64, [blocks, 1].
        word: Dither words, int64, the shape of ``roots``.

    Returns:
        int64, the shape of ``roots``; in [0, 255].
    """
    bits = float_bits(roots)
    counts, starts = (
        torch.tensor(of_quarter, dtype=torch.int64, device=roots.device) for of_quarter in (COUNTS, STARTS)
    )
    quarter = bits >> 21 & 3
    code = (bits >> 23) * 16 + starts[quarter] - (top - 255)
    bits &= 0x1FFFFF
    bits *= counts[quarter]
    bits += word >> 11
    code += bits >> 21
    return torch.where(roots > 0, code.clamp_(1, 255), 0)


def _wide_roots(code: Tensor, top: Tensor) -> Tensor:
    """What the codes of wide blocks stand for; int64 codes, and the numbers of the top levels."""
    number = code - 255 + top
    starts, steps = (torch.tensor(of_quarter, dtype=torch.int64, device=code.device) for of_quarter in (STARTS, STEPS))
    place = number & 15
    quarter = (place >= STARTS[1]).long() + (place >= STARTS[2]) + (place >= STARTS[3])
    mantissa = (quarter << 21) + (place - starts[quarter]) * steps[quarter]
    return torch.where(code > 0, bits_to_float(((number >> 4) << 23) + mantissa), 0.0)


def _encode_quotients(quotients: Tensor, key: DitherKey) -> tuple[Tensor, Tensor]:
    """Codes of a first moment in units of the second's root, and their scales."""
    blocks = to_blocks(quotients)
    scale = blocks.abs().amax(dim=-1)
    scale = torch.where(scale >= SMALLEST_QUOTIENT, scale, 0.0)
    per_unit = torch.where(scale > 0, divide(QUOTIENT_CODES, scale), 0.0)
    word = _block_words(quotients, key, PHASE_SIGNED)
    code = ((blocks * per_unit.unsqueeze(-1)).to(torch.int64) + (word >> 8)) >> 24
    return from_blocks(code, quotients.shape).to(torch.int8), scale.view(scale_shape(quotients.shape))


def _finite(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0.0)


def _block_words(values: Tensor, key: DitherKey, phase: int) -> Tensor:
    word = dither_word(values.numel(), key.step, phase, key.first_index, values.device)
    return to_blocks(word.view(values.shape))
