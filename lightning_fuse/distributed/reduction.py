"""The one reduction of a step over several processes: the sum of squares of all gradients, each element counted once.

A sharded gradient lies in parts on the ranks of its mesh dimension, a replicated one is whole on each. Squares of
local parts are added up per mesh first, so that a step makes one all-reduce of one number per set of mesh dimensions
that shard anything: one under FSDP2, two where a body and a head are sharded over different meshes. Its result is the
same on every rank, and so is all that follows from it: whether the step is skipped, and what clipping multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fuse.kernels import sum_of_squares
from lightning_fuse.kernels.shards import is_dtensor, local_part


def global_sum_of_squares(
    grads: Sequence[Tensor], local_sum: Callable[[Sequence[Tensor]], Tensor] = sum_of_squares
) -> Tensor:
    """The sum of squares of whole gradients.

    Args:
        grads: At least one; plain tensors, or DTensors that are sharded or replicated. Every rank of a mesh calls this
            for the same parameters.
        local_sum: Adds up the squares of plain tensors.

    Returns:
        float64, 0-dimensional, the same bits on every rank of a mesh.

    Raises:
        NotImplementedError: A gradient is partial, a sum that has not been made yet.
    """
    if not any(map(is_dtensor, {type(grad): grad for grad in grads}.values())):  # one question per type
        return local_sum(grads)
    plain: list[Tensor] = []
    sharded: dict[tuple[int, tuple[int, ...]], tuple[Any, list[Tensor]]] = {}
    for grad in grads:
        dims = _sharding_dims(grad)
        if not dims:
            plain.append(local_part(grad))
            continue
        mesh = grad.device_mesh  # type: ignore[attr-defined]
        sharded.setdefault((hash(mesh), dims), (mesh, []))[1].append(local_part(grad))
    totals = [local_sum(plain)] if plain else []
    for (_, dims), (mesh, parts) in sharded.items():
        total = local_sum(parts).to(parts[0].device)
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        totals.append(total)
    return torch.stack([total.to(totals[0].device) for total in totals]).sum()


def _sharding_dims(grad: Tensor) -> tuple[int, ...]:
    """The mesh dimensions over which a gradient lies in parts; none where it is whole here."""
    if not is_dtensor(grad):
        return ()
    placements = grad.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise NotImplementedError(
            "a gradient is a partial sum over its mesh: reduce it before the step, as fully_shard does"
        )
    return tuple(dim for dim, placement in enumerate(placements) if placement.is_shard())
