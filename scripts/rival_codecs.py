"""Ways to keep Adam's two moments between steps, as functions from values to values read back, for format_error.py.

A *scheme* is what one row of the table measures. Those of the package come from its own codecs; the others are
written here from their published formulas, among them the teaching codec, linear int8, which nobody should use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_fuse.formats import STATE_FORMATS, Codec, DitherKey


class Roots(NamedTuple):
    """Square roots of a second moment: of what the update made it, and of what it was kept as."""

    new: Tensor
    kept: Tensor


class Keep(Protocol):
    """How one moment is kept."""

    def __call__(self, values: Tensor, step: int, roots: Roots | None = None) -> Tensor:
        """The values that the next update will find.

        Args:
            values: float32, after an update.
            step: The number of the update.
            roots: For a first moment: those of the second.
        """


@dataclass(frozen=True)
class Scheme:
    """One row of the table.

    Attributes:
        name: As it is printed.
        bits: Bits per element of both moments together, scales included, for long rows.
        first: How the first moment is kept.
        second: How the second moment is kept.
    """

    name: str
    bits: float
    first: Keep
    second: Keep


class LinearInt8:
    """The teaching codec: equal steps from zero to the largest magnitude of a block, rounded to nearest.

    The textbook form of 8-bit storage, ``code = round(levels * x / s)`` with ``s = max |x|``. Its error is at most
    ``s / (2 * levels)`` in absolute terms, so everything below that is read back as zero. For a second moment
    that is an explosion: the update divides by its square root.

    Args:
        signed: 127 levels on either side of zero, or 255 above it.
        block: Elements per scale.
    """

    def __init__(self, signed: bool, block: int = 128) -> None:
        self.levels, self.block = (127.0 if signed else 255.0), block

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes.

        Args:
            values: float32, [..., n] with n a multiple of the block.

        Returns:
            Codes as float32 whole numbers, [blocks, block], and float32 scales, [blocks, 1]; a zero block has scale 0.
        """
        blocks = values.reshape(-1, self.block)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        return torch.round(blocks / _nonzero(scale) * self.levels), scale

    def decode(self, codes: Tensor, scale: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Decodes to float32 of the given shape."""
        return (codes / self.levels * scale).view(shape)

    def bound(self, values: Tensor) -> Tensor:
        """The largest error of any element of each block, [blocks, 1]: half a step, and the rounding of float32."""
        scale = values.reshape(-1, self.block).abs().amax(dim=1, keepdim=True)
        return scale * (0.5 / self.levels + 2.0**-22)

    def __call__(self, values: Tensor, step: int, roots: Roots | None = None) -> Tensor:
        """Encodes and decodes."""
        return self.decode(*self.encode(values), values.shape)


def power_nearest(order: int, levels: float, block: int = 128) -> Keep:
    """Codes of the ``order``-th root of the magnitude, rounded to nearest: any 8-bit code without a dither.

    Args:
        order: 2 or 4.
        levels: The largest code.
        block: Elements per scale.

    Returns:
        The function that encodes and decodes; a value that is not 0 never gets the code 0 under the fourth root.
    """

    def keep(values: Tensor, step: int, roots: Roots | None = None) -> Tensor:
        blocks = values.reshape(-1, block)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        codes = torch.round((blocks.abs() / _nonzero(scale)) ** (1.0 / order) * levels)
        if order == 4:
            codes = torch.where(blocks > 0, codes.clamp(min=1.0), 0.0)
        return (torch.sign(blocks) * (codes / levels) ** order * scale).view(values.shape)

    return keep


def mapped(levels: Tensor, block: int = 256) -> Keep:
    """The nearest of 256 fixed levels times a scale per block, as bitsandbytes keeps 8-bit state.

    Args:
        levels: float32, ascending, in [-1, 1].
        block: Elements per scale, over the flattened tensor.

    Returns:
        The function that encodes and decodes.
    """
    middles = (levels[1:] + levels[:-1]) / 2

    def keep(values: Tensor, step: int, roots: Roots | None = None) -> Tensor:
        flat = values.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
        scale = padded.abs().amax(dim=1, keepdim=True)
        kept = levels[torch.bucketize(padded / _nonzero(scale), middles)] * scale
        return kept.view(-1)[: flat.numel()].view(values.shape)

    return keep


def packaged(codec: Codec) -> Keep:
    """A codec of the package."""

    def keep(values: Tensor, step: int, roots: Roots | None = None) -> Tensor:
        if roots is None:
            return codec.decode(codec.encode(values, DitherKey(step)))
        return codec.decode(codec.encode(values, DitherKey(step), roots.new), roots.kept)

    return keep


def exact(values: Tensor, step: int, roots: Roots | None = None) -> Tensor:
    """float32: nothing is lost."""
    return values


def all_schemes(with_maps: bool = True) -> list[Scheme]:
    """The rows of the table.

    Args:
        with_maps: Whether bitsandbytes' row is wanted; it is left out, too, where bitsandbytes is not installed.

    Returns:
        The schemes, those of the package first.
    """
    int8, bf16 = STATE_FORMATS["int8"], STATE_FORMATS["bf16"]
    signed, unsigned, narrow = packaged(int8.signed), packaged(int8.unsigned), packaged(bf16.unsigned)
    block_bits = 8 + 32 / 128
    root2, root4 = power_nearest(2, 127.0), power_nearest(4, 255.0)
    schemes = [
        Scheme("int8", 2 * block_bits, signed, unsigned),
        Scheme("int8, second moment alone", 32 + block_bits, exact, unsigned),
        Scheme("int8_bf16", block_bits + 16, signed, narrow),
        Scheme("bf16", 32, packaged(bf16.signed), narrow),
        Scheme("roots to nearest, block 128", 2 * block_bits, root2, root4),
        Scheme("roots to nearest, second alone", 32 + block_bits, exact, root4),
        Scheme("linear int8 (teaching codec)", 2 * block_bits, LinearInt8(True), LinearInt8(False)),
    ]
    maps = dynamic_maps() if with_maps else None
    if maps is not None:
        schemes.insert(4, Scheme("dynamic map, block 256 (bnb)", 2 * (8 + 32 / 256), mapped(maps[0]), mapped(maps[1])))
    return schemes


def dynamic_maps() -> tuple[Tensor, Tensor] | None:
    """The signed and unsigned dynamic maps of bitsandbytes, 256 levels each, or None where it is not installed."""
    try:
        from bitsandbytes.functional import create_dynamic_map
    except ImportError:
        return None
    return create_dynamic_map(signed=True), create_dynamic_map(signed=False)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, math.inf)
