"""int8: blocks of up to 128 one-byte codes and one float32 scale each, about 1.031 bytes an element.

Both moments are stored as the square root of a gradient's magnitude, so that small ones get their share of codes, and
both are rounded with the dither sequence of ``rounding.py``: a code is worth 1-2 % of the value and
beta2 = 0.999 moves it by 0.1 % a step, so nearest rounding would never move it at all.

Signed (first moment, momentum), one int8 per element, for a block of values m. Where the moment has a unit, that is
where the update divides by the root of a second moment, m stands for the quotient m / root, ``root`` being the root of
the second moment before it is encoded; what is read back is multiplied by the root of the second moment as it is
stored. A dithered code is then wrong by a share of the update, not of the block's largest moment, and an error of the
second moment's code moves both alike, so that it does not change the quotient::

    s = max |m|                                  stored
    code = sign(m) * min(127, floor(sqrt(|m|) * (127 / sqrt(s)) + d))
    m' = (code * |code|) * (s / 127^2)

Unsigned (second moment), one uint8 per element, for a block of values v, r = sqrt(v)::

    s = the smallest 2^(k/8) >= max sqrt(r)      stored; stands still from step to step
    code = min(255, floor(sqrt(r) * (255 / s) + d))    and never 0 for v > 0
    root = (code * code) * ((s * s) / 255^2),  v' = root * root

or, in a *wide* block, where at least an eighth of the elements that are not 0 have r < s^2 / 64, logarithmic codes, on
the levels L(n) = 2^(n/16), with L(n) <= r < L(n + 1) and L(top) = s^2::

    -s                                           stored: the sign bit is the kind
    code = n + floor((r - L(n)) / (L(n + 1) - L(n)) + d) - top + 255    clamped to [1, 255], and 0 for v = 0
    root = L(code - 255 + top),  v' = root * root

s^2 is itself a level, so a change of scale moves codes by whole numbers and rounds nothing anew. Levels are put
together from exponent bits and a table of 16 mantissas, and n is read off the bits of r: no logarithm is computed.
Below 1/64 a step of the fourth root is coarser than a level. Being a count, the decision depends on no order of
summation, and as ordinary blocks are far from the border, the kind stands still, too.

Every bracket without a tensor of values is computed once per block. Scales have no floor and all operations scale
exactly with powers of two: multiplying all gradients by a power of four changes no code. A block of zeros has scale 0.
A value that is not finite counts as zero here (the parameter has it already), so it spoils its element, not its block;
so does a quotient by a unit that is zero or not finite.

Blocks lie inside one row of dimension 0, the other dimensions flattened; a shorter row is one block, and the last block
of a row may be short. Slicing along dimension 0 therefore never cuts a block.
"""

from __future__ import annotations

import math
from math import ceil, prod

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec, Part, Place, extremes
from lightning_fuse.formats.rounding import (
    PHASE_SIGNED,
    PHASE_UNSIGNED,
    bits_to_float,
    dither_fraction,
    dither_word,
    float_bits,
)
from lightning_fuse.rules.rule import divide, sqrt

BLOCK = 128  # elements per scale

# A block is wide where one in WIDE_SHARE lies this many levels below the top: there a step of the fourth root (code 32
# of 255: 33^2 / 32^2 = 1.063) is coarser than a level (2^(1/16) = 1.044).
WIDE_LEVELS = 96
WIDE_SHARE = 8

# Mantissa bits of 2^(k/16), k = 0..16, rounded to float32; 2^(16/16) carries into the exponent.
_LEVELS = tuple(int((2.0 ** (k / 16) - 1.0) * 2.0**23 + 0.5) for k in range(17))
_GRID = _LEVELS[::2]  # of 2^(k/8), k = 0..8

_LEVEL_OF_ONE = 16 * 127  # levels are numbered from 2^-127, so that a number's upper bits are its exponent


