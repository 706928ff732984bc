"""Regions: all state of one kind on one device in one allocation, of which ``optimizer.state`` holds views.

One allocation instead of thousands, one linear scan, one copy for offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes; a cache line pair, so that no two tensors share a vector store


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
    sizes: dict[tuple[str, torch.dtype, torch.device], int] = {}
    offsets = []
    for request in requests:
        kind = (request.key, request.dtype, request.device)
        offsets.append(sizes.get(kind, 0))
        sizes[kind] = offsets[-1] + _aligned(prod(request.shape), request)
    regions = {kind: torch.zeros(size, dtype=kind[1], device=kind[2]) for kind, size in sizes.items()}
    views = []
    for request, offset in zip(requests, offsets, strict=True):
        region = regions[(request.key, request.dtype, request.device)]
        views.append(region[offset : offset + prod(request.shape)].view(request.shape))
    return views


def _aligned(numel: int, request: Request) -> int:
    """Elements that one tensor takes up in its region; step counters, one number each, are packed."""
    if not request.shape:
        return 1
    per_line = ALIGNMENT // request.dtype.itemsize
    return -(-numel // per_line) * per_line
