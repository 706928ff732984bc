"""Our state as torch.optim's own optimizers keep it, so that a run can go on without this package.

What comes out is what our optimizer would have decoded at its next step, so torch's next update is ours up to the
rounding of one step. torch has no master weights: a 16-bit parameter goes on with its 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_fuse.formats.format import decode_moments
from lightning_fuse.kernels.kernel import ParamState
from lightning_fuse.optim.settings import plain_numbers
from lightning_fuse.optim.state_groups import NO_NUMBERS

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer

# The beginning of a rule's name -> torch's optimizer of the same maths.
TORCH_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def torch_class(rule: str) -> type[torch.optim.Optimizer]:
    """Torch's optimizer of a rule.

    Args:
        rule: The rule's name.

    Returns:
        The class.

    Raises:
        ValueError: torch has none.
    """
    known = TORCH_CLASSES.get(rule.split("_")[0])
    if known is None:
        raise ValueError(
            f"torch.optim has no optimizer of the rule {rule!r}; it has {', '.join(TORCH_CLASSES)}: "
            "keep lightning_fuse, or export the weights alone"
        )
    return known


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
    # torch's own packing gives indices; its hooks and the entry of ours are left out.
    index_of = {p: index for index, spec in enumerate(optimizer.specs()) for p in (spec.param,)}
    state: dict[int, dict[str, Tensor]] = {}
    for spec in optimizer.specs():
        held = optimizer.state.get(spec.param, {})
        if not held or not int(held["step"]):
            continue
        moments = _decoded(ParamState.of(spec, held))
        if torch_class(spec.rule.name) is not torch.optim.SGD:
            moments["step"] = held["step"].to("cpu", torch.float32)
        if moments:
            state[index_of[spec.param]] = moments
    return {"state": state, "param_groups": [_group(optimizer, group, index_of) for group in optimizer.param_groups]}


def _decoded(state: ParamState) -> dict[str, Tensor]:
    moments = state.spec.rule.moments
    values = decode_moments(moments, state.spec.codecs, state.moments)
    # float32 state is decoded as it is, and what is handed out must not change with the next step.
    return {moment.name: value.clone() for moment, value in zip(moments, values, strict=True)}


def _group(optimizer: FusedOptimizer, group: dict[str, Any], index_of: dict[Tensor, int]) -> dict[str, Any]:
    """A group with torch's own keys, the way it would be executed left to torch."""
    cls = torch_class(optimizer._rule(group).name)
    numbers = {key: value for key, value in plain_numbers(group).items() if key not in NO_NUMBERS}
    accepted = {
        key: value for key, value in cast(Any, cls)([torch.zeros(1)]).param_groups[0].items() if key != "params"
    }
    names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
    return {**accepted, **numbers, **names, "params": [index_of[p] for p in group["params"]]}