class Int8Signed(Codec):
    """The codec ``int8_signed``: square-root codes of a signed moment; see the module for its formula."""

    name = "int8_signed"
    scaled = True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See ``Codec.parts``."""
        return _parts(shape, torch.int8)

    def encode(self, values: Tensor, place: Place, root: Tensor | None = None) -> tuple[Tensor, ...]:
        """See ``Codec.encode``; returns codes and scales."""
        # Where the unit is zero this is a quotient that is not finite, and so a zero.
        blocks = to_blocks(_finite(values if root is None else values / _finite(root)))
        scale = blocks.abs().amax(dim=-1)
        per_unit = torch.where(scale > 0, divide(127.0, sqrt(scale)), 0.0)
        dither = _block_dither(values, place, PHASE_SIGNED)
        code = torch.floor(sqrt(blocks.abs()) * per_unit.unsqueeze(-1) + dither).clamp(max=127.0)
        codes = from_blocks(torch.copysign(code, blocks), values.shape)
        return codes.to(torch.int8), scale.view(scale_shape(values.shape))

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        codes, scale = parts
        code = to_blocks(codes.to(torch.float32))
        values = from_blocks((code * code.abs()) * _per_block(_units(scale, 127.0), codes.shape), codes.shape)
        return values if root is None else values * _finite(root)

    def fault(self, parts: tuple[Tensor, ...], *, signed: bool, finite: bool) -> str:
        """See ``Codec.fault``; what is not finite is never stored."""
        codes, scale = parts
        lowest, highest = extremes(scale)
        if not (lowest >= 0.0 and highest < math.inf):
            return "a scale that is negative, infinite or NaN"
        return "the code -128, which none has" if extremes(codes)[0] < -127 else ""


class Int8Unsigned(Codec):
    """The codec ``int8_unsigned``: fourth-root or logarithmic codes of a second moment; see the module."""

    name = "int8_unsigned"
    scaled = True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See ``Codec.parts``."""
        return _parts(shape, torch.uint8)

    def encode(self, values: Tensor, place: Place, root: Tensor | None = None) -> tuple[Tensor, ...]:
        """See ``Codec.encode``; returns codes and scales."""
        roots = sqrt(to_blocks(_finite(values)))
        fourth = sqrt(roots)
        scale = grid_ceil(fourth.amax(dim=-1))
        per_unit = torch.where(scale > 0, divide(255.0, scale), 0.0)
        dither = _block_dither(values, place, PHASE_UNSIGNED)
        code = torch.floor(fourth * per_unit.unsqueeze(-1) + dither)
        code = torch.where(roots > 0, code.clamp(1.0, 255.0), 0.0)
        top = top_level(scale)
        wide = _is_wide(roots, top)
        if wide.any():
            levels = _level_codes(roots, top, dither)
            code = torch.where(wide.unsqueeze(-1) & (roots > 0), levels, code)
        scale = torch.where(wide, -scale, scale)
        return from_blocks(code, values.shape).to(torch.uint8), scale.view(scale_shape(values.shape))

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        own = self.root(parts)
        return own * own

    def root(self, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``Codec.root``; what the codes stand for, without a square root."""
        codes, scale = parts
        blocks = to_blocks(codes)
        code, wide = blocks.to(torch.float32), torch.signbit(scale)
        roots = (code * code) * _per_block(_units(scale * scale, 255.0), codes.shape)
        if wide.any():
            number = blocks.to(torch.int64) - 255 + _per_block(top_level(scale.abs()), codes.shape)
            levels = torch.where(blocks > 0, level(number), 0.0)
            roots = torch.where(_per_block(wide, codes.shape), levels, roots)
        return from_blocks(roots, codes.shape)

    def fault(self, parts: tuple[Tensor, ...], *, signed: bool, finite: bool) -> str:
        """See ``Codec.fault``; a negative scale is a wide block's, and lies on the grid."""
        scale = parts[1]
        lowest, highest = extremes(scale)
        if not (-math.inf < lowest and highest < math.inf):
            return "a scale that is infinite or NaN"
        if lowest < 0 and not torch.equal(torch.where(scale < 0, grid_ceil(scale.abs()), 0.0), (-scale).clamp(min=0.0)):
            return "a negative scale that is no power of 2^(1/8)"
        return ""


def _is_wide(roots: Tensor, top: Tensor) -> Tensor:
    """Whether an eighth of what is not zero in a block lies below 1/64 of its top level; a count has no order.

    Args:
        roots: float32, [..., 128].
        top: Number of the top level, int64, [...].

    Returns:
        bool, [...].
    """
    small = ((roots > 0) & (roots < level(top - WIDE_LEVELS).unsqueeze(-1))).sum(dim=-1)
    return WIDE_SHARE * small >= (roots > 0).sum(dim=-1).clamp(min=1)


def _level_codes(roots: Tensor, top: Tensor, dither: Tensor) -> Tensor:
    """Codes of a wide block, before a zero becomes 0.

    Args:
        roots: float32, [..., 128], 0 or a normal number > 0.
        top: Number of the top level, int64, [...].
        dither: float32, the shape of ``roots``.

    Returns:
        float32, the shape of ``roots``; whole numbers in [1, 255].
    """
    bits, levels = float_bits(roots), torch.tensor(_LEVELS, dtype=torch.int64, device=roots.device)
    mantissa = bits & 0x7FFFFF
    below = sum((mantissa >= bound).to(torch.int64) for bound in _LEVELS[1:16])
    rest, gap = mantissa - levels[below], levels[below + 1] - levels[below]
    share = rest.to(torch.float32) / gap.to(torch.float32)
    number = (bits >> 23) * 16 + below + torch.floor(share + dither).to(torch.int64)
    return (number - top.unsqueeze(-1) + 255).clamp(1, 255).to(torch.float32)


def level(number: Tensor) -> Tensor:
    """The level of a given number: 2^(number / 16 - 127), put together from exponent and table.

    Args:
        number: int64, any shape, in [16, 4080).

    Returns:
        float32, the shape of ``number``.
    """
    levels = torch.tensor(_LEVELS, dtype=torch.int64, device=number.device)
    return bits_to_float(((number >> 4) << 23) + levels[number & 15])


def top_level(scale: Tensor) -> Tensor:
    """The number of the level that is the square of a scale on the grid 2^(k/8).

    Args:
        scale: float32, any shape, on the grid, or 0.

    Returns:
        int64, the shape of ``scale``; for 0 some number that no code uses.
    """
    bits = float_bits(scale)
    eighths = sum(((bits & 0x7FFFFF) >= bound).to(torch.int64) for bound in _GRID[1:8])
    return ((bits >> 23) - 127) * 32 + eighths * 4 + _LEVEL_OF_ONE


def grid_ceil(x: Tensor) -> Tensor:
    """The smallest float32 on the grid 2^(k/8) that is not below ``x``, found on the bits.

    Args:
        x: float32, any shape, 0 or a normal number > 0.

    Returns:
        float32, the shape of ``x``; 0 where ``x`` is 0.
    """
    bits = float_bits(x)
    mantissa, exponent = bits & 0x7FFFFF, bits & 0x7F800000
    grid = torch.tensor(_GRID, dtype=torch.int64, device=x.device)
    steps = (mantissa.unsqueeze(-1) > grid[:8]).sum(dim=-1)
    return torch.where(x > 0, bits_to_float(exponent + grid[steps]), 0.0)


def row_length(shape: tuple[int, ...] | torch.Size) -> int:
    """Elements in which blocks may lie without a cut: a row of dimension 0, or the whole of a vector or scalar."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


def rows(shape: tuple[int, ...] | torch.Size) -> int:
    """How many rows the given shape has; a vector or scalar is one row."""
    return shape[0] if len(shape) > 1 else 1


def blocks_per_row(shape: tuple[int, ...] | torch.Size) -> int:
    """Blocks that one row of the given shape needs."""
    return ceil(row_length(shape) / BLOCK)


def scale_shape(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """Shape of the scales: [rows, blocks per row], or [blocks] for vectors and scalars."""
    blocks = blocks_per_row(shape)
    return (shape[0], blocks) if len(shape) > 1 else (blocks,)


def to_blocks(values: Tensor) -> Tensor:
    """Lays a parameter-shaped tensor out as blocks, short blocks padded with zeros.

    Args:
        values: Any dtype, the parameter's shape.

    Returns:
        The same dtype, shape [rows, blocks per row, 128].
    """
    length, blocks = row_length(values.shape), blocks_per_row(values.shape)
    count = rows(values.shape)
    padded = torch.nn.functional.pad(values.reshape(count, length), (0, blocks * BLOCK - length))
    return padded.view(count, blocks, BLOCK)


def from_blocks(blocks: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The inverse of ``to_blocks``: drops the padding and restores the parameter's shape."""
    return blocks.flatten(1)[:, : row_length(shape)].reshape(shape)


def _parts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Part, ...]:
    return (Part(".codes", shape, dtype), Part(".scale", scale_shape(shape), torch.float32))


def _units(top: Tensor, codes: float) -> Tensor:
    """What the square of a code is worth where ``codes`` stands for ``top``; a true division on every device."""
    return top / torch.full_like(top, codes * codes)


def _per_block(units: Tensor, shape: torch.Size) -> Tensor:
    return units.view(rows(shape), blocks_per_row(shape), 1)


def _finite(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0.0)


def _block_dither(values: Tensor, place: Place, phase: int) -> Tensor:
    word = dither_word(values.numel(), place.step, phase, place.index_start, values.device)
    return to_blocks(dither_fraction(word).view(values.shape))
