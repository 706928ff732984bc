"""Values and shapes that the tests of state formats share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_fuse.formats import STATE_FORMATS, Codec

# Around a block of 128, rows shorter and longer than one, no elements, no dimensions, a prime.
SHAPES = [(), (0,), (1,), (127,), (128,), (129,), (3, 127), (2, 129), (5, 3, 7), (1009,), (4, 0), (3, 1)]

# (format's word, whether the moment is signed, its codec): every codec as it is reached by a user's word.
CODECS: list[tuple[str, bool, Codec]] = [
    (f"{name}-{'signed' if signed else 'unsigned'}", signed, fmt.signed if signed else fmt.unsigned)
    for name, fmt in STATE_FORMATS.items()
    for signed in (True, False)
]
CODEC_IDS = [name for name, _, _ in CODECS]


def moments(shape: tuple[int, ...], signed: bool, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Values as a moment has them: over some orders of magnitude, a few exact zeros, negative where signed."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(shape, generator=generator))
    values = size * torch.randn(shape, generator=generator)
    values = torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, values)
    return values if signed else values * values


def block_slices(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Where blocks lie, written anew from the definition: (row, columns) of the tensor seen as rows."""
    rows = shape[0] if len(shape) > 1 else 1
    length = torch.Size(shape[1:] if len(shape) > 1 else shape).numel()
    for row in range(rows):
        for begin in range(0, length, 128):
            yield slice(row, row + 1), slice(begin, min(begin + 128, length))


def as_rows(values: Tensor) -> Tensor:
    """The tensor as [rows of dimension 0, the rest]."""
    if values.dim() > 1:
        return values.reshape(values.shape[0], values[0].numel() if values.shape[0] else 0)
    return values.reshape(1, values.numel())


def largest_of_block(values: Tensor) -> Tensor:
    """For each element the largest finite magnitude in its block, in the tensor's shape."""
    rows, result = as_rows(values), torch.zeros_like(as_rows(values))
    for row, columns in block_slices(tuple(values.shape)):
        block = rows[row, columns]
        finite = torch.where(block.isfinite(), block.abs(), 0.0)
        result[row, columns] = finite.max() if finite.numel() else 0.0
    return result.reshape(values.shape)
