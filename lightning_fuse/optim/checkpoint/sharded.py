"""What a checkpoint holds of a parameter's part that lies here: of DTensors the local tensor, of whole tensors its rows.

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
        Plain tensors of the part that lies here; ``held`` itself where that is all of it.
    """
    if spec.shard is None and not any(map(is_dtensor, _raw_values(held))):
        return held
    return {key: _local(spec, value) for key, value in held.items()}


def _raw_values(held: Mapping[str, Any]) -> Any:
    """The values, none of them mapped from a file by asking for it."""
    return dict.values(held) if isinstance(held, dict) else held.values()


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
