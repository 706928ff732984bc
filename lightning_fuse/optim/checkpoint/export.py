"""Our state as torch.optim's own optimizers keep it, so that a run can go on without this package.

What comes out is what our optimizer would have decoded at its next step, so torch's next update is ours up to the
rounding of one step. torch has no master weights: a 16-bit parameter goes on with its 16 bits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lightning_fuse.formats.format import decode_moments, state_tensors
from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.kernels.shards import local_part
from lightning_fuse.optim.catalog import CATALOG
from lightning_fuse.optim.checkpoint.hyperparameters import NON_HYPERPARAMETERS
from lightning_fuse.optim.fused import FusedOptimizer
from lightning_fuse.optim.group_cache import plain_numbers

# Our class -> the word for it, and torch's optimizer of the same maths.
TORCH_CLASSES: dict[type[FusedOptimizer], tuple[str, type[torch.optim.Optimizer]]] = {
    entry.cls: (entry.name, entry.torch_twin) for entry in CATALOG if entry.torch_twin is not None
}


@torch.no_grad()
def to_torch_state(optimizer: FusedOptimizer) -> dict[str, Any]:
    """The state dict that torch's optimizer of the same rule, over the same parameters in the same groups, loads.

    Args:
        optimizer: One of ours.

    Returns:
        torch's words and kinds: ``step`` float32, moments float32 in the parameter's shape. A parameter that was never
        stepped has no state.

    Raises:
        ValueError: torch has no such optimizer.
    """
    twin = torch_class(optimizer)
    # torch's own packing gives indices; its hooks and the entry of ours are left out.
    state: dict[int, dict[str, Tensor]] = {}
    for index, spec in enumerate(optimizer.specs()):
        held = optimizer.state.get(spec.param, {})
        if "step" not in held or not int(held["step"]):
            continue
        moments = decoded(spec, held)
        if twin is not torch.optim.SGD:
            moments["step"] = held["step"].to("cpu", torch.float32)
        if moments:
            state[index] = moments
    groups, start = [], 0
    for group in optimizer.param_groups:
        end = start + len(group["params"])
        groups.append({**_settings(twin, group), "params": list(range(start, end))})
        start = end
    return {"state": state, "param_groups": groups}


def torch_class(optimizer: FusedOptimizer) -> type[torch.optim.Optimizer]:
    """Torch's optimizer of the same rule.

    Args:
        optimizer: One of ours.

    Returns:
        The class.

    Raises:
        ValueError: torch has none.
    """
    for cls in type(optimizer).__mro__:
        if cls in TORCH_CLASSES:
            return TORCH_CLASSES[cls][1]
    known = ", ".join(word for word, _ in TORCH_CLASSES.values())
    raise ValueError(
        f"torch.optim has no optimizer of the rule of {type(optimizer).__name__}; it has {known}: "
        "keep lightning_fuse, or export the weights alone"
    )


def decoded(spec: ParamSpec, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """The moments of one parameter as its next step would decode them.

    Args:
        spec: The parameter.
        held: Its state.

    Returns:
        float32 by name. They are copies: what is handed out must not change with the next step.
    """
    moments, held = spec.rule.moments, {key: local_part(held[key]) for key in spec.tensors}
    kept = [
        state_tensors(moment, codec, held, spec.local_shape) for moment, codec in zip(moments, spec.codecs, strict=True)
    ]
    values = decode_moments(moments, spec.codecs, kept)
    copies = {moment.name: value.clone() for moment, value in zip(moments, values, strict=True)}
    if spec.shard is None:
        return copies
    return {name: spec.shard.wrap(value, spec.local_shape[1:]) for name, value in copies.items()}


def _settings(twin: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """A group with torch's own keys, the way it would be executed left to torch."""
    numbers = {key: value for key, value in plain_numbers(group).items() if key not in NON_HYPERPARAMETERS}
    accepted = cast(Any, twin)([torch.zeros(1)]).param_groups[0]
    accepted = {key: value for key, value in accepted.items() if key != "params"}
    names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
    return {**accepted, **numbers, **names}
