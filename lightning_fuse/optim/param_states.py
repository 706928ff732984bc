"""Where specs get memory: at a parameter's first gradient, or from what somebody has put into its state.

``optimizer.state[p]`` belongs to its user, as every torch optimizer's does: wrappers keep entries of their own there,
torch's and other loaders replace tensors or the whole dict. Entries with other keys are left alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fuse.formats.format import TensorSpec
from lightning_fuse.kernels.kernel import STEP, ParamSpec, ParamState
from lightning_fuse.kernels.shards import is_dtensor, local_part
from lightning_fuse.optim.checkpoint.schema import FORMAT, read_format
from lightning_fuse.optim.regions import Request, allocate

StateStore: TypeAlias = MutableMapping[Tensor, dict[str, Any]]


@torch.no_grad()
def ensure_states(specs: Sequence[ParamSpec], store: StateStore) -> list[ParamState]:
    """The states of parameters; allocates what is missing, for all of them at once, and starts their master weights.

    Args:
        specs: The parameters that are to have state.
        store: ``optimizer.state``; changed in place.

    Returns:
        One state per spec.

    Raises:
        RuntimeError: A tensor in ``store`` has another shape or dtype than the format of its parameter.
    """
    for spec in specs:
        if spec.param in store:
            adopt(spec, store[spec.param])
    missing = [
        (spec, part) for spec in specs for key, part in spec.tensors.items() if key not in store.get(spec.param, ())
    ]
    requests = [Request(part.suffix, part.shape, part.dtype, spec.param.device) for spec, part in missing]
    for (spec, part), tensor in zip(missing, allocate(requests) if requests else (), strict=True):
        sharded = spec.shard is not None and bool(part.shape)
        value = spec.shard.wrap(tensor, part.shape[1:]) if spec.shard is not None and sharded else tensor
        store.setdefault(spec.param, {})[part.suffix] = value
    of_masters = {id(spec): spec for spec, part in missing if part.suffix in ("master", "remainder")}
    for spec in of_masters.values():
        start_master(spec, store[spec.param])
    return [ParamState.of(spec, store[spec.param]) for spec in specs]


def start_master(spec: ParamSpec, held: dict[str, Any]) -> None:
    """Sets the master weight to what the parameter alone says.

    Args:
        spec: The parameter.
        held: Its state; changed in place.
    """
    for part, value in zip(spec.master.parts(spec.local_shape), spec.master.start(spec.local), strict=True):
        local_part(held[part.suffix]).copy_(value)


def adopt(spec: ParamSpec, held: dict[str, Any]) -> None:
    """Takes over what somebody put into a parameter's state: another loader, a wrapper, a hand.

    What ``state_dict`` hands out is accepted; a step of any kind becomes ours, a description of the format is dropped.

    Args:
        spec: The parameter.
        held: Its state; changed in place.

    Raises:
        RuntimeError: A tensor has another shape, dtype or device than the format says, or all are of another format.
    """
    text = read_format(held)
    here = [spec.state_format.name, spec.master.name]
    if text is not None and text.split(" ")[2:] != here:
        raise RuntimeError(
            f"somebody has put state into {spec.name} that is described as {text!r}, this optimizer keeps state "
            f"{here[0]!r} and master {here[1]!r}: build it with the settings that were saved, or load through its own "
            "load_state_dict, which converts formats"
        )
    held.pop(FORMAT, None)
    device = spec.param.device
    step = held.get("step")
    if step is not None and not (isinstance(step, Tensor) and step.dtype == STEP.dtype and step.device == device):
        held["step"] = torch.as_tensor(float(step), dtype=STEP.dtype, device=device)
    for key, wanted in spec.tensors.items():
        tensor = held.get(key)
        if isinstance(tensor, Tensor) and bool(wanted.shape) and (spec.shard is not None) == is_dtensor(tensor):
            tensor = local_part(tensor)
        if tensor is not None and not _fits(tensor, wanted, device):
            what = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else tensor
            raise RuntimeError(
                f"state {key} of {spec.name} is {what}, expected {wanted.dtype} {wanted.shape} on {device} "
                f"(state={spec.state_format.name!r}, master={spec.master.name!r}): "
                "replace state through load_state_dict, which converts formats"
            )
        if tensor is not None and not tensor.is_contiguous():
            whole = tensor.contiguous()
            held[key] = whole if spec.shard is None else spec.shard.wrap(whole, wanted.shape[1:])


def _fits(tensor: Any, wanted: TensorSpec, device: torch.device) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.shape == wanted.shape
        and tensor.dtype == wanted.dtype
        and tensor.device == device
    )
