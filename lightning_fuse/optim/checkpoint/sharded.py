"""What a checkpoint holds of the part of a parameter that lies here: of DTensors the local tensor, of others the rows.

Blocks never leave a row, so the codes and scales of some rows are those rows of the codes and scales of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor

from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.kernels.shards import is_dtensor


def local_state(spec: ParamSpec, held: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of one parameter as far as it concerns this process; every rank takes part.

    Args:
        spec: The parameter.
        held: What a checkpoint holds for it: plain tensors of the whole, or DTensors on any mesh.

    Returns:
        Plain tensors of the part that lies here.
    """
    return {key: _local(spec, value) for key, value in held.items()}


def _local(spec: ParamSpec, value: Any) -> Any:
    shard, whole = spec.shard, spec.shape
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if is_dtensor(value):
        wrapped: Any = value
        if shard is None:
            return wrapped.full_tensor()
        return wrapped.redistribute(shard.mesh, shard.placements).to_local()
    if shard is None or value.shape[0] != whole[0] or not spec.local_shape:
        return value
    first = spec.first_index // max(1, prod(whole[1:]))
    return value[first : first + spec.local_shape[0]]
