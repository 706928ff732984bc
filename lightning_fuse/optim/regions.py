"""Regions: all state of one kind on one device in one allocation, of which ``optimizer.state`` holds views.

One allocation instead of thousands, one linear scan, one copy for offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_fuse.kernels.cpu.native import zeros as cpu_zeros

ALIGNMENT = 128  # bytes; a cache line pair, so that no two tensors share a vector store

# Bytes by which each region starts later within its page than the one before. Elements of one index would otherwise lie
# at one place of their pages in every region, and a core that works on them together takes them for aliases.
STAGGER = 256

Kind = tuple[str, torch.dtype, torch.device]  # what one region collects


@dataclass(frozen=True)
class Request:
    """One tensor of state that is wanted.

    Attributes:
        key: Its key in ``optimizer.state[p]``, which is also the kind that a region collects.
        shape: Its shape.
        dtype: Its dtype.
        device: Where it lives.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def allocate(requests: Sequence[Request]) -> list[Tensor]:
    """Allocates zeros for all requests, one region for each (key, dtype, device).

    Args:
        requests: What is wanted, in any order.

    Returns:
        One contiguous tensor per request, in the same order; each is a view into its region.
    """
    sizes, offsets = _layout(requests)
    regions = {kind: _zeros(size, *kind[1:], number) for number, (kind, size) in enumerate(sizes.items())}
    views = []
    for request, offset in zip(requests, offsets, strict=True):
        region = regions[(request.key, request.dtype, request.device)]
        views.append(region[offset : offset + prod(request.shape)].view(request.shape))
    return views


def region_bytes(requests: Sequence[Request]) -> int:
    """Bytes that ``allocate`` takes for requests, without taking them."""
    sizes, _ = _layout(requests)
    staggered = sum(STAGGER * (number % 8) for number, kind in enumerate(sizes) if kind[2].type == "cpu")
    return staggered + sum(size * dtype.itemsize for (_, dtype, _), size in sizes.items())


def _layout(requests: Sequence[Request]) -> tuple[dict[Kind, int], list[int]]:
    """Elements of every region, and where in its region each request begins."""
    sizes: dict[Kind, int] = {}
    offsets = []
    for request in requests:
        kind = (request.key, request.dtype, request.device)
        offsets.append(sizes.get(kind, 0))
        sizes[kind] = offsets[-1] + _aligned(prod(request.shape), request)
    return sizes, offsets


def _zeros(size: int, dtype: torch.dtype, device: torch.device, number: int) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    skipped = STAGGER * (number % 8) // dtype.itemsize
    return cpu_zeros(skipped + size, dtype)[skipped:]


def _aligned(numel: int, request: Request) -> int:
    """Elements that one tensor takes up in its region; step counters, one number each, are packed."""
    if not request.shape:
        return 1
    per_line = ALIGNMENT // request.dtype.itemsize
    return -(-numel // per_line) * per_line
