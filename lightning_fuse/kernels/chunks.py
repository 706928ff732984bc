"""How a tensor is cut into chunks: what one thread takes at a time, and what a sum of squares is ordered by."""

from __future__ import annotations

from lightning_fuse.formats.blocks import BLOCK

CHUNK = 1 << 16  # elements, at most


def chunk_ends(numel: int, row: int) -> list[int]:
    """Where the chunks of a tensor end: as far as 65,536 elements go without cutting a block.

    Args:
        numel: Elements of the tensor.
        row: Elements in which blocks lie without a cut; ``numel`` where there are no blocks.

    Returns:
        The ends in row-major order, the last one ``numel``; none for an empty tensor.
    """
    ends: list[int] = []
    begin = 0
    while begin < numel:
        begin = numel if numel - begin <= CHUNK else block_start(begin + CHUNK, row)
        ends.append(begin)
    return ends


def block_start(element: int, row: int) -> int:
    """The last start of a block at or before an element; blocks lie inside rows of ``row`` elements."""
    return element - element % row % BLOCK
