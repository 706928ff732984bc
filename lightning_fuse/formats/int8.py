"""int8: blocks of up to 128 one-byte codes and one float32 scale each, about 1.031 bytes an element.

Both moments are stored as the square root of a gradient's magnitude, so that codes are spent evenly over orders of
magnitude, and both are rounded with the dither sequence of ``rounding.py``: a code is worth 1-2 % of the value and
beta2 = 0.999 moves it by 0.1 % a step, so nearest rounding would never move it at all.

Signed (first moment, momentum), one int8 per element, for a block of values m::

    s = max |m|                                  stored
    code = sign(m) * min(127, floor(sqrt(|m|) * (127 / sqrt(s)) + d))
    m' = q * |q|    with q = code * (sqrt(s) / 127)

Unsigned (second moment), one uint8 per element, for a block of values v, r = sqrt(sqrt(v))::

    s = the smallest 2^(k/8) >= max r            stored; stands still from step to step
    code = min(255, floor(r * (255 / s) + d))    and never 0 for v > 0
    v' = (x * x) * (x * x)    with x = code * (s / 255)

Every bracket without a tensor of values is computed once per block. Scales have no floor and all operations scale
exactly with powers of two: multiplying all gradients by a power of four changes no code. A block of zeros has scale 0.
A value that is not finite counts as zero here (the parameter has it already), so it spoils its element, not its block.

Blocks lie inside one row of dimension 0, the other dimensions flattened; a shorter row is one block, and the last block
of a row may be short. Slicing along dimension 0 therefore never cuts a block.
"""

from __future__ import annotations

from math import ceil, prod

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec, Part, Place
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

# Mantissa bits of 2^(k/8), k = 0..8, rounded to float32; 2^(8/8) carries into the exponent.
_GRID_MANTISSAS = tuple(int((2.0 ** (k / 8) - 1.0) * 2.0**23 + 0.5) for k in range(9))


class Int8Signed(Codec):
    """The codec ``int8_signed``: square-root codes of a signed moment; see the module for its formula."""

    name = "int8_signed"
    scaled = True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See ``Codec.parts``."""
        return _parts(shape, torch.int8)

    def encode(self, values: Tensor, place: Place) -> tuple[Tensor, ...]:
        """See ``Codec.encode``; returns codes and scales."""
        blocks = to_blocks(_finite(values))
        scale = blocks.abs().amax(dim=-1)
        per_unit = torch.where(scale > 0, divide(127.0, sqrt(scale)), 0.0)
        dither = _block_dither(values, place, PHASE_SIGNED)
        code = torch.floor(sqrt(blocks.abs()) * per_unit.unsqueeze(-1) + dither).clamp(max=127.0)
        codes = from_blocks(torch.copysign(code, blocks), values.shape)
        return codes.to(torch.int8), scale.view(scale_shape(values.shape))

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``Codec.decode``."""
        codes, scale = parts
        q = to_blocks(codes.to(torch.float32)) * _per_block(_units(sqrt(scale), 127.0), codes.shape)
        return from_blocks(q * q.abs(), codes.shape)


class Int8Unsigned(Codec):
    """The codec ``int8_unsigned``: fourth-root codes of a second moment; see the module for its formula."""

    name = "int8_unsigned"
    scaled = True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See ``Codec.parts``."""
        return _parts(shape, torch.uint8)

    def encode(self, values: Tensor, place: Place) -> tuple[Tensor, ...]:
        """See ``Codec.encode``; returns codes and scales."""
        roots = sqrt(sqrt(to_blocks(_finite(values))))
        scale = grid_ceil(roots.amax(dim=-1))
        per_unit = torch.where(scale > 0, divide(255.0, scale), 0.0)
        dither = _block_dither(values, place, PHASE_UNSIGNED)
        code = torch.floor(roots * per_unit.unsqueeze(-1) + dither).clamp(max=255.0)
        code = torch.where(roots > 0, code.clamp(min=1.0), 0.0)
        return from_blocks(code, values.shape).to(torch.uint8), scale.view(scale_shape(values.shape))

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        """See ``Codec.decode``."""
        codes, scale = parts
        x = to_blocks(codes.to(torch.float32)) * _per_block(_units(scale, 255.0), codes.shape)
        square = x * x
        return from_blocks(square * square, codes.shape)


def grid_ceil(x: Tensor) -> Tensor:
    """The smallest float32 on the grid 2^(k/8) that is not below ``x``, found on the bits.

    Args:
        x: float32, any shape, 0 or a normal number > 0.

    Returns:
        float32, the shape of ``x``; 0 where ``x`` is 0.
    """
    bits = float_bits(x)
    mantissa, exponent = bits & 0x7FFFFF, bits & 0x7F800000
    grid = torch.tensor(_GRID_MANTISSAS, dtype=torch.int64, device=x.device)
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


def _units(scale: Tensor, codes: float) -> Tensor:
    """What one code is worth in each block; a true division on every device (see ``rule.divide``)."""
    return scale / torch.full_like(scale, codes)


def _per_block(units: Tensor, shape: torch.Size) -> Tensor:
    return units.view(rows(shape), blocks_per_row(shape), 1)


def _finite(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0.0)


def _block_dither(values: Tensor, place: Place, phase: int) -> Tensor:
    word = dither_word(values.numel(), place.step, phase, place.index_start, values.device)
    return to_blocks(dither_fraction(word).view(values.shape))
