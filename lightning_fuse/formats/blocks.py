"""Where the blocks of a parameter lie that share a scale.

Blocks lie inside one row of dimension 0, the other dimensions flattened; a shorter row is one block, and the last block
of a row may be short. Slicing along dimension 0 therefore never cuts a block.
"""

from __future__ import annotations

from math import ceil, prod

import torch
from torch import Tensor

from lightning_fuse.formats.format import TensorSpec

BLOCK = 128  # elements per scale


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


def scaled_parts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Codes of a given dtype and their scales."""
    return (TensorSpec(".codes", shape, dtype), TensorSpec(".scale", scale_shape(shape), torch.float32))


def step_size(top: Tensor, codes: float) -> Tensor:
    """What one code is worth where ``codes`` of them stand for ``top``; a true division on every device."""
    return top / torch.full_like(top, codes)


def per_block(values: Tensor, shape: torch.Size) -> Tensor:
    """One value per block of a parameter of the given shape, laid out beside ``to_blocks``."""
    return values.view(rows(shape), blocks_per_row(shape), 1)
