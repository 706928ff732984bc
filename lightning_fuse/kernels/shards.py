"""Where the part of a parameter that lies here is in the whole: FSDP2's shards along dimension 0.

Blocks and dither words are counted in the whole parameter, so the codes and scales of a shard are the same bits as
those of the same rows on one device. Rows are never cut, and a block lies inside one row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The part of one DTensor that lies here.

    Attributes:
        mesh: The device mesh.
        placements: One per mesh dimension: ``Replicate()`` or ``Shard(0)``.
        shape: Shape of the whole.
        first_index: Index of the first local element in the whole, row-major.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    first_index: int

    def wrap(self, local: Tensor, rest: tuple[int, ...]) -> Tensor:
        """State of the local part as a DTensor, so that every standard way of saving sees the whole.

        Args:
            local: [local rows, *rest], contiguous.
            rest: Its shape behind dimension 0.

        Returns:
            A DTensor over the same memory, [rows of the whole, *rest].
        """
        shape = (self.shape[0], *rest)
        stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
        kind: Any = _dtensor()
        wrapped: Tensor = kind.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return wrapped


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; there is none where nobody has imported its module, which takes a second."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """The memory that lies here: of a DTensor its local tensor, of any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def shard_of(p: Tensor) -> Shard | None:
    """Where the local part of a parameter lies.

    Args:
        p: Any parameter.

    Returns:
        The shard; None for a tensor that is no DTensor.
    """
    if not is_dtensor(p):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = p
    shape = tuple(p.shape)
    _, offset = compute_local_shape_and_global_offset(p.shape, sharded.device_mesh, sharded.placements)
    first_index = (offset[0] if offset else 0) * prod(shape[1:])
    return Shard(sharded.device_mesh, tuple(sharded.placements), shape, first_index)


def unsupported_reason(p: Tensor) -> str:
    """Why a DTensor cannot be stepped, as it reads after "because"; empty where it can.

    Args:
        p: Any tensor.
    """
    if not is_dtensor(p):
        return ""
    sharded: Any = p
    for placement in sharded.placements:
        strided = type(placement).__name__ == "_StridedShard"
        if strided or not (placement.is_replicate() or placement.is_shard(0)):
            return (
                f"its placement is {placement}: supported are Shard(0), as fully_shard makes it, and Replicate(); "
                "shard along dimension 0, or step such parameters with one of torch's own optimizers"
            )
    return ""


def _dtensor() -> type | None:
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor
